"""Functional updates by name, such as `x.at["batch", 0].set(y)`, and of a slice whose start may be traced."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ..axis import Names, name_of
from ..core import errors
from ..core.tree_spec import StaticLeaf
from ..distribution.mesh_axes import evenly_sharded
from ..named_array import NamedArray, NamedOrNumeric, raw
from . import _kernels
from ._index_plan import IndexLayout, Item, SliceSpec, make_plan, require_in_range
from ._op_types import publish
from ._operands import operand, private, require_named, require_positions, static_number
from .indexing import get_kernel, mask_names


class Update(Protocol):
    """`x.at[index].f(value)`: the array with some elements changed."""

    def __call__(
        self,
        value: NamedOrNumeric,
        *,
        mode: str | jax.lax.GatherScatterMode | None = None,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
    ) -> NamedArray: ...
    def __get__(self, instance: Any, owner: Any = None) -> Update: ...


def _make_update(name: str, summary: str, example: str, shown: str) -> Update:
    def op(self, value, *, mode=None, indices_are_sorted=False, unique_indices=False):
        options = _options_of_scatter(mode=mode, indices_are_sorted=indices_are_sorted, unique_indices=unique_indices)
        x = self.array
        items, operands, checked = make_plan(x, self.index, for_update=True, in_range=mode is None)
        value, value_names = operand(value)
        changed = _update_kernel(name, x.names, items, value_names, options).apply(x.array, value, *operands)
        require_in_range(checked)
        return changed

    doc = f"""{summary}

    Arguments:
        value: a named array that broadcasts by name to the selected elements, or a scalar.
        mode: what to do with indices out of range, as in `jax.numpy.ndarray.at`: they are dropped by default.
        indices_are_sorted, unique_indices: promises that the indices are in order, and that none occurs twice.

    >>> axn.named({example}, "x").at["x", 1].{name}(2)
    NamedArray({shown})
    """
    update = publish(op, name, __name__, doc)
    update.__qualname__ = f"IndexedArray.{name}"  # pyright: ignore[reportAttributeAccessIssue]
    return update  # pyright: ignore[reportReturnType]


class IndexedArray:
    """A part of an array to read or change: the result of `x.at[index]`.

    >>> axn.arange(axn.Axis("x", 3)).at["x", 0].get()
    NamedArray(int32[], 0)
    """

    __slots__ = ("array", "index")

    def __init__(self, array: NamedArray, index: SliceSpec):
        self.array = array
        self.index = index

    # fmt: off
    set = _make_update("set", "Replace the selected elements.", "[1, 2, 3]", "int32[x=3], [1 2 3]")
    add = _make_update("add", "Add a value to the selected elements, as often as each is selected.", "[1, 2, 3]", "int32[x=3], [1 4 3]")
    subtract = _make_update("subtract", "Subtract a value from the selected elements.", "[1, 2, 3]", "int32[x=3], [1 0 3]")
    multiply = _make_update("multiply", "Multiply the selected elements by a value.", "[1, 2, 3]", "int32[x=3], [1 4 3]")
    divide = _make_update("divide", "Divide the selected elements by a value.", "[1., 2., 3.]", "float32[x=3], [1. 1. 3.]")
    power = _make_update("power", "Raise the selected elements to a power.", "[1, 2, 3]", "int32[x=3], [1 4 3]")
    min = _make_update("min", "Return the array with the selected elements limited to at most a value.", "[1, 5, 3]", "int32[x=3], [1 2 3]")
    max = _make_update("max", "Return the array with the selected elements limited to at least a value.", "[1, 0, 3]", "int32[x=3], [1 2 3]")
    # fmt: on

    def get(
        self,
        *,
        mode: str | jax.lax.GatherScatterMode | None = None,
        fill_value: NamedOrNumeric | None = None,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
    ) -> NamedArray:
        """Return the selected elements, with a mode for indices out of range.

        Arguments:
            mode: 'fill', 'clip' or 'promise_in_bounds', as in `jax.numpy.ndarray.at`.
            fill_value: the value of elements out of range in mode 'fill'.
            indices_are_sorted, unique_indices: promises that the indices are in order, and that none occurs twice.

        >>> x = axn.named([1., 2.], "x")
        >>> x.at["x", axn.named([0, 5], "y")].get(mode="fill", fill_value=-1.)
        NamedArray(float32[y=2], [ 1. -1.])
        """
        options = _options_of_scatter(
            mode=mode, fill_value=fill_value, indices_are_sorted=indices_are_sorted, unique_indices=unique_indices
        )
        x = self.array
        items, operands, checked = make_plan(x, self.index, for_update=bool(options), in_range=mode is None)
        found = get_kernel(x.names, items, options).apply(x.array, *operands)
        require_in_range(checked)
        return found


class Indexer:
    """The type of `x.at`, which is indexed to select elements.

    >>> axn.zeros({"x": 2}).at["x", 0].set(1)
    NamedArray(float32[x=2], [1. 0.])
    """

    __slots__ = ("array",)

    def __init__(self, array: NamedArray):
        self.array = array

    def __getitem__(self, index: SliceSpec) -> IndexedArray:
        return IndexedArray(self.array, index)


def _options_of_scatter(*, mode: Any, fill_value: Any = None, **promises: bool) -> tuple[tuple[str, Any], ...]:
    if fill_value is not None:
        fill_value = StaticLeaf(static_number("at[...].get", "fill_value", fill_value))
    given = {"mode": mode, "fill_value": fill_value, **{k: v or None for k, v in promises.items()}}
    return tuple((k, v) for k, v in given.items() if v is not None)


@_kernels.shared("names", "items", "value_names")
def _update_kernel(
    how: str, names: Names, items: tuple[Item, ...], value_names: Names, options: Any
) -> _kernels.Kernel:
    what = f"at[...].{how}"
    layout = IndexLayout(names, items)
    extra = [n for n in value_names if n not in layout.out_names]
    if extra:
        raise ValueError(
            f"{what}: the value has axes {errors.describe_axes(extra)} that the selected part "
            f"{errors.describe_axes(layout.out_names)} lacks."
        )

    def positional(a, value, *operands):
        # On several mesh axes, XLA drops updates, or repeats them, if their axis is sharded unevenly.
        even = functools.partial(evenly_sharded, what, beside=[a])
        value, *operands = map(even, (value_names, *layout.operands), (value, *operands))
        return layout.update(how, a, value, value_names, operands, dict(options))

    # The result keeps the array's sharding, however the indices and the value are sharded. The layout checks sizes.
    others = [value_names, *layout.operands]
    in_names = [names, *(mask_names(n, n) for n in others)]
    return _kernels.make_kernel(what, positional, in_names, names, same_sizes=False)


# --- slices whose starts may be traced ---


def updated_slice(array: NamedArray, start: Mapping[Any, Any], update: NamedArray) -> NamedArray:
    """Replace a slice of an array.

    The slice must fit, which is checked if its start is known. As in `jax.lax.dynamic_update_slice`, a traced start is
    moved until it does.

    Arguments:
        start: the start of the slice along each of its axes; may be traced, and may be a named array with a start for
            each element of an axis. Axes that are not named start at 0.
        update: the new slice, which gives the sizes. Along an axis that `start` names and the update lacks, the slice
            has size one.

    >>> axn.updated_slice(axn.zeros({"x": 4}), {"x": jnp.array(1)}, axn.ones({"x": 2}))
    NamedArray(float32[x=4], [0. 1. 1. 0.])
    """
    require_named("updated_slice", array, "array")
    result = write_slice(array, start, update)
    for s, v in start.items():
        axis = array.resolve_axis(name_of(s))
        width = update.axis_size(axis.name) if axis.name in update.names else 1
        number, label = isinstance(v, (int, np.integer)), "the start of a slice"
        require_positions(
            "updated_slice", label, np.asarray(v) if number else v, axis, from_end=not number, slack=width - 1
        )
    return result


def write_slice(array: NamedArray, start: Mapping[Any, Any], update: NamedArray) -> NamedArray:
    """Replace a slice as `updated_slice` does, but move every start until the slice fits."""
    require_named("updated_slice", update, "update")
    starts = {name_of(s): v for s, v in start.items()}
    for n, v in starts.items():
        if not jnp.issubdtype(jnp.result_type(raw(v)), jnp.integer):
            raise TypeError(f"updated_slice: the start along {n!r} is an integer, got {jnp.result_type(raw(v))}.")
    layout = tuple((n, v.names if isinstance(v, NamedArray) else ()) for n, v in starts.items())
    kernel = _updated_slice_kernel(array.names, update.names, layout)
    return kernel.apply(array.array, update.array, *map(raw, starts.values()))


@_kernels.shared("names", "update_names", "starts")
def _updated_slice_kernel(names: Names, update_names: Names, starts: tuple[tuple[str, Names], ...]) -> _kernels.Kernel:
    what = "updated_slice"
    _kernels.select(what, names, tuple(n for n, _ in starts))
    _kernels.select(what, names, update_names)
    per_element = tuple(dict.fromkeys(n for _, layout in starts for n in layout))
    _kernels.select(what, names, per_element)
    clash = [n for n, _ in starts if n in per_element]
    if clash:
        raise ValueError(f"{what}: a start is given along {errors.describe_axes(clash)}, which start arrays have too.")
    inner = tuple(n for n in names if n not in per_element)
    moved = tuple(n for n, _ in starts)

    def place(a, update, *values):
        at = dict(zip(moved, values, strict=True))
        zero = np.int32(0)
        return jax.lax.dynamic_update_slice(a, update, [jnp.asarray(at.get(n, zero), jnp.int32) for n in inner])

    def positional(a, update, *values):
        sizes = dict(zip(update_names, update.shape, strict=True))
        known = dict(zip(names, a.shape, strict=True))
        for (axis, layout), value in zip(starts, values, strict=True):
            for n, size in zip(layout, value.shape, strict=True):
                places = [("the array", known[n]), (f"the start of {axis!r}", size)]
                places += [("the update", sizes[n])] if n in sizes else []
                if len({s for _, s in places}) > 1:
                    raise ValueError(errors.size_mismatch(what, n, places))
        too_large = [n for n, s in zip(names, a.shape, strict=True) if sizes.get(n, 1) > s]
        if too_large:
            raise ValueError(
                f"{what}: {errors.describe_axes(too_large, [sizes[n] for n in too_large])} of the update does not fit "
                f"{errors.describe_axes(names, a.shape)}."
            )
        full = [sizes.get(n, 1 if n in moved else s) for n, s in zip(names, a.shape, strict=True)]
        update = jnp.broadcast_to(_kernels.align(update, update_names, names), full).astype(a.dtype)
        layouts = (names, names, *(layout for _, layout in starts))
        return _kernels.map_over(place, per_element, layouts, names)(a, update, *values)

    # The result keeps the sharding of the array, whatever the shardings of the update and the starts.
    in_names = [names, private("`update`", update_names), *(private(f"the start of {n}", s) for n, s in starts)]
    return _kernels.make_kernel(what, positional, in_names, names)
