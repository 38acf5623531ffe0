"""Named mutable references: `jax.Ref` with axis names.

A `NamedRef` is a mutable array whose axes have names. Reading an index of it gives a named array; assigning to one
writes in place, also inside `jax.jit`. `ref.slice` gives a view: another `NamedRef` of part of the same memory.

>>> ref = axn.new_ref(axn.zeros({"row": 2, "col": 3}))
>>> ref["row", 0] = 1.0
>>> ref.slice({"row": 1})["col", 2] = 5.0
>>> axn.freeze(ref)
NamedArray(float32[row=2, col=3], [[1. 1. 1.] [0. 0. 5.]])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from ._mesh import Names
from .array import NamedArray, NamedOrNumeric, resolve, wrap
from .axis import Axis, AxisSelector
from .ops._index_plan import Item, SliceSpec, make_plan
from .ops.broadcasting import broadcast_to
from .ops.slices import dslice

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
        block, moved = self._block()
        array = wrap(self.ref[block], self._block_names())
        return array[moved] if moved else array

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

    def slice(self, selector: Mapping[AxisSelector, Any]) -> NamedRef:
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

    def _block(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The index into the memory that holds the view, and what is left to do with dynamic slices by name."""
        starts = iter(self.starts)
        index: list[Any] = []
        moved: dict[str, Any] = {}
        for name, (start, size, step), length in zip(self.memory, self.view, self.ref.shape, strict=True):
            if size is None:
                index.append(next(starts) if start is None else start)
            elif start is None:
                index.append(slice(0, length))
                moved[name] = _indices(next(starts), size, step, name)
            elif step > 0:
                index.append(slice(start, min(start + size * step, length), step))
            else:
                index.append(slice(0, length))
                moved[name] = _indices(start, size, step, name)
        return tuple(index), moved

    def _block_names(self) -> Names:
        return self.names

    def _write(self, value: NamedOrNumeric) -> None:
        block, moved = self._block()
        if moved:
            value = wrap(self.ref[block], self.names).at[moved].set(value)
        axes = tuple(Axis(n, s) for n, s in zip(self.names, _sizes(block), strict=True))
        named = value if isinstance(value, NamedArray) else wrap(jnp.asarray(value), ())
        self.ref[block] = broadcast_to(named, axes).array.astype(self.dtype)


register_dataclass(NamedRef, data_fields=["ref", "starts"], meta_fields=["memory", "view"])


def _sizes(block: Sequence[Any]) -> list[int]:
    return [len(range(i.start, i.stop, i.step or 1)) for i in block if isinstance(i, slice)]


def _indices(start: Any, size: int, step: int, name: str) -> Any:
    """A dynamic slice of an axis, or the indices of one with steps."""
    if step == 1 and not isinstance(start, int):
        return dslice(start, size)
    return wrap(start + step * jnp.arange(size, dtype=np.int32), (name,))


def _compose(start: Any, entry: _Entry, item: Item, operand: Any) -> tuple[Any, _Entry]:
    """What an index on a view shows of the memory."""
    step = entry.step
    match item.kind:
        case "at":
            return start + step * item.static, _Entry(None, None)
        case "dynamic at":
            return start + step * _static_if_known(operand), _Entry(None, None)
        case "slice":
            first, stop, by = item.static
            return start + step * first, _Entry(None, len(range(first, stop, by)), step * by)
        case _:
            return start + step * _static_if_known(operand), _Entry(None, item.static, step)


def _static_if_known(start: Any) -> Any:
    return int(start) if isinstance(start, np.integer) else start


def _whole(ref: Any, names: Names) -> NamedRef:
    return NamedRef(ref, (), names, tuple(_Entry(0, size) for size in ref.shape))


def new_ref(value: NamedArray) -> NamedRef:
    """A mutable copy of a named array.

    Arguments:
        value: what it holds at first.

    >>> axn.new_ref(axn.zeros({"x": 3}))
    NamedRef(float32[x=3])
    """
    return _whole(jax.new_ref(value.array), value.names)


def freeze(ref: NamedRef) -> NamedArray:
    """What a reference holds, as an array; the reference, and every view of it, cannot be used any more.

    Arguments:
        ref: a reference to the whole of its memory, or a view.

    >>> axn.freeze(axn.new_ref(axn.zeros({"x": 2})))
    NamedArray(float32[x=2], [0. 0.])
    """
    block, moved = ref._block()
    whole = jax.freeze(ref.ref)
    shown = wrap(whole[block], ref.names)
    return shown[moved] if moved else shown


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
