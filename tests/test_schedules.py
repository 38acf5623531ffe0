"""Pipelines: values and gradients are those of the plain fold, and what moves and waits is what the schedule says."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import axonym as axn
from axonym import nn
from axonym.schedules import GPipe, OneFOneB
from axonym.schedules._sharded_loss import is_computed_from_shards
from tests.executed import executed
from tests.helpers import spec

pytestmark = pytest.mark.usefixtures("quick_compilation")

Batch, Pos, Embed, Mlp, Layers = axn.make_axes(batch=16, pos=2, embed=8, mlp=8, layers=8)
MAPPING = {"layers": "stage", "batch": "data"}


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
X = axn.named(RNG.normal(size=(16, 2, 8)).astype(np.float32), (Batch, Pos, Embed))
SCALE = axn.named(RNG.normal(size=16).astype(np.float32), Batch)  # of each example
SHIFT = axn.named(RNG.normal(size=8).astype(np.float32), Layers)  # of each layer


def loss(model: Any, x: axn.NamedArray, scale: axn.NamedArray, shift: Any, schedule: Any = None) -> Any:
    y = model.fold(x, scale, shift=shift, schedule=schedule)
    return axn.sum(axn.sin(y)).scalar(), y


def gradient(schedule: Any = None) -> Any:
    return jax.value_and_grad(functools.partial(loss, schedule=schedule), (0, 1, 2, 3), has_aux=True)


ARGUMENTS = MODEL, X, SCALE, SHIFT
HEAD = axn.named(RNG.normal(size=(8, 6)).astype(np.float32), (Embed, axn.Axis("vocab", 6)))
LABELS = axn.named(RNG.integers(0, 6, (16, 2)), (Batch, Pos))


def head_and_loss(y: axn.NamedArray, head: axn.NamedArray, labels: axn.NamedArray) -> Any:
    return nn.cross_entropy_loss(axn.dot(y, head, axis="embed"), "vocab", labels, reduction=axn.sum).scalar()


def inside(schedule: Any = None) -> Any:
    """The loss inside the fold."""

    def loss(model: Any, x: Any, scale: Any, shift: Any, head: Any) -> Any:
        return model.fold(x, scale, shift=shift, schedule=schedule, then=head_and_loss, then_args=(head, LABELS))

    return jax.value_and_grad(loss, (0, 1, 2, 3, 4))


@functools.cache
def plain() -> Any:
    return jax.jit(gradient())(*ARGUMENTS)


def mesh_of(kind: AxisType, **sizes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def assert_close(found: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-4, atol=1e-4)


KINDS = (AxisType.Auto, AxisType.Explicit)


@pytest.mark.parametrize("kind", KINDS, ids=["auto", "explicit"])
@pytest.mark.parametrize("schedule", [GPipe(4), GPipe(2, remat=False), OneFOneB(4)], ids=["gpipe", "kept", "1f1b"])
def test_equals_the_plain_fold(schedule: GPipe, kind: AxisType) -> None:
    with jax.set_mesh(mesh_of(kind, stage=4, data=2)), axn.axis_mapping(MAPPING):
        arguments = axn.shard(ARGUMENTS)
        found = jax.block_until_ready(jax.jit(gradient(schedule))(*arguments))
    assert_close(found, plain())
    assert spec(found[0][1]) == ("data", None, None)


@pytest.mark.parametrize("kind", KINDS, ids=["auto", "explicit"])
@pytest.mark.parametrize("schedule", [GPipe(4), OneFOneB(8), OneFOneB(2, gather="inside")])
def test_with_the_loss_inside(schedule: Any, kind: AxisType) -> None:
    """As many microbatches as stages, more and fewer; the head is stored sharded, as the layers are."""
    expected = jax.jit(inside())(*ARGUMENTS, HEAD)
    storage = {"layers": "stage", "embed": "data"}
    with jax.set_mesh(mesh_of(kind, stage=4, data=2)):
        compiled = axn.fsdp(lambda *args: inside(schedule)(*args), storage, MAPPING)
        found = jax.block_until_ready(compiled(*ARGUMENTS, HEAD))
    assert_close(found, expected)


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


@pytest.mark.parametrize("gather", ["before", "inside"])
@pytest.mark.parametrize("kind", KINDS, ids=["auto", "explicit"])
def test_with_parameters_stored_sharded(gather: Any, kind: AxisType) -> None:
    """One all-gather of each parameter, or one in every tick, and as many to gather them again for the derivative."""
    storage = {"layers": "stage", "embed": "data"}
    schedule = GPipe(4, gather=gather)

    def step(model: Any, *rest: Any) -> Any:
        return gradient(schedule)(model, *rest)

    with jax.set_mesh(mesh_of(kind, stage=4, data=2)):
        compiled = axn.fsdp(step, storage, MAPPING)
        found = jax.block_until_ready(compiled(*ARGUMENTS))
    assert_close(found, plain())


@pytest.mark.parametrize("kind", KINDS, ids=["auto", "explicit"])
@pytest.mark.parametrize("schedule", [GPipe(4), OneFOneB(4)], ids=["gpipe", "1f1b"])
def test_with_tensor_parallelism(schedule: Any, kind: AxisType) -> None:
    """By the partitioner inside of ticks on Auto mesh axes, and by gathering on Explicit ones."""
    mapping = {"layers": "stage", "mlp": "model", "batch": "data"}
    with jax.set_mesh(mesh_of(kind, stage=2, data=2, model=2)), axn.axis_mapping(mapping):
        found = jax.block_until_ready(jax.jit(gradient(schedule))(*axn.shard(ARGUMENTS)))
    assert_close(found, plain())


@pytest.mark.parametrize("microbatches", [2, 8])
def test_what_is_executed_is_what_the_schedule_says(microbatches: int, optimized: None) -> None:
    """A collective of weights in a tick would be executed as often as there are ticks."""
    schedule = GPipe(microbatches)
    with jax.set_mesh(mesh_of(AxisType.Auto, stage=4, data=2)), axn.axis_mapping(MAPPING):
        compiled = jax.jit(gradient(schedule)).lower(*axn.shard(ARGUMENTS)).compile()
    found = executed(compiled)
    assert found["collective-permute"][0] == 2 * schedule.ticks(stages=4)
    assert set(found) == {"collective-permute", "all-reduce"}
    assert found["all-reduce"][0] <= 12  # the result, the loss, and the gradient of each array, in any number of ticks


def test_what_is_executed_with_the_loss_inside(optimized: None) -> None:
    schedule = OneFOneB(8)
    with jax.set_mesh(mesh_of(AxisType.Auto, stage=4, data=2)), axn.axis_mapping(MAPPING):
        found = executed(jax.jit(inside(schedule)).lower(*axn.shard((*ARGUMENTS, HEAD))).compile())
    assert found["collective-permute"][0] == 2 * schedule.ticks(stages=4)
    assert set(found) == {"collective-permute", "all-reduce"}
    assert found["all-reduce"][0] <= 12


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


Vocab = axn.Axis("vocab", 96)
TIED = MAPPING | {"vocab": "stage"}
TOKENS = axn.named(RNG.integers(0, 96, (16, 2)), (Batch, Pos))
TABLE = nn.Embedding(axn.named(RNG.normal(size=(96, 8)).astype(np.float32) / 3, (Vocab, Embed)), Vocab, Embed)
NORM = nn.RmsNorm.init(Embed)


def tied(schedule: Any = None, of_logits: Any = None) -> Any:
    """A model whose tokens are embedded and predicted with one table."""

    def head(y: Any, table: Any, norm: Any, labels: Any) -> Any:
        logits = table.unembed(norm(y))
        if of_logits is not None:
            return of_logits(logits, labels).scalar()
        return nn.cross_entropy_loss(logits, "vocab", labels, axn.sum, where=labels > 2).scalar()

    def loss(model: Any, table: Any, norm: Any, tokens: Any) -> Any:
        then_args = table, norm, tokens
        return model.fold(table.embed(tokens), SCALE, shift=SHIFT, schedule=schedule, then=head, then_args=then_args)

    return jax.value_and_grad(loss, (0, 1, 2))


@functools.cache
def plain_tied() -> Any:
    return jax.jit(tied())(MODEL, TABLE, NORM, TOKENS)


@pytest.mark.parametrize("kind", KINDS, ids=["auto", "explicit"])
@pytest.mark.parametrize("schedule", [GPipe(4), OneFOneB(8)], ids=["gpipe", "1f1b"])
def test_the_vocabulary_is_sharded_over_stages(schedule: Any, kind: AxisType, optimized: None) -> None:
    """No collective has the table; those in a tick of `OneFOneB` have a microbatch, or numbers for each example."""
    with jax.set_mesh(mesh_of(kind, stage=4, data=2)):
        jitted: Any = axn.named_jit(tied(schedule), TIED, in_placement=TIED)
        compiled = jitted.lower(MODEL, TABLE, NORM, TOKENS).compile()
        found = jax.block_until_ready(jitted(MODEL, TABLE, NORM, TOKENS))
    assert_close(found, plain_tied())
    assert spec(found[1][1].weight) == ("stage", None)
    shapes = re.findall(r"= (.*?) (?:all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", compiled.as_text())
    assert shapes and not [s for s in shapes if "96,8]" in s]
    counts = executed(compiled)
    assert set(counts) == {"collective-permute", "all-reduce"}
    if isinstance(schedule, OneFOneB):
        assert counts["collective-permute"][0] == 2 * schedule.ticks(stages=4)
        assert counts["all-reduce"][0] <= 6 * schedule.ticks(stages=4) + 16


def cross_entropy(logits: Any, labels: Any) -> Any:
    return nn.cross_entropy_loss(logits, "vocab", labels, axn.sum)


OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "reduced on its own": lambda x, t: axn.sum(axn.logsumexp(x, "vocab") + axn.max(x, "vocab")),
    "reduced before": lambda x, t: cross_entropy(nn.standardize(x, "vocab"), t),
    "some of it": lambda x, t: cross_entropy(x["vocab", :90], t),
    "positions": lambda x, t: cross_entropy(axn.where(axn.arange(x.resolve_axis("vocab")) < 90, x, -9.0), t),
    "its size": lambda x, t: cross_entropy(x, t) / x.axis_size("vocab"),
    "its order": lambda x, t: cross_entropy(axn.flip(x, "vocab"), t),
    "without names": lambda x, t: cross_entropy(axn.named(jnp.cumsum(x.array, -1), x.names), t),
}


SHARDED: dict[str, Callable[[Any, Any], Any]] = {
    "the loss": cross_entropy,
    "with a mask of labels": lambda x, t: nn.cross_entropy_loss(x, "vocab", t, axn.sum, where=t > 2),
    "capped": lambda x, t: cross_entropy(30.0 * axn.tanh(x / 30.0), t) / t.size,
    "computed again": lambda x, t: jax.checkpoint(cross_entropy)(x.astype("bfloat16").astype("float32"), t),
    "with its normalizers": lambda x, t: axn.sum(nn.cross_entropy_loss_and_log_normalizers(x, "vocab", t)[1] ** 2),
}


@pytest.mark.parametrize("of_logits", [*OTHERS, *SHARDED])
def test_what_may_be_computed_from_shards(of_logits: str) -> None:
    def traced(size: int) -> Any:
        then = lambda y, table, labels: (OTHERS | SHARDED)[of_logits](axn.dot(y, table, axis="embed"), labels).scalar()
        return jax.make_jaxpr(then)(X, axn.ones((Embed, Vocab.resize(size))), TOKENS)

    try:
        found = is_computed_from_shards(traced(96), traced(24))
    except (LookupError, ValueError):  # shards are too small
        found = False
    assert found == (of_logits in SHARDED)


@pytest.mark.parametrize("other", ["reduced on its own", "reduced before", "its size"])
def test_other_functions_of_the_vocabulary_get_all_of_it(other: str) -> None:
    """Also if the cross-entropy, which reduces shards, comes after them."""
    with jax.set_mesh(mesh_of(AxisType.Auto, stage=4, data=2)):
        jitted: Any = axn.named_jit(tied(OneFOneB(4), OTHERS[other]), TIED, in_placement=TIED)
        found = jax.block_until_ready(jitted(MODEL, TABLE, NORM, TOKENS))
    assert_close(found, jax.jit(tied(of_logits=OTHERS[other]))(MODEL, TABLE, NORM, TOKENS))


def test_memory_does_not_grow_with_microbatches(optimized: None) -> None:
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


def test_memory_of_rematerialized_stages(optimized: None) -> None:
    def temporaries(schedule: Any) -> int:
        with jax.set_mesh(mesh_of(AxisType.Auto, stage=4, data=2)), axn.axis_mapping(MAPPING):
            wide = axn.zeros({"batch": 256, "pos": 8, "embed": 8}), axn.zeros({"batch": 256}), SHIFT
            compiled = jax.jit(gradient(schedule)).lower(*axn.shard((MODEL, *wide))).compile()
        memory: Any = compiled.memory_analysis()
        return memory.temp_size_in_bytes

    assert temporaries(GPipe(8)) < 0.7 * temporaries(GPipe(8, remat=False))


def test_one_stage_is_the_plain_fold() -> None:
    assert_close(loss(*ARGUMENTS, schedule=GPipe(4)), plain()[0])


def test_schedule() -> None:
    """The table and the numbers agree."""
    for schedule, stages in ((GPipe(5), 3), (GPipe(1), 4), (GPipe(12), 2), (OneFOneB(5), 3), (OneFOneB(1), 4)):
        both = isinstance(schedule, OneFOneB)
        table: Any = [[m if both else (m,) for m in row] for row in schedule.table(stages)]
        assert len(table) == stages and {len(row) for row in table} == {schedule.ticks(stages)}
        for way in range(1 + both):
            assert all([m[way] for m in row if m[way] is not None] == [*range(schedule.microbatches)] for row in table)
        idle = sum(m is None for row in table for both in row for m in both)
        assert idle / (stages * schedule.ticks(stages) * (1 + both)) == pytest.approx(schedule.idle(stages))
        assert len(schedule.draw(stages).splitlines()) == stages


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: MODEL.fold(X, SCALE, SHIFT, schedule=GPipe(3)),
         "axis 'batch' of size 16 cannot be cut into 3 microbatches of one size on each of 2 devices"),
        (lambda: MODEL.fold(X, SCALE, SHIFT, schedule=GPipe(2, axis="examples")),
         r"cuts axis 'examples' into microbatches, .* got \(batch=16, pos=2, embed=8\)"),
        (lambda: nn.Stacked.init(axn.Axis("layers", 6), Block)(key=jax.random.key(0)).fold(
            X, SCALE, 0.0, schedule=GPipe(2)), r"the 6 layers of axis 'layers' cannot be .* 4 stages of \(stage=4\)"),
        (lambda: GPipe(0), "at least one microbatch, got 0"),
        (lambda: OneFOneB(2, gather=cast(Any, "never")), "not 'never'"),
        (lambda: MODEL.fold(X, SCALE, SHIFT, schedule=OneFOneB(2), then=lambda y: y), "`then` must return one number"),
    ],
)  # fmt: skip
def test_errors(call: Any, text: str) -> None:
    mesh = mesh_of(AxisType.Auto, stage=4, data=2)
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING), pytest.raises(ValueError, match=text):
        call()


def test_with_the_loss_inside_only_the_batch_is_sharded() -> None:
    with (
        jax.set_mesh(mesh_of(AxisType.Auto, stage=4, data=2)),
        axn.axis_mapping({"layers": "stage", "pos": "data"}),
        pytest.raises(ValueError, match=r"may be sharded along 'batch' only, and the active mapping shards 'pos' too"),
    ):
        inside(OneFOneB(2))(*ARGUMENTS, HEAD)


@pytest.mark.further
@pytest.mark.parametrize("schedule", [GPipe(3), OneFOneB(3)])
def test_draw_into_axes(schedule: Any) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    ax = schedule.draw(2, ax=figure.subplots())
    assert [x.get_text() for x in ax.get_yticklabels()] == ["stage 0", "stage 1"]
    assert sorted(int(x.get_text()) for x in ax.texts) == sorted([0, 1, 2] * 2 * (1 + isinstance(schedule, OneFOneB)))
    assert ax.get_title().startswith(f"{type(schedule).__name__}, 3 microbatches: ")


def test_layers_in_a_sequence_have_no_stages() -> None:
    layers = nn.BlockSeq.init(Layers, Block)(key=jax.random.key(0))
    with pytest.raises(TypeError, match="cannot be stages of a pipeline"):
        layers.fold(X, SCALE, SHIFT, schedule=GPipe(2))
