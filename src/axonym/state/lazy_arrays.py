"""Lazy arrays: entries of a state dict that are read one slice at a time.

A checkpoint is larger than what one device or one host should hold at once. While a model is loaded, its leaves are
therefore lazy arrays, which have a shape and a dtype and can be reshaped, transposed, stacked and scaled without being
read. Once the shardings are known, each device reads the slice that is its shard.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal
from jax.sharding import AbstractMesh

from ..core.operation_rules import inside
from ..core.tree_spec import PROGRAM_ARRAYS, TreeSpec, flatten_arrays
from ..distribution import active_settings
from ..named_array import NamedArray, wrap
from .naming import require_representable

Index = tuple[slice, ...]


class LazyArray(abc.ABC):
    """An array that is read one slice at a time."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @abc.abstractmethod
    def read(self, index: Index) -> np.ndarray:
        """Read a slice of the array into host memory, as a copy."""

    @abc.abstractmethod
    def reshape(self, shape: tuple[int, ...]) -> LazyArray: ...

    @abc.abstractmethod
    def transpose(self, permutation: Sequence[int]) -> LazyArray: ...

    @abc.abstractmethod
    def part(self, index: Index) -> LazyArray:
        """Return a slice of the array, which is not read yet; every slice has a start and a stop."""


@dataclasses.dataclass(frozen=True)
class LazyEntry(LazyArray):
    """An entry of a state dict, cast to a dtype when it is read."""

    source: Any
    """A NumPy array, which can be a view of a file, or anything that has a shape and can be sliced."""
    dtype: np.dtype
    key: str = "an entry"
    """The name of the entry in messages."""

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(self.source.shape)

    def read(self, index: Index) -> np.ndarray:
        values = np.asarray(self.source[index])
        self.require_representable(values)
        # A copy, so that the result does not keep the file open.
        return np.array(values, self.dtype)

    def require_representable(self, values: Any) -> None:
        """Raise an error if the dtype lacks some of the values; traced values are not known, so they pass."""
        if not isinstance(values, Tracer):
            require_representable(f"from_state_dict: {self.key}", values, self.dtype)

    def reshape(self, shape: tuple[int, ...]) -> LazyEntry:
        if not isinstance(self.source, _VIEWABLE):
            for axis, size in enumerate(shape):
                if size == 1 and shape[:axis] + shape[axis + 1 :] == self.shape:  # a layer of several
                    return LazyEntry(_WithAxis(self.source, axis), self.dtype, self.key)
        return LazyEntry(self._viewable().reshape(shape), self.dtype, self.key)

    def transpose(self, permutation: Sequence[int]) -> LazyEntry:
        return LazyEntry(self._viewable().transpose(permutation), self.dtype, self.key)

    def part(self, index: Index) -> LazyEntry:
        return LazyEntry(self._viewable()[index], self.dtype, self.key)

    def _viewable(self) -> Any:
        return self.source if isinstance(self.source, _VIEWABLE) else np.asarray(self.source[...])


@dataclasses.dataclass(frozen=True)
class _WithAxis:
    """A source that can only be sliced, with one more axis, of size one."""

    source: Any
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.source.shape[: self.axis], 1, *self.source.shape[self.axis :])

    def __getitem__(self, index: Any) -> np.ndarray:
        within = index if index is ... else index[: self.axis] + index[self.axis + 1 :]
        return np.expand_dims(np.asarray(self.source[within]), self.axis)


_VIEWABLE = (np.ndarray, jax.Array)
"""The sources that are reshaped, transposed and sliced without being read."""


@dataclasses.dataclass(frozen=True)
class LazyConcatenation(LazyArray):
    """Arrays that are joined along an axis, such as layers along an axis that has size one in each."""

    parts: tuple[LazyArray, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._with_size(self.parts[0].shape, sum(part.shape[self.axis] for part in self.parts))

    @property
    def dtype(self) -> np.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.parts[0].dtype

    def read(self, index: Index) -> np.ndarray:
        # One part at a time goes to its place, so that no more than one is in memory besides the result.
        shape = [len(range(*s.indices(size))) for s, size in zip(index, self.shape, strict=True)]
        result, filled = np.empty(shape, self.dtype), 0
        places = np.moveaxis(result, self.axis, 0)
        for part, within in self._overlapping(index):
            values = np.moveaxis(part.read(within), self.axis, 0)
            places[filled : filled + len(values)] = values
            filled += len(values)
        return result

    def reshape(self, shape: tuple[int, ...]) -> LazyArray:
        leading, size = math.prod(self.shape[: self.axis]), self.shape[self.axis]
        for axis in range(len(shape)):
            if shape[axis] == size and math.prod(shape[:axis]) == leading:  # the reshape keeps the joined axis
                kept = [(*shape[:axis], part.shape[self.axis], *shape[axis + 1 :]) for part in self.parts]
                parts = tuple(part.reshape(inner) for part, inner in zip(self.parts, kept, strict=True))
                return LazyConcatenation(parts, axis)
        missing = has_missing(self)
        return MissingArray(shape, self.dtype) if missing else LazyEntry(read_all(self).reshape(shape), self.dtype)

    def transpose(self, permutation: Sequence[int]) -> LazyConcatenation:
        parts = tuple(part.transpose(permutation) for part in self.parts)
        return LazyConcatenation(parts, list(permutation).index(self.axis))

    def part(self, index: Index) -> LazyArray:
        found = tuple(part.part(within) for part, within in self._overlapping(index))
        if len(found) > 1:
            return LazyConcatenation(found, self.axis)
        return found[0] if found else self.parts[0].part(index)

    def _with_size(self, values: tuple[Any, ...], size: Any) -> tuple[Any, ...]:
        return (*values[: self.axis], size, *values[self.axis + 1 :])

    def _overlapping(self, index: Index) -> Iterator[tuple[LazyArray, Index]]:
        """Yield the parts that a slice overlaps, each with the slice of it."""
        start, stop, _ = index[self.axis].indices(self.shape[self.axis])
        for part in self.parts:
            size = part.shape[self.axis]
            if start < size and stop > 0:
                yield part, self._with_size(index, slice(max(start, 0), min(stop, size)))
            start, stop = start - size, stop - size


def stack_lazily(parts: Sequence[LazyArray], axis: int) -> LazyConcatenation:
    """Stack arrays of one shape along a new axis."""
    shape = (*parts[0].shape[:axis], 1, *parts[0].shape[axis:])
    return LazyConcatenation(tuple(part.reshape(shape) for part in parts), axis)


@dataclasses.dataclass(frozen=True)
class LazyElementwise(LazyArray):
    """A function of every element of an array, such as a product with a number."""

    array: LazyArray
    fn: Callable[[Any], Any]
    """The function, of NumPy's and JAX's arrays alike."""
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.array.shape

    def read(self, index: Index) -> np.ndarray:
        return self.fn(self.array.read(index)).astype(self.dtype, copy=False)

    def reshape(self, shape: tuple[int, ...]) -> LazyElementwise:
        return dataclasses.replace(self, array=self.array.reshape(shape))

    def transpose(self, permutation: Sequence[int]) -> LazyElementwise:
        return dataclasses.replace(self, array=self.array.transpose(permutation))

    def part(self, index: Index) -> LazyElementwise:
        return dataclasses.replace(self, array=self.array.part(index))


@dataclasses.dataclass(frozen=True)
class MissingArray(LazyArray):
    """An array that has a shape and a dtype but no values."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, index: Index) -> np.ndarray:
        raise ValueError(f"An array {self.dtype}{self.shape} without values cannot be read.")

    def reshape(self, shape: tuple[int, ...]) -> MissingArray:
        return MissingArray(tuple(shape), self.dtype)

    def transpose(self, permutation: Sequence[int]) -> MissingArray:
        return MissingArray(tuple(self.shape[p] for p in permutation), self.dtype)

    def part(self, index: Index) -> MissingArray:
        return MissingArray(tuple(s.stop - s.start for s in index), self.dtype)


def has_missing(x: LazyArray) -> bool:
    """Return whether any part of the array has no values."""
    return any(map(has_missing, _parts_of(x))) or isinstance(x, MissingArray)


def is_missing(x: LazyArray) -> bool:
    """Return whether no part of the array has values."""
    return all(map(is_missing, _parts_of(x))) if _parts_of(x) else isinstance(x, MissingArray)


def with_missing_from(own: jax.Array | np.ndarray, x: LazyArray) -> LazyArray:
    """Take the parts that have no values, such as single layers, from another array of the same shape."""
    if not has_missing(x):
        return x
    if isinstance(x, LazyElementwise) and isinstance(x.array, LazyConcatenation):
        x = LazyConcatenation(tuple(dataclasses.replace(x, array=part) for part in x.array.parts), x.array.axis)
    if not isinstance(x, LazyConcatenation):
        return as_lazy(own)
    stops = [*itertools.accumulate(part.shape[x.axis] for part in x.parts)]
    pieces = (
        own[(*[slice(None)] * x.axis, slice(n - part.shape[x.axis], n))] for n, part in zip(stops, x.parts, strict=True)
    )
    return LazyConcatenation(tuple(map(with_missing_from, pieces, x.parts)), x.axis)


def is_on_device(x: LazyArray) -> bool:
    """Return whether the values are JAX arrays, which can be tracers."""
    return any(map(is_on_device, _parts_of(x))) or (isinstance(x, LazyEntry) and isinstance(x.source, jax.Array))


def _parts_of(x: LazyArray) -> tuple[LazyArray, ...]:
    """Return the arrays that a lazy array is made of."""
    return x.parts if isinstance(x, LazyConcatenation) else (x.array,) if isinstance(x, LazyElementwise) else ()


def read_all(x: LazyArray) -> Any:
    """Return all values: as a JAX array if they are on a device, else as a NumPy array."""
    if not is_on_device(x):
        return x.read((slice(None),) * len(x.shape))
    if isinstance(x, LazyConcatenation):
        return jnp.concatenate([read_all(part) for part in x.parts], x.axis)
    if isinstance(x, LazyElementwise):
        return x.fn(read_all(x.array)).astype(x.dtype)
    assert isinstance(x, LazyEntry)
    x.require_representable(x.source)
    return x.source if x.source.dtype == x.dtype else x.source.astype(x.dtype)


def as_lazy(x: Any) -> LazyArray:
    """Convert an array of any kind to a lazy array."""
    if isinstance(x, LazyArray):
        return x
    return MissingArray(tuple(x.shape), x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else LazyEntry(x, x.dtype)


def abstract(x: LazyArray) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a lazy array, as JAX describes an abstract array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def with_abstract_arrays(tree: Any) -> Any:
    """Replace the lazy arrays of a tree with abstract ones."""
    return jax.tree.map(lambda x: abstract(x) if isinstance(x, LazyArray) else x, tree)


def scale_array(x: NamedArray | None, factor: float) -> NamedArray | None:
    """Multiply an array of a module, which can be lazy. None and arrays without values are returned unchanged."""
    if x is None or factor == 1:
        return x
    array = x.array
    if isinstance(array, LazyArray):
        return wrap(LazyElementwise(array, lambda values: values * factor, array.dtype), x.names)
    return wrap((array * factor).astype(array.dtype), x.names) if isinstance(array, (jax.Array, np.ndarray)) else x


# --- calling functions with lazy arrays ---


def call_lazily(fn: Callable[..., Any], *trees: Any) -> Any:
    """Call a function of trees with lazy arrays, and return its result with lazy arrays.

    The function is traced, and its jaxpr is evaluated with lazy arrays. The function should only reshape, transpose and
    rename arrays: the operands of any other operation are read whole.
    """
    given, spec = flatten_arrays(trees, (*PROGRAM_ARRAYS, LazyArray), named=False)
    arrays = list(map(as_lazy, given))
    returned: list[TreeSpec] = []

    def of_arrays(*traced: Any) -> list[Any]:
        results, result_spec = flatten_arrays(fn(*spec.unflatten(traced)), PROGRAM_ARRAYS, named=False)
        returned[:] = [result_spec]
        return results

    # The shardings are applied later, when the arrays are read.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), active_settings.activate(None):
        program = jax.make_jaxpr(of_arrays)(*map(abstract, arrays))
        outputs = _evaluate_jaxpr(program.jaxpr, program.consts, arrays)
    return returned[0].unflatten(outputs)


def _evaluate_jaxpr(jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any]) -> list[LazyArray]:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], map(as_lazy, [*consts, *arrays]), strict=True))

    def value_of(x: Any) -> LazyArray:
        return as_lazy(np.asarray(x.val)) if isinstance(x, Literal) else known[x]

    for equation in jaxpr.eqns:
        operands = [value_of(x) for x in equation.invars]
        known.update(zip(equation.outvars, _evaluate_equation(equation, operands), strict=True))
    return [value_of(x) for x in jaxpr.outvars]


def _evaluate_equation(equation: Any, operands: Sequence[LazyArray]) -> Sequence[LazyArray]:
    kind, params = equation.primitive.name, equation.params
    if (called := inside(equation)) and called[0].how == "call":
        return _evaluate_jaxpr(called[0].jaxpr, called[0].constants, operands)
    if kind == "transpose":
        return [operands[0].transpose(params["permutation"])]
    shape = equation.outvars[0].aval.shape
    if kind == "squeeze" or (kind == "reshape" and params["dimensions"] is None):
        return [operands[0].reshape(shape)]
    if kind == "broadcast_in_dim" and math.prod(shape) == math.prod(operands[0].shape):  # as `expand_dims` does
        return [operands[0].reshape(shape)]
    if kind in ("split", "unstack"):
        axis = params["axis"]
        sizes = params["sizes"] if kind == "split" else [1] * operands[0].shape[axis]
        whole = [slice(0, size) for size in operands[0].shape]
        ranges = [slice(stop - size, stop) for stop, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
        parts = (operands[0].part((*whole[:axis], r, *whole[axis + 1 :])) for r in ranges)
        return [part.reshape(out.aval.shape) for part, out in zip(parts, equation.outvars, strict=True)]
    if kind == "stack":
        return [stack_lazily(operands, params["axis"])]
    if kind == "concatenate":
        return [LazyConcatenation(tuple(operands), params["dimension"])]
    if kind == "convert_element_type":
        return [LazyElementwise(operands[0], lambda values: values, np.dtype(params["new_dtype"]))]
    if any(map(has_missing, operands)):
        return [MissingArray(tuple(v.aval.shape), v.aval.dtype) for v in equation.outvars]
    results = equation.primitive.bind(*map(read_all, operands), **params)
    return [as_lazy(r) for r in (results if equation.primitive.multiple_results else [results])]
