"""Named mutable references: `jax.Ref` with axis names.

A `NamedRef` is a mutable array whose axes have names. Reading an index of it gives a named array; assigning to one
writes in place, also inside `jax.jit`. `ref.slice` gives a view: another `NamedRef` of part of the same memory.

Positions that are arrays, traced or not, are moved into the range of what is shown, for writing as for reading; so no
view reaches beyond what it shows.

>>> ref = axn.new_ref(axn.zeros({"row": 2, "col": 3}))
>>> ref["row", 0] = 1.0
>>> ref.slice({"row": 1})["col", 2] = 5.0
>>> axn.freeze(ref)
NamedArray(float32[row=2, col=3], [[1. 1. 1.] [0. 0. 5.]])
"""

from __future__ import annotations

from collections.abc import Mapping
from types import EllipsisType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from . import _errors
from ._mesh_axes import explicit_mesh
from .array import NamedArray, NamedOrNumeric, resolve, wrap
from .axis import Axis, AxisSelector, Names
from .ops._index_plan import Item, SliceSpec, make_plan
from .ops._operands import require_named
from .ops.broadcasting import broadcast_to
from .ops.dynamic_slice import dslice
from .ops.slicing import updated_slice

__all__ = ["NamedRef", "freeze", "get", "new_ref", "swap"]


class _Entry(NamedTuple):
    """What a view shows of one axis of the memory. A start that is None is traced, and stands in `NamedRef.starts`."""

    start: int | None
    size: int | None
    """None where a single element is shown, so that the axis is gone."""
    step: int = 1


class NamedRef:
    """A mutable array whose axes have names, or a view of one. Made by `new_ref`.

    >>> ref = axn.new_ref(axn.zeros({"x": 3}))
    >>> ref["x", 1] = 2.0
    >>> ref[...]
    NamedArray(float32[x=3], [0. 2. 0.])
    """

    __slots__ = ("memory", "names", "ref", "starts", "view")
    __hash__ = object.__hash__

    def __init__(self, ref: Any, starts: tuple[Any, ...], memory: Names, view: tuple[_Entry, ...]):
        self.ref = ref
        self.starts = starts
        self.memory = memory
        self.view = view
        self.names = tuple(n for n, e in zip(memory, view, strict=True) if e.size is not None)

    # --- what it is ---

    @property
    def dtype(self) -> Any:
        """The dtype of the elements.

        >>> axn.new_ref(axn.zeros({"x": 3})).dtype
        dtype('float32')
        """
        return self.ref.dtype

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the array, or of the view.

        >>> axn.new_ref(axn.zeros({"x": 3})).axes
        (Axis(name='x', size=3),)
        """
        return tuple(Axis(n, e.size) for n, e in zip(self.memory, self.view, strict=True) if e.size is not None)

    @property
    def shape(self) -> dict[str, int]:
        """Sizes by name, in order.

        >>> axn.new_ref(axn.zeros({"x": 3})).shape
        {'x': 3}
        """
        return {a.name: a.size for a in self.axes}

    @property
    def named_shape(self) -> dict[str, int]:
        """`shape` under the name some code knows.

        >>> axn.new_ref(axn.zeros({"x": 3})).named_shape
        {'x': 3}
        """
        return self.shape

    @property
    def ndim(self) -> int:
        """How many axes there are.

        >>> axn.new_ref(axn.zeros({"x": 3})).ndim
        1
        """
        return len(self.names)

    def resolve_axis(self, axis: AxisSelector) -> Axis:
        """The axis of that name, with its size.

        >>> axn.new_ref(axn.zeros({"x": 3})).resolve_axis("x")
        Axis(name='x', size=3)
        """
        return resolve(self.names, tuple(a.size for a in self.axes), axis, "resolve_axis")[0]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{a.name}={a.size}" for a in self.axes)
        return f"NamedRef({self.dtype}[{sizes}])"

    # --- reading and writing ---

    def value(self) -> NamedArray:
        """The elements as they are now.

        >>> axn.new_ref(axn.ones({"x": 2})).value()
        NamedArray(float32[x=2], [1. 1.])
        """
        block, names, left = self._block()
        array = wrap(self.ref[block], names)
        return array[left] if left else array

    def __getitem__(self, index: SliceSpec = ...) -> NamedArray:
        if index is Ellipsis:
            return self.value()
        view = self._narrowed(index)
        return self.value()[index] if view is None else view.value()

    def __setitem__(self, index: SliceSpec, value: NamedOrNumeric) -> None:
        view = self if index is Ellipsis else self._narrowed(index)
        if view is None:  # index arrays: change them in the whole of what this shows
            self._write(self.value().at[index].set(value))
        else:
            view._write(value)

    def slice(self, selector: Mapping[Any, Any]) -> NamedRef:
        """A view: a reference to part of the same memory.

        Arguments:
            selector: an integer, a slice or `ds(start, size)` for each axis that is narrowed.

        >>> ref = axn.new_ref(axn.zeros({"x": 3}))
        >>> view = ref.slice({"x": slice(1, 3)})
        >>> view[...] = 7.0
        >>> ref[...]
        NamedArray(float32[x=3], [0. 7. 7.])
        """
        view = self._narrowed(selector)
        if view is None:
            raise TypeError(f"slice of {self}: a view is made of integers, slices and ds(start, size), not of arrays.")
        return view

    def unsliced(self) -> NamedRef:
        """The whole of the memory that a view is part of.

        >>> axn.new_ref(axn.zeros({"x": 3})).slice({"x": 0}).unsliced()
        NamedRef(float32[x=3])
        """
        return _whole(self.ref, self.memory)

    def unsafe_buffer_pointer(self) -> Any:
        """The address of the memory on its device, where JAX tells it.

        >>> axn.new_ref(axn.zeros({"x": 3})).unsafe_buffer_pointer() > 0
        True
        """
        return self.ref.unsafe_buffer_pointer()

    # --- how ---

    def _narrowed(self, index: SliceSpec) -> NamedRef | None:
        """The view that an index selects, or None where it has index arrays."""
        shown = wrap(jax.ShapeDtypeStruct(tuple(a.size for a in self.axes), self.dtype), self.names)
        items, operands = make_plan(shown, index)
        if any(item.kind == "gather" for item in items):
            return None
        by_name = {item.name: item for item in items}
        given = iter(operands)
        new = {item.name: next(given) for item in items if item.operand_names is not None}
        old = iter(self.starts)
        view, starts = [], []
        for name, entry in zip(self.memory, self.view, strict=True):
            start = next(old) if entry.start is None else entry.start
            if entry.size is not None and name in by_name:
                start, entry = _compose(start, entry, by_name[name], new.get(name))
            static = isinstance(start, int)
            view.append(entry._replace(start=start if static else None))
            if not static:
                starts.append(start)
        return NamedRef(self.ref, tuple(starts), self.memory, tuple(view))

    def _parts(self) -> dict[str, Any]:
        """What the view shows of the memory, as an index by name."""
        starts = iter(self.starts)
        parts: dict[str, Any] = {}
        for name, entry, length in zip(self.memory, self.view, self.ref.shape, strict=True):
            start = next(starts) if entry.start is None else entry.start
            if entry != _Entry(0, length):
                parts[name] = _part(name, start, entry)
        return parts

    def _block(self) -> tuple[tuple[Any, ...], Names, dict[str, Any]]:
        """A block of the memory that JAX can read and write, as an index; its axes; what is left to take of them."""
        parts = self._parts()
        split = explicit_mesh([self.ref]) is not None  # such a ref is only read and written as a whole
        left = {n: p for n, p in parts.items() if split or not _is_simple(p)}
        index = tuple(slice(None) if n in left else parts.get(n, slice(None)) for n in self.memory)
        return index, tuple(n for n, i in zip(self.memory, index, strict=True) if isinstance(i, slice)), left

    def _write(self, value: NamedOrNumeric) -> None:
        value = value if isinstance(value, NamedArray) else wrap(jnp.asarray(value), ())
        for kind in (jnp.inexact, jnp.complexfloating):
            if jnp.issubdtype(value.dtype, kind) and not jnp.issubdtype(self.dtype, kind):
                raise TypeError(
                    f"Writing {value.dtype} to {self} would lose part of it. Convert it first with `astype`."
                )
        value = broadcast_to(value, self.axes).astype(self.dtype)
        block, names, left = self._block()
        if left:
            value = _replaced(wrap(self.ref[block], names), left, value)
        self.ref[block] = value.array


register_dataclass(NamedRef, data_fields=["ref", "starts"], meta_fields=["memory", "view"])


def _part(name: str, start: Any, entry: _Entry) -> Any:
    """What a view shows of an axis, as an index."""
    size, step = entry.size, entry.step
    if size is None:
        return start
    if isinstance(start, int):
        stop = start + size * step
        return slice(start, stop if stop >= 0 else None, step)
    return dslice(start, size) if step == 1 else wrap(start + step * jnp.arange(size, dtype=np.int32), (name,))


def _is_simple(part: Any) -> bool:
    """Whether JAX takes this index of a reference."""
    return part.step > 0 if isinstance(part, slice) else not isinstance(part, (dslice, NamedArray))


def _replaced(array: NamedArray, part: dict[str, Any], value: NamedArray) -> NamedArray:
    """The array with a part replaced by a value that has the axes of the part."""
    if all(isinstance(p, dslice) for p in part.values()):
        return updated_slice(array, {n: p.start for n, p in part.items()}, value)
    return array.at[part].set(value)


def _compose(start: Any, entry: _Entry, item: Item, operand: Any) -> tuple[Any, _Entry]:
    """What an index on a view shows of the memory."""
    assert entry.size is not None
    match item.kind:
        case "at":
            return start + entry.step * item.static, _Entry(None, None)
        case "dynamic at":
            return start + entry.step * _inside(operand, entry.size, 1), _Entry(None, None)
        case "slice":
            first, stop, by = item.static
            return start + entry.step * first, _Entry(None, len(range(first, stop, by)), entry.step * by)
        case _:
            return start + entry.step * _inside(operand, entry.size, item.static), _Entry(None, item.static, entry.step)


def _inside(position: Any, size: int, length: int) -> Any:
    """Where `length` elements start, as an integer if it is known; else moved so that they fit into `size`."""
    if isinstance(position, np.integer):
        return int(position)
    position = jnp.where(position < 0, position + size, position)
    return jnp.clip(position, 0, size - length)


def _whole(ref: Any, names: Names) -> NamedRef:
    return NamedRef(ref, (), names, tuple(_Entry(0, size) for size in ref.shape))


def new_ref(value: NamedArray) -> NamedRef:
    """A mutable copy of a named array.

    Arguments:
        value: what it holds at first.

    >>> axn.new_ref(axn.zeros({"x": 3}))
    NamedRef(float32[x=3])
    """
    array = require_named("new_ref", value).array
    if jnp.ndim(array) != len(value.names):
        raise ValueError(_errors.wrong_rank(value.names, jnp.shape(array)))
    return _whole(jax.new_ref(array), value.names)


def freeze(ref: NamedRef) -> NamedArray:
    """What a reference holds, as an array; the reference, and every view of it, cannot be used any more.

    Arguments:
        ref: a reference to the whole of its memory, or a view.

    >>> axn.freeze(axn.new_ref(axn.zeros({"x": 2})))
    NamedArray(float32[x=2], [0. 0.])
    """
    return wrap(jax.freeze(ref.ref), ref.memory)[ref._parts()]


def get(ref: NamedRef, idx: SliceSpec | EllipsisType = ...) -> NamedArray:
    """Part of what a reference holds: `ref[idx]`.

    Arguments:
        ref: a named reference.
        idx: which elements.

    >>> axn.get(axn.new_ref(axn.ones({"x": 2})), {"x": 0})
    NamedArray(float32[], 1.)
    """
    return ref[idx]


def swap(ref: NamedRef, idx: SliceSpec | EllipsisType, value: NamedOrNumeric) -> NamedArray:
    """Replace part of what a reference holds, and return what was there.

    Arguments:
        ref: a named reference.
        idx: which elements.
        value: what to put there.

    >>> ref = axn.new_ref(axn.ones({"x": 2}))
    >>> axn.swap(ref, {"x": 0}, 5.0), ref[...]
    (NamedArray(float32[], 1.), NamedArray(float32[x=2], [5. 1.]))
    """
    old = ref[idx]
    ref[idx] = value
    return old
