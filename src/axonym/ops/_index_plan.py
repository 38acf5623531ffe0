"""Turn an index as users write it into operations on the array.

`make_plan` checks an index against an array and splits it into static items, which are part of a kernel's key, and
operands. `IndexLayout` determines from the items and the names alone how index arrays combine with the array.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..axis import Axis, AxisSelector, Names, name_of
from ..core import errors
from ..core.jax_versions import set_apart
from ..distribution.mesh_axes import evenly_sharded
from ..named_array import NamedArray, NamedOrNumeric, describe_array, raw
from . import _kernels
from ._operands import as_positions, at_least_int32, require_positions
from ._prefixes import strided_slice

NamedIndex: TypeAlias = "NamedOrNumeric | slice | ds | Sequence[Any]"
"""The index of one axis: `docs/indexing.md` lists what it can be."""
SliceSpec: TypeAlias = (
    Mapping[Any, NamedIndex] | tuple[AxisSelector, NamedIndex, *tuple[Any, ...]] | tuple[()] | EllipsisType
)


class ds:
    """A slice whose length is known (a number, or an axis with a size), and whose start may be traced.

    >>> x = axn.arange(axn.Axis("x", 8))
    >>> jax.jit(lambda i: x["x", axn.ds(i, 3)])(2)
    NamedArray(int32[x=3], [2 3 4])
    """

    __slots__ = ("size", "start")

    must_fit: ClassVar[bool] = True
    """A slice that does not fit its axis is an error. If False, zeros are read outside and nothing is written."""

    def __init__(self, start: NamedOrNumeric, length: int | Axis):
        self.start: Any = start
        self.size = length.size if isinstance(length, Axis) else operator.index(length)
        if self.size < 0:
            raise ValueError(f"ds: a length cannot be negative, got {self.size}.")

    @classmethod
    def block(cls, idx: Any, size: int) -> Self:
        """Make the slice of the `idx`-th block of `size` elements.

        >>> axn.arange(axn.Axis("x", 8))["x", axn.ds.block(1, 4)]
        NamedArray(int32[x=4], [4 5 6 7])
        """
        return cls(idx * size, size)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.start}, {self.size})"


class Item(NamedTuple):
    """The index of one axis. Everything here is static: the items of an index are part of the kernel's key.

    | kind            | static                   | operand         |
    |-----------------|--------------------------|-----------------|
    | "at"            | the index                |                 |
    | "slice"         | (start, stop, step)      |                 |
    | "dynamic at"    |                          | the index       |
    | "dynamic slice" | the size                 | the start       |
    | "gather"        | names of the index array | the index array |
    """

    name: str
    kind: str
    static: Any = None
    padded: bool = False
    """True if elements outside of the axis are read as zeros."""

    @property
    def operand_names(self) -> Names | None:
        """Return the names of the operand, or None if there is no operand."""
        if self.kind == "gather":
            return self.static
        return () if self.kind.startswith("dynamic") else None

    def renamed(self, rename: Callable[[Any], Any]) -> Item:
        """Return the item with its names replaced."""
        static = rename(self.static) if self.kind == "gather" else self.static
        return self._replace(name=rename(self.name), static=static)


def _as_mapping(x: NamedArray, key: Any) -> list[tuple[str, Any]]:
    """Convert an index to pairs of axis name and index; every name must exist and occur once."""
    if key is Ellipsis or (isinstance(key, tuple) and not key):
        return []
    if isinstance(key, Mapping):
        pairs = list(key.items())
    elif isinstance(key, tuple) and len(key) % 2 == 0 and all(isinstance(k, (str, Axis)) for k in key[::2]):
        pairs = list(zip(key[::2], key[1::2], strict=True))
    else:
        masked = isinstance(key, NamedArray) and key.dtype == np.bool_
        axis = x.names[0] if x.names else "axis"
        raise TypeError(
            f"Indexing {describe_array(x)}: expected axes and indices in turn, x[{axis!r}, index, ...], or a mapping "
            f"{{{axis!r}: index}}. There is no indexing by position."
            + (" A mask chooses elements in `axonym.where(mask, x, other)`." if masked else "")
        )
    names = [name_of(selector) for selector, _ in pairs]
    missing = [n for n in names if n not in x.names]
    if missing:
        raise ValueError(errors.missing_axes("Indexing", missing, x.names, jnp.shape(x.array)))
    twice = ", ".join(repr(n) for n in dict.fromkeys(names) if names.count(n) > 1)
    if twice:
        raise ValueError(
            f"Indexing {describe_array(x)}: more than one index for axis {twice}. Index the result again instead."
        )
    for selector, _ in pairs:
        # Axes are interned, so equal ones are identical.
        if isinstance(selector, Axis) and x.resolve_axis(selector.name) is not selector:
            found = x.resolve_axis(selector.name).size
            raise ValueError(
                errors.size_mismatch("Indexing", selector.name, [("the array", found), ("the index", selector.size)])
            )
    return list(zip(names, (index for _, index in pairs), strict=True))


def make_plan(
    x: NamedArray, key: Any, *, for_update: bool = False, in_range: bool = True, for_view: bool = False
) -> tuple[tuple[Item, ...], list[Any], list[Any]]:
    """Return the items of an index, the operands that they need, and the positions for `require_in_range`.

    Outside a trace, positions are operands, so that walking along an axis compiles once. In a trace they are static, so
    that the compiler knows them. For an update, or a look-up with a mode for indices out of range, dynamic slices
    become index arrays, because cutting out a block moves a block that is out of range. With such a mode, positions
    in index arrays need not be in range (`in_range`). For a view, every dynamic slice must fit, even one that does not
    have to fit elsewhere.
    """
    shape = jnp.shape(x.array)
    if len(shape) != len(x.names):
        raise ValueError(errors.wrong_rank(x.names, shape))
    traced = isinstance(x.array, Tracer)
    # Pallas is slow to import; if it is not, there is no slice as it writes them, `pl.ds(start, size)`.
    pallas = sys.modules.get("jax.experimental.pallas")
    items: list[Item] = []
    operands: list[Any] = []
    checked: list[Any] = []

    def add(name: str, kind: str, static: Any = None, operand: Any = None, padded: bool = False) -> None:
        items.append(Item(name, kind, static, padded))
        if operand is not None:
            operands.append(operand)

    for name, index in _as_mapping(x, key):
        size = shape[x.names.index(name)]
        if isinstance(index, slice):
            start, stop, step = _slice_bounds(name, index, size)
            if traced or step != 1 or for_update:
                add(name, "slice", (start, stop, step))
            else:
                add(name, "dynamic slice", max(stop - start, 0), np.int32(start))
        elif isinstance(index, ds) or (pallas is not None and isinstance(index, pallas.Slice)):
            must_fit = for_view or getattr(index, "must_fit", True)
            _add_dynamic_slice(add, name, index, size, for_update, must_fit)
            if must_fit and in_range:
                checked.append((name, size, index.start, index.size))
        elif isinstance(index, (int, np.integer)) and not isinstance(index, (bool, np.bool_)):
            if not -size <= index < size:
                valid = f"an index lies in {-size}..{size - 1}" if size else "it has no elements"
                raise IndexError(f"Indexing: {index} is out of range for axis {name!r} of size {size}: {valid}.")
            position = int(index) % size
            if traced:
                add(name, "at", position)
            else:
                add(name, "dynamic at", None, np.int32(position))
        else:
            array, names = _index_array(name, index, size)
            if in_range:
                given = raw(index)  # in jit, the converted array is traced
                checked.append((name, size, given if hasattr(given, "dtype") else array, None))
            add(name, "gather" if names else "dynamic at", names or None, array)
    return tuple(items), operands, checked


def require_in_range(checked: Sequence[Any]) -> None:
    """Check the positions of an index whose values are known: call it after the work that needs them has started."""
    for name, size, positions, width in checked:
        positions = raw(positions)
        if type(size) is not int or isinstance(positions, (int, Tracer)):  # a size may be symbolic
            continue
        label, slack = ("an index", 0) if width is None else ("the start of a slice", width - 1)
        require_positions("Indexing", label, positions, Axis(name, size), None, _WAY_OUT, True, slack)


_WAY_OUT = " `x.at[...].get` and updates take a `mode` for what is out of range."


def _slice_bounds(name: str, index: slice, size: Any) -> tuple[Any, Any, int]:
    if jax.export.is_symbolic_dim(size):  # as in `jax.export`; JAX checks that the bounds fit
        if index.step not in (None, 1):
            raise ValueError(f"Indexing: axis {name!r} has the symbolic size {size}, so a slice of it has no stride.")
        start, stop = (
            otherwise if bound is None else bound if jax.export.is_symbolic_dim(bound) or bound >= 0 else size + bound
            for bound, otherwise in ((index.start, 0), (index.stop, size))
        )
        return start, stop, 1
    try:
        bounds = index.indices(size)
    except jax.errors.TracerIntegerConversionError:
        raise TypeError(
            f"Indexing: a slice of axis {name!r} needs known bounds, got traced ones. Use ds(start, size), whose start "
            "may be traced."
        ) from None
    except TypeError:
        kinds = ", ".join(type(b).__name__ for b in (index.start, index.stop, index.step) if b is not None)
        raise TypeError(f"Indexing: the bounds of a slice of axis {name!r} must be integers, got {kinds}.") from None
    return bounds if range(*bounds) else (0, 0, 1)  # `jax.lax.slice` refuses a stop before the start


def _add_dynamic_slice(
    add: Callable[..., None], name: str, index: Any, size: int, for_update: bool, must_fit: bool
) -> None:
    if getattr(index, "stride", 1) not in (None, 1):
        raise ValueError(f"Indexing: axis {name!r}: a dynamic slice has no stride, got {index.stride}.")
    if must_fit and index.size > size:
        raise IndexError(f"Indexing: a slice of {index.size} elements does not fit axis {name!r} of size {size}.")
    start = index.start
    padded = not must_fit
    if isinstance(start, (int, np.integer)):
        fits = 0 <= start <= size - index.size
        if must_fit and not fits:
            raise IndexError(
                f"Indexing: {index!r} is out of range for axis {name!r} of size {size}: the start must lie in "
                f"0..{size - index.size}."
            )
        start, names, padded = np.int32(start), (), not fits
    else:
        start, names = _index_array(name, start, size)
    if not names and not for_update and not padded:
        add(name, "dynamic slice", index.size, start)
        return
    if name in names:
        raise ValueError(f"Indexing: the start of a slice of axis {name!r} cannot have this axis itself.")
    offsets = jnp.arange(index.size, dtype=jnp.int32)
    array = jnp.expand_dims(start, -1) + offsets.reshape((1,) * len(names) + (-1,))
    add(name, "gather", (*names, name), array, padded)


def _index_array(name: str, index: Any, size: int) -> tuple[Any, Names]:
    """Return an index array and its names; a raw 1-D array or a list keeps the axis that it indexes."""
    if isinstance(index, NamedArray):
        array, names = index.array, index.names
        if jnp.ndim(array) != len(names):
            raise ValueError(errors.wrong_rank(names, jnp.shape(array)))
    else:
        array: Any = index
        if isinstance(index, (list, tuple)):
            if any(isinstance(i, Tracer) for i in index):
                array = jnp.asarray(index)
            else:
                array = np.asarray(index, dtype=None if index else np.int32)  # NumPy takes an empty list for floats
        if not hasattr(array, "ndim") or not hasattr(array, "dtype"):
            raise TypeError(
                f"Indexing: axis {name!r} cannot be indexed with {type(index).__name__}; use an integer, a slice, "
                "ds(start, size) or an array of integers."
            )
        if array.ndim > 1:
            raise ValueError(
                f"Indexing: a raw index array for axis {name!r} has shape {tuple(array.shape)}; only 1-D ones go "
                "without names. Name its axes with axonym.named(array, axes)."
            )
        names = (name,) * array.ndim
    if array.dtype == bool:
        if names != (name,) or array.shape != (size,):
            raise ValueError(
                f"Indexing: a mask for axis {name!r} of size {size} must have this axis alone, got "
                f"{errors.describe_axes(names, array.shape)}. For masks over several axes use axonym.where."
            )
        if isinstance(array, Tracer):
            raise TypeError(
                f"Indexing: a traced mask for axis {name!r} would give a result of unknown size. Use axonym.where, or "
                "axonym.nonzero with a size."
            )
        return np.flatnonzero(np.asarray(array)).astype(np.int32), names
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"Indexing: axis {name!r} needs integers, got an array of {array.dtype}.")
    return at_least_int32(array), names  # JAX computes positions in this dtype


def cut_block(a: jax.Array, names: Names, items: Sequence[Item], operands: Mapping[Item, jax.Array]) -> jax.Array:
    """Apply integers and slices: one static slice, one dynamic slice, and a squeeze of the integers' axes."""
    static = {
        i.name: i.static if i.kind == "slice" else (i.static, i.static + 1, 1) for i in items if i not in operands
    }
    if static:
        bounds = [static.get(n, (0, size, 1)) for n, size in zip(names, a.shape, strict=True)]
        # XLA slices forwards only: the same elements are taken in rising order, and reversed.
        backwards = [i for i, (_, _, step) in enumerate(bounds) if step < 0]
        for i in backwards:
            taken = range(*bounds[i])
            bounds[i] = (taken[-1], taken[0] + 1, -taken.step)
        # Whether a symbolic end comes before the start is not known here; JAX checks it.
        ends: list[Any] = [e if jax.export.is_symbolic_dim(e) else max(b, e) for b, e, _ in bounds]
        a = strided_slice(a, [b for b, _, _ in bounds], ends, [s for _, _, s in bounds])
        a = jax.lax.rev(a, backwards) if backwards else a
    if operands:
        starts: list[Any] = [np.int32(0)] * a.ndim
        sizes = list(a.shape)
        for item in items:
            if item in operands:
                position = names.index(item.name)
                starts[position] = operands[item]
                sizes[position] = 1 if item.kind == "dynamic at" else item.static
        dtype = jnp.result_type(*(s.dtype for s in starts))  # all starts must have one
        a = jax.lax.dynamic_slice(a, [jnp.asarray(s, dtype) for s in starts], sizes)
    gone = [names.index(i.name) for i in items if i.kind in ("at", "dynamic at")]
    return jax.lax.squeeze(a, gone) if gone else a


class IndexLayout:
    """How an index applies to an array, determined from names alone.

    The axes of index arrays are either shared with the array (batch dimensions, mapped over with `vmap`) or new (they
    take the place of the first axis indexed by one). Inside the `vmap`, plain NumPy indexing does the work. There are
    no dynamic slices here: they were cut out before, or became index arrays.
    """

    def __init__(self, names: Names, items: Sequence[Item]):
        self.names = names
        self.items = {i.name: i for i in items}
        self.operands = tuple(i.operand_names for i in items if i.operand_names is not None)
        index_names = list(dict.fromkeys(n for layout in self.operands for n in layout))
        # If an index array has an axis that is sliced, its elements along the axis match the slice's.
        indexed = [i.name for i in items if i.kind != "slice" or i.name in index_names]
        self.shared = tuple(n for n in names if n in index_names and n not in indexed)
        self.new = tuple(n for n in index_names if n not in self.shared)

        inner = [n for n in names if n not in self.shared]
        positions = [p for p, n in enumerate(inner) if n in indexed]
        adjacent = bool(positions) and positions == list(range(positions[0], positions[0] + len(positions)))
        rest = [n for n in inner if n not in indexed]
        at = positions[0] if adjacent else 0
        self.inner_names = tuple(inner)
        """The array without the shared axes, as NumPy indexing sees it."""
        self.inner_result = (*rest[:at], *self.new, *rest[at:])
        """The layout of NumPy indexing: new axes replace the indexed ones if these are adjacent, else come first."""

        first = next((n for n in names if n in self.items and self.items[n].kind == "gather"), None)
        out: list[str] = []
        for n in names:
            out += self.new if n == first else () if n in indexed else (n,)
        self.out_names = tuple(out)
        """The layout of the result: the array's, with the new axes in place of the first gathered one."""

    def get(self, a: jax.Array, operands: Sequence[jax.Array], keywords: Mapping[str, Any]) -> jax.Array:
        """Return the selected elements, in the layout `out_names`."""
        sizes = self._check(a, operands)

        def lookup(a, *operands):
            index = self._index(a.shape, operands)
            return a.at[index].get(**keywords) if keywords else a[index]

        found = (*self.shared, *self.inner_result)
        # Padding would not match slices, and would break a promise that indices are in order, or unique.
        pads = keywords.keys() <= {"mode", "fill_value"} and all(i.kind != "slice" for i in self.items.values())
        operands = [
            evenly_sharded("index", o, x, self.new, beside=[a, *operands], fill=0 if pads else None)
            for o, x in zip(self.operands, operands, strict=True)
        ]
        result = _kernels.map_over(lookup, self.shared, (self.names, *self.operands), found)(a, *operands)
        result = evenly_sharded("index", found, result, self.new)
        ends = [sizes[n] for n in found]
        result = result if list(result.shape) == ends else jax.lax.slice(result, [0] * result.ndim, ends)
        return _kernels.transpose_to(result, found, self.out_names)

    def update(
        self,
        how: str,
        a: jax.Array,
        value: jax.Array,
        value_names: Names,
        operands: Sequence[jax.Array],
        keywords: Mapping[str, Any],
    ) -> jax.Array:
        """Update the selected elements with the method `how` of `a.at[...]`, and return the array."""
        selected = self._check(a, operands)
        for n, size in zip(value_names, value.shape, strict=True):
            if selected[n] != size:
                places = [("the selected part", selected[n]), ("the value", size)]
                raise ValueError(errors.size_mismatch(f"at[...].{how}", n, places))
        order = tuple(n for n in (*self.shared, *self.inner_result) if n in value_names)
        value = _kernels.transpose_to(value, value_names, order)
        inner_order = tuple(n for n in order if n not in self.shared)

        def change(a, value, *operands):
            if inner_order:
                value = _kernels.align(value, inner_order, self.inner_result)
            index = self._index(a.shape, operands)
            return set_apart(getattr(set_apart(a).at[index], how)(value, **keywords))

        in_names = (self.names, order, *self.operands)
        return _kernels.map_over(change, self.shared, in_names, self.names)(a, value, *operands)

    def _index(self, shape: Sequence[int], operands: Sequence[jax.Array]) -> tuple[Any, ...]:
        """Return the NumPy index inside the maps. Index arrays broadcast by name to the new axes."""
        remaining = iter(operands)
        index: dict[str, Any] = {}
        for item in self.items.values():
            match item.kind:
                case "at":
                    index[item.name] = item.static
                case "slice" if item.name in self.new:
                    index[item.name] = _kernels.align(jnp.arange(*item.static), (item.name,), self.new)
                case "slice":
                    start, stop, step = item.static
                    index[item.name] = slice(start, None if stop < 0 else stop, step)
                case "dynamic at":
                    index[item.name] = next(remaining)
                case "gather":
                    inner = tuple(n for n in item.static if n not in self.shared)
                    array = as_positions(next(remaining), shape[self.inner_names.index(item.name)])
                    index[item.name] = _kernels.align(array, inner, self.new) if inner else array
        return tuple(index.get(n, slice(None)) for n in self.inner_names)

    def _check(self, a: jax.Array, operands: Sequence[jax.Array]) -> dict[str, int]:
        """Return the sizes of the selected part. An axis must have one size in the array and in all index arrays."""
        seen: dict[str, tuple[str, int]] = {}
        for n, size in zip(self.names, a.shape, strict=True):
            item = self.items.get(n)
            if item is None or item.kind == "slice":
                seen[n] = ("the array", size if item is None else len(range(*item.static)))
        gathers = [i for i in self.items.values() if i.operand_names is not None]
        for item, operand in zip(gathers, operands, strict=True):
            for n, size in zip(item.operand_names or (), operand.shape, strict=True):
                place, known = seen.setdefault(n, (f"the index of {item.name!r}", size))
                if known != size:
                    places = [(place, known), (f"the index of {item.name!r}", size)]
                    raise ValueError(errors.size_mismatch("Indexing", n, places))
        return {n: size for n, (_, size) in seen.items()}
