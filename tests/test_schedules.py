"""Pipelines: values and gradients agree with the plain fold, communication and idle time with the schedule."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer
from jax.sharding import AxisType

import axonym as axn
import axonym.haliax as hax
from axonym import nn
from axonym.nn.attention import Causal, dot_product_attention
from axonym.schedules import GPipe, OneFOneB
from axonym.schedules._pipeline import _Pipeline
from benchmarks.schedules import stage_runs
from tests.executed import executed
from tests.helpers import covering, spec

Batch, Pos, Embed, Mlp, Layers = axn.make_axes(batch=16, pos=16, embed=8, mlp=8, layers=8)
MAPPING = {"layers": "stage", "batch": "data"}
QUICK: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # the same collectives


class Block(eqx.Module):
    norm: nn.RmsNorm
    up: nn.Linear
    down: nn.Linear

    @staticmethod
    def init(*, key: Any) -> Block:
        up, down = jax.random.split(key)
        return Block(nn.RmsNorm.init(Embed), nn.Linear.init(Embed, Mlp, key=up), nn.Linear.init(Mlp, Embed, key=down))

    def __call__(self, x: axn.NamedArray, scale: axn.NamedArray, shift: Any) -> axn.NamedArray:
        return x + self.down(axn.tanh(self.up(self.norm(x)))) * scale + shift


MODEL = nn.Stacked.init(Layers, Block, gradient_checkpointing=False)(key=jax.random.key(0))
RNG = np.random.default_rng(0)
X = axn.named(RNG.normal(size=(16, 16, 8)).astype(np.float32), (Batch, Pos, Embed))
SCALE = axn.named(RNG.normal(size=16).astype(np.float32), Batch)  # of each example
SHIFT = axn.named(RNG.normal(size=8).astype(np.float32), Layers)  # of each layer


def loss(model: Any, x: axn.NamedArray, scale: axn.NamedArray, shift: Any, schedule: Any = None) -> Any:
    y = model.fold(x, scale, shift=shift, schedule=schedule)
    return axn.sum(axn.sin(y)).scalar(), y


def gradient(schedule: Any = None) -> Any:
    return jax.value_and_grad(functools.partial(loss, schedule=schedule), (0, 1, 2, 3), has_aux=True)


ARGUMENTS = MODEL, X, SCALE, SHIFT
HEAD = axn.named(RNG.normal(size=(8, 6)).astype(np.float32), (Embed, axn.Axis("vocab", 6)))
LABELS = axn.named(RNG.integers(0, 6, (16, 16)), (Batch, Pos))


def head_and_loss(y: axn.NamedArray, head: axn.NamedArray, labels: axn.NamedArray) -> Any:
    return nn.cross_entropy_loss(axn.dot(y, head, axis="embed"), "vocab", labels, reduction=axn.sum).scalar()


def inside(schedule: Any = None) -> Any:
    """Return the loss inside the fold."""

    def loss(model: Any, x: Any, scale: Any, shift: Any, head: Any) -> Any:
        return model.fold(x, scale, shift=shift, schedule=schedule, then=head_and_loss, then_args=(head, LABELS))

    return jax.value_and_grad(loss, (0, 1, 2, 3, 4))


def mesh_of(kind: AxisType, **sizes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def assert_close(found: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-4, atol=1e-4)


KINDS = (AxisType.Auto, AxisType.Explicit)


@pytest.mark.parametrize("kind", KINDS, ids=["auto", "explicit"])
def test_loops_inside(kind: AxisType) -> None:
    """Their carries start as numbers and zeros, which are the same on all devices."""

    def layer(block: Any, x: axn.NamedArray) -> axn.NamedArray:
        zeros = axn.zeros(x["pos", 0].axes)
        return x + axn.fold(lambda total, y: total + axn.tanh(block.up(y)).rename({"mlp": "embed"}), "pos")(zeros, x)

    def loss(model: Any, x: axn.NamedArray, schedule: Any = None) -> Any:
        then = lambda y: axn.fold(lambda total, y: total + axn.sum(y * y).scalar(), "pos")(0.0, y)
        return model.fold_via(layer, schedule=schedule, then=then)(x)

    expected = jax.jit(jax.value_and_grad(loss))(MODEL, X)
    with jax.set_mesh(mesh_of(kind, stage=4, data=2)), axn.axis_mapping(MAPPING):
        step = jax.jit(jax.value_and_grad(functools.partial(loss, schedule=OneFOneB(4))))
        assert_close(jax.block_until_ready(step(*axn.shard((MODEL, X)))), expected)


def test_gradients_of_narrow_floats_are_summed_in_float32() -> None:
    """A sum over examples that float16 does not hold, although the mean fits."""
    head = (HEAD * 0 + 4.0).astype(jnp.float16)

    def loss(head: Any, x: Any) -> Any:
        then = lambda y, head: axn.sum(axn.dot(y, head, axis="embed")).astype(jnp.float32).scalar()
        total = MODEL.fold(x, SCALE, shift=SHIFT, schedule=OneFOneB(8), then=then, then_args=(head,))
        return total / 1e4

    big = X * 0 + 4000.0
    with jax.set_mesh(mesh_of(AxisType.Auto, stage=4, data=2)), axn.axis_mapping(MAPPING):
        found = jax.jit(jax.grad(loss))(*axn.shard((head, big)))
    assert np.isfinite(found.array).all() and (abs(found.array) > 10).all()


@pytest.mark.parametrize(("schedule", "step"), [(GPipe(4, gather="inside"), gradient), (OneFOneB(4), inside)])
def test_devices_add_up_gradients_of_narrow_floats_in_float32(schedule: Any, step: Any) -> None:
    """Results of the last stage, and gradients of what the first one gets, are not: all but one number are zero."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), arguments_of(step))
    with jax.set_mesh(mesh_of(AxisType.Auto, stage=4, data=2)):
        storage: Any = {"layers": "stage", "embed": "data"}
        text = axn.fsdp(lambda *args: step(schedule)(*args), storage, MAPPING).lower(*narrow).as_text()
    sums = re.findall(r'"stablehlo.(?:all_reduce|reduce_scatter)".*?\}\) : \(tensor<(.*?)>\)', text, flags=re.DOTALL)
    assert len([x for x in sums if x.endswith("f32")]) > 5
    assert {x for x in sums if x.endswith("bf16")} <= {"4x2x16x8xbf16"}


Vocab = axn.Axis("vocab", 96)
VOCABULARY = MAPPING | {"vocab": "stage"}
TOKENS = axn.named(RNG.integers(0, 96, (16, 16)), (Batch, Pos))
TABLE = nn.Embedding(axn.named(RNG.normal(size=(96, 8)).astype(np.float32) / 3, (Vocab, Embed)), Vocab, Embed)
NORM = nn.RmsNorm.init(Embed)


def tied(schedule: Any = None, of_logits: Any = None) -> Any:
    """Make a model whose tokens are embedded and predicted with one table."""

    def head(y: Any, table: Any, norm: Any, labels: Any) -> Any:
        logits = table.unembed(norm(y))
        if of_logits is not None:
            return of_logits(logits, labels).scalar()
        return nn.cross_entropy_loss(logits, "vocab", labels, axn.sum, where=labels > 2).scalar()

    def loss(model: Any, table: Any, norm: Any, tokens: Any) -> Any:
        then_args = table, norm, tokens
        return model.fold(table.embed(tokens), SCALE, shift=SHIFT, schedule=schedule, then=head, then_args=then_args)

    return jax.value_and_grad(loss, (0, 1, 2))


DATA, SHARDED_STORAGE, TENSOR, TIED = (
    (MAPPING, MAPPING, {"stage": 4, "data": 2}),
    ({"layers": "stage", "embed": "data"}, MAPPING, {"stage": 4, "data": 2}),
    (MAPPING | {"mlp": "model"},) * 2 + ({"stage": 2, "data": 2, "model": 2},),
    (VOCABULARY, VOCABULARY, {"stage": 4, "data": 2}),
)
"""Storage and compute mapping, and mesh."""


class Row(NamedTuple):
    schedule: Any
    mappings: Any
    step: Callable[[Any], Any]
    bytes: int
    """The temporaries of a device."""
    gathers: tuple[int, ...] = (0,)
    """The limit for them."""
    scatters: int = 0


ROWS = {
    "gpipe": Row(GPipe(4), DATA, gradient, 41088),
    "gpipe, kept": Row(GPipe(2, remat=False), DATA, gradient, 204376),
    "gpipe, rounds": Row(GPipe(4, rounds=2), DATA, gradient, 38536),
    "gpipe, fsdp before": Row(GPipe(4), SHARDED_STORAGE, gradient, 42816, (5,), 5),
    # Each of five parameters in each of seven ticks, and again for the derivative.
    "gpipe, fsdp inside": Row(GPipe(4, gather="inside"), SHARDED_STORAGE, gradient, 42816, (70,), 35),
    "gpipe, tensor": Row(GPipe(4), TENSOR, gradient, 54464),
    "1f1b, behind": Row(OneFOneB(4), DATA, gradient, 38240),
    "1f1b": Row(OneFOneB(8), DATA, inside, 20152),
    "1f1b, rounds": Row(OneFOneB(8, rounds=2), DATA, inside, 21496),
    # In each of eight ticks, for each way, if XLA does not merge these; and the head's, once.
    "1f1b, fsdp inside": Row(OneFOneB(2, gather="inside"), SHARDED_STORAGE, inside, 66296, (41, 81), 41),
    "1f1b, rounds, fsdp": Row(OneFOneB(4, rounds=2), SHARDED_STORAGE, inside, 33464, (6,), 6),
    "1f1b, tensor": Row(OneFOneB(4), TENSOR, inside, 50168),
    "gpipe, vocabulary": Row(GPipe(4), TIED, tied, 62128),
    "1f1b, vocabulary": Row(OneFOneB(8), TIED, tied, 31752),
    "1f1b, rounds, vocabulary": Row(OneFOneB(4, rounds=2), TIED, tied, 48392),
}


@functools.cache
def plain(step: Any) -> Any:
    return jax.jit(step())(*arguments_of(step))


def arguments_of(step: Any) -> tuple[Any, ...]:
    return {gradient: ARGUMENTS, inside: (*ARGUMENTS, HEAD), tied: (MODEL, TABLE, NORM, TOKENS)}[step]


def distributed(row: Row, kind: AxisType) -> tuple[Any, jax.sharding.Mesh]:
    """Return the step of a row, and its mesh."""
    storage, compute, sizes = row.mappings
    fn = lambda *args: row.step(row.schedule)(*args)
    if storage == compute:
        jitted: Any = axn.named_jit(fn, compute, in_placement=compute, compiler_options=QUICK)
    else:
        jitted = axn.fsdp(fn, storage, compute, compiler_options=QUICK)
    return jitted, mesh_of(kind, **sizes)


@pytest.mark.parametrize("kind", KINDS, ids=["auto", "explicit"])
@pytest.mark.parametrize("name", ROWS)
def test_table(name: str, kind: AxisType) -> None:
    """Values and gradients are those of the plain fold, and the program does what the schedule says.

    A collective of weights in a tick would be executed as often as there are ticks.
    """
    row = ROWS[name]
    schedule, sizes, step = row.schedule, row.mappings[2], row.step
    jitted, mesh = distributed(row, kind)
    with jax.set_mesh(mesh):
        compiled = jitted.lower(*arguments_of(step)).compile()
        found = jax.block_until_ready(jitted(*arguments_of(step)))
    assert_close(found, plain(step))

    stages, M, R = sizes["stage"], schedule.microbatches, schedule.rounds
    ticks, counts, text = schedule.ticks(stages), executed(compiled), compiled.as_text()
    turns = [int(n) for n in re.findall(r'known_trip_count":\{"n":"(\d+)"', text)]
    behind = isinstance(schedule, OneFOneB) and step is gradient
    sent = 2 * ticks + behind * (M + stages - 1)
    # With rounds, each array of the layers is moved, and so is its gradient.
    moved = R * (7 + (6 if step is tied else 7)) if R > 1 else 0
    assert ticks in turns and schedule.idle(stages) == pytest.approx((stages - 1) / (M * R + stages - 1))
    assert counts.pop("collective-permute")[0] == sent + moved
    sums, _ = counts.pop("all-reduce")
    in_ticks = (step is tied and isinstance(schedule, OneFOneB)) or (sizes.get("model") and kind == AxisType.Auto)
    assert sums <= 12 or (in_ticks and sums <= 20 * ticks)  # the result, the loss, and the gradient of each array
    gathers, scatters = (counts.pop(what, (0, 0))[0] for what in ("all-gather", "reduce-scatter"))
    in_model = 3 if sizes.get("model") and kind == AxisType.Explicit else 0
    assert not counts and scatters == row.scatters
    assert gathers - in_model in row.gathers
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 1.2 * row.bytes  # versions of XLA differ by a sixth
    if step is tied:
        assert spec(found[1][1].weight) == ("stage", None)
        shapes = re.findall(r"= (.*?) (?:all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", text)
        assert shapes and not [s for s in shapes if "96,8]" in s]
    elif step is gradient:
        assert spec(found[0][1]) == ("data", None, None)


class Affine(eqx.Module):
    scale: axn.NamedArray
    shift: jax.Array

    def __call__(self, x: axn.NamedArray, noise: jax.Array) -> axn.NamedArray:
        return x * self.scale + self.shift + axn.named(noise, "embed")


def noise_for(layers: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(3), (layers.Block.size, 2))


@pytest.mark.parametrize(("stages", "rounds"), [(4, 2), (4, 3), (2, 4)])
def test_layers_get_to_their_stages(stages: int, rounds: int) -> None:
    """Each after the other, with its own arguments."""
    L = axn.Axis("layers", stages * rounds * 2)
    scale = axn.named(jnp.linspace(0.5, 1.5, L.size), L)
    layers = nn.Stacked(Affine(scale, jnp.arange(L.size, dtype=jnp.float32)), L)
    arguments = layers, axn.ones({"batch": 8, "embed": 2})

    def fold(layers: Any, x: Any, schedule: Any = None) -> Any:
        return layers.fold(x, noise=noise_for(layers), schedule=schedule)

    mesh = mesh_of(AxisType.Explicit, stage=stages, data=8 // stages)
    with jax.set_mesh(mesh), axn.axis_mapping({"layers": "stage"}):
        found = jax.jit(lambda *args: fold(*args, schedule=GPipe(4, rounds=rounds)))(*axn.shard(arguments))
        assert_close(jax.block_until_ready(found), fold(*arguments))


class Noisy(eqx.Module):
    scale: axn.NamedArray

    def __call__(self, x: axn.NamedArray, key: Any) -> axn.NamedArray:
        return x + nn.dropout(axn.ones(x.axes) * self.scale, 0.5, inference=False, key=key)


@pytest.mark.parametrize(
    ("schedule", "old", "kind"), covering([GPipe(4), GPipe(4, rounds=2), OneFOneB(4)], [False, True], KINDS), ids=str
)
def test_each_microbatch_draws_its_own_numbers(schedule: Any, old: bool, kind: AxisType) -> None:
    """Also each shard of the batch, in each layer: no two blocks of examples have one mask, for derivatives, too."""
    L, batch, embed = axn.make_axes(layers=8, batch=16, embed=64)
    layers = nn.Stacked(Noisy(axn.named(2.0 ** jnp.arange(8), L)), L)
    key = jax.random.PRNGKey(3) if old else jax.random.key(3)

    def loss(layers: Any, x: Any) -> Any:
        result = layers.fold(x, key=key, schedule=schedule)
        return axn.sum(result).scalar(), result

    with jax.set_mesh(mesh_of(kind, stage=4, data=2)), axn.axis_mapping({"layers": "stage", "batch": "data"}):
        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (total, result), gradient = jax.block_until_ready(step(*axn.shard((layers, axn.zeros((batch, embed))))))
    # The masks of all layers are the binary digits of the result.
    masks = np.asarray(result.array).astype(int)[..., None] >> np.arange(1, 9) & 1
    np.testing.assert_array_equal(result.array, masks @ (2.0 ** np.arange(1, 9)))
    assert abs(masks.mean() - 0.5) < 0.02
    rows = np.moveaxis(masks, -1, 0).reshape(-1, embed.size)
    assert len(np.unique(rows, axis=0)) == len(rows)
    np.testing.assert_allclose(gradient.stacked.scale.array, 2 * masks.sum((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(total, result.array.sum(), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=["auto", "explicit"])
@pytest.mark.parametrize("schedule", [GPipe(8, rounds=2), OneFOneB(2)], ids=["gpipe, rounds", "1f1b"])
def test_stages_in_the_order_of_the_mapping(schedule: Any, kind: AxisType) -> None:
    """Over mesh axes that the mesh has in another order."""
    L = axn.Axis("layers", 16)
    layers = nn.Stacked(Affine(axn.named(jnp.linspace(0.5, 1.5, 16), L), jnp.arange(16.0) / 16), L)
    arguments = layers, axn.ones({"batch": 8, "embed": 2})

    def loss(layers: Any, x: Any, schedule: Any = None) -> Any:
        return axn.sum(axn.sin(layers.fold(x, noise=noise_for(layers), schedule=schedule))).scalar()

    expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(*arguments)
    with jax.set_mesh(mesh_of(kind, stage=4, data=2)), axn.axis_mapping({"layers": ("data", "stage")}):
        step = jax.jit(jax.value_and_grad(functools.partial(loss, schedule=schedule), (0, 1)))
        assert_close(jax.block_until_ready(step(*axn.shard(arguments))), expected)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return nn.cross_entropy_loss(logits, "vocab", labels, axn.sum)


OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "some of it": lambda x, t: cross_entropy(x["vocab", :90], t),
    "its order": lambda x, t: cross_entropy(axn.flip(x, "vocab"), t),
    "without names": lambda x, t: cross_entropy(axn.named(jnp.cumsum(x.array, -1), x.names), t),
}


SHARDED: dict[str, Callable[[Any, Any], Any]] = {
    "the loss": cross_entropy,
    "reduced on its own": lambda x, t: axn.sum(axn.logsumexp(x, "vocab") + axn.max(x, "vocab")),
    "reduced before": lambda x, t: cross_entropy(nn.standardize(x, "vocab"), t),
    "its size": lambda x, t: cross_entropy(x, t) / x.axis_size("vocab"),
    "with a mask of labels": lambda x, t: nn.cross_entropy_loss(x, "vocab", t, axn.sum, where=t > 2),
    "capped": lambda x, t: cross_entropy(30.0 * axn.tanh(x / 30.0), t) / t.size,
    "computed again": lambda x, t: jax.checkpoint(cross_entropy)(x.astype("bfloat16").astype("float32"), t),
    "positions": lambda x, t: cross_entropy(axn.where(axn.arange(x.resolve_axis("vocab")) < 90, x, -9.0), t),
    "with its logsumexp": lambda x, t: axn.sum(axn.square(axn.logsumexp(x, Vocab.resize(x.axis_size("vocab"))))),
    "with its normalizers": lambda x, t: axn.sum(nn.cross_entropy_loss_and_log_normalizers(x, "vocab", t)[1] ** 2),
}


@pytest.mark.parametrize("of_logits", [*OTHERS, *SHARDED])
def test_what_is_computed_from_shards_of_the_vocabulary(of_logits: str) -> None:
    """Functions that need all of it get it: the table is gathered once."""
    fn = (OTHERS | SHARDED)[of_logits]
    with jax.set_mesh(mesh_of(AxisType.Auto, stage=4, data=2)):
        jitted: Any = axn.named_jit(tied(OneFOneB(4), fn), VOCABULARY, in_placement=VOCABULARY, compiler_options=QUICK)
        gathers = executed(jitted.lower(MODEL, TABLE, NORM, TOKENS).compile()).get("all-gather", (0, 0))[0]
        found = jax.block_until_ready(jitted(MODEL, TABLE, NORM, TOKENS))
    assert_close(found, jax.jit(tied(of_logits=fn))(MODEL, TABLE, NORM, TOKENS))
    assert gathers == (of_logits in OTHERS)


SPELLED: dict[str, Callable[[Any, Any], Any]] = {
    "an axis": lambda x, t: nn.cross_entropy_loss(x, Vocab, t, axn.sum),
    "keywords": lambda x, t: nn.cross_entropy_loss(logits=x, Label=Vocab, targets=t, reduction=axn.sum),
    "a z-loss": lambda x, t: cross_entropy(x, t) + axn.sum(axn.square(axn.logsumexp(x, axis=Vocab))),
    "of Haliax": lambda x, t: (
        hax.nn.cross_entropy_loss(x, Vocab, t, hax.sum) + hax.sum(hax.nn.logsumexp(x, Vocab) ** 2)
    ),
}


@pytest.mark.parametrize("spelled", SPELLED)
def test_an_axis_sends_what_its_name_does(spelled: str) -> None:
    """It only repeats the name: the table stays sharded over the stages."""
    with jax.set_mesh(mesh_of(AxisType.Auto, stage=4, data=2)):
        jitted: Any = axn.named_jit(tied(OneFOneB(4), SPELLED[spelled]), VOCABULARY, in_placement=VOCABULARY)
        counts = executed(jitted.lower(MODEL, TABLE, NORM, TOKENS).compile())
        found = jax.block_until_ready(jitted(MODEL, TABLE, NORM, TOKENS))
    assert not {"all-gather", "reduce-scatter", "all-to-all"} & {*counts}
    assert_close(found, jax.jit(tied(of_logits=SPELLED[spelled]))(MODEL, TABLE, NORM, TOKENS))


def test_a_loss_is_summed_in_its_own_dtype() -> None:
    """Beyond the range of float32."""
    with jax.enable_x64(True):
        wide = X.astype(jnp.float64)
        then = lambda y: 1e200 * axn.sum(y * y).scalar()
        step = lambda x, schedule: MODEL.fold(x, SCALE, shift=SHIFT, schedule=schedule, then=then)
        expected = jax.jit(jax.value_and_grad(functools.partial(step, schedule=None)))(wide)
        with jax.set_mesh(mesh_of(AxisType.Auto, stage=4, data=2)), axn.axis_mapping(MAPPING):
            found = jax.jit(jax.value_and_grad(functools.partial(step, schedule=OneFOneB(4))))(*axn.shard((wide,)))
            for x, y in zip(jax.tree.leaves(jax.block_until_ready(found)), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13 * abs(np.asarray(y)).max())


def test_memory_does_not_grow_with_microbatches() -> None:
    """Of one batch cut into more microbatches, and with twice as many microbatches of one size."""

    def temporaries(microbatches: int) -> int:
        wide = axn.zeros({"batch": 512, "pos": 8, "embed": 8}), axn.zeros({"batch": 512}), SHIFT

        def loss(model: Any, x: Any, scale: Any, shift: Any) -> Any:
            then = lambda y: axn.sum(axn.sin(y)).scalar()
            return model.fold(x, scale, shift=shift, schedule=OneFOneB(microbatches), then=then)

        with jax.set_mesh(mesh_of(AxisType.Auto, stage=4, data=2)), axn.axis_mapping(MAPPING):
            compiled = jax.jit(jax.value_and_grad(loss)).lower(*axn.shard((MODEL, *wide))).compile()
        memory: Any = compiled.memory_analysis()
        return memory.temp_size_in_bytes

    assert temporaries(32) < temporaries(8)


def test_memory_of_rematerialized_stages() -> None:
    def temporaries(schedule: Any) -> int:
        with jax.set_mesh(mesh_of(AxisType.Auto, stage=4, data=2)), axn.axis_mapping(MAPPING):
            wide = axn.zeros({"batch": 256, "pos": 8, "embed": 8}), axn.zeros({"batch": 256}), SHIFT
            compiled = jax.jit(gradient(schedule)).lower(*axn.shard((MODEL, *wide))).compile()
        memory: Any = compiled.memory_analysis()
        return memory.temp_size_in_bytes

    assert temporaries(GPipe(8)) < 0.7 * temporaries(GPipe(8, remat=False))


def test_one_stage_is_the_plain_fold() -> None:
    assert_close(loss(*ARGUMENTS, schedule=GPipe(4)), loss(*ARGUMENTS))


@pytest.mark.parametrize("rounds", [1, 2])
def test_stages_run_as_often_as_the_idle_share_says(rounds: int) -> None:
    schedule = OneFOneB(8, rounds=rounds)
    assert 1 - 2 * 8 * rounds / stage_runs(schedule, 4) == pytest.approx(schedule.idle(4))


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_schedule(rounds: int) -> None:
    """The table and the numbers agree."""
    some = ((GPipe, 12, 2), (OneFOneB, 4, 4)) if rounds > 1 else ((GPipe, 5, 3), (GPipe, 1, 4), (OneFOneB, 5, 3))
    for make, microbatches, stages in some:
        schedule: Any = make(microbatches, rounds=rounds)
        both = isinstance(schedule, OneFOneB)
        table: Any = [[m if both else (m,) for m in row] for row in schedule.table(stages)]
        assert len(table) == stages and {len(row) for row in table} == {schedule.ticks(stages)}
        for way in range(1 + both):
            rows = [[m[way] for m in row if m[way] is not None] for row in table]
            assert all(sorted(row) == sorted([*range(microbatches)] * rounds) for row in rows)
        # Ticks in which no stage works in a direction take no time for it.
        ways = [[m[way] for m in column] for column in zip(*table, strict=True) for way in range(1 + both)]
        taken = [m for way in ways if any(x is not None for x in way) for m in way]
        assert sum(m is None for m in taken) / len(taken) == pytest.approx(schedule.idle(stages))
        assert len(schedule.draw(stages).splitlines()) == stages


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: MODEL.fold(X, SCALE, SHIFT, schedule=GPipe(3)),
         "axis 'batch' of size 16 cannot be cut into 3 microbatches of one size on each of 2 devices"),
        (lambda: MODEL.fold(X, SCALE, SHIFT, schedule=GPipe(2, axis="examples")),
         r"cuts axis 'examples' into microbatches, .* got \(batch=16, pos=16, embed=8\)"),
        (lambda: nn.Stacked.init(axn.Axis("layers", 6), Block)(key=jax.random.key(0)).fold(
            X, SCALE, 0.0, schedule=GPipe(2)),
         r"the 6 layers of axis 'layers' cannot .* \(stage=4\)\. .*, which adds layers that .*\.$"),
        (lambda: MODEL.fold(X, SCALE, 0.0, schedule=GPipe(4, rounds=4)),
         r"the 8 layers of axis 'layers' cannot be .* 4 stages of \(stage=4\) in 4 rounds"),
        (lambda: MODEL.fold(X, SCALE, 0.0, schedule=OneFOneB(2, rounds=2)),
         r"OneFOneB: with several rounds, .*; 2 is not a multiple of 4"),
        (lambda: GPipe(6, rounds=2).idle(4), "GPipe: .* 6 is not a multiple of 4"),
        (lambda: GPipe(4, rounds=2, remat=False), "`remat` cannot be False"),
        (lambda: OneFOneB(4, rounds=0), "at least one round, got 0"),
        (lambda: GPipe(0), "at least one microbatch, got 0"),
        (lambda: OneFOneB(2, gather=cast(Any, "never")), "not 'never'"),
        (lambda: MODEL.fold(X, SCALE, SHIFT, schedule=GPipe(2, keep_sharded=["poss"])),
         "keeps 'poss' sharded, and there is no such axis.*'pos'"),
        (lambda: MODEL.fold(X, SCALE, SHIFT, schedule=OneFOneB(2), then=lambda y: y), "`then` must return one number"),
    ],
)  # fmt: skip
def test_errors(call: Any, text: str) -> None:
    mesh = mesh_of(AxisType.Auto, stage=4, data=2)
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING), pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize(
    ("schedule", "mapping", "kind"),
    covering(
        [GPipe(4), OneFOneB(2)], [{"pos": "model"}, {"pos": "model", "key_pos": "model"}, {"embed": "model"}], KINDS
    ),
    ids=str,
)
def test_layers_reduce_axes_that_are_sharded(schedule: Any, mapping: Any, kind: AxisType) -> None:
    """Over a mesh axis that neither stages nor examples are sharded over: in a mean, attention, products, the loss."""

    def layer(block: Any, x: axn.NamedArray, context: axn.NamedArray) -> axn.NamedArray:
        keys = axn.tanh(x).rename({"pos": "key_pos"})
        attended = dot_product_attention(block.norm(x), keys, keys, "key_pos", "embed", mask=Causal("pos"))
        return x + attended + axn.mean(block.up(x), "mlp") - axn.mean(x, "pos") + axn.mean(context, "pos")

    def loss(model: Any, x: Any, context: Any, head: Any, schedule: Any = None) -> Any:
        options: Any = {"schedule": schedule, "then": head_and_loss, "then_args": (head, LABELS)}
        return model.fold_via(layer, **options)(x, context)

    arguments = MODEL, X, axn.sin(X["batch", 0]), HEAD
    expected = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*arguments)
    with jax.set_mesh(mesh_of(kind, stage=2, data=2, model=2)), axn.axis_mapping(MAPPING | mapping):
        step = jax.jit(jax.value_and_grad(functools.partial(loss, schedule=schedule), (0, 1, 2, 3)))
        assert_close(jax.block_until_ready(step(*axn.shard(arguments))), expected)


def test_layers_reduce_axes_of_further_arguments_over_the_mesh_axis_of_the_batch() -> None:
    context = axn.sin(X["batch", 0]).rename({"pos": "key_pos"})
    fold = MODEL.fold_via(lambda block, x, context: x + axn.mean(context, "key_pos"), schedule=GPipe(4))
    mapping = MAPPING | {"key_pos": "data"}
    with jax.set_mesh(mesh_of(AxisType.Auto, stage=4, data=2)), axn.axis_mapping(mapping):
        found = jax.jit(fold)(*axn.shard((X, context)))
    assert_close(found, X + 8 * axn.mean(context, "key_pos"))


@pytest.mark.parametrize("schedule", [GPipe(4), OneFOneB(2)], ids=["gpipe", "1f1b"])
def test_narrow_floats_beside_the_partitioner(schedule: Any) -> None:
    """XLA for CPUs would abort on a sum of bfloat16 over some mesh axes."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (MODEL, X, SCALE, SHIFT, HEAD * 0.3))
    expected = jax.jit(inside())(*narrow)
    with jax.set_mesh(mesh_of(AxisType.Auto, stage=2, data=2, model=2)), axn.axis_mapping(MAPPING | {"mlp": "model"}):
        value, _ = jax.block_until_ready(jax.jit(inside(schedule))(*axn.shard(narrow)))
    np.testing.assert_allclose(value, expected[0], rtol=2e-2)


def test_results_are_sharded_like_the_carry() -> None:
    """Nothing is gathered: each device works on its shard of the positions."""
    mapping = MAPPING | {"pos": "model"}
    for kind in KINDS:
        with jax.set_mesh(mesh_of(kind, stage=2, data=2, model=2)), axn.axis_mapping(mapping):
            arguments = axn.shard((MODEL, X, SCALE, SHIFT))
            fold = jax.jit(lambda model, *args: model.fold(*args, schedule=GPipe(4, keep_sharded=["pos"])))
            y = jax.block_until_ready(fold(*arguments))
            gathers = executed(fold.lower(*arguments).compile()).get("all-gather", (0, 0))[0]
        assert spec(y) == ("data", "model", None)
        assert not gathers


@pytest.mark.parametrize("step", [gradient, inside])
def test_what_jax_keeps_for_derivatives_has_no_tracers(step: Any) -> None:
    """`jax.checking_leaks` cannot say so: loops in `shard_map` leak without Axonym, too."""
    with jax.set_mesh(mesh_of(AxisType.Auto, stage=4, data=2)), axn.axis_mapping(MAPPING):
        jitted = jax.jit(step(OneFOneB(4)))
        jitted.trace(*axn.shard(arguments_of(step)))
    kept = [x for x in gc.get_objects() if isinstance(x, _Pipeline)]
    folds = [cell.cell_contents for x in kept for cell in x._fold.__closure__ or ()]
    assert kept and not any(isinstance(x, Tracer) for x in jax.tree.leaves([*map(vars, kept), *folds]))


def test_layers_in_a_sequence_have_no_stages() -> None:
    layers = nn.BlockSeq.init(Layers, Block)(key=jax.random.key(0))
    with pytest.raises(TypeError, match="cannot be stages of a pipeline"):
        layers.fold(X, SCALE, SHIFT, schedule=GPipe(2))
