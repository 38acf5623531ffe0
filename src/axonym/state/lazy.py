"""Arrays that are not read before one knows which part of them is wanted.

A checkpoint is larger than what one device, or one host, should hold at once. So what stands for an entry of a state
dict, until the arrays of the model are made, says only its shape and dtype and can be sliced. It can also be reshaped
and transposed without being read: that is what turns the form of an array in a file into its form in a model.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.sharding import AbstractMesh

from .. import _context
from ..array import NamedArray, wrap
from ..jax_utils import is_jax_array_like

Index = tuple[slice, ...]


class LazyArray(abc.ABC):
    """An array that is read one part at a time."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @abc.abstractmethod
    def read(self, index: Index) -> np.ndarray:
        """A part of it, as an array of its own in host memory."""

    @abc.abstractmethod
    def reshape(self, shape: tuple[int, ...]) -> LazyArray: ...

    @abc.abstractmethod
    def transpose(self, permutation: Sequence[int]) -> LazyArray: ...


@dataclasses.dataclass(frozen=True)
class Entry(LazyArray):
    """An entry of a state dict, which comes out in the dtype that is wanted."""

    source: Any
    """What holds the values: a NumPy array, which can be a view of a file, or anything with a shape and slices."""
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(self.source.shape)

    def read(self, index: Index) -> np.ndarray:
        # A copy, so that nothing refers to the file any more.
        return np.array(self.source[index], self.dtype)

    def reshape(self, shape: tuple[int, ...]) -> Entry:
        return Entry(self._viewable().reshape(shape), self.dtype)

    def transpose(self, permutation: Sequence[int]) -> Entry:
        return Entry(self._viewable().transpose(permutation), self.dtype)

    def _viewable(self) -> Any:
        return self.source if isinstance(self.source, (np.ndarray, jax.Array)) else np.asarray(self.source[...])


@dataclasses.dataclass(frozen=True)
class Stack(LazyArray):
    """Several arrays of one shape as one, with a new axis that counts them."""

    parts: tuple[LazyArray, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        inner = self.parts[0].shape
        return (*inner[: self.axis], len(self.parts), *inner[self.axis :])

    @property
    def dtype(self) -> np.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.parts[0].dtype

    def read(self, index: Index) -> np.ndarray:
        within = index[: self.axis] + index[self.axis + 1 :]
        return np.stack([part.read(within) for part in self.parts[index[self.axis]]], self.axis)

    def reshape(self, shape: tuple[int, ...]) -> LazyArray:
        leading, count = math.prod(self.shape[: self.axis]), len(self.parts)
        for axis in range(len(shape)):
            if shape[axis] == count and math.prod(shape[:axis]) == leading:  # the axis itself is left as it is
                inner = shape[:axis] + shape[axis + 1 :]
                return Stack(tuple(part.reshape(inner) for part in self.parts), axis)
        return Entry(whole(self).reshape(shape), self.dtype)

    def transpose(self, permutation: Sequence[int]) -> Stack:
        inner = [p - (p > self.axis) for p in permutation if p != self.axis]
        return Stack(tuple(part.transpose(inner) for part in self.parts), list(permutation).index(self.axis))


@dataclasses.dataclass(frozen=True)
class Scaled(LazyArray):
    """An array times a number."""

    array: LazyArray
    factor: float

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.array.dtype

    def read(self, index: Index) -> np.ndarray:
        return (self.array.read(index) * self.factor).astype(self.dtype)

    def reshape(self, shape: tuple[int, ...]) -> Scaled:
        return Scaled(self.array.reshape(shape), self.factor)

    def transpose(self, permutation: Sequence[int]) -> Scaled:
        return Scaled(self.array.transpose(permutation), self.factor)


@dataclasses.dataclass(frozen=True)
class Absent(LazyArray):
    """An array of which only shape and dtype are known."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, index: Index) -> np.ndarray:
        raise ValueError(f"An array {self.dtype}{self.shape} that is not there cannot be read.")

    def reshape(self, shape: tuple[int, ...]) -> Absent:
        return Absent(tuple(shape), self.dtype)

    def transpose(self, permutation: Sequence[int]) -> Absent:
        return Absent(tuple(self.shape[p] for p in permutation), self.dtype)


def is_absent(x: LazyArray) -> bool:
    """Whether some of the array is not there."""
    return any(map(is_absent, _parts(x))) or isinstance(x, Absent)


def is_on_device(x: LazyArray) -> bool:
    """Whether the values are those of JAX arrays, which can be traced."""
    return any(map(is_on_device, _parts(x))) or (isinstance(x, Entry) and isinstance(x.source, jax.Array))


def _parts(x: LazyArray) -> tuple[LazyArray, ...]:
    """The arrays that one is made of."""
    return x.parts if isinstance(x, Stack) else (x.array,) if isinstance(x, Scaled) else ()


def whole(x: LazyArray) -> Any:
    """All of an array: as a JAX array if it is one already, else in host memory."""
    if not is_on_device(x):
        return x.read((slice(None),) * len(x.shape))
    if isinstance(x, Stack):
        return jnp.stack([whole(part) for part in x.parts], x.axis)
    if isinstance(x, Scaled):
        return (whole(x.array) * x.factor).astype(x.dtype)
    assert isinstance(x, Entry)
    return x.source if x.source.dtype == x.dtype else x.source.astype(x.dtype)


def lazy(x: Any) -> LazyArray:
    """An array of any kind as a lazy one."""
    if isinstance(x, LazyArray):
        return x
    return Absent(tuple(x.shape), x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else Entry(x, x.dtype)


def abstract(x: LazyArray) -> jax.ShapeDtypeStruct:
    """What JAX knows an array by that it does not have."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def scaled(x: NamedArray | None, factor: float) -> NamedArray | None:
    """An array of a module times a number. What is not there, or has no values, stays as it is.

    Arguments:
        x: the array, which can be lazy.
        factor: the number.
    """
    if x is None or factor == 1:
        return x
    array = x.array
    if isinstance(array, LazyArray):
        return wrap(Scaled(array, factor), x.names)
    return wrap((array * factor).astype(array.dtype), x.names) if isinstance(array, (jax.Array, np.ndarray)) else x


# --- functions that rearrange ---


def rearranged(fn: Callable[..., Any], *trees: Any) -> Any:
    """What a function of trees returns, with lazy arrays in it and without reading any.

    The function is traced, and its program carried out on lazy arrays. It should do nothing with arrays but reshape,
    transpose and rename: what anything else needs is read as a whole.

    Arguments:
        fn: the function.
        *trees: its arguments, whose arrays can be lazy or abstract.
    """
    leaves, structure = jax.tree.flatten(trees)
    positions = [i for i, x in enumerate(leaves) if is_jax_array_like(x)]
    arrays = [lazy(leaves[i]) for i in positions]
    returned: list[Any] = []

    def of_arrays(*traced: Any) -> list[Any]:
        filled = list(leaves)
        for i, x in zip(positions, traced, strict=True):
            filled[i] = x
        results, result_structure = jax.tree.flatten(fn(*jax.tree.unflatten(structure, filled)))
        returned[:] = [None if is_jax_array_like(r) else r for r in results], result_structure
        return [r for r in results if is_jax_array_like(r)]

    # Where arrays lie does not matter yet.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), _context.in_force(None):
        program = jax.make_jaxpr(of_arrays)(*map(abstract, arrays))
        outputs = iter(_carried_out(program.jaxpr, program.consts, arrays))
    others, result_structure = returned
    return jax.tree.unflatten(result_structure, [next(outputs) if x is None else x for x in others])


_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
"""The primitives that stand for a whole program, and which of their parameters that is."""


def _carried_out(jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any]) -> list[LazyArray]:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], map(lazy, [*consts, *arrays]), strict=True))

    def value_of(x: Any) -> LazyArray:
        return lazy(np.asarray(x.val)) if isinstance(x, Literal) else known[x]

    for equation in jaxpr.eqns:
        operands = [value_of(x) for x in equation.invars]
        known.update(zip(equation.outvars, _one_step(equation, operands), strict=True))
    return [value_of(x) for x in jaxpr.outvars]


def _one_step(equation: Any, operands: Sequence[LazyArray]) -> Sequence[LazyArray]:
    kind, params = equation.primitive.name, equation.params
    if kind in _CALLS:
        inner = params[_CALLS[kind]]
        return _carried_out(inner.jaxpr, inner.consts, operands)
    if kind == "transpose":
        return [operands[0].transpose(params["permutation"])]
    shape = equation.outvars[0].aval.shape
    if kind == "squeeze" or (kind == "reshape" and params["dimensions"] is None):
        return [operands[0].reshape(shape)]
    if kind == "broadcast_in_dim" and math.prod(shape) == math.prod(operands[0].shape):  # as `expand_dims` does it
        return [operands[0].reshape(shape)]
    if any(map(is_absent, operands)):
        return [Absent(tuple(v.aval.shape), v.aval.dtype) for v in equation.outvars]
    results = equation.primitive.bind(*map(whole, operands), **params)
    return [lazy(r) for r in (results if equation.primitive.multiple_results else [results])]
