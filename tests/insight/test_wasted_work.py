"""Reports tell the work that a step could leave out, with the line that makes it; and nothing of its healthy twin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import axonym as axn
from axonym import nn

Batch, Pos, Embed, Mlp, Words = axn.make_axes(batch=32, pos=16, embed=32, mlp=64, words=64)
Layers, Turns, Experts = axn.make_axes(layers=4, turns=8, experts=8)
Tree = Any


def weights(dtype: Any = jnp.float32) -> Tree:
    shapes = {"up": (Embed, Mlp), "down": (Mlp, Embed), "head": (Embed, Words), "table": (Words, Embed)}
    return {name: axn.ones(axes, dtype=dtype) for name, axes in shapes.items()}


def numbers(*axes: axn.Axis, dtype: Any = jnp.float32) -> axn.NamedArray:
    return axn.ones(axes, dtype=dtype)


def words(*axes: axn.Axis) -> axn.NamedArray:
    return axn.zeros(axes, dtype=int)


def hidden(w: Tree, x: axn.NamedArray) -> axn.NamedArray:
    return axn.dot(axn.tanh(axn.dot(x, w["up"], axis="embed")), w["down"], axis="mlp")


def trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(w: Tree, *rest: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda w: axn.mean(loss(w, *rest)).scalar().astype(jnp.float32))(w)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g.astype(w.dtype), w, gradients)

    return step


def padded(to: int) -> Callable[..., Any]:
    def loss(w: Tree, x: axn.NamedArray) -> Any:
        x = axn.pad(x, {"pos": (0, to - Pos.size)})  # padding
        return hidden(w, x)["pos", : Pos.size]

    return loss


def cached(w: Tree, tokens: axn.NamedArray) -> Any:
    """Compute one token in each turn."""

    def turn(carry: Any, at: Any) -> Any:
        token, out = carry
        token = axn.argmax(axn.dot(hidden(w, w["table"]["words", token]), w["head"], axis="embed"), "words")
        return token.astype(out.dtype), out.at["pos", at].set(token.astype(out.dtype))

    return axn.fold(turn, Pos)((tokens["pos", 0], tokens), axn.arange(Pos))[1]


def without_cache(w: Tree, tokens: axn.NamedArray) -> Any:
    def turn(tokens: axn.NamedArray, at: Any) -> Any:
        scores = axn.dot(hidden(w, w["table"]["words", tokens]), w["head"], axis="embed")  # cache
        return tokens.at["pos", at].set(axn.argmax(scores["pos", at - 1], "words").astype(tokens.dtype))

    return axn.fold(turn, Pos)(tokens, axn.arange(Pos))


def conditioned(inside: bool) -> Callable[..., Any]:
    """Make steps that read a text, or nothing in the first of them."""

    def step(w: Tree, x: axn.NamedArray, text: axn.NamedArray) -> Any:
        before = hidden(w, text)

        def turn(x: axn.NamedArray, at: Any) -> Any:
            seen = hidden(w, axn.where(at < 2, 0.0, text)) if inside else before  # turns
            return x + hidden(w, x + seen)

        return axn.fold(turn, Turns)(x, axn.arange(Turns))

    return step


def recurrent(inside: bool) -> Callable[..., Any]:
    def loss(w: Tree, x: axn.NamedArray) -> Any:
        of_input = x if inside else axn.dot(x, w["up"], axis="embed")

        def turn(h: axn.NamedArray, x: axn.NamedArray) -> Any:
            x = axn.dot(x, w["up"], axis="embed") if inside else x  # apart
            h = axn.tanh(axn.dot(axn.dot(h, w["down"], axis="mlp"), w["up"], axis="embed") + x)
            return h, h

        start = axn.zeros((Batch, Mlp))
        return axn.scan(turn, Pos)(start, of_input)[1]

    return loss


def picked(late: bool) -> Callable[..., Any]:
    def loss(w: Tree, x: axn.NamedArray, at: axn.NamedArray) -> Any:
        y = x + hidden(w, x)
        scores = axn.dot(y if late else y["pos", at], w["head"], axis="embed")  # unused
        return scores["pos", at] if late else scores

    return loss


def modulated(early: bool) -> Callable[..., Any]:
    def loss(w: Tree, x: axn.NamedArray, given: axn.NamedArray) -> Any:
        given = axn.broadcast_axis(given, Pos) if early else given  # equal
        return x * hidden(w, given) + hidden(w, x)

    return loss


def mixed(all_of_them: bool) -> Callable[..., Any]:
    def loss(w: Tree, x: axn.NamedArray) -> Any:
        gate, chosen = axn.top_k(nn.softmax(axn.dot(x, w["router"], axis="embed"), "experts"), "experts", 2, "choice")
        if not all_of_them:
            return x * gate.sum("choice")
        gates = axn.dot(gate, nn.one_hot(chosen, Experts), axis="choice")
        h = axn.tanh(axn.dot(x, w["into"], axis="embed"))  # experts
        return axn.dot(axn.dot(h, w["out"], axis="mlp"), gates, axis="experts")

    return loss


def experts() -> Tree:
    shapes = {"router": (Embed, Experts), "into": (Experts, Embed, Mlp), "out": (Experts, Mlp, Embed)}
    return {name: axn.ones(axes) for name, axes in shapes.items()}


def widened(wide: bool) -> Callable[..., Any]:
    def loss(w: Tree, x: axn.NamedArray) -> Any:
        places = axn.sin(axn.arange(Pos).astype(jnp.float32))
        places = places if wide else places.astype(jnp.bfloat16)
        x = x + places  # wide
        return hidden(w, hidden(w, x)).astype(jnp.float32)

    return loss


def fine_tuned(only_head: bool) -> Callable[..., Any]:
    def step(w: Tree, state: Tree, x: axn.NamedArray) -> Any:
        def loss(w: Tree, head: Tree) -> Any:
            return axn.mean(axn.dot(hidden(w, x), head, axis="embed") ** 2).scalar()

        gradients = jax.grad(lambda w: loss(w, w["head"]))(w)  # frozen
        if only_head:
            gradients = {"head": jax.grad(lambda head: loss(w, head))(w["head"])}
        state = {**state, **{name: 0.9 * state[name] + g for name, g in gradients.items()}}
        updates = {name: m if name == "head" else axn.zeros_like(m) for name, m in state.items()}
        return jax.tree.map(lambda w, u: w - u, w, updates), state

    return step


def clipped(whole: bool) -> Callable[..., Any]:
    def step(w: Tree, x: axn.NamedArray) -> Any:
        gradients = jax.grad(lambda w: axn.mean(hidden(w, x) ** 2).scalar())(w)
        gradients = axn.unshard(gradients) if whole else gradients  # gathered
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
        return jax.tree.map(lambda w, g: w - g / norm, w, gradients)

    return step


def checkpointed(twice: bool) -> Callable[..., Any]:
    def layer(w: Tree, x: axn.NamedArray) -> Any:
        inner = jax.checkpoint(hidden) if twice else hidden
        return x + inner(w, axn.tanh(inner(w, x)))  # checkpointed

    return lambda w, x: jax.checkpoint(layer)(w, x)


def accumulated(stacks: bool) -> Callable[..., Any]:
    def step(w: Tree, x: axn.NamedArray) -> Any:
        def gradients_of(x: axn.NamedArray) -> Any:
            return jax.grad(lambda w: axn.mean(hidden(w, x) ** 2).scalar())(w)

        parts = axn.unflatten_axis(x, "batch", {"part": Turns.size, "batch": Batch.size // Turns.size})
        if stacks:
            found = axn.scan(lambda _, x: (None, gradients_of(x)), "part")(None, parts)[1]  # stacked
            return axn.tree.map(lambda g: axn.sum(g, "part"), found)
        start = jax.tree.map(jnp.zeros_like, w)
        return axn.fold(lambda sums, x: jax.tree.map(jnp.add, sums, gradients_of(x)), "part")(start, parts)

    return step


def triangle(by_hand: bool) -> Callable[..., Any]:
    def loss(w: Tree, x: axn.NamedArray) -> Any:
        left, right = x, axn.rename(x, {"batch": "other"})
        if not by_hand:
            return axn.dot(axn.dot(left, right, axis="embed"), right, axis="other")
        left = axn.broadcast_axis(left, Batch.alias("other"))
        y = axn.sum(left * right, "embed")  # sum of products
        return axn.mean(y, "other") * axn.dot(x, w["head"], axis="embed")

    return loss


def attended(repeats: bool) -> Callable[..., Any]:
    def step(keys: axn.NamedArray, query: axn.NamedArray) -> Any:
        if repeats:
            keys = axn.broadcast_axis(keys, axn.Axis("group", 8))  # repeated
            keys, query = (axn.flatten_axes(a, ("kv", "group"), "heads") for a in (keys, query))
        return axn.dot(query, keys, axis="embed")

    return step


def replicated(whole: bool) -> Callable[..., Any]:
    def loss(w: Tree, x: axn.NamedArray) -> Any:
        x = axn.unshard(x) if whole else x  # replicated
        return hidden(w, x)

    return loss


def raveled(joins: bool) -> Callable[..., Any]:
    def step(w: Tree, average: Any) -> Any:
        if not joins:
            return jax.tree.map(lambda w: 0.1 * w, w)
        return 0.9 * average + 0.1 * jnp.concatenate([jnp.ravel(x.array) for x in w.values()])  # joined

    return step


@dataclasses.dataclass(frozen=True)
class Twins:
    """A step with a fault, the same one without, and their arguments."""

    faulty: Callable[..., Any]
    healthy: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]] = lambda: (weights(), numbers(Batch, Pos, Embed))
    mapping: Any = dataclasses.field(default_factory=lambda: {"batch": "data"})


FSDP = {"embed": "data"}, {"batch": "data"}
HALF = lambda: (weights(jnp.bfloat16), numbers(Batch, Pos, Embed, dtype=jnp.bfloat16))
KV = axn.make_axes(batch=8, kv=2, key_pos=128, embed=32)
STEPS: dict[str, Twins] = {
    "padding": Twins(trained(padded(64)), trained(padded(18))),
    "cache": Twins(without_cache, cached, lambda: (weights(), words(Batch, Pos))),
    "turns": Twins(
        conditioned(True), conditioned(False), lambda: (weights(), numbers(Batch, Embed), numbers(Batch, Embed))
    ),
    "apart": Twins(trained(recurrent(True)), trained(recurrent(False))),
    "unused": Twins(
        trained(picked(True)), trained(picked(False)), lambda: (weights(), numbers(Batch, Pos, Embed), words(Batch))
    ),
    "equal": Twins(
        trained(modulated(True)),
        trained(modulated(False)),
        lambda: (weights(), numbers(Batch, Pos, Embed), numbers(Batch, Embed)),
    ),
    "experts": Twins(trained(mixed(True)), trained(mixed(False)), lambda: (experts(), numbers(Batch, Pos, Embed))),
    "wide": Twins(trained(widened(True)), trained(widened(False)), HALF),
    "frozen": Twins(fine_tuned(False), fine_tuned(True), lambda: (weights(), weights(), numbers(Batch, Pos, Embed))),
    "gathered": Twins(clipped(True), clipped(False), mapping=FSDP),
    "checkpointed": Twins(trained(checkpointed(True)), trained(checkpointed(False))),
    "stacked": Twins(accumulated(True), accumulated(False)),
    "sum of products": Twins(trained(triangle(True)), trained(triangle(False))),
    "repeated": Twins(
        attended(True),
        attended(False),
        lambda: (numbers(*KV), numbers(KV[0], KV[1], axn.Axis("group", 8), KV[3])),
    ),
    "replicated": Twins(trained(replicated(True)), trained(replicated(False))),
    "joined": Twins(raveled(True), raveled(False), lambda: (weights(), jnp.ones(4 * 2048)), FSDP),
}


def found(step: Callable[..., Any], twins: Twins) -> tuple[axn.insight.AvoidableWork, ...]:
    mesh, args = axn.make_mesh({"data": 8}), jax.eval_shape(twins.arguments)
    return axn.insight.explain(step, *args, mapping=twins.mapping, mesh=mesh, by="partitioner").avoidable


@pytest.mark.parametrize("why", STEPS)
def test_the_line_of_a_fault_is_told(why: str) -> None:
    lines = Path(__file__).read_text().splitlines()
    marked = {i for i, line in enumerate(lines, 1) if line.endswith(f"# {why}")}
    work = [work for work in found(STEPS[why].faulty, STEPS[why]) if work.why == why]
    assert len(work) == 1 and work[0].source is not None and work[0].source.line in marked, work


def more_padded(w: Tree, x: axn.NamedArray) -> Any:
    empty = axn.zeros((Batch, Pos.resize(64), Embed))
    return hidden(w, empty.at["pos", : Pos.size].set(x))["pos", : Pos.size]  # padding


def zeroed(w: Tree, state: Tree, x: axn.NamedArray) -> Any:
    gradients = jax.grad(lambda w: axn.mean(axn.dot(hidden(w, x), w["head"], axis="embed") ** 2).scalar())(w)  # frozen
    gradients = {name: g if name == "head" else 0.0 * g for name, g in gradients.items()}
    state = jax.tree.map(lambda m, g: 0.9 * m + g, state, gradients)
    return jax.tree.map(lambda w, m: w - m, w, state), state


def distant(w: Tree, x: axn.NamedArray) -> Any:
    return axn.sum((axn.broadcast_axis(x, Words) - w["table"]) ** 2, "embed")  # sum of products


OTHERS: dict[str, Callable[..., Any]] = {"padding": trained(more_padded), "frozen": zeroed, "sum of products": distant}


@pytest.mark.parametrize("why", OTHERS)
def test_the_line_of_another_form_is_told(why: str) -> None:
    lines = Path(__file__).read_text().splitlines()
    marked = {i for i, line in enumerate(lines, 1) if line.endswith(f"# {why}")}
    work = [work for work in found(OTHERS[why], STEPS[why]) if work.why == why]
    assert len(work) == 1 and work[0].source is not None and work[0].source.line in marked, work


@pytest.mark.parametrize("why", STEPS)
def test_nothing_is_told_of_its_healthy_twin(why: str) -> None:
    assert found(STEPS[why].healthy, STEPS[why]) == ()


def test_gradients_of_each_task_that_are_used_again_are_no_sum_of_products() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ w) - x) ** 2)

    def adapted(w: jax.Array, x: jax.Array) -> jax.Array:
        return loss(w - 0.1 * jax.grad(loss)(w, x), x)

    def step(w: jax.Array, tasks: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jnp.mean(jax.vmap(adapted, (None, 0))(w, tasks)))(w)

    args = [jax.ShapeDtypeStruct(sizes, "float32") for sizes in ((256, 256), (16, 16, 256))]
    report = axn.insight.explain(jax.jit(step), *args, by="partitioner")
    assert [work for work in report.avoidable if work.why == "sum of products"] == []
