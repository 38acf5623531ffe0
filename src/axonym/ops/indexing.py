"""Index arrays by name: look-ups, slices, gathers and updates.

An index is a mapping from axes to the index of each, written `x["batch", 0, "embed", 1:3]` or
`x[{"batch": 0, "embed": slice(1, 3)}]`. Axes that are not named are kept. The index of an axis can be:

| index                              | what becomes of the axis                                               |
|------------------------------------|------------------------------------------------------------------------|
| an integer or a scalar array       | it goes                                                                |
| a slice                            | it stays, shorter                                                      |
| `ds(start, size)`                  | it stays, `size` long; the start may be traced                         |
| a named integer array              | the array's axes take its place; axes shared with `x` are matched      |
| a list or 1-D raw integer array    | it stays, with the elements picked                                     |
| a boolean mask, not traced         | it stays, with the elements picked where the mask is true              |

Indexing has two stages: integers and slices cut out a block (one `slice` or `dynamic_slice`), then index arrays gather
from it. Axes that an index array shares with `x` are batch dimensions of that gather, as in `jnp.take_along_axis`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _fsdp_ops, _kernels
from ..array import NamedArray, wrap
from ..axis import AxisSelector, Names
from ._index_plan import IndexLayout, Item, SliceSpec, make_plan
from ._operands import require_named

_BLOCKS = ("slice", "dynamic slice")
_ZEROS_OUTSIDE = (("fill_value", 0), ("mode", "fill"))


def index(array: NamedArray, slices: SliceSpec) -> NamedArray:
    """Return a part of an array: `array[slices]`.

    Arguments:
        array: a named array.
        slices: a mapping from axes to indices, or axes and indices in turn.

    >>> x = axn.arange(axn.make_axes(row=2, col=3))
    >>> axn.index(x, {"row": 1})
    NamedArray(int32[col=3], [3 4 5])
    >>> x["col", 1:, "row", 0]
    NamedArray(int32[col=2], [1 2])
    >>> x["col", axn.named([2, 0], "picked")]
    NamedArray(int32[row=2, picked=2], [[2 0] [5 3]])
    """
    items, operands = make_plan(require_named("index", array), slices)
    if not items:
        return array
    kernel = get_kernel(array.names, items, _ZEROS_OUTSIDE if any([i.padded for i in items]) else ())
    return wrap(kernel.call(array.array, *operands), kernel.names)


def take(array: NamedArray, axis: AxisSelector, index: Any) -> NamedArray:
    """Return the elements of one axis at some indices: `array[axis, index]`.

    Arguments:
        array: a named array.
        axis: the axis to index.
        index: an integer, or a named array of integers.

    >>> axn.take(axn.named([10, 20, 30], "x"), "x", axn.named([2, 0], "picked"))
    NamedArray(int32[picked=2], [30 10])
    """
    return array[axis, index]


@_kernels.cached
def get_kernel(names: Names, items: tuple[Item, ...], options: tuple[tuple[str, Any], ...]) -> _kernels.Kernel:
    """Return the kernel of a look-up; with options, JAX's gather treats indices that are out of range."""
    cut = tuple(i for i in items if i.kind in _BLOCKS or not (options or i.kind == "gather"))
    gone = {i.name for i in cut if i.kind in ("at", "dynamic at")}
    layout = IndexLayout(tuple(n for n in names if n not in gone), [i for i in items if i not in cut])

    def positional(a, *operands):
        by_item = dict(zip((i for i in items if i.operand_names is not None), operands, strict=True))
        if cut:
            a = _cut_block(a, names, cut, by_item)
        rest = [operand for item, operand in by_item.items() if item not in cut]
        return layout.get(a, rest, dict(options)) if layout.items else a

    replaced = {i.name for i in items if i.kind not in ("slice", "dynamic slice")}
    in_names = [mask_names(names, replaced), *(i.operand_names for i in items if i.operand_names is not None)]
    per_device = None
    if [i.kind for i in items] == ["gather"] and not layout.shared and not options:
        per_device = functools.partial(
            _fsdp_ops.looked_up, positional, (names, in_names[1]), layout.out_names, items[0].name
        )
    # The layout compares sizes after the slices are cut out.
    return _kernels.make_kernel(
        "index", positional, in_names, layout.out_names, same_sizes=False, per_device=per_device
    )


def mask_names(names: Names, replaced: Collection[str]) -> Names:
    """Return the names, with unique ones for axes that an index replaces, so that no index array matches them."""
    return tuple(f"{n} (indexed)" if n in replaced else n for n in names)


def _cut_block(a: jax.Array, names: Names, items: Sequence[Item], operands: Mapping[Item, jax.Array]) -> jax.Array:
    """Apply integers and slices: one static slice, one dynamic slice, and the axes of the integers squeezed away."""
    static = {
        i.name: i.static if i.kind == "slice" else (i.static, i.static + 1, 1) for i in items if i not in operands
    }
    if static:
        bounds = [static.get(n, (0, size, 1)) for n, size in zip(names, a.shape, strict=True)]
        if all(step > 0 for _, _, step in bounds):
            a = jax.lax.slice(a, *zip(*((b, max(b, e), s) for b, e, s in bounds), strict=True))
        else:
            a = a[tuple(slice(b, None if e < 0 else e, s) for b, e, s in bounds)]
    if operands:
        starts: list[Any] = [np.int32(0)] * a.ndim
        sizes = list(a.shape)
        for item in items:
            if item in operands:
                position = names.index(item.name)
                starts[position] = operands[item]
                sizes[position] = 1 if item.kind == "dynamic at" else item.static
        dtype = jnp.result_type(*(s.dtype for s in starts))
        a = jax.lax.dynamic_slice(a, [jnp.asarray(s, dtype) for s in starts], sizes)
    gone = [names.index(i.name) for i in items if i.kind in ("at", "dynamic at")]
    return jax.lax.squeeze(a, gone) if gone else a
