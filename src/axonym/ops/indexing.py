"""Index arrays by name: look-ups, slices, gathers and updates.

An index is a mapping from axes to the index of each; `docs/indexing.md` lists what an index can be.

Indexing has two stages: integers and slices cut out a block (one `slice` or `dynamic_slice`), then index arrays gather
from it. Axes that an index array shares with `x` are batch dimensions of that gather, as in `jnp.take_along_axis`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..axis import Axis, AxisSelector, Names, name_of
from ..core.tree_spec import StaticLeaf
from ..distribution import policy
from ..distribution.fsdp_ops import active_mappings, mesh_to_run_on, possible, run_with_auto_axes, varying_alike
from ..distribution.mesh_axes import axes_in, spec_of
from ..distribution.operation_scope import DerivedName
from ..distribution.policy import PlacedAxes
from ..named_array import NamedArray, NamedOrNumeric, describe_array, wrap
from . import _kernels
from ._index_plan import IndexLayout, Item, NamedIndex, SliceSpec, cut_block, ds, make_plan, require_in_range
from ._operands import distinct, extreme, require_named

_BLOCKS = ("slice", "dynamic slice")
_FILL = (("mode", "fill"),)
_ZEROS_OUTSIDE = (("fill_value", 0), *_FILL)


def index(array: NamedArray, slices: SliceSpec) -> NamedArray:
    """Return a part of an array: `array[slices]`, for a mapping from axes to indices, or axes and indices in turn.

    >>> x = axn.arange(axn.make_axes(row=2, col=3))
    >>> axn.index(x, {"row": 1})
    NamedArray(int32[col=3], [3 4 5])
    >>> x["col", 1:, "row", 0]
    NamedArray(int32[col=2], [1 2])
    >>> x["col", axn.named([2, 0], "picked")]
    NamedArray(int32[row=2, picked=2], [[2 0] [5 3]])
    """
    found, checked = look_up(array, slices)
    if checked:
        require_in_range(checked)
    return found


def look_up(array: NamedArray, slices: SliceSpec) -> tuple[NamedArray, list[Any]]:
    """Return a part of an array, and the positions for `require_in_range`."""
    items, operands, checked = make_plan(require_named("index", array), slices)
    if not items:
        return array, checked
    kernel = get_kernel(array.names, items, _ZEROS_OUTSIDE if any([i.padded for i in items]) else ())
    return kernel.apply(array.array, *operands), checked


def take(array: NamedArray, axis: AxisSelector, index: NamedIndex) -> NamedArray:
    """Return the elements of one axis at an integer, or at a named array of integers.

    A position out of range is an error outside jit, where it is checked. In jit it gives, as in `jax.numpy.take`, NaN,
    the least integer of a signed dtype, or else the largest one.

    >>> axn.take(axn.named([10.0, 20.0, 30.0], "x"), "x", axn.named([2, 0], "picked"))
    NamedArray(float32[picked=2], [30. 10.])
    """
    items, operands, checked = make_plan(require_named("take", array), {axis: index}, for_update=True)
    found = get_kernel(array.names, items, _FILL).apply(array.array, *operands)
    require_in_range(checked)
    return found


def slice(
    array: NamedArray,
    axis: AxisSelector | Mapping[Any, Any] | None = None,
    new_axis: AxisSelector | Mapping[Any, int | Axis] | None = None,
    *,
    start: NamedOrNumeric | Mapping[Any, NamedOrNumeric] | None = None,
    length: int | Axis | Mapping[Any, int | Axis] | None = None,
) -> NamedArray:
    """Return a slice along one or several axes, with a known size and a start that may be traced.

    Arguments:
        axis: the axis to slice, or a mapping from axes to the starts of their slices.
        new_axis: the axis of the slice, or a mapping from axes to the sizes or axes of their slices.
        start: the start of the slice, 0 by default; or a mapping, in place of `axis`.
        length: the size of the slice, or its axis; or a mapping, in place of `new_axis`.

    >>> x = axn.arange(axn.Axis("x", 5))
    >>> axn.slice(x, "x", start=1, length=2)
    NamedArray(int32[x=2], [1 2])
    >>> axn.slice(x, {"x": 1}, {"x": axn.Axis("window", 2)})
    NamedArray(int32[window=2], [1 2])
    """
    # `slice(x, "pos", start=2, length=3)`, `slice(x, {"pos": 2}, {"pos": 3})`, and the latter by keyword.
    starts: Any = start if isinstance(start, Mapping) else axis if isinstance(axis, Mapping) else None
    lengths: Any = length if isinstance(length, Mapping) else new_axis if isinstance(new_axis, Mapping) else None
    if starts is None and isinstance(axis, (str, Axis)):
        starts = {axis: 0 if start is None else start}
        if lengths is None:
            new, size = new_axis, length.size if isinstance(length, Axis) else length
            if isinstance(new, Axis) and size not in (None, new.size):
                raise ValueError(f"slice: the new axis {new} does not have the length {size}.")
            if isinstance(new, str) and isinstance(size, (int, np.integer)):
                new = Axis(new, size)
            lengths = {axis: new if isinstance(new, (str, Axis)) or length is None else length}
    if starts is None or lengths is None:
        raise TypeError(
            f"slice of {describe_array(array)}: give an axis with start and length, or mappings of starts and of "
            "lengths."
        )
    starts, lengths = ({name_of(k): v for k, v in given.items()} for given in (starts, lengths))
    if set(lengths) != set(starts) or any(not isinstance(v, (int, np.integer, Axis)) for v in lengths.values()):
        raise ValueError(
            f"slice of {describe_array(array)}: each axis needs a start and a size; got starts for {sorted(starts)} "
            f"and sizes for {sorted(n for n, v in lengths.items() if v is not None)}."
        )
    result = index(array, {n: ds(s, lengths[n]) for n, s in starts.items()})
    renames = {n: v.name for n, v in lengths.items() if isinstance(v, Axis) and v.name != n}
    if not renames:
        return result
    return wrap(result.array, distinct("slice", tuple(renames.get(n, n) for n in result.names)))


@_kernels.shared("names", "items")
def get_kernel(names: Names, items: tuple[Item, ...], options: tuple[tuple[str, Any], ...]) -> _kernels.Kernel:
    """Return the kernel of a look-up; with options, JAX's gather treats indices that are out of range."""
    cut = tuple(i for i in items if i.kind in _BLOCKS or not (options or i.kind == "gather"))
    gone = {i.name for i in cut if i.kind in ("at", "dynamic at")}
    layout = IndexLayout(tuple(n for n in names if n not in gone), [i for i in items if i not in cut])
    keywords = {name: option.value if isinstance(option, StaticLeaf) else option for name, option in options}

    def positional(a, *operands):
        by_item = dict(zip((i for i in items if i.operand_names is not None), operands, strict=True))
        if cut:
            a = cut_block(a, names, cut, by_item)
        rest = [operand for item, operand in by_item.items() if item not in cut]
        return layout.get(a, rest, keywords) if layout.items else a

    replaced = {i.name for i in items if i.kind not in ("slice", "dynamic slice")}
    in_names = [mask_names(names, replaced), *(i.operand_names for i in items if i.operand_names is not None)]
    per_device = None
    if [i.kind for i in items] == ["gather"] and not layout.shared and options in ((), _FILL):
        per_device = functools.partial(
            _look_up_sharded_columns, positional, (names, in_names[1]), layout.out_names, items[0].name, bool(options)
        )
    # The layout compares sizes after the slices are cut out.
    return _kernels.make_kernel(
        "index", positional, in_names, layout.out_names, same_sizes=False, per_device=per_device
    )


def mask_names(names: Names, replaced: Collection[str]) -> Names:
    """Return the names, with unique ones for axes that an index replaces, so that no index array matches them."""
    return tuple(DerivedName(n, f"{n} (indexed)") if n in replaced else n for n in names)


def _look_up_sharded_columns(
    fn: Callable[..., jax.Array],
    in_names: tuple[Names, Names],
    out_names: Names,
    indexed: str,
    fills: bool,
    table: jax.Array,
    indices: jax.Array,
) -> jax.Array | None:
    """Look up rows of a table whose columns are stored sharded like the batch; return None for other tables.

    The table is not gathered: each device looks up its shard of the columns for the rows that all devices need, and an
    all-to-all exchanges columns for rows. The gradient takes the same way back. If storage and compute mapping shard
    the rows over the same other mesh axes, each device looks up the rows in its shard, and the results are added.

    Arguments:
        fn: the look-up, on shards of the table and the indices.
        indexed: the axis of the table that is indexed.
        fills: whether what is out of range is NaN, or the extreme of its dtype, and not the nearest row.
    """
    mesh = mesh_to_run_on()
    if mesh is None:
        return None
    names, index_names = in_names
    by = active_mappings(mesh)
    exchange, over = policy.exchange_columns(names, index_names, indexed, by), by.used(indexed)
    if exchange is None:
        return None
    if over and (table.dtype == jnp.bool_ or any(a in over for n in index_names for a in by.used(n))):
        return None
    operands = [PlacedAxes(names, [*map(by.stored, names)]), PlacedAxes(index_names, [*map(by.used, index_names)])]
    out_spec = spec_of(map(by.used, out_names))
    used = axes_in(out_spec)
    if len(set(used)) < len(used) or not possible(operands, (table, indices), mesh):
        return None
    specs = [spec_of(operand.over) for operand in operands]
    extra, row_of_indices = exchange.axes, index_names.index(exchange.row)
    row, column = out_names.index(exchange.row), out_names.index(exchange.column)

    def per_device(table, indices):
        table = varying_alike(table, specs[0], specs, mesh)
        own, indices = indices, jax.lax.all_gather(indices, extra, axis=row_of_indices, tiled=True)
        if not over:
            return trade(fn(table, indices))
        size = table.shape[names.index(indexed)]
        last = size * jax.lax.axis_size(over) - 1
        # As in JAX, negative indices count from the end, and indices out of range have the value of the nearest row,
        # but no gradient goes back to that row.
        indices, exists = from_start(indices, last)
        indices = jnp.clip(indices, 0, last).astype(jnp.int32) - size * jax.lax.axis_index(over)
        is_here = _kernels.align((indices >= 0) & (indices < size), index_names, out_names)
        found = jnp.where(is_here, fn(table, indices), jnp.zeros((), table.dtype))
        if not fills:
            return jax.lax.psum(trade(jnp.where(exists, found, jax.lax.stop_gradient(found))), over)
        inexact, unsigned = (jnp.issubdtype(table.dtype, kind) for kind in (jnp.inexact, jnp.unsignedinteger))
        filled = jnp.nan if inexact else extreme(table.dtype, largest=unsigned)
        return jnp.where(from_start(own, last)[1], jax.lax.psum(trade(found), over), filled)

    def from_start(indices, last):
        if indices.dtype.itemsize < 4:  # the dtype may not hold the size of the table
            indices = indices.astype(jnp.int32)
        indices = jnp.where(indices < 0, indices + (last + 1), indices)
        return indices, _kernels.align((indices >= 0) & (indices <= last), index_names, out_names)

    def trade(found):
        return jax.lax.all_to_all(found, extra, split_axis=row, concat_axis=column, tiled=True)

    return run_with_auto_axes(per_device, (table, indices), specs, out_spec, mesh)
