"""The table of parameters: the axes of each, the mesh axes that they are sharded over, and the bytes of a shard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

import axonym as axn
from axonym import NamedArray
from axonym.sharding import Leaf

_HEAD = ("parameter", "axes → mesh axes", "bytes", "per device")
_NUMBERS = 2
"""How many columns, the last ones, have numbers."""


def table(model: Any, optimizer: Any) -> list[str]:
    """The lines of the table. What it says is read from the arrays, not from the mapping that placed them."""
    rows = [_row(path, x) for path, x in named_leaves(model)]
    parts = {"all parameters": model, "state of the optimizer": optimizer}
    totals = [(name, "", *map(readable, bytes_of(tree))) for name, tree in parts.items()]
    widths = [max(len(row[i]) for row in (_HEAD, *rows, *totals)) for i in range(len(_HEAD))]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return [_line(_HEAD, widths), rule, *(_line(r, widths) for r in rows), rule, *(_line(r, widths) for r in totals)]


def named_leaves(tree: Any) -> list[tuple[str, NamedArray]]:
    """The named arrays of a tree, each with its path."""
    found = jax.tree.leaves_with_path(tree, is_leaf=axn.is_named_array)
    return [(Leaf(path, x, None, None).path.replace("/", "."), x) for path, x in found if axn.is_named_array(x)]


def split_axes(x: NamedArray) -> dict[str, tuple[str, ...]]:
    """Find the sharded axes, and the mesh axes that they are sharded over."""
    sharding = x.array.sharding
    if not isinstance(sharding, NamedSharding):
        return {}
    spec = (*sharding.spec, *(None,) * (len(x.names) - len(sharding.spec)))
    entries = {n: (e,) if isinstance(e, str) else tuple(e or ()) for n, e in zip(x.names, spec, strict=True)}
    return {n: axes for n, axes in entries.items() if math.prod(sharding.mesh.shape[a] for a in axes) > 1}


def bytes_of(tree: Any) -> tuple[int, int]:
    """How much the arrays of a tree take together, and on one device."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    parts = (math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)
    return sum(x.size * x.dtype.itemsize for x in arrays), sum(parts)


def readable(count: float) -> str:
    """A number of bytes in a unit that suits it."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _row(path: str, x: NamedArray) -> tuple[str, ...]:
    split = split_axes(x)
    axes = [f"{name}={size}" + (f"→{'+'.join(split[name])}" if name in split else "") for name, size in x.shape.items()]
    return path, " ".join(axes), *map(readable, bytes_of(x))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    words = len(cells) - _NUMBERS
    padded = [c.ljust(w) if i < words else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
    return "  ".join(padded)
