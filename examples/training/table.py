"""Print the table of parameters: the axes of each, the mesh axes they are sharded over, and the bytes of a shard."""

from __future__ import annotations

import io
import math
from typing import Any

import jax
from jax.sharding import NamedSharding
from rich import box
from rich.console import Console
from rich.filesize import decimal as readable
from rich.table import Table

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
    drawn = Table(box=box.HORIZONTALS, show_edge=False, pad_edge=False)
    for i, name in enumerate(_HEAD):
        drawn.add_column(name, justify="right" if i >= len(_HEAD) - _NUMBERS else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    drawn.add_section()
    for row in totals:
        drawn.add_row(*row)
    console = Console(file=io.StringIO(), width=1000, markup=False, highlight=False)
    with console.capture() as printed:
        console.print(drawn)
    return [line.rstrip() for line in printed.get().splitlines()]


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


def _row(path: str, x: NamedArray) -> tuple[str, ...]:
    split = split_axes(x)
    axes = [f"{name}={size}" + (f"→{'+'.join(split[name])}" if name in split else "") for name, size in x.shape.items()]
    return path, " ".join(axes), *map(readable, bytes_of(x))
