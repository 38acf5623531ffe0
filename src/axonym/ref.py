"""Named mutable references: `jax.Ref` with axis names. May change before 1.0.

A `NamedRef` is a mutable array whose axes have names. Reading an index of a reference gives a named array; assigning to
an index writes in place, also inside `jax.jit`. `ref.slice` gives a view: another `NamedRef` to a slice of the same
memory.

Indices that are arrays, traced or not, are clamped to the bounds of the reference or view, for writing and for reading.
So a view never accesses memory outside of its own slice.

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

from .axis import Axis, AxisSelector, Names
from .core import errors
from .distribution.mesh_axes import explicit_mesh
from .named_array import NamedArray, NamedOrNumeric, resolve_axes, wrap
from .ops._index_plan import Item, SliceSpec, ds, make_plan, require_in_range
from .ops._operands import require_named
from .ops.broadcasting import broadcast_to
from .ops.updating import updated_slice

__all__ = ["NamedRef", "freeze", "get", "new_ref", "swap"]


class _Range(NamedTuple):
    """The range of a view along one axis of the memory. If `start` is None, the start is traced: see `NamedRef.starts`.

    A `size` of None is a single index, so the view does not have the axis.
    """

    start: int | None
    size: int | None
    step: int = 1


class NamedRef:
    """A mutable array with named axes, or a view of one. Made by `new_ref`.

    >>> ref = axn.new_ref(axn.zeros({"x": 3}))
    >>> ref["x", 1] = 2.0
    >>> ref[...]
    NamedArray(float32[x=3], [0. 2. 0.])
    """

    __slots__ = ("memory", "names", "ref", "starts", "view")
    __hash__ = object.__hash__

    def __init__(self, ref: Any, starts: tuple[Any, ...], memory: Names, view: tuple[_Range, ...]):
        self.ref = ref
        self.starts = starts
        self.memory = memory
        self.view = view
        self.names = tuple(n for n, e in zip(memory, view, strict=True) if e.size is not None)

    # --- properties ---

    @property
    def dtype(self) -> Any:
        """Return the dtype of the elements.

        >>> axn.new_ref(axn.zeros({"x": 3})).dtype
        dtype('float32')
        """
        return self.ref.dtype

    axes, shape, ndim = NamedArray.axes, NamedArray.shape, NamedArray.ndim

    def resolve_axis(self, axis: AxisSelector) -> Axis:
        """Return the axis with a given name, including its size.

        >>> axn.new_ref(axn.zeros({"x": 3})).resolve_axis("x")
        Axis(name='x', size=3)
        """
        return resolve_axes(self.names, self._sizes(), axis, "resolve_axis")[0]

    def _sizes(self) -> tuple[int, ...]:
        return tuple(e.size for e in self.view if e.size is not None)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{a.name}={a.size}" for a in self.axes)
        return f"NamedRef({self.dtype}[{sizes}])"

    # --- reading and writing ---

    def value(self) -> NamedArray:
        """Read the elements into a named array.

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
        if view is None:  # index arrays: read, update and write the whole view
            self._write(self.value().at[index].set(value))
        else:
            view._write(value)

    def slice(self, selector: Mapping[Any, Any]) -> NamedRef:
        """Return a view: a reference to a slice of the same memory.

        The selector has an integer, a slice or `ds(start, size)` for each axis to index.

        >>> ref = axn.new_ref(axn.zeros({"x": 3}))
        >>> view = ref.slice({"x": slice(1, 3)})
        >>> view[...] = 7.0
        >>> ref[...]
        NamedArray(float32[x=3], [0. 7. 7.])
        """
        view = self._narrowed(selector)
        if view is None:
            raise TypeError(f"slice of {self}: a view takes integers, slices and ds(start, size), not index arrays.")
        return view

    def unsliced(self) -> NamedRef:
        """Return the reference to the whole memory of a view.

        >>> axn.new_ref(axn.zeros({"x": 3})).slice({"x": 0}).unsliced()
        NamedRef(float32[x=3])
        """
        return _ref_to_all(self.ref, self.memory)

    def unsafe_buffer_pointer(self) -> Any:
        """Return the address of the memory on its device, on the platforms where JAX provides it.

        >>> axn.new_ref(axn.zeros({"x": 3})).unsafe_buffer_pointer() > 0
        True
        """
        return self.ref.unsafe_buffer_pointer()

    # --- implementation ---

    def _narrowed(self, index: SliceSpec) -> NamedRef | None:
        """Return the view that an index selects; None if the index contains index arrays."""
        shown = wrap(jax.ShapeDtypeStruct(self._sizes(), self.dtype), self.names)
        items, operands, checked = make_plan(shown, index, for_view=True)
        if any(item.kind == "gather" for item in items):
            return None
        require_in_range(checked)
        by_name = {item.name: item for item in items}
        given = iter(operands)
        new = {item.name: next(given) for item in items if item.operand_names is not None}
        # Static starts are part of the tree's structure, and traced ones its leaves, in the order of the axes.
        old = iter(self.starts)
        view, starts = [], []
        for name, entry in zip(self.memory, self.view, strict=True):
            start = next(old) if entry.start is None else entry.start
            if entry.size is not None and name in by_name:
                start, entry = _composed_index(start, entry, by_name[name], new.get(name))
            static = isinstance(start, int)
            view.append(entry._replace(start=start if static else None))
            if not static:
                starts.append(start)
        return NamedRef(self.ref, tuple(starts), self.memory, tuple(view))

    def _index(self) -> dict[str, Any]:
        """Return the view's index into the memory, by name."""
        starts = iter(self.starts)
        index: dict[str, Any] = {}
        for name, entry, length in zip(self.memory, self.view, self.ref.shape, strict=True):
            start = next(starts) if entry.start is None else entry.start
            size, step = entry.size, entry.step
            if size is None:
                index[name] = start
            elif isinstance(start, int):
                stop = start + size * step
                if entry != _Range(0, length):
                    index[name] = slice(start, stop if stop >= 0 else None, step)
            elif step == 1:
                index[name] = ds(start, size)
            else:
                index[name] = wrap(start + step * jnp.arange(size, dtype=np.int32), (name,))
        return index

    def _block(self) -> tuple[Any, Names, dict[str, Any]]:
        """Return the index of a block of the memory that JAX can access, its axes, and the index within the block."""
        by_name = self._index()
        # JAX reads and writes a reference on Explicit axes, or one without elements, only as a whole.
        whole = explicit_mesh([self.ref]) is not None or 0 in self.ref.shape
        in_jax = {} if whole else {n: i for n, i in by_name.items() if not isinstance(i, (ds, NamedArray))}
        in_jax = {n: i for n, i in in_jax.items() if not isinstance(i, slice) or i.step > 0}
        if any(not isinstance(i, slice) for i in in_jax.values()):  # inside jit JAX takes no stride next to a position
            in_jax = {n: i for n, i in in_jax.items() if not isinstance(i, slice) or i.step == 1}
        left = {n: i for n, i in by_name.items() if n not in in_jax}
        names = tuple(n for n in self.memory if isinstance(in_jax.get(n, slice(None)), slice))
        return tuple(in_jax.get(n, slice(None)) for n in self.memory) if in_jax else ..., names, left

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
            old, slices = wrap(self.ref[block], names), all(isinstance(i, ds) for i in left.values())
            starts = {n: getattr(i, "start", None) for n, i in left.items()}
            value = updated_slice(old, starts, value) if slices else old.at[left].set(value)
        self.ref[block] = value.array


register_dataclass(NamedRef, data_fields=["ref", "starts"], meta_fields=["memory", "view"])


def _composed_index(start: Any, entry: _Range, item: Item, operand: Any) -> tuple[Any, _Range]:
    """Compose an index into a view with the view's own index into the memory."""
    assert entry.size is not None
    match item.kind:
        case "at":
            return start + entry.step * item.static, _Range(None, None)
        case "dynamic at":
            return start + entry.step * _clamped_start(operand, entry.size, 1), _Range(None, None)
        case "slice":
            first, stop, by = item.static
            return start + entry.step * first, _Range(None, len(range(first, stop, by)), entry.step * by)
        case _:
            start = start + entry.step * _clamped_start(operand, entry.size, item.static)
            return start, _Range(None, item.static, entry.step)


def _clamped_start(position: Any, size: int, length: int) -> Any:
    """Return a static start as an integer; clamp a traced start so that `length` elements fit into `size`."""
    if isinstance(position, np.integer):
        return int(position)
    position = jnp.where(position < 0, position + size, position)
    return jnp.clip(position, 0, size - length)


def _ref_to_all(ref: Any, names: Names) -> NamedRef:
    return NamedRef(ref, (), names, tuple(_Range(0, size) for size in ref.shape))


def new_ref(value: NamedArray) -> NamedRef:
    """Make a mutable copy of a named array.

    >>> axn.new_ref(axn.zeros({"x": 3}))
    NamedRef(float32[x=3])
    """
    array = require_named("new_ref", value).array
    if jnp.ndim(array) != len(value.names):
        raise ValueError(errors.wrong_rank(value.names, jnp.shape(array)))
    return _ref_to_all(jax.new_ref(array), value.names)


def freeze(ref: NamedRef) -> NamedArray:
    """Return the value of a reference as an array, and invalidate the reference and all its views.

    >>> axn.freeze(axn.new_ref(axn.zeros({"x": 2})))
    NamedArray(float32[x=2], [0. 0.])
    """
    return wrap(jax.freeze(ref.ref), ref.memory)[ref._index()]


def get(ref: NamedRef, idx: SliceSpec | EllipsisType = ...) -> NamedArray:
    """Read an index of a reference: `ref[idx]`.

    >>> axn.get(axn.new_ref(axn.ones({"x": 2})), {"x": 0})
    NamedArray(float32[], 1.)
    """
    return ref[idx]


def swap(ref: NamedRef, idx: SliceSpec | EllipsisType, value: NamedOrNumeric) -> NamedArray:
    """Write to an index of a reference, and return the old values.

    >>> ref = axn.new_ref(axn.ones({"x": 2}))
    >>> axn.swap(ref, {"x": 0}, 5.0), ref[...]
    (NamedArray(float32[], 1.), NamedArray(float32[x=2], [5. 1.]))
    """
    old = ref[idx]
    ref[idx] = value
    return old
