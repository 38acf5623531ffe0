"""Experts, sequences and tensor parallelism inside a pipeline: values, gradients, and what devices send."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import axonym as axn
from axonym import nn
from axonym.insight import contract
from axonym.nn.attention import Causal, apply_rotary, dot_product_attention
from axonym.schedules import GPipe, OneFOneB
from tests.executed import executed

Batch, Pos, Embed, Mlp, Layers = axn.make_axes(batch=16, pos=8, embed=8, mlp=16, layers=4)
Experts, Scores, Heads, Size = axn.make_axes(experts=4, scores=4, heads=2, head_size=4)
Vocab = axn.Axis("vocab", 32)
RNG = np.random.default_rng(0)
X = axn.named(RNG.normal(size=(16, 8, 8)), (Batch, Pos, Embed))
HEAD = axn.named(RNG.normal(size=(8, 32)), (Embed, Vocab))
LABELS = axn.named(RNG.integers(0, 32, (16, 8)).astype(np.int32), (Batch, Pos))
QUICK: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Mixture(eqx.Module):
    """A block whose experts each token chooses; a round sends all rows, so that the bytes follow from the sizes."""

    router: nn.Linear
    up: nn.MoELinear
    down: nn.MoELinear
    exchange: Any = eqx.field(static=True, default=None)

    @staticmethod
    def init(*, key: Any) -> Mixture:
        router, up, down = jax.random.split(key, 3)
        return Mixture(
            nn.Linear.init(Embed, Scores, use_bias=False, key=router),
            nn.MoELinear.init(Experts, Embed, Mlp, use_bias=False, key=up),
            nn.MoELinear.init(Experts, Mlp, Embed, use_bias=False, key=down),
        )

    def __call__(self, x: axn.NamedArray) -> axn.NamedArray:
        weights, chosen = axn.top_k(nn.softmax(self.router(x), Scores), Scores, 2, "choice")

        def of_experts(layers: Any, rows: Any, sizes: Any) -> Any:
            return layers[1](nn.gelu(layers[0](rows, sizes)), sizes)

        layers = self.up, self.down
        y = nn.dispatch(of_experts, layers, x, chosen, Experts, round_size=10**6, exchange=self.exchange)
        return x + axn.dot(y, weights, axis="choice")


class Attention(eqx.Module):
    project: nn.Linear
    out: nn.Linear
    context: Any = eqx.field(static=True, default=None)

    @staticmethod
    def init(*, key: Any) -> Attention:
        project, out = jax.random.split(key)
        axes = axn.Axis("parts", 3), Heads, Size
        return Attention(
            nn.Linear.init(Embed, axes, use_bias=False, key=project),
            nn.Linear.init((Heads, Size), Embed, use_bias=False, key=out),
        )

    def __call__(self, x: axn.NamedArray, segments: Any = None) -> axn.NamedArray:
        q, k, v = axn.unbind(self.project(x), "parts")
        q, k = (apply_rotary(y, "head_size", Pos) for y in (q, k))
        k, v = (y.rename({"pos": "key_pos"}) for y in (k, v))
        mask = Causal("pos", segments=segments)
        return x + self.out(dot_product_attention(q, k, v, "key_pos", "head_size", mask=mask, context=self.context))


class Both(eqx.Module):
    attention: Attention
    mixture: Mixture

    @staticmethod
    def init(*, key: Any) -> Both:
        first, second = jax.random.split(key)
        return Both(Attention.init(key=first), Mixture.init(key=second))

    def __call__(self, x: axn.NamedArray, segments: Any = None) -> axn.NamedArray:
        return self.mixture(self.attention(x, segments))


def layers(block: Any, number: int = 4, divisible_by: int = 1) -> Any:
    model = nn.Stacked.init(Layers.resize(number), block, divisible_by=divisible_by)(key=jax.random.key(0))
    return jax.tree.map(lambda x: x.astype(jnp.float64), model)


def head(y: axn.NamedArray, table: axn.NamedArray, labels: axn.NamedArray) -> Any:
    return nn.cross_entropy_loss(axn.dot(y, table, axis=Embed), Vocab, labels, axn.sum).scalar()


def step(model: Any, x: Any, table: Any, *args: Any, schedule: Any = None) -> Any:
    def loss(model: Any, x: Any, table: Any) -> Any:
        return model.fold(x, *args, schedule=schedule, then=head, then_args=(table, LABELS))

    return jax.value_and_grad(loss, (0, 1, 2))(model, x, table)


class Row(NamedTuple):
    block: Any
    mesh: dict[str, int]
    mapping: dict[str, Any]
    storage: dict[str, Any]
    schedule: Any
    kind: AxisType
    layers: int = 4
    """The number of layers, which are stored as four."""


EP = {"layers": "stage", "batch": ("data", "expert"), "experts": "expert"}
CP = {"layers": "stage", "batch": "data", "pos": "context", "key_pos": "context"}
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
ROWS = {
    "experts": Row(
        Mixture, {"stage": 2, "expert": 4}, EP | {"batch": "expert"}, {}, OneFOneB(4, keep_sharded=["experts"]), AUTO
    ),
    "experts, fsdp inside, rounds": Row(
        Mixture,
        {"stage": 2, "data": 2, "expert": 2},
        EP,
        {"embed": "data"},
        OneFOneB(2, "batch", "inside", 2, ["experts"]),
        EXPLICIT,
        layers=3,
    ),
    "experts, fsdp before": Row(
        Mixture, {"stage": 2, "data": 2, "expert": 2}, EP, {"embed": "data"}, GPipe(2, keep_sharded=[Experts]), AUTO
    ),
    "experts, tensor": Row(
        Mixture,
        {"stage": 2, "expert": 2, "model": 2},
        EP | {"batch": "expert", "mlp": "model"},
        {},
        GPipe(2, rounds=2, keep_sharded=["experts"]),
        AUTO,
    ),
    "sequence": Row(
        Attention, {"stage": 2, "data": 2, "context": 2}, CP, {}, GPipe(2, rounds=2, keep_sharded=["pos"]), EXPLICIT, 3
    ),
    "sequence, vocabulary": Row(
        Attention,
        {"stage": 2, "data": 1, "context": 4},
        CP | {"vocab": "stage"},
        {},
        OneFOneB(2, keep_sharded=["pos"]),
        AUTO,
    ),
    "sequence, experts": Row(
        Both,
        {"stage": 2, "expert": 2, "context": 2},
        CP | EP | {"batch": "expert"},
        {},
        OneFOneB(2, keep_sharded=["experts", "pos"]),
        EXPLICIT,
    ),
}


def mesh_of(row: Row) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(row.mesh.values()), tuple(row.mesh), axis_types=(row.kind,) * len(row.mesh))


def assert_equal(found: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=2e-14 * np.abs(y).max())


@pytest.mark.parametrize("name", ROWS)
def test_values_and_communication(name: str) -> None:
    """Rows and keys move, and no expert and no position is gathered; gradients are summed once, after the ticks."""
    row = ROWS[name]
    schedule, sizes = row.schedule, row.mesh
    with jax.enable_x64(True):
        expected = jax.jit(step)(layers(row.block, row.layers), X, HEAD)
        arguments = layers(row.block, row.layers, divisible_by=4), X, HEAD
        fn = functools.partial(step, schedule=schedule)
        with jax.set_mesh(mesh_of(row)):
            if row.storage:
                jitted: Any = axn.fsdp(fn, row.mapping | row.storage, row.mapping, compiler_options=QUICK)
            else:
                jitted = axn.named_jit(fn, row.mapping, in_placement=row.mapping, compiler_options=QUICK)
            compiled = jitted.lower(*arguments).compile()
            found = jax.block_until_ready(jitted(*arguments))
            report = contract(never_gathers=["experts", "pos", "key_pos", "vocab"]).check(jitted, *arguments)
    reasons = {c.reason for c in report.collectives}
    assert row.block is Attention or "sends rows to experts, which is sharded over expert, or results back" in reasons
    along = "shards along pos or key_pos"  # a ring moves them, and an exchange for heads trades them
    assert row.block is Mixture or any(along in str(reason) for reason in reasons)
    total, (of_layers, *others) = jax.device_get(found)
    assert not any(x[row.layers :].any() for x in jax.tree.leaves(of_layers))
    assert_equal((total, (jax.tree.map(lambda x: x[: row.layers], of_layers), *others)), expected)
    counts = executed(compiled)
    gathered = counts.pop("all-gather", (0, 0))[0]
    assert bool(gathered) == bool(row.storage)
    S, R, M = sizes["stage"], schedule.rounds, schedule.microbatches
    runs = (M * R + S - 1 if isinstance(schedule, GPipe) else schedule.ticks(S)) * Layers.size // (S * R)
    if row.block is not Attention:
        n = sizes["expert"]
        rows = 2 * X.size // Embed.size // M // np.prod([k for a, k in sizes.items() if a not in ("stage", "model")])
        # A round sends rows, the numbers of their experts, and results: forward, again for the derivative, which sends
        # two arrays more. XLA may merge the two exchanges of numbers.
        once = n * rows * Embed.size * 8
        numbers = n * rows * 4
        assert counts["all-to-all"][1] in (runs * (6 * once + 2 * numbers), runs * (6 * once + numbers))
    else:  # keys go around, or are exchanged for heads, besides the microbatches that go from stage to stage
        assert "all-to-all" in counts or counts["collective-permute"][0] > 2 * runs


def test_sums_of_gradients_do_not_grow_with_microbatches() -> None:
    def sums(microbatches: int) -> int:
        row = ROWS["experts"]
        model, fn = (
            nn.Stacked.init(Layers, Mixture)(key=jax.random.key(0)),
            functools.partial(step, schedule=GPipe(microbatches, keep_sharded=["experts"])),
        )
        arguments = model, X.astype(jnp.float32), HEAD.astype(jnp.float32)
        with jax.set_mesh(mesh_of(row)):
            jitted: Any = axn.named_jit(fn, row.mapping, in_placement=row.mapping, compiler_options=QUICK)
            return executed(jitted.lower(*arguments).compile())["all-reduce"][1]

    assert sums(4) <= sums(2)


def test_memory_is_at_most_twice_that_of_experts_alone() -> None:
    E, Wide = axn.Axis("experts", 16), axn.Axis("mlp", 512)

    class Large(Mixture):
        @staticmethod
        def init(*, key: Any) -> Mixture:
            small = Mixture.init(key=key)
            up = nn.MoELinear.init(E, Embed, Wide, use_bias=False, key=key)
            down = nn.MoELinear.init(E, Wide, Embed, use_bias=False, key=key)
            return eqx.tree_at(lambda m: (m.up, m.down), small, (up, down))

    def temporaries(sizes: dict[str, int], mapping: dict[str, Any], schedule: Any) -> int:
        def of(model: Any, x: Any) -> Any:
            def layer(block: Any, x: Any) -> Any:
                chosen = axn.argmax(block.router(x), Scores)
                layers = block.up, block.down
                return x + nn.dispatch(
                    lambda both, rows, sizes: both[1](both[0](rows, sizes), sizes), layers, x, chosen, E
                )

            return axn.sum(model.fold_via(layer, schedule=schedule)(x)).scalar()

        model = nn.Stacked.init(Layers, Large, gradient_checkpointing=True)(key=jax.random.key(0))
        with jax.set_mesh(axn.make_mesh(sizes)):
            jitted: Any = axn.named_jit(jax.value_and_grad(of), mapping, in_placement=mapping)
            memory: Any = jitted.lower(model, X).compile().memory_analysis()
        return memory.temp_size_in_bytes

    alone = temporaries({"expert": 8}, {"batch": "expert", "experts": "expert"}, None)
    inside = temporaries({"stage": 2, "expert": 4}, EP | {"batch": "expert"}, GPipe(4, keep_sharded=["experts"]))
    assert inside < 2 * alone


# --- what cannot stay sharded ---

TRAPS: dict[str, Any] = {
    "positions of the axis": lambda x: x + axn.arange(x.resolve_axis("pos")) * 0.1,
    "positions of the complete axis": lambda x: x + axn.arange(Pos) * 0.1,
    "a mean": lambda x: x - axn.mean(x, "pos"),
    "a slice": lambda x: x + x["pos", 0],
    "its order": lambda x: x + axn.flip(x, "pos"),
    "its size": lambda x: x / x.axis_size("pos"),
    "a choice by its size": lambda x: (lambda a, b: a + (a if x.axis_size("pos") == 8 else b))(axn.sin(x), axn.cos(x)),
    "another name": lambda x: x + axn.logsumexp(x.rename({"pos": "p"}), "p"),
    "its logsumexp": lambda x: x + axn.logsumexp(x, Pos),
    "merged": lambda x: axn.tanh(x.flatten_axes(("batch", "pos"), "rows")).unflatten_axis(
        "rows", x.resolve_axis(("batch", "pos"))
    ),
    "a loop": lambda x: x + axn.fold(lambda total, y: total + axn.tanh(y), "pos")(axn.zeros(x["pos", 0].axes), x),
    "a branch": lambda x: jax.lax.cond(True, lambda: x * 2.0, lambda: x * float(x.axis_size("pos"))),
    "a mask": lambda x: x + dot_product_attention(
        x, x.rename({"pos": "key_pos"}), x.rename({"pos": "key_pos"}), "key_pos", "embed",
        mask=nn.attention.causal_mask(Pos, Pos.alias("key_pos")),
    ),
    "limited experts": lambda x: x * (
        nn.limit_capacity((axn.mean(x, ("batch", "embed")) > 0).astype(int), axn.Axis("experts", 2), 0.5) >= 0
    ),
    "the load of experts": lambda x: x * nn.load_balancing_loss(
        nn.softmax(axn.mean(x, "batch"), "embed"), axn.argmax(axn.mean(x, "batch"), "embed"), Embed
    ),
    "its own derivative": lambda x: _scaled(x),
    "two shards in one array": lambda x: x + axn.logsumexp(
        axn.dot(x, x.rename({"pos": "key_pos"}), axis="embed"), "key_pos"
    ),
    "a fixed length": lambda x: x + axn.mean(axn.pad(x, {"pos": (0, 16 - x.axis_size("pos"))}), "pos"),
    "steps by its size": lambda x: x + axn.arange(x.resolve_axis("pos"), step=1 / x.axis_size("pos")),
    "the largest along it": lambda x: x + axn.sum(axn.top_k(x, "pos", 2, "choice")[0], "choice"),
    "a window by its size": lambda x: x + dot_product_attention(
        x, x.rename({"pos": "key_pos"}), x.rename({"pos": "key_pos"}), "key_pos", "embed",
        mask=Causal("pos", window=x.axis_size("pos") // 2),
    ),
}  # fmt: skip


@jax.custom_vjp
def _scaled(x: Any) -> Any:
    return x


_scaled.defvjp(lambda x: (x, None), lambda _, g: (g / (1 + jnp.max(abs(g.array))),))


NEED_ALL = {"a slice", "its order", "merged", "a loop", "limited experts", "a fixed length", "the largest along it",
            "two shards in one array"}  # fmt: skip
GET_IT = {"its order", "a loop"}
"""The refused ones that also run with the complete axis, which is then no different from one that was never kept."""


@pytest.mark.parametrize("trap", TRAPS)
def test_layers_that_need_a_complete_axis_are_refused_or_get_it(trap: str) -> None:
    weights = axn.ones({"layers": 2})

    def loss(weights: Any, x: Any, schedule: Any = None) -> Any:
        layer = lambda w, x: TRAPS[trap](x) * w
        return axn.sum(axn.sin(nn.Stacked(weights, Layers.resize(2)).fold_via(layer, schedule=schedule)(x))).scalar()

    mapping = {"layers": "stage", "pos": "context", "key_pos": "context"}
    with jax.set_mesh(axn.make_mesh({"stage": 2, "context": 4})), axn.axis_mapping(mapping):
        # One microbatch, so that means over examples are as in the plain fold.
        def staged(*keep: str) -> Any:
            schedule = GPipe(1, keep_sharded=keep)
            return jax.jit(jax.value_and_grad(functools.partial(loss, schedule=schedule), (0, 1)))

        arguments = axn.shard((weights, X))
        if trap not in NEED_ALL:
            found = staged("pos")(*arguments)
        else:
            text = r"keeps 'pos' sharded, and its layers need all of it: .* in test_pipelines_inside.py:\d+ needs all"
            with pytest.raises(ValueError, match=text):
                staged("pos").trace(*arguments)
            if trap not in GET_IT:
                return
            found = staged()(*arguments)
    expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(weights, X)
    for x, y in zip(jax.tree.leaves(jax.block_until_ready(found)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def _mean(y: Any) -> Any:
    return axn.sum(axn.mean(axn.sin(y), "batch")).scalar()


@jax.custom_vjp
def _weighted(x: Any, w: Any) -> Any:
    return x * w[None, None]


def _weighted_backward(kept: Any, g: Any) -> Any:
    x, w = kept
    return g * w[None, None] * 2, jnp.sum(g * x, (0, 1))  # of x by its own rule; of w a sum over examples


_weighted.defvjp(lambda x, w: (_weighted(x, w), (x, w)), _weighted_backward)


def _penalty(y: Any) -> Any:
    slope = jax.grad(lambda z: axn.sum(axn.sin(z) ** 3).scalar())(y)
    return axn.sum(slope * slope).scalar()


THENS: dict[str, tuple[Any, str]] = {
    # A function of all results, and of weights if it takes these, and what refuses it.
    "a mean over the batch": (_mean, ""),
    "a mean of all": (lambda y: axn.mean(axn.sin(y)).scalar(), ""),
    "a sum": (lambda y: axn.sum(axn.sin(y)).scalar(), ""),
    "a mean along a kept axis": (lambda y: axn.sum(axn.mean(axn.sin(y), "pos")).scalar(), ""),
    "a maximum along a kept axis": (lambda y: axn.sum(axn.max(axn.sin(y), "pos")).scalar(), ""),
    "a softmax along a kept axis": (lambda y: axn.sum(nn.softmax(y, "pos") ** 2).scalar(), ""),
    "the last position": (lambda y: axn.mean(axn.sin(y["pos", -1])).scalar(), ""),
    "the size of the batch": (lambda y: axn.sum(axn.sin(y)).scalar() / y.axis_size("batch"), ""),
    "a function for its size": (
        lambda y: axn.sum((axn.sin if y.axis_size("batch") == 16 else axn.cos)(y)).scalar(), ""
    ),
    "positions in the batch": (lambda y: axn.sum(axn.sin(y) * axn.arange(y.resolve_axis("batch"))).scalar(), ""),
    "labels from outside": (lambda y: axn.sum(axn.sin(y) * LABELS).scalar(), ""),
    "the same for all examples": (lambda y: axn.sum(axn.sin(y)).scalar() + axn.sum(HEAD * 0.5).scalar(), ""),
    "a number": (lambda y: 2.5, ""),
    "an inner derivative": (_penalty, ""),
    "an inner derivative of a mean": (lambda y: axn.sum(jax.grad(_mean)(y) ** 2).scalar(), ""),
    "a product of a mean": (lambda y: axn.dot(axn.mean(y, ("batch", "pos")), HEAD, axis="embed").sum().scalar(), ""),
    "random numbers": (lambda y: axn.sum(y * axn.random.normal(jax.random.key(3), y.axes)).scalar(), ""),
    "a loop": (lambda y: axn.fold(lambda t, z: t + axn.mean(z * z).scalar(), "embed")(0.0, y), ""),
    "a loop over both": (
        lambda y: axn.sum(axn.fold(lambda t, z: t + axn.mean(z, "batch"), "embed")(axn.zeros(Pos), y)).scalar(), ""
    ),
    "a branch": (
        lambda y: jax.lax.cond(y.axis_size("pos") > 4, lambda: axn.mean(y * y).scalar(), lambda: 0.5), ""
    ),
    "computed again": (lambda y: jax.checkpoint(_mean)(y) * 2 + jax.checkpoint(lambda y: 1.0)(y), ""),
    "its own derivative": (lambda y, w: axn.sum(axn.named(_weighted(y.array, w.array), y.names)).scalar(), ""),
    "a penalty of weights": (lambda y, w: axn.mean(y * y).scalar() + axn.sum(w * w).scalar(), ""),
    "a product with a mean": (lambda y, w: axn.sum(axn.mean(y, "batch") * axn.sin(w)).scalar(), ""),
    "a maximum over the batch": (lambda y: axn.sum(axn.max(y, "batch")).scalar(), "'max' .* all of 'batch'"),
    "a softmax over the batch": (lambda y: axn.sum(nn.softmax(y, "batch") ** 2).scalar(), "all of 'batch'"),
    "a root of a mean": (lambda y: axn.sqrt(axn.mean(y * y)).scalar(), "'sqrt' .* all of 'batch'"),
    "differences from a mean": (lambda y: axn.sum((y - axn.mean(y, "batch")) ** 2).scalar(), "all of 'batch'"),
    "a part of the batch": (lambda y: axn.sum(y["batch", :3]).scalar(), "all of 'batch'"),
    "a sort of the batch": (lambda y: axn.sum(axn.sort(y, "batch") * axn.arange(Batch)).scalar(), "all of 'batch'"),
    "a branch by a mean": (
        lambda y: jax.lax.cond(axn.mean(y).scalar() > 0, lambda: axn.sum(y).scalar(), lambda: 0.0), "all of 'batch'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", THENS)
def test_a_loss_is_that_of_all_examples_or_refused(name: str) -> None:
    """Of devices with shards of the batch and of positions, and of microbatches."""
    then, refused = THENS[name]

    def loss(weights: Any, x: Any, scale: Any, schedule: Any = None) -> Any:
        layer = lambda w, x: axn.tanh(x * w)
        takes_both = then.__code__.co_argcount == 2
        given = lambda y, w: then(y * w, w) if takes_both else then(y * w)
        fold = nn.Stacked(weights, Layers.resize(2)).fold_via(layer, schedule=schedule, then=given, then_args=(scale,))
        return fold(x)

    mapping = CP
    arguments = axn.ones({"layers": 2}), X.astype(jnp.float32), axn.linspace(Embed, start=0.5, stop=1.5)
    step = jax.value_and_grad(functools.partial(loss, schedule=OneFOneB(4, keep_sharded=["pos"])), (0, 1, 2))
    with jax.set_mesh(axn.make_mesh({"stage": 2, "data": 2, "context": 2})), axn.axis_mapping(mapping):
        if refused:
            with pytest.raises(ValueError, match=f"must be a sum or a mean over 'batch': .*{refused}"):
                jax.eval_shape(step, *arguments)
            return
        found = jax.block_until_ready(jax.jit(step, compiler_options=QUICK)(*axn.shard(arguments)))
    expected = jax.jit(jax.value_and_grad(loss, (0, 1, 2)), compiler_options=QUICK)(*arguments)
    for x, y in zip(jax.tree.leaves(jax.device_get(found)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "schedule", [GPipe(2, keep_sharded=["key_pos"]), OneFOneB(2, keep_sharded=["key_pos"])], ids=["gpipe", "1f1b"]
)
def test_further_arguments_stay_sharded_where_the_carry_has_no_such_axis(schedule: Any) -> None:
    """Devices along their mesh axis compute the same results, which count once."""
    context = axn.named(RNG.normal(size=(8, 16)), ("key_pos", "batch")).astype(jnp.float32)

    def loss(weights: Any, x: Any, context: Any, schedule: Any = None) -> Any:
        layer = lambda w, x, context: axn.sin(x * w + axn.logsumexp(context, "key_pos"))
        fold = nn.Stacked(weights, Layers.resize(2)).fold_via(
            layer, schedule=schedule, then=lambda y: axn.sum(y * y).scalar()
        )
        return fold(x, context)

    arguments = axn.ones({"layers": 2}), X.astype(jnp.float32), context
    mapping = {"layers": "stage", "batch": "data", "key_pos": "context"}
    expected = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arguments)
    with jax.set_mesh(axn.make_mesh({"stage": 2, "data": 2, "context": 2})), axn.axis_mapping(mapping):
        step = jax.jit(jax.value_and_grad(functools.partial(loss, schedule=schedule), (0, 1, 2)))
        counts = executed(step.lower(*axn.shard(arguments)).compile())
        found = jax.block_until_ready(step(*axn.shard(arguments)))
    assert "all-gather" not in counts
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_carry_of_which_some_has_the_kept_axis(kind: AxisType, size: int) -> None:
    """Over a mesh axis of size 1, what needs all of an axis has it."""

    def loss(weights: Any, x: Any, schedule: Any = None) -> Any:
        along = axn.cumsum if size == 1 else lambda x, _: axn.sin(x)
        layer = lambda w, c: (along(c[0], "pos") * w, c[1] + axn.sum(c[0], "pos"))
        fold = nn.Stacked(weights, Layers.resize(2)).fold_via(
            layer, schedule=schedule, then=lambda y: axn.sum(axn.sin(y[0])).scalar() + axn.sum(axn.sin(y[1])).scalar()
        )
        return fold((x, axn.zeros_like(x["pos", 0])))

    arguments = axn.ones({"layers": 2}), X.astype(jnp.float32)
    expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(*arguments)
    mesh = jax.make_mesh((2, 4 // size, size), ("stage", "data", "context"), axis_types=(kind,) * 3)
    with jax.set_mesh(mesh), axn.axis_mapping({"layers": "stage", "batch": "data", "pos": "context"}):
        for make in (GPipe, OneFOneB):
            schedule = make(2, keep_sharded=["pos"])
            found = jax.jit(jax.value_and_grad(functools.partial(loss, schedule=schedule), (0, 1)))(
                *axn.shard(arguments)
            )
            for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_an_exchange_that_a_pipeline_cannot_do_is_refused(kind: AxisType) -> None:
    with jax.set_mesh(jax.make_mesh((2, 4), ("stage", "context"), axis_types=(kind,) * 2)):
        model: Any = nn.Stacked.init(Layers, Attention)(key=jax.random.key(0))
        layer = lambda block, x: dataclasses.replace(block, context="ring")(x) - axn.flip(x, "pos")
        text = r"context='ring'.*: a pipeline around it gathers axis .*pos', so `context`.*: its schedule lacks `keep"
        with axn.axis_mapping(CP | {"batch": None}), pytest.raises(ValueError, match=text):
            jax.eval_shape(model.fold_via(layer, schedule=GPipe(2)), X)
        text = r"needs all of 'pos'. Without 'pos' in `keep_sharded`, each device gets all of it."
        with axn.axis_mapping(CP | {"batch": None}), pytest.raises(ValueError, match=text):
            jax.eval_shape(model.fold_via(layer, schedule=GPipe(2, keep_sharded=["pos"])), X)
        model = nn.Stacked.init(Layers, Mixture)(key=jax.random.key(0))
        layer = lambda block, x: dataclasses.replace(block, exchange="all_to_all")(x) * axn.mean(block.up.weight)
        text = r"exchange='all_to_all': a pipeline around it gathers axis 'experts', so .*: its schedule lacks `keep"
        mapping = {"layers": "stage", "batch": "context", "experts": "context"}
        with axn.axis_mapping(mapping), pytest.raises(ValueError, match=text):
            jax.eval_shape(model.fold_via(layer, schedule=GPipe(2)), X)


def _means_of_pairs(rows: axn.NamedArray) -> axn.NamedArray:
    """Return the mean of two neighbouring rows in the place of both."""
    x = rows.array
    pairs = x.reshape(-1, 2, *x.shape[1:])
    return axn.named(jnp.broadcast_to(pairs.mean(1, keepdims=True), pairs.shape).reshape(x.shape), rows.names)


Row1 = axn.Axis("one", 1)
OF_EXPERTS: dict[str, tuple[Any, str]] = {
    # Those of a device get what those of all devices would: the result, and the reason of a refusal.
    "a bias of each, and all of their numbers": (lambda up, bias, rows, sizes: (
        up(nn.gelu(rows), sizes)
        + nn.MoELinear(bias.broadcast_axis(Row1), None, Experts, Row1, Mlp)(
            axn.ones((rows.resolve_axis("rows"), Row1)), sizes
        ) * axn.logsumexp(axn.arange(sizes.resolve_axis("experts")) * 1.0, "experts")
    ), ""),
    "a product by groups": (lambda up, bias, rows, sizes: axn.named(
        jax.lax.ragged_dot(rows.array, up.weight.rearrange(("experts", "embed", "mlp")).array, sizes.array),
        ("rows", "mlp"),
    ), ""),
    "how many": (lambda up, bias, rows, sizes: up(rows, sizes) * jnp.int32(sizes.axis_size("experts")), ""),
    "how many, in float": (lambda up, bias, rows, sizes: up(rows, sizes) / sizes.axis_size("experts"), ""),
    "whether they are all": (lambda up, bias, rows, sizes: up(rows, sizes) * (sizes.axis_size("experts") == 4), ""),
    "the first": (lambda up, bias, rows, sizes: up(rows, sizes) + bias["experts", 0], "'index' .* needs all"),
    "their sum": (lambda up, bias, rows, sizes: up(rows, sizes) * axn.sum(sizes, "experts"), "'sum' .* the numbers"),
    "a mean of rows": (lambda up, bias, rows, sizes: up(rows - axn.mean(rows, "rows"), sizes), "'mean' .* each row"),
    "numbers without names": (
        lambda up, bias, rows, sizes: up(
            rows, sizes + axn.named(jnp.arange(sizes.axis_size("experts")), "experts") * 0
        ), r"'add' .* uses the numbers of rows"
    ),
    "bins and largest of a row": (lambda up, bias, rows, sizes: up(
        axn.top_k(rows, "embed", 8, "k")[0].rename({"k": "embed"})
        + axn.named(jnp.digitize(rows.array, np.linspace(-1.0, 1.0, 5)), rows.names), sizes
    ), ""),
    "a sum of rows that nobody uses": (lambda up, bias, rows, sizes: (axn.sum(rows, "rows"), up(rows, sizes))[1], ""),
    "pairs of rows": (lambda up, bias, rows, sizes: up(_means_of_pairs(rows), sizes), "'reshape' .* each row"),
    "a running sum of rows": (lambda up, bias, rows, sizes: axn.cumsum(up(rows, sizes), "rows"), "each row"),
    "a place among the rows": (
        lambda up, bias, rows, sizes: up(rows, sizes) + axn.arange(rows.resolve_axis("rows")), "each row"
    ),
    "weighted by their numbers": (lambda up, bias, rows, sizes: up(rows, sizes) * (sizes["experts", 0] > 2), "numbers"),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_what_experts_compute(name: str) -> None:
    """In a pipeline, `fn` is the same for the experts of a device as for all, in integers too, or refused."""
    fn, refused = OF_EXPERTS[name]
    model: Any = nn.Stacked.init(Layers, Mixture)(key=jax.random.key(0))
    biases = axn.random.normal(jax.random.key(1), (Layers, Experts, Mlp))

    def layer(block: Any, x: Any) -> Any:
        block, bias = block
        chosen = axn.argmax(block.router(x), Scores)
        y = nn.dispatch(lambda layer, *args: fn(layer[0], layer[1], *args), (block.up, bias), x, chosen, Experts)
        return x + axn.mean(y, Mlp)

    def loss(model: Any, x: Any, schedule: Any = None) -> Any:
        return axn.sum(axn.sin(model.fold_via(layer, schedule=schedule)(x))).scalar()

    both: Any = model.stacked, biases
    model = nn.Stacked(both, Layers)
    mapping = {"layers": "stage", "batch": "expert", "experts": "expert"}
    staged = functools.partial(loss, schedule=GPipe(2, keep_sharded=["experts"]))
    with jax.set_mesh(axn.make_mesh({"stage": 2, "expert": 4})), axn.axis_mapping(mapping):
        if refused:
            with pytest.raises(ValueError, match=f"dispatch: `fn` gets some of the rows and experts .*{refused}"):
                jax.eval_shape(staged, model, X)
            return
        arguments = axn.shard((model, X.astype(jnp.float32)))
        found = jax.block_until_ready(jax.jit(jax.value_and_grad(staged), compiler_options=QUICK)(*arguments))
    expected = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(model, X.astype(jnp.float32))
    for x, y in zip(jax.tree.leaves(jax.device_get(found)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
