"""What errors and warnings advise works, and does what was meant.

A row of the table provokes a message, takes the code out of it, and runs it. The code of the library is searched for
messages with code in them: each must be in the table, or among the exceptions, with a reason.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import functools
import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas
import pytest
import xarray
from jax.experimental import pallas
from jax.sharding import NamedSharding, PartitionSpec

import axonym as axn
from axonym import nn
from axonym.core import errors, foreign_names
from axonym.nn.attention import Causal, KVCache, combine_masks_or, dot_product_attention
from axonym.quantization import quantize_weights
from axonym.schedules import GPipe
from tests.helpers import exports, modules, spec

ROOT = Path(axn.__file__).parent
untyped: Any = axn  # for calls that a type checker would refuse

KEY = jax.random.key(0)
X = axn.arange({"batch": 4, "embed": 3}, dtype=float)
UNTYPED: Any = X
INTEGERS = axn.arange({"batch": 4})
LOGITS = axn.arange({"batch": 4, "label": 3}, dtype=float)
AUTO, EXPLICIT = (axn.make_mesh({"data": 4, "model": 2}, explicit=explicit) for explicit in (False, True))


@dataclasses.dataclass(frozen=True)
class Advice:
    """A message with code in it."""

    says: str
    """The code as it is written in the library: `{…}` stands for what is filled in."""
    provoke: Callable[[], Any]
    meant: Callable[[Any], Any]
    """Whether the result is what the user meant; for a statement, of its variables."""
    run: str = "CODE"
    """What is run: `CODE` is the advice."""
    dots: str = "..."
    """What the user writes for the dots."""
    names: dict[str, Any] = dataclasses.field(default_factory=dict)


def same(found: Any, expected: Any) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(expected)))


def on(mesh: Any, fn: Callable[[], Any], mapping: Any = None) -> Any:
    with jax.set_mesh(mesh), axn.axis_mapping(mapping):
        return jax.block_until_ready(fn())


def on_mesh(mesh: Any, fn: Callable[[], Any]) -> Any:
    with jax.set_mesh(mesh):
        return fn()


def per_device(fn: Any, *args: Any, **options: Any) -> Any:
    return on(AUTO, lambda: axn.shard_map(fn, **options)(*args), {"batch": "data"})


def doubled(x: axn.NamedArray) -> axn.NamedArray:
    """Double an array by a Pallas kernel."""

    def kernel(source: Any, target: Any) -> None:
        target[...] = source[...] * 2

    shape = jax.ShapeDtypeStruct(x.array.shape, x.dtype)
    return axn.named(pallas.pallas_call(kernel, out_shape=shape, interpret=True)(x.array), x.axes)


def running(start: Any) -> Callable[[axn.NamedArray], Any]:
    """Return a sum over the rows of a shard, which begins with `start`."""

    def total(x: axn.NamedArray) -> Any:
        return axn.psum(jax.lax.scan(lambda c, row: (c + axn.named(row, "embed"), None), start(), x.array)[0], "batch")

    return total


def disagreeing() -> tuple[axn.NamedArray, axn.NamedArray]:
    """Return an array that is sharded over two different mesh axes."""
    x = axn.ones({"batch": 8, "embed": 4})
    return axn.shard(x, {"batch": "data"}, mesh=EXPLICIT), axn.shard(x, {"batch": "model"}, mesh=EXPLICIT)


def mixing_up(**options: Any) -> jax.Array:
    """Call a distributed function that mixes up two axes of one size."""
    transposed = axn.names.distribute(lambda x, w: x @ w.T, names=("batch embed", "embed mlp"), **options)
    return transposed(jnp.ones((4, 2)), jnp.eye(2))


def colliding() -> tuple[axn.NamedArray, axn.NamedArray]:
    """Return two arrays, two axes of which are sharded over one mesh axis."""
    x, y = axn.ones({"batch": 8}), axn.ones({"embed": 8})
    return axn.shard(x, {"batch": "data"}, mesh=EXPLICIT), axn.shard(y, {"embed": "data"}, mesh=EXPLICIT)


HALF, SQUARE = axn.ones({"a": 2, "b": 2}, dtype=jnp.float16), axn.eye(axn.Axis("a", 2), axn.Axis("b", 2))
QUERY = axn.ones({"pos": 4, "head_size": 2})


def attend(**options: Any) -> axn.NamedArray:
    key = QUERY.rename({"pos": "key_pos"})
    return dot_product_attention(QUERY, key, key, "key_pos", "head_size", **options)


def quantized(**options: Any) -> Any:
    layer = nn.Linear.init(axn.Axis("embed", 8), axn.Axis("mlp", 4), key=KEY)
    return on(AUTO, lambda: quantize_weights(layer, "int4", **options), {"embed": "data"})


EIGHT = axn.ones({"batch": 8})
RAW = {"w": jnp.ones((8, 4)), "b": jnp.ones(8)}
ROWS = jax.device_put(jnp.arange(8.0), NamedSharding(AUTO, PartitionSpec("data")))
SUM_OF_ROWS = jax.shard_map(
    lambda x: jax.lax.psum(x.sum(), "data"), mesh=AUTO, in_specs=PartitionSpec("data"), out_specs=PartitionSpec()
)
check_shard_invariance = functools.partial(axn.testing.check_shard_invariance, draws=1)
COLUMNS = axn.shard(axn.ones({"batch": 4, "embed": 4}), {"embed": "model"}, mesh=EXPLICIT)
SERIES = pandas.Series([1.0, 2.0], index=pandas.Index([0, 1], name="t"))
LIFTED = axn.lift(lambda x: x.sum(), "i ->")


def ring_in_a_pipeline(**options: Any) -> Any:
    def layer(w: Any, x: Any) -> Any:
        k = x.rename({"pos": "key_pos"})
        return x + dot_product_attention(x * w, k, k, "key_pos", "embed", context="ring")

    weights: Any = axn.ones({"layers": 2})
    fold = nn.Stacked(weights, axn.Axis("layers", 2)).fold_via(layer, schedule=GPipe(2, **options))
    mapping = {"layers": "stage", "pos": "context", "key_pos": "context"}
    x, mesh = axn.ones({"batch": 2, "pos": 4, "embed": 4}), axn.make_mesh({"stage": 2, "context": 4})
    return axn.insight.explain(axn.named_jit(fold, mapping, in_placement=mapping), x, mesh=mesh, by="partitioner")


def layers_of(number: int) -> Any:
    return nn.Stacked.init(axn.Axis("layers", number), nn.Linear)(X.axes[1], X.axes[1], key=KEY)


def in_stages(layers: Any) -> axn.NamedArray:
    with axn.axis_mapping({"layers": "stage"}):
        return jax.block_until_ready(jax.jit(layers.fold_via(lambda layer, x: layer(x), schedule=GPipe(2)))(X))


def untyped_set(x: Any) -> None:
    x["batch", 0] = 1


def generator() -> Iterator[int]:
    yield 1


def expert_rows(**options: Any) -> Any:
    """Send rows to experts, each of which doubles its own."""
    rows, expert = axn.ones({"tokens": 4, "embed": 2}), axn.named([0, 1, 0, 1], "tokens")
    experts, weight = axn.Axis("experts", 2), axn.ones({"experts": 2})
    return nn.dispatch(lambda w, x, sizes: x * 2, weight, rows, expert, experts, **options)


def of_two(layer: nn.MoELinear, rows: axn.NamedArray) -> axn.NamedArray:
    return layer(rows, axn.named([rows.size // 3 - 1, 1], "experts"))


def fold(start: Any, change: Callable[..., Any] = lambda c, x: c + x, x: axn.NamedArray = X) -> Any:
    return axn.fold(change, "batch")(start, x)


def gathered(start: axn.NamedArray) -> Any:
    """Sum the rows of an array, with a sum that each step replicates."""
    return jax.jit(lambda c: fold(c, lambda c, x: axn.shard(c + x, {"embed": None}), COLUMNS))(start)


def rows_or(other: Callable[[], axn.NamedArray], x: axn.NamedArray) -> Any:
    return axn.cond(axn.psum(x.sum(), "batch") < 0, other, lambda: x)


def chosen(x: axn.NamedArray, place: Callable[..., Any]) -> Any:
    """Return one of two results, which are sharded differently unless `place` changes that."""
    return jax.jit(lambda x: axn.cond(x.sum() > 0, lambda x: x, lambda x: place(axn.shard(x, {"embed": None})), x))(x)


def written(cache: KVCache) -> KVCache:
    """Write to the second row of a cache."""
    new = axn.ones({"key_pos": 1, "head_size": 1})
    return cache.update(new, new, at={"batch": 1})


def cache_of(**options: Any) -> KVCache:
    KPos, HeadSize = axn.make_axes(key_pos=4, head_size=1)
    return KVCache.init(axn.Axis("batch", 2), (), KPos, HeadSize, **options)


def days() -> Any:
    return xarray.DataArray(np.array(["2000-01-01", "2000-01-03"], "datetime64[s]"), dims="t")


def scaled_products(scale: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
    return jax.lax.dot_general(*args, **kwargs) * scale.sum()


def sharded_product(dot_general: Any) -> axn.NamedArray:
    w = axn.shard(axn.ones({"embed": 4, "mlp": 4}), {"mlp": "model"}, mesh=EXPLICIT)
    return on(EXPLICIT, lambda: axn.dot(FOURS, w, axis="embed", dot_general=dot_general))


def summed(offset: Callable[..., Any]) -> Any:
    """Return where each shard begins, with two arrays whose shards differ in size."""
    long, short = axn.ones({"batch": 8}), axn.ones({"batch": 4})
    return per_device(lambda x, y: y + offset(y), long, short)


FOURS = axn.shard(axn.ones({"batch": 4, "embed": 4}), {"batch": "data"}, mesh=EXPLICIT)
BOTH = axn.ones({"batch": 4, "data": 3})
MOE = nn.MoELinear.init(axn.Axis("experts", 2), axn.Axis("embed", 3), axn.Axis("out", 2), key=KEY)
BATCH_NORM, STATE = eqx.nn.make_with_state(nn.BatchNorm.init)(axn.Axis("embed", 3), "batch")
LINEAR = eqx.nn.Linear(3, 4, key=KEY)


async def waits() -> None:
    with axn.axis_mapping({"batch": "data"}):
        await asyncio.sleep(0)


async def _together(task: Callable[[], Any]) -> None:
    await asyncio.gather(task(), task())


TABLE = [
    # Axes.
    Advice("{{…}: {…}}", lambda: untyped.zeros(4), lambda spec: axn.zeros(spec).shape == {"batch": 4}),
    Advice("axonym.Axis({…}, {…})", lambda: untyped.zeros(4), lambda axis: axn.zeros(axis).shape == {"batch": 4}),
    Advice(
        "axonym.Axis({…}, {…})",
        lambda: untyped.segment_sum(X, INTEGERS, 4),
        lambda axis: axn.segment_sum(X, INTEGERS, axis).shape == {"new": 4, "embed": 3},
    ),
    Advice(
        "x.sum({…})",
        lambda: axn.dot(X, axn.ones({"mlp": 2}), axis="embed"),
        lambda x: axn.dot(x, axn.ones({"mlp": 2}), axis=()).shape == {"batch": 4, "mlp": 2},
    ),
    # Named arrays.
    Advice(
        "x.shape[name]", lambda: untyped.ones({"embed": 3}).shape[0], lambda size: size == 3, names={"name": "embed"}
    ),
    Advice(
        "x.shape[name]", lambda: untyped.ones({"embed": 3}).shape(), lambda size: size == 3, names={"name": "embed"}
    ),
    Advice("x.shape.values()", lambda: list(X.shape), lambda sizes: [*sizes] == [4, 3]),
    Advice("x.all()", lambda: bool(X > 0), lambda x: not x, run="bool((x > 0).all())"),
    Advice("x.any()", lambda: bool(X > 0), lambda x: x, run="bool((x > 0).any())"),
    Advice(
        "axonym.where(x, a, b)", lambda: bool(X > 0), lambda y: same(y, X * 2), names={"x": X > 0, "a": X * 2, "b": X}
    ),
    Advice(
        "axonym.where(condition, x, y)",
        lambda: jax.jit(lambda x: 1 if x.sum() > 0 else 2)(X),
        lambda y: same(y, -X),
        run="jax.jit(lambda condition, x: CODE)(x.sum() > 100, x)",
        names={"y": -X},
    ),
    Advice(
        "axonym.cond(condition, f, g, x)",
        lambda: jax.jit(lambda x: 1 if x.sum() > 0 else 2)(X),
        lambda y: same(y, X * 2),
        run="jax.jit(lambda condition, x: CODE)(x.sum() > 0, x)",
        names={"f": lambda x: x * 2, "g": lambda x: -x},
    ),
    Advice(
        "x = x.at[{…}, 0].set(value)",
        lambda: untyped_set(X),
        lambda ns: ns["x"].array[0].sum() == 0,
        names={"value": 0},
    ),
    Advice("x.axis_size({…})", lambda: len(UNTYPED), lambda size: size == 4),
    Advice(
        "for row in x.unbind({…})",
        lambda: list(X),
        lambda ns: same(ns["rows"], [X["batch", i] for i in range(4)]),
        run="rows = [row CODE]",
    ),
    Advice("x.unbind({…})", lambda: list(INTEGERS), lambda rows: len(rows) == 4, names={"x": INTEGERS}),
    Advice("numpy.asarray(x.array)", lambda: np.asarray(X), lambda a: same(a, X.array)),
    Advice("axonym.to_host(x).array", lambda: np.asarray(X), lambda a: isinstance(a, np.ndarray) and same(a, X.array)),
    Advice(
        "NamedArray(array, axes)",
        lambda: axn.Named["batch"](np.ones(4)),
        lambda x: x.shape == {"batch": 4},
        names={"NamedArray": axn.NamedArray, "array": np.ones(4), "axes": "batch"},
    ),
    # Operations.
    Advice(
        "axonym.broadcast_arrays(..., require_subset=False)",
        lambda: X + axn.ones({"mlp": 2}),
        lambda pair: (pair[0] + pair[1]).shape == {"batch": 4, "embed": 3, "mlp": 2},
        dots="x, axonym.ones({'mlp': 2})",
    ),
    Advice(
        "coords.align(other, join='inner')",
        lambda: axn.Coordinates({"x": [0, 1]}).align(axn.Coordinates({"x": [1, 2]})),
        lambda positions: positions == ({"x": slice(1, 2, 1)}, {"x": slice(0, 1, 1)}),
        names={"coords": axn.Coordinates({"x": [0, 1]}), "other": axn.Coordinates({"x": [1, 2]})},
    ),
    Advice(
        "array.flatten('name')",
        lambda: axn.sort(X),
        lambda y: y.shape == {"name": 12},
        run="axonym.sort(CODE)",
        names={"array": X},
    ),
    Advice(
        "axis=...",
        lambda: untyped.dot(X, X),
        lambda y: y.shape == {"batch": 4},
        run="axonym.dot(x, x, CODE)",
        dots="'embed'",
    ),
    Advice(
        "axonym.where(mask, x, other)", lambda: UNTYPED[X > 0], lambda y: same(y, X), names={"mask": X >= 0, "other": 0}
    ),
    Advice(
        ".astype(jnp.float32)",
        lambda: axn.linalg.det(HALF, ("a", "b")),
        lambda y: y == 0,
        run="axonym.linalg.det(HALF CODE, ('a', 'b'))",
    ),
    Advice(
        "axonym.linalg.eigvals(a, axes, new_axis)",
        lambda: axn.poly.poly(SQUARE),
        lambda p: p.array.shape == (3,),
        run="axonym.poly.poly(CODE)",
        names={"a": SQUARE, "axes": ("a", "b"), "new_axis": "root"},
    ),
    Advice(
        ".mean()",
        lambda: axn.grad(lambda x: x * 2)(X),
        lambda g: same(g, axn.full_like(X, 2 / 12)),
        run="axonym.grad(lambda x: (x * 2) CODE)(x)",
    ),
    Advice(
        ".sum()",
        lambda: axn.grad(lambda x: x * 2)(X),
        lambda g: same(g, axn.full_like(X, 2)),
        run="axonym.grad(lambda x: (x * 2) CODE)(x)",
    ),
    Advice(
        ".astype(jnp.float32)",
        lambda: axn.grad(lambda x: x.sum())(INTEGERS),
        lambda g: same(g, np.ones(4)),
        run="axonym.grad(lambda x: x.sum())(axonym.arange({'batch': 4}) CODE)",
    ),
    Advice(
        "jax.random.key(seed)",
        lambda: axn.random.normal(X, {"batch": 4}),
        lambda key: axn.random.normal(key, {"batch": 4}).size == 4,
        names={"seed": 0},
    ),
    Advice(
        "jax.random.key(seed)",
        lambda: untyped.random.normal(0.5, {"batch": 4}),
        lambda key: axn.random.normal(key, {"batch": 4}).size == 4,
        names={"seed": 0},
    ),
    Advice(
        "logits.astype(float)",
        lambda: axn.random.categorical(KEY, INTEGERS, "batch"),
        lambda i: 0 <= i.item() < 4,
        run="axonym.random.categorical(jax.random.key(0), CODE, 'batch')",
        names={"logits": INTEGERS},
    ),
    Advice(
        "p=axonym.named(probabilities, {…})",
        lambda: axn.random.choice(KEY, {"draw": 2}, INTEGERS, "batch", p=axn.ones({"x": 4})),
        lambda y: y.tolist() == [3, 3],
        run="axonym.random.choice(jax.random.key(0), {'draw': 2}, axonym.arange({'batch': 4}), 'batch', CODE)",
        names={"probabilities": [0.0, 0.0, 0.0, 1.0]},
    ),
    # Neural networks.
    Advice(
        "targets.rename({…})",
        lambda: nn.cross_entropy_loss(LOGITS, "label", axn.named([0, 1, 2, 0], "b")),
        lambda loss: same(loss, nn.cross_entropy_loss(LOGITS, "label", axn.named([0, 1, 2, 0], "batch"))),
        run="axonym.nn.cross_entropy_loss(logits, 'label', CODE)",
        names={"targets": axn.named([0, 1, 2, 0], "b"), "logits": LOGITS},
    ),
    Advice(
        "axonym.broadcast_axis(logits, {…})",
        lambda: nn.cross_entropy_loss(LOGITS["batch", 0], "label", axn.named([0, 1], "draw")),
        lambda loss: loss.shape == {"draw": 2},
        run="axonym.nn.cross_entropy_loss(CODE, 'label', targets, reduction=None)",
        names={"targets": axn.named([0, 1], "draw"), "logits": LOGITS["batch", 0]},
    ),
    Advice(  # an axis of another size is not the axis of the logits
        "axonym.broadcast_axis(logits, {…})",
        lambda: nn.cross_entropy_loss(LOGITS, "label", axn.named([0, 1], "draw")),
        lambda loss: loss.shape == {"draw": 2, "batch": 4},
        run="axonym.nn.cross_entropy_loss(CODE, 'label', targets, reduction=None)",
        names={"targets": axn.named([0, 1], "draw"), "logits": LOGITS},
    ),
    Advice(
        "ignore_index=...",
        lambda: nn.cross_entropy_loss(LOGITS, "label", axn.named([0, -1, 2, 0], "batch")),
        lambda loss: bool(axn.isfinite(loss)),
        dots="-1",
        run="axonym.nn.cross_entropy_loss(logits, 'label', targets, CODE)",
        names={"targets": axn.named([0, -1, 2, 0], "batch"), "logits": LOGITS},
    ),
    Advice("inference=True", lambda: nn.Dropout(0.5)(X), lambda y: same(y, X), run="axonym.nn.Dropout(0.5)(x, CODE)"),
    Advice(
        "inference=True",
        lambda: attend(pdrop=0.5, inference=False),
        lambda y: same(y, attend()),
        run="attend(pdrop=0.5, CODE)",
    ),
    Advice(
        "key.rename({{…}: 'key_{…}'})",
        lambda: dot_product_attention(QUERY, QUERY, QUERY, "pos", "head_size"),
        lambda key: dot_product_attention(QUERY, key, key, "key_pos", "head_size").shape == QUERY.shape,
        names={"key": QUERY},
    ),
    Advice(
        "written_out(QPos, KPos)",
        lambda: untyped.nn.attention.combine_masks_or(Causal("pos"), axn.ones({"pos": 4, "key_pos": 4}, dtype=bool)),
        lambda mask: same(combine_masks_or(mask, ~mask), axn.ones({"pos": 4, "key_pos": 4}, dtype=bool)),
        run="Causal('pos').CODE",
        names={"QPos": axn.Axis("pos", 4), "KPos": axn.Axis("key_pos", 4)},
    ),
    Advice(
        "MLP.init(In, Out, width, depth, key=key)",
        lambda: nn.MLP((), "relu"),  # pyright: ignore
        lambda mlp: mlp(X).shape == {"batch": 4, "out": 2},
        names={"MLP": nn.MLP, "In": axn.Axis("embed", 3), "Out": axn.Axis("out", 2), "width": 8, "depth": 1},
    ),
    Advice(
        "axonym.nn.with_state(model, state)",
        lambda: axn.state.to_state_dict(BATCH_NORM),
        lambda model: "running_var" in axn.state.to_state_dict(model),
        names={"model": BATCH_NORM, "state": STATE},
    ),
    # Transforms.
    Advice(
        "axonym.vmap(f, {…}, {…})",
        lambda: axn.vmap(lambda m, x: m(x.array), "batch")(LINEAR, X),
        lambda y: np.allclose(y, jax.vmap(LINEAR)(X.array), rtol=1e-5),
        run="CODE(linear, x)",
        names={"f": lambda m, x: m(x.array), "linear": LINEAR},
    ),
    # Placement.
    Advice(
        "axonym.axis_mapping({{…}: {…}})",
        lambda: on_mesh(AUTO, lambda: jax.jit(axn.stencil(lambda u: u(embed=1), {"embed": "edge"}))(X)),
        lambda ns: ns["mapping"] == {"batch": "data"},
        run="with CODE: mapping = axonym.current_mapping()",
    ),
    Advice(
        "{{…}: {…}}", lambda: on(AUTO, lambda: axn.axis_mapping({"data": "batch"})), lambda m: m == {"batch": "data"}
    ),
    Advice(
        "{{…}: {…}}",
        lambda: on(AUTO, lambda: axn.named_jit(lambda x: x, {"data": "batch"})(X)),
        lambda m: m == {"batch": "data"},
    ),
    *(
        Advice("{{…}: {…}}", call, lambda m: m == {"batch": "data"})
        for call in (
            lambda: on(AUTO, lambda: axn.shard(X, {"data": "batch"})),
            lambda: on(AUTO, lambda: axn.shard(X, {"data": ("batch", "embed")})),
            lambda: axn.axis_mapping({"data": "batch"})(lambda: on_mesh(AUTO, lambda: axn.shard(X)))(),
            lambda: axn.shard(X, {"data": "batch"}),
            lambda: axn.named_jit(lambda x: x, {"data": "batch"})(X),
        )
    ),
    *(
        Advice(
            "{{…}: {…}}",
            lambda call=call: call([("batch", "data")]),
            lambda m: on(AUTO, lambda: spec(axn.shard(X, m))[0]) == "data",
        )
        for call in (
            untyped.axis_mapping,
            lambda m: on(AUTO, lambda: axn.shard(X, m)),
            lambda m: axn.named_jit(lambda x: x, m),
            lambda m: axn.fsdp(lambda x: x, m, {}),
            lambda m: axn.named_jit(lambda x: x, in_placement=m)(X),
            lambda m: axn.named_jit(lambda x: x, in_placement=tuple(m))(X),
            lambda m: axn.shard(X, m),
            lambda m: axn.named_jit(lambda x: x, in_placement={"x": m})(X),
            lambda m: axn.named_jit(lambda x: x, out_placement=m)(X),
            lambda m: on(AUTO, lambda: axn.named_jit(lambda x: x, in_placement={"x": m})(X)),
            lambda m: on(AUTO, lambda: axn.named_jit(lambda x: x, out_placement=m)(X)),
        )
    ),
    *(
        Advice(
            "axonym.make_mesh({'data': 4})",
            lambda call=call: call({"batch": 4}),
            lambda mesh: mesh.shape == {"data": 4},
        )
        for call in (
            untyped.axis_mapping,
            lambda m: on(AUTO, lambda: axn.shard(X, m)),
            lambda m: axn.named_jit(lambda x: x, m),
            lambda m: axn.named_jit(lambda x: x, in_placement=m)(X),
            lambda m: on(AUTO, lambda: axn.named_jit(lambda x: x, out_placement=m)(X)),
        )
    ),
    Advice(
        "axonym.axis_mapping({{…}: {…}}, merge=True)",
        lambda: on(EXPLICIT, lambda: axn.add(*disagreeing())),
        lambda ns: spec(ns["y"])[0] == "data",
        run="with jax.set_mesh(EXPLICIT), CODE: y = axonym.add(*disagreeing())",
    ),
    Advice(
        "donate_args=(True, False)",
        lambda: axn.named_jit(lambda x, y: x + y, donate_args=(0,)),
        lambda fn: same(fn(X + 0, X), X * 2),
        run="axonym.named_jit(lambda x, y: x + y, CODE)",
    ),
    Advice(
        "donate_kwargs={'state': True}",
        lambda: axn.named_jit(lambda x, state: x, donate_args=(0,)),
        lambda fn: same(fn(X, state=X + 0), X),
        run="axonym.named_jit(lambda x, state: x + state * 0, CODE)",
    ),
    Advice(
        "with {…}(...):",
        lambda: axn.axis_mapping({"batch": "data"})(generator),
        lambda ns: ns["found"] == {"batch": "data"},
        run="CODE found = axonym.current_mapping()",
        dots="{'batch': 'data'}",
        names={"axis_mapping": axn.axis_mapping},
    ),
    Advice(
        "with jax.set_mesh(mesh): ...",
        lambda: jax.jit(lambda x: axn.shard(x, {"batch": "data"}, mesh=EXPLICIT))(X),
        lambda ns: spec(ns["y"])[0] == "data",
        dots="y = jax.jit(lambda x: axonym.shard(x, {'batch': 'data'}))(x)",
        names={"mesh": EXPLICIT},
    ),
    Advice(
        "to_state_dict(tree)",
        lambda: axn.state.save_state_dict({"x": X}, "unused.safetensors"),
        lambda d: [*d] == ["x"],
        names={"to_state_dict": axn.state.to_state_dict, "tree": {"x": X}},
    ),
    Advice(
        "method='nearest'",
        lambda: axn.Coordinates({"lat": [-60.0, 0.0, 60.0]}).sel(lat=7),
        lambda found: found == {"lat": 1},
        run="axonym.Coordinates({'lat': [-60.0, 0.0, 60.0]}).sel(lat=7, CODE)",
    ),
    # Per device.
    Advice(
        "axonym.shard_map(f, check_vma=False)",
        lambda: per_device(doubled, X),
        lambda fn: same(on(AUTO, lambda: fn(X), {"batch": "data"}), X * 2),
        names={"f": doubled},
    ),
    Advice(
        "axonym.pvary(x, {…})",
        lambda: per_device(running(lambda: axn.zeros({"embed": 3})), X),
        lambda fn: same(per_device(running(fn), X), X.sum("batch")),
        run="lambda: (lambda x: CODE)(axonym.zeros({'embed': 3}))",
    ),
    Advice(
        "axonym.all_gather(..., invariant=True)",
        lambda: per_device(lambda x: axn.sum(x, "batch"), X),
        lambda fn: same(per_device(fn, X), X),
        run="lambda x: CODE",
        dots="x, 'batch'",
    ),
    Advice(
        "axonym.MeshAxis({…})",
        lambda: per_device(lambda x: axn.psum(x.sum("batch"), "data"), BOTH),
        lambda fn: same(per_device(fn, BOTH), np.full(3, 4.0)),
        run="lambda x: axonym.psum(x.sum('batch'), CODE)",
    ),
    Advice(
        "axonym.axis_offset({…}, x=x)",
        lambda: summed(lambda y: axn.axis_offset("batch")),
        lambda fn: same(summed(fn), np.arange(4) + 1.0),
        run="lambda x: CODE",
    ),
    Advice(
        "jax.lax.pcast(..., {…}, to='varying')",
        lambda: per_device(lambda x: rows_or(lambda: axn.zeros(x.axes), x), X),
        lambda fn: same(per_device(lambda x: rows_or(lambda: axn.named(fn(), x.axes), x), X), X),
        run="lambda: CODE",
        dots="jnp.zeros((1, 3))",
    ),
    Advice(
        "axonym.shard(..., {after})",
        lambda: on(EXPLICIT, lambda: gathered(axn.shard(axn.zeros({"embed": 4}), {"embed": "model"}))),
        lambda start: same(on(EXPLICIT, lambda: gathered(start())), np.full(4, 4.0)),
        run="lambda: CODE",
        dots="axonym.zeros({'embed': 4})",
    ),
    Advice(
        "axonym.shard(..., {before})",
        lambda: on(EXPLICIT, lambda: chosen(COLUMNS, lambda x: x)),
        lambda place: same(on(EXPLICIT, lambda: chosen(COLUMNS, place)), np.ones((4, 4))),
        run="lambda x: CODE",
        dots="x",
    ),
    Advice(
        ".astype({…})",
        lambda: fold(axn.zeros({"embed": 3}, dtype=int)),
        lambda change: same(fold(axn.zeros({"embed": 3}, dtype=int), change), X.sum("batch")),
        run="lambda c, x: (c + x) CODE",
        names={"int32": jnp.int32},
    ),
    # Experts, caches, quantization, contractions.
    Advice(
        "Stacked.init(..., divisible_by={…})",
        lambda: on_mesh(axn.make_mesh({"stage": 4}), lambda: in_stages(layers_of(6))),
        lambda made: same(in_stages(made), in_stages(layers_of(6))),
        run="nn.CODE(X.axes[1], X.axes[1], key=KEY)",
        dots="axn.Axis('layers', 6), nn.Linear",
    ),
    Advice(
        "keep_sharded=[{…}]",
        lambda: ring_in_a_pipeline(),
        lambda report: "all-gather" not in {c.kind for c in report.collectives},
        run="ring_in_a_pipeline(CODE)",
        names={"ring_in_a_pipeline": lambda **options: ring_in_a_pipeline(**options)},
    ),
    Advice(
        'exchange="all_to_all"',
        lambda: on(AUTO, lambda: expert_rows(exchange="ragged"), {"experts": "model"}),
        lambda fn: same(on(AUTO, fn, {"experts": "model"}), np.full((4, 2), 2.0)),
        run="jax.jit(lambda: expert_rows(CODE))",
    ),
    Advice(
        "rows=...",
        lambda: expert_rows(rows="tokens"),
        lambda y: same(y, np.full((4, 2), 2.0)),
        run="expert_rows(CODE)",
        dots="'sorted_rows'",
    ),
    Advice(
        "order={…}",
        lambda: nn.limit_capacity(axn.zeros({"tokens": 4, "choice": 2}, dtype=int), axn.Axis("experts", 2), 0.5),
        lambda y: int((y < 0).sum().item()) == 6,
        run="nn.limit_capacity(expert, axonym.Axis('experts', 2), 0.5, CODE)",
        names={"expert": axn.zeros({"tokens": 4, "choice": 2}, dtype=int)},
    ),
    Advice(
        "axonym.flatten_axes(inputs, {…}, 'rows')",
        lambda: of_two(MOE, axn.stack([X, X], "draw")),
        lambda y: y.shape == {"rows": 8, "out": 2},
        run="of_two(MOE, CODE)",
        names={"inputs": axn.stack([X, X], "draw")},
    ),
    Advice(
        "allow={…}",
        mixing_up,
        lambda y: same(y, jnp.ones((4, 2))),
        run="mixing_up(CODE)",
    ),
    Advice(
        "per_example=True",
        lambda: written(cache_of(per_example=False)),
        lambda c: c.lengths.tolist() == [0, 1],
        run="written(cache_of(CODE))",
    ),
    Advice(
        "dataclasses.replace(cache, lengths=...)",
        lambda: written(cache_of(per_example=False)),
        lambda c: c.lengths.tolist() == [0, 1],
        run="written(CODE)",
        dots="axonym.zeros({'batch': 2}, dtype=int)",
        names={"cache": cache_of(per_example=False)},
    ),
    Advice(
        "group={…}",
        lambda: quantized(group=4),
        lambda layer: layer.weight.shape == {"mlp": 4, "embed": 8},
        run="quantized(CODE)",
    ),
    Advice(
        "jax.tree_util.Partial(fn, array)",
        lambda: sharded_product(functools.partial(scaled_products, FOURS.array)),
        lambda fn: same(sharded_product(fn), np.full((4, 4), 64.0)),
        names={"fn": scaled_products, "array": FOURS.array},
    ),
    Advice("i='row'", lambda: LIFTED(X), lambda y: same(y, X.sum("embed")), run="LIFTED(x, i='embed')"),
    # Reports, pictures and xarray.
    Advice(
        "mapping=",
        lambda: axn.insight.explain(lambda x: x.sum(), X, by="names"),
        lambda report: report.count() == 1,
        run="axonym.insight.explain(lambda x: x.sum(), x, by='names', mesh=AUTO, CODE{'batch': 'data'})",
    ),
    Advice(
        "(t - t[0]) / np.timedelta64(1, 's')",
        lambda: axn.from_xarray(days()),
        lambda x: x.tolist() == [0, 172800],
        run="axonym.from_xarray(CODE)",
        names={"t": days()},
    ),
    Advice(
        "t / np.timedelta64(1, 's')",
        lambda: axn.from_xarray(days() - days()[0]),
        lambda x: x.tolist() == [0, 172800],
        run="axonym.from_xarray(CODE)",
        names={"t": days() - days()[0]},
    ),
    Advice(
        "pandas.factorize(a)",
        lambda: axn.from_xarray(xarray.DataArray(["b", "a", "b"], dims="t")),
        lambda found: found[0].tolist() == [0, 1, 0],
        names={"a": np.array(["b", "a", "b"])},
    ),
    Advice(
        ".to_xarray()",
        lambda: axn.from_xarray(SERIES),
        lambda x: x.shape == {"t": 2},
        run="axonym.from_xarray(SERIES CODE)",
    ),
    # Meshes, and trees without names.
    Advice(
        "with jax.set_mesh(axonym.make_mesh({…})):",
        lambda: axn.shard(EIGHT, {"batch": "data"}),
        lambda ns: spec(ns["y"]) == ("data",),
        run="CODE y = axonym.shard(EIGHT, {'batch': 'data'})",
    ),
    Advice(
        "with jax.set_mesh(mesh):",
        lambda: axn.shard(EIGHT, {"batch": "data"}, AUTO.abstract_mesh),
        lambda ns: spec(ns["y"]) == ("data",),
        run="CODE y = axonym.shard(EIGHT, {'batch': 'data'})",
        names={"mesh": AUTO},
    ),
    Advice(
        "axonym.sharding.TreePathShardingRule({…}, ('.*', jax.P()))",
        lambda: axn.shard(RAW, {"batch": "data"}, AUTO),
        lambda tree: {key: x.sharding.shard_shape(x.shape) for key, x in tree.items()} == {"w": (2, 4), "b": (2,)},
        run="axonym.shard(RAW, CODE, AUTO)",
    ),
    # Checks of how functions are distributed.
    Advice(
        "gradients=False",
        lambda: check_shard_invariance(lambda x: axn.sqrt(x * 0), EIGHT),
        lambda found: found.compared == 1,
        run="check_shard_invariance(lambda x: axonym.sqrt(x * 0), EIGHT, CODE)",
    ),
    Advice(
        "reference=",
        lambda: check_shard_invariance(SUM_OF_ROWS, ROWS),
        lambda found: found.compared == 1,
        run="check_shard_invariance(SUM_OF_ROWS, ROWS, CODEjnp.sum)",
    ),
    Advice(
        "jax.device_put(x, NamedSharding(mesh, spec))",
        lambda: check_shard_invariance(lambda x: x * 2, jnp.arange(8.0)),
        lambda found: found.compared == 1,
        run="check_shard_invariance(lambda x: x * 2, CODE)",
        names={"x": jnp.arange(8.0), "mesh": AUTO, "spec": PartitionSpec("data")},
    ),
    Advice(
        "uneven='pad'",
        lambda: axn.shard(axn.ones({"batch": 6}), {"batch": "data"}, AUTO),
        lambda x: same(axn.to_host(x), axn.ones({"batch": 6})) and spec(x) == ("data",),
        run="axn.shard(axn.ones({'batch': 6}), {'batch': 'data'}, mesh, CODE)",
        names={"mesh": AUTO},
    ),
    Advice(
        "axonym.shard(tree, placement, mesh, uneven='pad')",
        lambda: axn.remap(axn.shard(axn.ones({"batch": 6}), {"batch": "data"}, AUTO, uneven="pad"), {}, AUTO),
        lambda x: spec(x) == ("data",),
        names={"tree": axn.ones({"batch": 6}), "placement": {"batch": "data"}, "mesh": AUTO},
    ),
    Advice(
        "axonym.shard({…}, placement, mesh)",
        lambda: axn.transfer(axn.shard(X, {"batch": "data"}, AUTO), jax.eval_shape(lambda: X)),
        lambda target: (
            axn.transfer(axn.shard(X, {"batch": "data"}, AUTO), target)(axn.shard(X, {"batch": "data"}, AUTO)).sum()
            == 66
        ),
        names={"target": jax.eval_shape(lambda: X), "placement": {}, "mesh": AUTO},
    ),
    Advice(
        "matrix={{…}: {…}}",
        lambda: axn.optim.roles({"table": axn.ones({"vocab": 3, "embed": 2})}),
        lambda roles: (roles[0].rows, roles[0].columns) == (("vocab",), ("embed",)),
        run="axn.optim.roles({'table': axn.ones({'vocab': 3, 'embed': 2})}, CODE)",
    ),
    Advice(
        "asyncio.to_thread(axn.in_context(fn))",
        lambda: asyncio.run(_together(waits)),
        lambda mapping: asyncio.run(mapping) == {"batch": "data"},
        run="on(AUTO, lambda: CODE, {'batch': 'data'})",
        names={"fn": axn.current_mapping, "asyncio": asyncio, "on": on, "AUTO": AUTO},
    ),
]

EXCEPTIONS = {
    "(name: a b)": "a form of the language of `rearrange`, with words to fill in",
    "{a b}": "a form of the language of annotations",
    "x.at[...].get": "the name of a method that takes a `mode`, with an index to fill in",
    "f(x)": "a part of the advice before it",
    "g(x)": "a part of the advice before it",
    "x.resolve_axis({…})": "not to write, but where an Axis comes from",
    "axonym.sum(x, axis)": "in a docstring",
    "axonym.shard(x)": "in a step that is planned, as in tests/insight/test_planning.py",
    "jax.config.update('jax_num_cpu_devices', 8)": "must run before JAX starts, as in tests/conftest.py",
    "batch_fn=lambda xs: axonym.tree.map(lambda *x: axonym.stack(x, 'batch'), *xs)": "tests/test_named_array.py does",
    "jax.config.update('jax_num_cpu_devices', {…})": "must run before JAX starts, as in tests/conftest.py",
    "mask=axonym.nn.attention.Causal('pos')": "tests/nn/test_attention.py does, for queries with these positions",
    "x.map(axonym.mean, 'lat')": "tests/interop/test_labelled.py calls it so",
    "axonym.named_jit(model)": "tests/test_raw_values.py reads this message",
    "equinox.filter_jit(model)": "stands in the same message",
    "rule.lenient()": "is for a rule of the user's own; tests/sharding/test_rules.py calls it where the message comes",
}
"""Code in messages that is not run here, and why."""


def in_messages() -> Iterator[str]:
    """Yield the code in the texts of the library, apart from docstrings, and `foreign_names`, tested below."""
    for path in ROOT.rglob("*.py"):
        if path.name == "foreign_names.py":
            continue
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        parts = {id(v) for n in nodes if isinstance(n, ast.JoinedStr) for v in n.values}
        docs = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
        for node in nodes:
            if id(node) in parts | docs:
                continue
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(v.value) if isinstance(v, ast.Constant) else "{…}" for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            for code in re.findall(r"`([^`\n]+)`", text):
                if re.search(r"[(\[{=]", code.replace("{…}", "")):
                    yield code


@pytest.mark.oldest
def test_every_message_with_code_is_in_the_table() -> None:
    found, known = set(in_messages()), {advice.says for advice in TABLE}
    assert found - known - EXCEPTIONS.keys() == set()
    assert (EXCEPTIONS.keys() | known) - found == set(), "no longer in the library"


# --- names from elsewhere ---

WORDS: dict[str, Any] = {
    "a": np.ones((4, 3)),
    "axis": axn.Axis("season", 2),
    "coords": {"batch": [1, 2, 3, 4]},
    "data": xarray.DataArray(np.ones(3), dims="embed"),
    "dates": xarray.DataArray(pandas.date_range("2020-01-30", periods=4), dims="batch", name="batch"),
    "device": jax.devices()[0],
    "f": lambda x: x,
    "ids": axn.named([0, 1, 0, 1], "batch"),
    "indices": axn.named([0, 1], "draw"),
    "k": 2,
    "labels": xarray.DataArray([0, 0, 1, 1], dims="batch", name="season"),
    "logits": LOGITS,
    "loss": lambda x: x.sum(),
    "mask": X > 0,
    "model": {"weight": X},
    "new": axn.named([0.5], "batch"),
    "positions": axn.arange({"batch": 4}, dtype=float),
    "step": lambda x: x,
    "targets": axn.named([0, 1, 2, 0], "batch"),
    "value": 0.0,
    "values": 0.0,
    "weights": X,
    "x": X,
    "y": X,
    "Channels": axn.Axis("channels", 3),
    "In": axn.Axis("channels", 3),
    "Out": axn.Axis("features", 2),
    "Embed": axn.Axis("embed", 3),
}
HEADS = QUERY.rename({"head_size": "head_dim"})
OWN_WORDS: dict[str, dict[str, Any]] = {
    "attention": {"query": HEADS} | dict.fromkeys(("key", "value"), HEADS.rename({"pos": "key_pos"})),
    "binary": {"targets": LOGITS * 0},
    "pool": {"x": axn.ones({"batch": 2, "channels": 3, "height": 4, "width": 4})},
    "grad(": {"model": X},
    "split(": {"x": axn.ones({"batch": 4, "embed": 5})},
    "unflatten": {"x": axn.ones({"batch": 4, "embed": 6})},
}
"""What words mean in code that has these in it."""


def foreign() -> list[str]:
    """Return the code in advice about names that arrays and packages of the library lack."""
    said = [foreign_names.of_array(name, X.names) for name in foreign_names.ARRAY]
    for package, names in (("axonym", foreign_names.PACKAGE), ("axonym.nn", foreign_names.NETWORKS)):
        said += [foreign_names.in_package(package, name) for name in names]
    codes = {code for text in said for code in re.findall(r"`([^`]+)`", text)}
    return sorted(codes, key=lambda code: ("load_" in code, code))


@pytest.mark.oldest
def test_advice_about_names_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it runs; what each is for, `test_foreign_names` says."""
    monkeypatch.chdir(tmp_path)
    for code in foreign():
        own = WORDS | {k: v for word, names in OWN_WORDS.items() if word in code for k, v in names.items()}
        end = " pass" if code.endswith(":") else ": pass" if code.startswith("class ") else ""
        try:
            with jax.set_mesh(AUTO):
                run(code + end, COMMON | own)
        except Exception as error:
            error.add_note(f"in `{code}`")
            raise


# --- calls with wrong arguments ---

AXES = {"Batch": "batch", "Col": "col", "Input": "embed", "Output": "out", "Row": "row", "Vocab": "vocab"}
WORDS_OF_CALLS: dict[str, Any] = {
    **{word: axn.Axis(name, 3) for word, name in AXES.items()},
    **dict.fromkeys(("b", "concentration", "df", "dfden", "dfnum", "lam", "loc", "mean", "scale"), 2.0),
    **{"left": 0.0, "mode": 0.5, "right": 1.0, "lower": 0.0, "upper": 1.0, "minval": 0, "maxval": 9, "n": 3, "p": 0.5},
    **{"carry": 0.0, "depth": 1, "kernel_size": 1, "groups": 1, "width": 4, "Spatial": "height"},
    "f": lambda *args: args,
}
OWN_WORDS_OF_CALLS = OWN_WORDS | {"gamma(": {"a": 2.0}, "beta(": {"a": 2.0}, "one_hot(": {"x": INTEGERS}}
OWN_WORDS_OF_CALLS["solve("] = {"x": axn.eye(axn.Axis("batch", 3), axn.Axis("embed", 3)), "b": axn.ones({"batch": 3})}
UNKNOWN: list[dict[str, Any]] = [
    {"what": 1},
    {"dim": "batch"},
    {"dim": 0},
    {"dim": "embed"},
    {"dims": (0,)},
    {"dims": (0, 1)},
    {"dims": ("batch", "embed")},
]


@functools.cache
def say_how_to_call() -> dict[str, Any]:
    """Return the public functions and layers whose errors for wrong arguments end with a correct call, by path."""
    code = errors.say_how_to_call(lambda: None).__code__
    found = {id(v): (f"{m.__name__}.{n}", v) for m in modules(native=True) for n, v in exports(m).items()}
    return {
        path: x
        for path, x in found.values()
        if not inspect.isabstract(x) and getattr(x.__init__ if isinstance(x, type) else x, "__code__", None) is code
    }


@pytest.mark.oldest
@pytest.mark.parametrize("path", say_how_to_call())
def test_calls_in_messages(path: str) -> None:
    """Whatever argument is unknown, the call that the message advises runs."""
    found, name = say_how_to_call()[path], path.rpartition(".")[2]
    if isinstance(found, type):
        calls = [
            found,
            *([found.init] if hasattr(found, "init") else ()),
        ]
    else:
        calls = [functools.partial(found, X)]
    texts = [message_of(functools.partial(call, **unknown)) for call in calls for unknown in UNKNOWN]
    codes = [re.findall(r"`([^`]+)`", text) for text in texts]
    assert all(codes), texts
    for code in set(itertools.chain(*codes)):
        own = {k: v for word, names in OWN_WORDS_OF_CALLS.items() if word in code for k, v in names.items()}
        run(code, COMMON | WORDS | WORDS_OF_CALLS | own | {name: found})


def message_of(provoke: Callable[[], Any]) -> str:
    """Return the text of the error or the warning of a call, with its notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            provoke()
        except Exception as error:
            return "\n".join([str(error), *getattr(error, "__notes__", ())])
    (warning,) = caught
    return str(warning.message)


def run(code: str, names: dict[str, Any]) -> Any:
    """Return the value of an expression, or the variables after a statement."""
    try:
        compiled = compile(code, "advice", "eval")
    except SyntaxError:
        exec(compile(code, "advice", "exec"), names)
        return names
    return eval(compiled, names)


COMMON: dict[str, Any] = {
    "__name__": __name__,
    "axonym": axn,
    "jax": jax,
    "jnp": jnp,
    "numpy": np,
    "equinox": eqx,
    "optax": optax,
    "key": KEY,
}


@pytest.mark.parametrize("advice", TABLE, ids=lambda advice: advice.says)
def test_advice(advice: Advice) -> None:
    pattern = re.escape(advice.says).replace(re.escape("{…}"), ".+?")
    pattern = re.sub(r"\\\{(before|after)\\\}", ".+?", pattern)
    codes = re.findall(r"`([^`]+)`", text := message_of(advice.provoke))
    code = next((c for c in codes if re.fullmatch(pattern, c)), None)
    assert code is not None, text
    names = globals() | COMMON | {"x": X} | advice.names
    assert advice.meant(run(advice.run.replace("CODE", code.replace("...", advice.dots)), names)), code
