"""Indexing: every form of index, for reading and for updating, compared with NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn
from axonym.ops.updating import updated_slice
from tests.ops.case import Case, Operand, f, of

BPE = ("batch", "pos", "embed")
X = f(*BPE)
POSITION = of("index")
Batch, Pos, Embed = axn.make_axes(batch=8, pos=4, embed=8)
MASK = np.array([True, False, True, False, False, True, False, False])
# For cases that differ from others only in how the index is written: their programs are tested there.
LIGHT: dict[str, Any] = {"grad": False, "sharded": False, "vmap": False}


def _case(
    name: str,
    label: str,
    operands: tuple[Operand, ...],
    call: Callable[..., Any],
    reference: Callable[..., Any],
    names: Any,
    **options: Any,
) -> Case:
    """Make a case whose call returns one array, or several for related forms.

    References are compiled as a whole if they are differentiated: one by one, their operations take much longer.
    """
    differentiable = options.get("grad", True)
    return Case(
        name, operands, call, jax.jit(reference) if differentiable else reference, label, names=names, **options
    )


def _at(x: Any) -> Any:
    return jnp.asarray(x).at


def _windows(x: Any, starts: Any, size: int) -> Any:
    """Take from every row of `x` (batch, pos, embed) its own window along pos."""
    positions = jnp.asarray(starts)[:, None] + np.arange(size)
    return jnp.take_along_axis(jnp.asarray(x), positions[:, :, None], 1)


def _with_windows(x: Any, starts: Any, update: Any) -> Any:
    """Write such windows back: `update` is (batch, 2, embed)."""
    rows = [jax.lax.dynamic_update_slice(x[b], update[b], (starts[b], 0)) for b in range(8)]
    return jnp.stack(rows)


LOOKUPS = [
    _case(
        "index",
        "integers",
        (X,),
        lambda x: (
            x["pos", 1],
            x["embed", 0, "pos", -1],
            x["batch", np.int64(3)],
            x["batch", -8, "pos", 0, "embed", 7],
        ),
        lambda x: (x[:, 1], x[:, -1, 0], x[3], x[0, 0, 7]),
        (("batch", "embed"), ("batch",), ("pos", "embed"), ()),
        vmap=False,
    ),
    _case(
        "index",
        "slices",
        (X,),
        lambda x: (
            x["pos", 1:3],
            x["embed", 1:7:3, "batch", ::2],
            x["embed", -2:0:-2, "pos", ::-1],
            x["pos", np.int32(1) :, "batch", -100:100],
        ),
        lambda x: (
            x[:, 1:3],
            x[::2, :, 1:7:3],
            x[:, ::-1, -2:0:-2],
            x[:, 1:],
        ),
        (BPE,) * 4,
        vmap=False,
    ),
    _case(
        "index",
        "arrays without axes",
        (X, POSITION),
        lambda x, i: (x["pos", i], x["embed", i.array, "batch", 2], x["pos", -1 - i.array, "embed", 2:5]),
        lambda x, i: (jnp.take(x, i, 1), jnp.take(x[2], i, 1), jnp.take(x[:, :, 2:5], -1 - i, 1)),
        (("batch", "embed"), ("pos",), ("batch", "embed")),
        sharded=False,
        grad=False,
    ),
    _case(
        "index",
        "dynamic slices",
        (X, POSITION),
        lambda x, i: (
            x["pos", axn.ds(1, 2)],
            x["pos", axn.ds(i, 2), "embed", axn.ds.block(i, 4)],
            x["batch", axn.ds(i.array, axn.Axis("window", 4)), "pos", 0, "embed", ::2],
            x["embed", axn.ds(i - 3, 2)],
        ),
        lambda x, i: (
            x[:, 1:3],
            jax.lax.dynamic_slice(x, (0, i, 4 * i), (8, 2, 4)),
            jax.lax.dynamic_slice(x[:, 0, ::2], (i, 0), (4, 4)),
            jax.lax.dynamic_slice(x, (0, 0, i + 5), (8, 4, 2)),
        ),
        (BPE, BPE, ("batch", "embed"), BPE),
    ),
    _case(
        "index",
        "slices of each element",
        (X, of("index", "batch")),
        lambda x, i: (x["pos", axn.ds(i, 3)], x["embed", 1, "pos", axn.ds(i, 1)]),
        lambda x, i: (_windows(x, i, 3), _windows(x, i, 1)[:, :, 1]),
        (("batch", "pos", "embed"), ("batch", "pos")),
    ),
    _case(
        "index",
        "new axes",
        (X, of("index", "row", "heads")),
        lambda x, i: (x["pos", i], x["embed", i], x["batch", i]),
        lambda x, i: (x[:, i], x[:, :, i], x[i]),
        (
            ("batch", "row", "heads", "embed"),
            ("batch", "pos", "row", "heads"),
            ("row", "heads", "pos", "embed"),
        ),
    ),
    _case(
        "index",
        "shared axes",
        (X, of("index", "pos", "batch"), of("index", "heads", "batch")),
        lambda x, i, j: (x["embed", i], x["pos", j], x["pos", 1, "embed", i["pos", 0]]),
        lambda x, i, j: (
            jnp.take_along_axis(x, i.T[:, :, None], 2)[:, :, 0],
            jnp.take_along_axis(x, j.T[:, :, None], 1),
            jnp.take_along_axis(x[:, 1], i[0][:, None], 1)[:, 0],
        ),
        (("batch", "pos"), ("batch", "heads", "embed"), ("batch",)),
    ),
    _case(
        "index",
        "the axis itself",
        (f("batch", "embed"), of("index", "pos"), of("index", "batch")),
        lambda x, i, j: (x["embed", i.rename({"pos": "embed"})], x["embed", j, "batch", 1]),
        lambda x, i, j: (x[:, i], x[1, j]),
        (("batch", "embed"), ("batch",)),
        **LIGHT,
    ),
    _case(
        "index",
        "several arrays",
        (X, of("index", "row"), of("index", "heads", "row")),
        lambda x, i, j: (
            x["pos", i, "embed", j],
            x["batch", i, "embed", j],
            x["embed", j, "pos", i, "batch", i],
            x["batch", i, "pos", 1, "embed", j],
            x["batch", 2, "embed", j],
            x["batch", ::3, "embed", j, "pos", i],
        ),
        lambda x, i, j: (
            jnp.swapaxes(x[:, i, j], 1, 2),
            jnp.moveaxis(x[i, :, j], 1, 0),
            x[i, i, j],
            x[i, 1, j].T,
            x[2][:, j],
            x[::3, i, j],
        ),
        (
            ("batch", "row", "heads"),
            ("row", "heads", "pos"),
            ("heads", "row"),
            ("row", "heads"),
            ("pos", "heads", "row"),
            ("batch", "heads", "row"),
        ),
        **LIGHT,
    ),
    _case(
        "index",
        "shared and new axes",
        (X, of("index", "heads", "batch"), of("index", "heads")),
        lambda x, i, j: (x["pos", i, "embed", j], x["embed", i, "pos", 2:4]),
        lambda x, i, j: (
            x[np.arange(8)[:, None], i.T, j[None]],
            jnp.take_along_axis(x[:, 2:4], i.T[:, None], 2),
        ),
        (("batch", "heads"), ("batch", "pos", "heads")),
        sharded=False,
        grad=False,
    ),
    _case(
        "index",
        "along a sliced axis",
        (f("batch", "embed"), of("index", "batch"), POSITION),
        lambda x, i, at: (
            x["batch", 2:6, "embed", i["batch", 0:4]],
            x["embed", i["batch", 0:4], "batch", axn.ds(at, 4)],
            x["batch", 6:2:-1, "embed", i["batch", 4:]],
        ),
        lambda x, i, at: (x[np.arange(2, 6), i[:4]], x[at + np.arange(4), i[:4]], x[np.arange(6, 2, -1), i[4:]]),
        (("batch",),) * 3,
        **LIGHT,
    ),
    _case(
        "index",
        "lists, raw arrays and masks",
        (X,),
        lambda x: (
            x["embed", [0, 2, -1]],
            x["pos", jnp.array([3, 3, 0]), "embed", 2],
            x["embed", MASK],
            x["embed", axn.named(MASK, "embed"), "pos", 0],
            x["pos", [True, True, False, True], "batch", 0],
        ),
        lambda x: (x[:, :, [0, 2, 7]], x[:, [3, 3, 0], 2], x[:, :, [0, 2, 5]], x[:, 0, [0, 2, 5]], x[0, [0, 1, 3]]),
        (BPE, ("batch", "pos"), BPE, ("batch", "embed"), ("pos", "embed")),
        **LIGHT,
    ),
    _case(
        "index",
        "ways of writing",
        (X,),
        lambda x: (
            axn.index(x, {"pos": 1, Embed: slice(2, 4)}),
            x[{Pos: 1, "batch": axn.named(2, ())}],
            x[Pos, 1, "embed", 0],
            x[...],
            x[{}],
        ),
        lambda x: (x[:, 1, 2:4], x[2, 1], x[:, 1, 0], x, x),
        (("batch", "embed"), ("embed",), ("batch",), BPE, BPE),
        **LIGHT,
    ),
    _case(
        "take",
        "",
        (X, of("index", "row"), POSITION),
        lambda x, i, j: (
            axn.take(x, "embed", i),
            x.take(Pos, 2),
            x.take("pos", index=j),
            axn.take(x, "pos", [1, 1, 0]),
        ),
        lambda x, i, j: (x[:, :, i], x[:, 2], jnp.take(x, j, 1), x[:, [1, 1, 0]]),
        (("batch", "pos", "row"), ("batch", "embed"), ("batch", "embed"), BPE),
        **LIGHT,
    ),
    _case(
        "index",
        "",
        (X, POSITION),
        lambda x, i: (x["embed", axn.ds.block(i.array, 4)], x["pos", axn.ds.block(3, 1)]),
        lambda x, i: (jax.lax.dynamic_slice(x, (0, 0, 4 * i), (8, 4, 4)), x[:, 3:]),
        (BPE, BPE),
        **LIGHT,
    ),
    _case(
        "slice",
        "",
        (X, POSITION),
        lambda x, i: (
            axn.slice(x, "pos", start=1, length=2),
            x.slice("pos", axn.Axis("row", 3), start=i),
            x.slice({"pos": 1, "embed": i}, {"pos": 2, "embed": axn.Axis("col", 5)}),
            axn.slice(x, start={Embed: 1}, length={"embed": 3}),
            axn.slice(x, "pos", length=axn.Axis("window", 3)),
        ),
        lambda x, i: (
            x[:, 1:3],
            jax.lax.dynamic_slice(x, (0, i, 0), (8, 3, 8)),
            jax.lax.dynamic_slice(x, (0, 1, i), (8, 2, 5)),
            x[:, :, 1:4],
            x[:, :3],
        ),
        (BPE, ("batch", "row", "embed"), ("batch", "pos", "col"), BPE, ("batch", "window", "embed")),
        **LIGHT,
    ),
    _case(
        "slice",
        "sharded",
        (X, POSITION),
        lambda x, i: (
            axn.slice(x, "batch", start=i, length=4),
            axn.slice(x, {"pos": i, "embed": 2}, {"pos": 2, "embed": 3}),
        ),
        lambda x, i: (
            jax.lax.dynamic_slice(x, (i, 0, 0), (4, 4, 8)),
            jax.lax.dynamic_slice(x, (0, i, 2), (8, 2, 3)),
        ),
        (BPE, BPE),
        grad=False,
    ),
    _case(
        "ops.updating.updated_slice",
        "",
        (X, f("embed", "pos"), POSITION),
        lambda x, y, i: (
            updated_slice(x, {"pos": 1, "batch": i}, y["pos", 0:2]),
            updated_slice(x, {"embed": i + 2}, y["embed", 0:3, "pos", 0]),
            updated_slice(x, {}, y),
        ),
        lambda x, y, i: (
            jax.lax.dynamic_update_slice(jnp.asarray(x), y.T[None, 0:2], (i, 1, 0)),
            jax.lax.dynamic_update_slice(
                jnp.asarray(x), jnp.broadcast_to(y[0:3, 0][None, None], (8, 4, 3)), (0, 0, i + 2)
            ),
            jnp.broadcast_to(y.T[None], x.shape),
        ),
        (BPE,) * 3,
    ),
    _case(
        "ops.updating.updated_slice",
        "of each element",
        (X, f("batch", "pos", "embed"), of("index", "batch")),
        lambda x, y, i: updated_slice(x, {"pos": i}, y["pos", 0:2]),
        lambda x, y, i: _with_windows(x, i, y[:, 0:2]),
        BPE,
        vmap=False,
    ),
]

UPDATES = [
    _case(
        "NamedArray.at",
        "set",
        (X, f("embed", "batch"), f("pos")),
        lambda x, y, z: (
            x.at["pos", -1].set(y),
            x.at["batch", 2, "embed", 1:7:2].set(z),
            x.at[{Pos: slice(None, None, -1), "batch": slice(2, 6)}].set(z),
            x.at["pos", 0, "embed", 2:4].set(7.0),
        ),
        lambda x, y, z: (
            _at(x)[:, -1].set(y.T),
            _at(x)[2, :, 1:7:2].set(z[:, None]),
            _at(x)[2:6].set(z[::-1][:, None]),
            _at(x)[:, 0, 2:4].set(7.0),
        ),
        (BPE,) * 4,
        vmap=False,
    ),
    _case(
        "NamedArray.at",
        "dynamic",
        (X, f("batch"), POSITION, of("index", "batch")),
        lambda x, y, i, j: (
            x.at["pos", i].set(y),
            x.at["pos", axn.ds(i, 2), "embed", axn.ds(2, 3)].set(y),
            x.at["pos", axn.ds(j, 2)].add(y),
        ),
        lambda x, y, i, j: (
            _at(x)[:, i].set(y[:, None]),
            _at(x)[:, i + np.arange(2)[:, None], np.arange(2, 5)].set(y[:, None, None]),
            _at(x)[np.arange(8)[:, None], j[:, None] + np.arange(2)].add(y[:, None, None]),
        ),
        (BPE,) * 3,
        grad=False,
    ),
    _case(
        "NamedArray.at",
        "gathered",
        (X, of("index", "heads"), f("heads", "batch"), of("index", "batch"), f("pos")),
        lambda x, i, y, j, z: (
            x.at["embed", i].add(y),
            x.at["pos", i, "embed", i].add(y),
            x.at["embed", j].subtract(z),
        ),
        lambda x, i, y, j, z: (
            _at(x)[:, :, i].add(y.T[:, None]),
            _at(x)[:, i, i].add(y.T),
            _at(x)[np.arange(8), :, j].add(-z[None]),
        ),
        (BPE,) * 3,
    ),
    _case(
        "NamedArray.at",
        "gathered and indexed",
        (X, of("index", "heads"), f("pos")),
        lambda x, i, z: (x.at["batch", i, "embed", 1].add(z), x.at["batch", 1, "embed", i].set(2.0)),
        lambda x, i, z: (_at(x)[i, :, 1].add(z[None]), _at(x)[1, :, i].set(2.0)),
        (BPE,) * 2,
        **LIGHT,
    ),
    _case(
        "NamedArray.at",
        "along a sliced axis",
        (f("batch", "embed"), of("index", "batch"), f("batch"), POSITION),
        lambda x, i, y, at: (
            x.at["batch", 2:6, "embed", i["batch", 0:4]].set(y["batch", 1:5]),
            x.at["embed", i["batch", 0:4], "batch", axn.ds(at, 4)].add(y["batch", 1:5]),
            x.at["batch", 6:2:-1, "embed", i["batch", 0:4]].set(y["batch", 1:5]),
        ),
        lambda x, i, y, at: (
            _at(x)[np.arange(2, 6), i[:4]].set(y[1:5]),
            _at(x)[at + np.arange(4), i[:4]].add(y[1:5]),
            _at(x)[np.arange(6, 2, -1), i[:4]].set(y[1:5]),
        ),
        (("batch", "embed"),) * 3,
        grad=False,
    ),
    _case(
        "NamedArray.at",
        "lists and masks",
        (X, f("batch")),
        lambda x, y: (
            x.at["embed", [0, 0, 3]].add(y),
            x.at["embed", MASK, "pos", 1].multiply(2.0),
            x.at["pos", []].set(y),
        ),
        lambda x, y: (
            _at(x)[:, :, [0, 0, 3]].add(y[:, None, None]),
            _at(x)[:, 1, [0, 2, 5]].multiply(2.0),
            x,
        ),
        (BPE,) * 3,
        **LIGHT,
    ),
    _case(
        "NamedArray.at",
        "other changes",
        (X, of("positive", "batch")),
        lambda x, y: (
            x.at["pos", 1].subtract(y),
            x.at["pos", 1].multiply(y),
            x.at["pos", 1].divide(y),
            abs(x).at["pos", 1].power(y),
            x.at["pos", 1].min(y),
            x.at["pos", 1].max(y),
        ),
        lambda x, y: (
            _at(x)[:, 1].add(-y[:, None]),
            _at(x)[:, 1].multiply(y[:, None]),
            _at(x)[:, 1].divide(y[:, None]),
            _at(np.abs(x))[:, 1].power(y[:, None]),
            _at(x)[:, 1].min(y[:, None]),
            _at(x)[:, 1].max(y[:, None]),
        ),
        (BPE,) * 6,
        **LIGHT,  # JAX has no derivative of a product with elements that may be picked twice
    ),
    _case(
        "NamedArray.at",
        "out of range",
        (X, f("heads", "batch")),
        lambda x, y: (
            x.at["embed", axn.named([1, 8], "heads")].set(y, mode="drop"),
            x.at["embed", axn.named([1, -9], "heads")].add(y, mode="drop"),
            x.at["pos", jnp.int32(4)].set(0.0, mode="drop"),
            x.at["pos", axn.ds(jnp.int32(3), 2)].set(0.0, mode="drop"),
            x.at["embed", axn.named([1, 8], "heads")].set(y, mode="clip"),
        ),
        lambda x, y: (
            _at(x)[:, :, 1].set(y[0][:, None]),
            _at(x)[:, :, 1].add(y[0][:, None]),
            x,
            _at(x)[:, 3].set(0.0),
            _at(x)[:, :, np.array([1, 7])].set(y.T[:, None]),
        ),
        (BPE,) * 5,
        **LIGHT,
    ),
    _case(
        "NamedArray.at",
        "get",
        (X, of("int", "heads"), POSITION),
        lambda x, i, at: (
            x.at["pos", 1, "embed", 2:5].get(),
            x.at["pos", i].get(mode="fill", fill_value=-1.0),
            x.at["pos", i, "batch", 3].get(mode="clip"),
            x.at["batch", at + 7].get(mode="fill", fill_value=2.0),
            x.at["pos", axn.ds(at + 2, 2), "embed", 0:4].get(mode="fill", fill_value=0.0),
            x.at["batch", 0:4, "embed", i].get(mode="promise_in_bounds"),
        ),
        lambda x, i, at: (
            x[:, 1, 2:5],
            _at(x)[:, i].get(mode="fill", fill_value=-1.0),
            _at(x)[3, i].get(mode="clip"),
            _at(x)[at + 7].get(mode="fill", fill_value=2.0),
            _at(x)[:, at + 2 + np.arange(2), 0:4].get(mode="fill", fill_value=0.0),
            _at(x)[0:4, :, i].get(mode="promise_in_bounds"),
        ),
        (
            ("batch", "embed"),
            ("batch", "heads", "embed"),
            ("heads", "embed"),
            ("pos", "embed"),
            BPE,
            ("batch", "pos", "heads"),
        ),
        **LIGHT,
    ),
    _case(
        "NamedArray.at",
        "integers",
        (of("int", "batch", "pos"), of("index", "batch")),
        lambda x, i: (x.at["pos", 1].set(3), x.at["pos", i].add(1), x.at["pos", 1].max(i), x["pos", i]),
        lambda x, i: (
            _at(x)[:, 1].set(3),
            _at(x)[np.arange(8), i].add(1),
            _at(x)[:, 1].max(i),
            x[np.arange(8), i],
        ),
        (("batch", "pos"),) * 3 + (("batch",),),
        **LIGHT,
    ),
]

CASES: list[Case] = [*LOOKUPS, *UPDATES]
