"""Selection and comparison: by a condition, by position along an axis, by the position among other elements."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn
from tests.ops.case import Case, f, of

COND = of("bool", "batch", "pos")
BPE, BP = ("batch", "pos", "embed"), ("batch", "pos")
FOUND = axn.Axis("found", 6)


def _nonzero(x: np.ndarray, size: int, fill: Any) -> list[np.ndarray]:
    fills = fill if isinstance(fill, tuple) else (fill,) * x.ndim
    found = [np.asarray(i, np.int32)[:size] for i in np.nonzero(x)]
    return [np.pad(i, (0, size - len(i)), constant_values=v) for i, v in zip(found, fills, strict=True)]


NEAR = (np.arange(8)[:, None] + [-1, 0, 1]) % 8


def _columns(x: Any, xp: Any, fp: Any) -> Any:
    """Interpolate at [row, embed] in [batch, pos, embed]."""
    column = jax.vmap(lambda x, fp: jnp.interp(x, xp, fp), in_axes=1, out_axes=1)
    return jax.vmap(lambda fp: column(x, fp))(fp)


WHERE = [
    Case("where", (COND, f(*BP), f(*BP)), axn.where, lambda c, x, y: jnp.where(c, x, y), names=BP),
    Case(
        "where",
        (of("bool", "pos"), f(*BPE), f("embed", "pos")),
        axn.where,
        lambda c, x, y: jnp.where(c[:, None], x, y.T),
        "broadcast",
        names=BPE,
    ),
    Case(
        "where",
        (of("bool", "pos", "batch"), f("batch")),
        lambda c, x: axn.where(c, 0.0, x),
        lambda c, x: jnp.where(c, 0.0, x),
        "scalar",
        names=("pos", "batch"),
    ),
    Case(
        "where",
        (f("pos"), f("batch", "pos")),
        lambda x, y: (axn.where(True, x, y), axn.where(np.bool_(False), x, y)),
        lambda x, y: (jnp.broadcast_to(x, y.shape), y),
        "constant",
        names=(BP, BP),
    ),
    Case(
        "where",
        (of("int", *BP), f("batch", "pos")),
        lambda x, y: axn.where(True, x, y),
        lambda x, y: x.astype(np.float32),
        "promoted",
        grad=False,
        names=BP,
    ),
    Case(
        "where",
        (f(*BP),),
        lambda x: axn.where(axn.sum(x) > 0, x, 1.0),
        lambda x: jnp.where(x.sum() > 0, x, 1.0),
        "scalar condition",
        names=BP,
    ),
]

NONZERO = [
    Case(
        "nonzero",
        (of("index", "batch", "pos"),),
        lambda x: axn.nonzero(x, size=axn.Axis("pos", 4)),
        lambda x: _nonzero(x, 4, 0),
        "too few places",
        grad=False,
        layout=False,
        names=(("pos",), ("pos",)),
    ),
    Case(
        "nonzero",
        (of("index", "batch", "pos"),),
        lambda x: axn.nonzero(x, size=axn.Axis("found", 40), fill_value=(-1, 99)),
        lambda x: _nonzero(x, 40, (-1, 99)),
        "filled",
        grad=False,
        layout=False,
        names=(("found",), ("found",)),
    ),
]

CLIP = [
    Case("clip", (f(*BP),), lambda x: axn.clip(x, -0.5, 0.5), lambda x: jnp.clip(x, -0.5, 0.5), "scalars", names=BP),
    Case("clip", (f(*BP),), lambda x: axn.clip(x, a_max=0), lambda x: jnp.clip(x, None, 0), "above", names=BP),
    Case(
        "clip",
        (f("pos"), f("batch", "pos")),
        lambda x, low: axn.clip(x, low),
        lambda x, low: jnp.clip(x[None], low),
        "below",
        names=BP,
    ),
    Case(
        "clip",
        (f("embed"), f("pos", "embed"), of("positive", "embed")),
        axn.clip,
        lambda x, low, high: jnp.clip(x[None], low, high[None]),
        "broadcast",
        names=("pos", "embed"),
    ),
    Case(
        "clip",
        (of("int", *BP),),
        lambda x: (axn.clip(x, 2), axn.clip(x)),
        lambda x: (np.clip(x, 2, None), x),
        "integers",
        grad=False,
        names=(BP, BP),
    ),
]


def _along(x: Any, indices: Any) -> Any:
    """Call `take_along_axis` for positions (batch, embed) along pos of an array (batch, pos, embed)."""
    return jnp.take_along_axis(x, indices[:, None, :], 1)[:, 0]


ALONG = [
    Case(
        "take_along_axis",
        (f(*BPE), of("index", "batch", "heads")),
        lambda x, i: axn.take_along_axis(x, axn.rename(i, {"heads": "pos"}), "pos"),
        lambda x, i: jnp.take_along_axis(x, i[:, :, None], 1),
        "several",
        names=BPE,
    ),
    Case(
        "take_along_axis",
        (f(*BPE), of("index", "embed", "batch")),
        lambda x, i: axn.take_along_axis(x, i, axn.Axis("pos", 4)),
        lambda x, i: _along(x, i.T),
        "one",
        names=("batch", "embed"),
    ),
    Case(
        "take_along_axis",
        (f(*BP), of("int", "batch")),
        lambda x, i: axn.take_along_axis(x, i, "pos", mode="clip"),
        lambda x, i: x[np.arange(8), np.clip(np.where(i < 0, i + 4, i), 0, 3)],
        "clipped",
        names=("batch",),
    ),
]

LOOKUP = [
    Case(
        "searchsorted",
        (f("x"), f("batch", "x")),
        lambda a, v: axn.searchsorted(axn.sort(a), v),
        lambda a, v: np.searchsorted(np.sort(a), v).astype(np.int32),
        grad=False,
        names=("batch", "x"),
    ),
    Case(
        "searchsorted",
        (of("int", "x"), of("int", *BP)),
        lambda a, v: axn.searchsorted(a, v, side="right", sorter=axn.argsort(a), method="sort"),
        lambda a, v: np.searchsorted(np.sort(a), v, side="right").astype(np.int32),
        "sorter",
        grad=False,
        names=BP,
    ),
    Case(
        "searchsorted",
        (f("x"),),
        lambda a: axn.searchsorted(axn.sort(a), 0.25),
        lambda a: np.int32(np.searchsorted(np.sort(a), 0.25)),
        "scalar",
        grad=False,
        names=(),
    ),
    Case(
        "interp",
        (f("row", "embed"), f("batch", "pos", "embed")),
        lambda x, fp: axn.interp(x, axn.arange(axn.Axis("pos", 4), dtype=float), fp),
        lambda x, fp: _columns(x, np.arange(4, dtype=np.float32), fp),
        "field",
        names=("batch", "row", "embed"),
    ),
    Case(
        "interp",
        (f("pos"), f("batch", "pos")),
        lambda x, fp: axn.interp(x, axn.cumsum(axn.exp(fp), "pos"), fp, axis="pos"),
        lambda x, fp: jax.vmap(lambda fp: jnp.interp(x, jnp.cumsum(jnp.exp(fp)), fp))(fp),
        "columns with points of their own",
        names=BP,
    ),
    Case(
        "interp",
        (f(*BP), f("batch")),
        lambda x, fp: axn.interp(x, axn.arange(axn.Axis("batch", 8), dtype=float), fp),
        lambda x, fp: jnp.interp(x, np.arange(8, dtype=np.float32), fp),
        names=BP,
    ),
    Case(
        "interp",
        (f(*BP),),
        lambda x: axn.interp(x, [0.0, 1.0], [3.0, 4.0], left=-1.0, right="extrapolate"),
        lambda x: jnp.where(x < 0, -1.0, x + 3),
        "ends",
        names=BP,
    ),
    Case(
        "interp",
        (f(*BP),),
        lambda x: axn.interp(x, [0.0, 1.0], [3.0, 4.0], period=2.0),
        lambda x: jnp.interp(x, jnp.asarray([0.0, 1.0]), jnp.asarray([3.0, 4.0]), period=2.0),
        "periodic",
        names=BP,
    ),
    Case(
        "regrid",
        (f(*BP), f("xyz", "batch")),
        lambda x, w: axn.regrid(x, "batch", axn.named(NEAR, ("batch", "xyz")), w, "xyz"),
        lambda x, w: jnp.einsum("bkp,kb->bp", jnp.asarray(x)[NEAR], w),
        "near",
        names=BP,
    ),
    Case(
        "regrid",
        (f(*BP), of("index", "row"), f("xyz")),
        lambda x, i, w: axn.regrid(x, "batch", i.broadcast_axis(axn.Axis("xyz", 3)), w, "xyz"),
        lambda x, i, w: jnp.asarray(x)[i] * w.sum(),
        "anywhere",
        names=("row", "pos"),
    ),
]

COMPARING = [
    Case(
        "isclose",
        (of("nan", *BPE), of("nan", "embed", "pos")),
        lambda a, b: axn.isclose(a, b, 0.1, 0.5, equal_nan=True),
        lambda a, b: np.isclose(a, b.T, 0.1, 0.5, equal_nan=True),
        grad=False,
        names=BPE,
    ),
    Case(
        "isclose",
        (f(*BP),),
        lambda a: axn.isclose(0.0, a, atol=0.5),
        lambda a: np.isclose(0.0, a, atol=0.5),
        "scalar",
        grad=False,
        names=BP,
    ),
    Case(
        "allclose",
        (f(*BP),),
        lambda a: (
            axn.allclose(a, axn.rearrange(a + 1e-7, ("pos", "batch"))),
            axn.allclose(a, 0.0),
            axn.allclose(a, 0.0, atol=99),
        ),
        lambda a: (True, False, True),
        grad=False,
    ),
    Case(
        "allclose",
        (of("nan", *BP),),
        lambda a: (axn.allclose(a, a), axn.allclose(a, a, equal_nan=True)),
        lambda a: (False, True),
        "nan",
        grad=False,
    ),
    Case(
        "array_equal",
        (f(*BP),),
        lambda a: (
            axn.array_equal(a, axn.rearrange(a, ("pos", "batch"))),
            axn.array_equal(a, a + 1),
            axn.array_equal(a, axn.rename(a, {"pos": "embed"})),
            axn.array_equal(a, axn.broadcast_axis(a, axn.Axis("embed", 2))),
            axn.array_equal(a, a["pos", 0:2]),
        ),
        lambda a: (True, False, False, False, False),
        grad=False,
    ),
    Case(
        "array_equal",
        (of("nan", *BP),),
        lambda a: (axn.array_equal(a, a), axn.array_equal(a, a, equal_nan=True)),
        lambda a: (False, True),
        "nan",
        grad=False,
    ),
    Case(
        "array_equiv",
        (f("pos"),),
        lambda a: (
            axn.array_equiv(a, axn.broadcast_axis(a, axn.Axis("batch", 8))),
            axn.array_equiv(axn.broadcast_axis(a, axn.Axis("batch", 8)), a + 1),
            axn.array_equiv(a, axn.rename(a, {"pos": "embed"})),
            axn.array_equiv(a, a["pos", 0:2]),
            axn.array_equiv(a * 0 + 3, 3),
        ),
        lambda a: (True, False, False, False, True),
        grad=False,
    ),
]

CASES: list[Case] = [*WHERE, *NONZERO, *CLIP, *ALONG, *LOOKUP, *COMPARING]
