"""Sorting, distinct values and counts, bits, and the diagonals of matrices."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import axonym as axn
from tests.helpers import public_name
from tests.ops.case import Case, f, of

BPE, BP = ("batch", "pos", "embed"), ("batch", "pos")
INT = of("int", "batch", "pos")
VALUES = axn.Axis("value", 16)


def _int32(x: Any) -> np.ndarray:
    return np.asarray(x, np.int32)


# --- sorting ---


SORTING = [
    Case("sort", (f(*BPE),), lambda x: axn.sort(x, "embed"), lambda x: jnp.sort(x, axis=2), "last", names=BPE),
    Case(
        "sort",
        (f(*BPE),),
        lambda x: axn.sort(x, axn.Axis("batch", 8)),
        lambda x: jnp.sort(x, axis=0),
        "first",
        names=BPE,
    ),
    Case(
        "sort",
        (f("batch"),),
        lambda x: axn.sort(x, descending=True),
        lambda x: jnp.sort(x)[::-1],
        "falling",
        names=("batch",),
    ),
    Case("sort", (of("nan", "batch"),), axn.sort, np.sort, "nan", grad=False, names=("batch",)),
    Case(
        "argsort",
        (f(*BPE),),
        lambda x: axn.argsort(x, "pos"),
        lambda x: _int32(np.argsort(x, axis=1)),
        grad=False,
        names=BPE,
    ),
    Case(
        "argsort",
        (INT,),
        lambda x: axn.argsort(x, "batch"),
        lambda x: _int32(np.argsort(x, axis=0, stable=True)),
        "stable",
        grad=False,
        names=BP,
    ),
    Case(
        "argsort",
        (INT,),
        lambda x: axn.argsort(x, "batch", descending=True),
        lambda x: _int32(np.argsort(-x, axis=0, stable=True)),
        "falling, equal ones in order",
        grad=False,
        names=BP,
    ),
    Case(
        "argsort",
        (f("batch"),),
        lambda x: axn.argsort(x, None, descending=True),
        lambda x: _int32(np.argsort(-x)),
        "falling",
        grad=False,
        names=("batch",),
    ),
    Case(
        "top_k",
        (f(*BPE),),
        lambda x: axn.top_k(x, "pos", 2),
        lambda x: (-np.sort(-x, axis=1)[:, :2], _int32(np.argsort(-x, axis=1)[:, :2])),
        grad=False,
        names=(BPE, BPE),
    ),
    Case(
        "top_k",
        (f("batch", "embed"),),
        lambda x: axn.top_k(x, axn.Axis("embed", 8), 3, axn.Axis("beam", 3))[0],
        lambda x: -jnp.sort(-x, axis=1)[:, :3],
        "new axis",
        names=("batch", "beam"),
    ),
]


# --- sets ---


def _unique(x: np.ndarray, size: int, fill: int | None = None, axis: int | None = None) -> list[np.ndarray]:
    """Return values, index, inverse and counts from NumPy, filled up to `size`."""
    values, index, inverse, counts = np.unique(x, True, True, True, axis)
    along, missing = axis or 0, size - len(index)
    first = np.take(values, [0], along)
    padding = np.repeat(first if fill is None else np.full_like(first, fill), missing, along)
    filled_index = np.pad(index, (0, missing), constant_values=index[0])
    inverse = inverse.reshape(x.shape if axis is None else -1)
    return [
        np.concatenate([values, padding], along),
        *map(_int32, (filled_index, inverse, np.pad(counts, (0, missing)))),
    ]


def _unique_case(picked: tuple[int, ...], *names: tuple[str, ...], **options: Any) -> Case:
    def reference(x: np.ndarray) -> Any:
        found = [_unique(x, 16)[i] for i in picked]
        return found[0] if len(found) == 1 else tuple(found)

    return Case(
        "unique",
        (INT,),
        lambda x: axn.unique(x, VALUES, **options),
        reference,
        grad=False,
        layout=False,
        names=names[0] if len(names) == 1 else names,
        label=" ".join(options),
    )


SETS = [
    _unique_case((0,), ("value",)),
    _unique_case((0, 3), ("value",), ("value",), return_counts=True),
    _unique_case((0, 2), ("value",), BP, return_inverse=True),
    _unique_case(
        (0, 1, 2, 3), ("value",), ("value",), BP, ("value",), return_index=True, return_inverse=True, return_counts=True
    ),
    Case(
        "unique",
        (of("index", "heads", "batch", "pos"),),
        lambda x: axn.unique(
            x[{"heads": 0}],
            VALUES,
            return_index=True,
            return_inverse=True,
            return_counts=True,
            axis="batch",
            fill_value=7,
        ),
        lambda x: _unique(x[0], 16, 7, 0),
        "slices",
        grad=False,
        layout=False,
        names=(("value", "pos"), ("value",), ("batch",), ("value",)),
    ),
    Case(
        "unique",
        (INT,),
        lambda x: axn.unique(x, axn.Axis("value", 2), return_counts=True),
        lambda x: [a[:2] for a in (np.unique(x), _int32(np.unique(x, return_counts=True)[1]))],
        "too few places",
        grad=False,
        names=(("value",), ("value",)),
    ),
    Case(
        "bincount",
        (INT,),
        lambda x: axn.bincount(x, axn.Axis("value", 4), minlength=2),
        lambda x: _int32([np.sum(x == i) for i in range(4)]),
        grad=False,
        names=("value",),
    ),
    Case(
        "bincount",
        (of("index", *BP), f("pos")),
        lambda x, w: axn.bincount(x, axn.Axis("value", 3), weights=w),
        lambda x, w: jnp.stack([jnp.sum(jnp.where(x == i, w[None], 0.0)) for i in range(3)]),
        "weights",
        names=("value",),
        rtol=1e-4,
    ),
    Case(
        "bincount",
        (of("bits", "batch"),),
        lambda x: axn.bincount(x, axn.Axis("value", 256), weights=2),
        lambda x: _int32(2 * np.bincount(x, minlength=256)),
        "bytes",
        grad=False,
        names=("value",),
    ),
    Case(
        "packbits",
        (of("bool", *BPE),),
        lambda x: axn.packbits(x, "batch"),
        lambda x: np.packbits(x, axis=0),
        grad=False,
        names=BPE,
    ),
    Case(
        "packbits",
        (of("int", *BP),),
        lambda x: axn.packbits(x, "pos", bitorder="little"),
        lambda x: np.packbits(x != 0, axis=1, bitorder="little"),
        "padded",
        grad=False,
        names=BP,
    ),
    Case(
        "unpackbits",
        (of("bits", *BP),),
        lambda x: axn.unpackbits(x, "pos"),
        lambda x: np.unpackbits(x, axis=1),
        grad=False,
        names=BP,
    ),
    Case(
        "unpackbits",
        (of("bits", *BP),),
        lambda x: axn.unpackbits(x, axn.Axis("batch", 8), count=12, bitorder="little"),
        lambda x: np.unpackbits(x, axis=0, count=12, bitorder="little"),
        "count",
        grad=False,
        names=BP,
    ),
]


# --- diagonals ---

MATRICES = f("row", "heads", "embed")


def _last_two(x: Any) -> Any:
    """Transpose (row, heads, embed) to (heads, row, embed)."""
    return jnp.moveaxis(x, 0, 1)


def _triangle(name: str, k: int) -> Case:
    op, fn = public_name(name), getattr(jnp, name)
    return Case(
        name,
        (MATRICES,),
        lambda x: op(x, "row", "embed", k),
        lambda x: _last_two(fn(_last_two(x), k)),
        f"{k}",
        names=("row", "heads", "embed"),
    )


DIAGONALS = [
    *(_triangle(name, k) for name in ("tril", "triu") for k in (0, 2, -1)),
    Case(
        "tril",
        (f("row", "col"),),
        lambda x: axn.tril(x, axn.Axis("col", 4), axn.Axis("row", 4)),
        lambda x: jnp.tril(x.T).T,
        "swapped",
        names=("row", "col"),
    ),
    Case(
        "trace",
        (MATRICES,),
        lambda x: axn.trace(x, "row", "embed", 1),
        lambda x: jnp.trace(x, 1, 0, 2),
        "offset",
        names=("heads",),
    ),
    Case(
        "trace",
        (of("int", "row", "col"),),
        lambda x: axn.trace(x, axn.Axis("row", 4), "col", dtype=float),
        lambda x: np.float32(np.trace(x)),
        "dtype",
        grad=False,
        names=(),
    ),
]

CASES: list[Case] = [*SORTING, *SETS, *DIAGONALS]
