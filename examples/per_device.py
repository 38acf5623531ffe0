"""Write models as per-device code: contractions, FSDP and tensor parallelism, sequences, experts, pipeline stages.

Each program is the function of one device, wrapped in `axonym.shard_map`. The script compares its result with that on
one device, and counts the collectives of the compiled program: `python examples/per_device.py`.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import axonym as axn
from axonym.manual.collectives import axis_size

Batch, Embed, Mlp = axn.make_axes(batch=8, embed=16, mlp=32)
Pos, Heads, Size = axn.make_axes(pos=32, heads=8, size=4)
Token, Expert = axn.make_axes(token=32, expert=8)
Layer, Micro, Row = axn.make_axes(layer=8, micro=4, row=2)


@dataclasses.dataclass(frozen=True)
class Program:
    """A per-device function, its reference on one device, and its collectives."""

    fn: Callable[..., Any]
    reference: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    mesh: dict[str, int]
    collectives: dict[str, int]
    """How often each collective stands in the compiled program."""
    options: dict[str, Any]
    """Further arguments of `shard_map`."""


def draw(seed: int, *axes: axn.Axis) -> axn.NamedArray:
    values = np.random.default_rng(seed).normal(size=[a.size for a in axes]) / 4
    return axn.named(values.astype(np.float32), axes)


# --- contractions over a sharded axis ---


def product(x, w):
    return axn.dot(x, w, axis="embed")


def product_all_reduce(x, w):
    """Sum over the shard of `embed`, then over devices; every device gets the result."""
    return axn.psum(axn.dot(x, w, axis="embed"), "embed")


def product_reduce_scatter(x, w):
    """Do the same, but leave each device its shard of the rows: half the traffic."""
    return axn.psum_scatter(axn.dot(x, w, axis="embed"), "batch", over="embed")


def product_ring(x, w):
    """Multiply all rows by the columns of this device; rows and columns of `w` are both sharded.

    An all-gather of the rows would leave devices idle. In this ring, each shard is sent on before it is multiplied, so
    no transfer waits for a product.
    """
    devices, own, rows = axis_size("batch"), axn.axis_index("batch"), x.axis_size("batch")
    found = axn.zeros((Batch, w.resolve_axis("mlp")))
    for step in range(devices):
        following = axn.shift(x, "batch") if step < devices - 1 else x
        came_from = (own - step) % devices
        found = found.at["batch", axn.ds(came_from * rows, rows)].set(axn.dot(x, w, axis="embed"))
        x = following
    return found


# --- layers ---


def mlp(params, x):
    return axn.dot(axn.tanh(axn.dot(x, params["up"], axis="embed")), params["down"], axis="mlp")


def mlp_tensor_parallel(params, x):
    """Shard the hidden features: the first contraction needs no communication, the second is summed over devices."""
    return axn.psum(mlp(params, x), "mlp")


def train(params, x):
    """A step of gradient descent on one device."""
    value, grads = jax.value_and_grad(lambda p: axn.mean((mlp(p, x) - x) ** 2).scalar())(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def train_fully_sharded(params, x):
    """Do the same with examples and parameters sharded over one mesh axis.

    A parameter is all-gathered where it is used. The gradient of the all-gather is a reduce-scatter, which sums over
    the examples of all devices, and leaves each device its shard.
    """

    def loss(params):
        gathered = {name: axn.all_gather(p, "embed") for name, p in params.items()}
        return axn.pmean(axn.mean((mlp(gathered, x) - x) ** 2), "batch").scalar()

    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


# --- sequences ---


def attention(q, k, v):
    """Compute causal attention. The positions of keys and values are `key_pos`."""
    scores = axn.dot(q, k, axis="size") / Size.size**0.5
    scores = axn.where(_is_past(q, k, 0, 0), scores, -1e9)
    weights = axn.exp(scores - axn.max(scores, "key_pos"))
    return axn.dot(weights, v, axis="key_pos") / axn.sum(weights, "key_pos")


def _is_past(q, k, q_start, k_start):
    """Mask the keys that are not after the query, for shards of the sequence that start at these positions."""
    both = (q.resolve_axis("pos"), k.resolve_axis("key_pos"))
    return (axn.arange(both[0]) + q_start).broadcast_axis(both[1]) >= axn.arange(both[1]) + k_start


def attention_ring(q, k, v):
    """Attend over a sharded sequence: keys and values go around a ring, and no device ever has all of them.

    Earlier sums are scaled down whenever a larger score turns up.
    """
    devices, own, length = axis_size("pos"), axn.axis_index("pos"), k.axis_size("key_pos")
    largest, total, mixed = axn.max(q, "size") * 0 - 1e9, axn.max(q, "size") * 0, q * 0
    for step in range(devices):
        following = axn.shift((k, v), "key_pos") if step < devices - 1 else (k, v)
        scores = axn.dot(q, k, axis="size") / Size.size**0.5
        k_start = (own - step) % devices * length
        scores = axn.where(_is_past(q, k, axn.axis_offset("pos"), k_start), scores, -1e9)
        new_largest = axn.maximum(largest, axn.max(scores, "key_pos"))
        weights, kept = axn.exp(scores - new_largest), axn.exp(largest - new_largest)
        total = total * kept + axn.sum(weights, "key_pos")
        mixed = mixed * kept + axn.dot(weights, v, axis="key_pos")
        largest, (k, v) = new_largest, following
    return mixed / total


def attention_all_to_all(q, k, v):
    """Attend over a sharded sequence: an all-to-all shards the heads instead, since each head needs all positions."""
    q = axn.all_to_all(q, split="heads", gather="pos")
    k, v = (axn.all_to_all(x, split="heads", gather="key_pos") for x in (k, v))
    return axn.all_to_all(attention(q, k, v), split="pos", gather="heads")


# --- experts ---


def experts(params, x):
    """Apply to each token the expert with the highest score, by computing all experts."""
    best, gate = _route(params, x)
    y = axn.dot(axn.tanh(axn.dot(x, params["up"], axis="embed")), params["down"], axis="mlp")
    return axn.dot(y, best, axis="expert") * gate


def _route(params, x):
    scores = axn.dot(x, params["router"], axis="embed")
    weights = axn.exp(scores) / axn.sum(axn.exp(scores), "expert")
    best = axn.equal(axn.argmax(scores, "expert").broadcast_axis(Expert), axn.arange(Expert))
    return best.astype(np.float32), axn.max(weights, "expert")


def experts_parallel(params, x):
    """Shard tokens and experts over one mesh axis. Tokens travel to their expert and back.

    Every device has a slot for each of its tokens at each expert, so that no token is dropped. With fewer slots, a
    token without a slot would have a row of zeros in `sent`.
    """
    Slot = axn.Axis("slot", x.axis_size("token"))
    best, gate = _route(params, x)
    slot = axn.cumsum(best, "token") - 1  # the tokens for one expert are numbered
    sent = (slot.broadcast_axis(Slot) == axn.arange(Slot)) * best
    inbox = axn.all_to_all(axn.dot(x, sent, axis="token"), split="expert", gather="slot")
    done = axn.dot(axn.tanh(axn.dot(inbox, params["up"], axis="embed")), params["down"], axis="mlp")
    outbox = axn.all_to_all(done, split="slot", gather="expert")
    return axn.dot(sent, outbox, axis=("expert", "slot")) * gate


# --- stages ---


def layers(w, x):
    """Apply a stack of layers, one after the other."""

    def layer(x, row):
        return axn.tanh(axn.dot(x, axn.named(row, ("embed", "out")), axis="embed")).rename({"out": "embed"}), None

    return jax.lax.scan(layer, x, w.array)[0]


def layers_pipelined(w, x):
    """Shard the layers into stages. Microbatches move from stage to stage, and each stage works on another one.

    This takes one step for each microbatch, and one less than the number of stages for the last microbatch to finish.
    """
    stages, stage, count = axis_size("layer"), axn.axis_index("layer"), x.axis_size("micro")

    def step(state, i):
        arriving = x["micro", jax.numpy.minimum(i, count - 1)]
        state = layers(w, axn.where(stage == 0, arriving, state))
        return axn.shift(state, "layer", wrap=False), axn.where(stage == stages - 1, state, 0.0)

    start = axn.pvary(axn.zeros_like(x["micro", 0]), "layer")
    _, left = jax.lax.scan(step, start, jax.numpy.arange(count + stages - 1))
    left = axn.named(left.array[stages - 1 :], x.axes)  # only the last stage has something that is not zero
    return axn.psum(left, "layer")


# --- what they are run with ---


def _operands():
    return draw(0, Batch, Embed), draw(1, Embed, Mlp)


def _model():
    return {"up": draw(1, Embed, Mlp), "down": draw(2, Mlp, Embed)}, draw(0, Batch, Embed)


def _sequence():
    Key = Pos.alias("key_pos")
    return draw(0, Pos, Heads, Size), draw(1, Key, Heads, Size), draw(2, Key, Heads, Size)


def _experts():
    weights = {"router": (Embed, Expert), "up": (Expert, Embed, Mlp), "down": (Expert, Mlp, Embed)}
    return {name: draw(i, *axes) for i, (name, axes) in enumerate(weights.items())}, draw(3, Token, Embed)


def _layers():
    return draw(0, Layer, Embed, Embed.alias("out")), draw(1, Micro, Row, Embed)


PROGRAMS = [
    Program(
        product_all_reduce,
        product,
        _operands,
        {"model": 8},
        {"all-reduce": 1},
        {"mapping": {"embed": "model"}},
    ),
    Program(
        product_reduce_scatter,
        product,
        _operands,
        {"model": 8},
        {"reduce-scatter": 1},
        # The rows are replicated in the arguments, so no argument says how the result is sharded.
        {"mapping": {"embed": "model"}, "out_specs": {"batch": "model"}},
    ),
    Program(
        product_ring,
        product,
        _operands,
        {"model": 8},
        {"collective-permute": 7},
        {"mapping": {"batch": "model", "mlp": "model"}},
    ),
    Program(
        mlp_tensor_parallel,
        mlp,
        _model,
        {"data": 4, "model": 2},
        {"all-reduce": 1},
        {"mapping": {"batch": "data", "mlp": "model"}},
    ),
    Program(
        train_fully_sharded,
        train,
        _model,
        {"data": 8},
        {"all-gather": 2, "reduce-scatter": 2, "all-reduce": 1},
        {"mapping": {"batch": "data"}, "in_specs": {"params": {"embed": "data"}}},
    ),
    Program(
        attention_ring,
        attention,
        _sequence,
        {"seq": 8},
        {"collective-permute": 2 * 7},  # keys and values
        {"mapping": {"pos": "seq", "key_pos": "seq"}},
    ),
    Program(
        attention_all_to_all,
        attention,
        _sequence,
        {"seq": 8},
        {"all-to-all": 4},
        {"mapping": {"pos": "seq", "key_pos": "seq"}},
    ),
    Program(
        experts_parallel,
        experts,
        _experts,
        {"data": 8},
        {"all-to-all": 2},
        {
            "mapping": {"token": "data"},
            "in_specs": {"params": {"router": {}, "up": {"expert": "data"}, "down": {"expert": "data"}}},
        },
    ),
    Program(
        layers_pipelined,
        layers,
        _layers,
        {"stage": 4},
        {"collective-permute": 1, "all-reduce": 1},  # the first of them in a loop
        {"mapping": {"layer": "stage"}},
    ),
]

_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all|ragged-all-to-all)(?:-start)?\("
)


def run(program: Program) -> tuple[float, Counter[str]]:
    """Run a program; return its distance from the reference, and its collectives."""
    arguments = program.arguments()
    with jax.set_mesh(axn.make_mesh(program.mesh)):
        compiled = jax.jit(axn.shard_map(program.fn, **program.options)).lower(*arguments).compile()
        found = jax.block_until_ready(compiled(*arguments))
    expected = jax.jit(program.reference)(*arguments)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    error = max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)
    return error, Counter(_COLLECTIVE.findall(str(compiled.as_text())))


def show(programs: list[Program]) -> None:
    """Run programs, and print what they do."""
    for program in programs:
        error, collectives = run(program)
        assert error < 1e-5 and collectives == program.collectives, (program.fn.__name__, error, collectives)
        listed = ", ".join(f"{kind} {times}" for kind, times in sorted(collectives.items()))
        print(f"{program.fn.__name__:<24} within {error:.0e} of one device; {listed}")


if __name__ == "__main__":
    # Eight simulated devices, so that it runs on any machine.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    show(PROGRAMS)
