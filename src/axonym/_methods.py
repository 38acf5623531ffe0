"""The methods and operators of `NamedArray`.

A method is the function of the same name: `axn.NamedArray.sum is axn.sum`. The list below is the only place that
defines this. Type checkers see `NamedArray` derive from `Methods`; on import, `attach` puts the same entries on the
class.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Never, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .core.jax_versions import called_by_grad
from .named_array import NamedArray, NamedOrNumeric, describe_array, is_named_array
from .ops import (
    broadcasting,
    contraction,
    diagonals,
    elementwise,
    indexing,
    joining,
    rearranging,
    reductions,
    selection,
    shaping,
    sorting,
    updating,
)
from .typing.annotations import annotate
from .typing.matching import matches_axes

R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)

_NUMBERS = (int, float, complex, bool, np.generic, np.ndarray)


def _is_operand(x: Any) -> bool:
    """Return whether operators accept `x`; if not, Python tries the other operand's operator."""
    return isinstance(x, (NamedArray, *_NUMBERS, jax.Array))


def _is_comparable(x: Any) -> bool:
    """Return whether `==` accepts `x`; a list is accepted to raise an error, where Python would return False."""
    return _is_operand(x) or isinstance(x, (list, tuple))


class _Property(Protocol[T_co]):
    """The type of a property, since type checkers do not look into `property` objects."""

    def __get__(self, instance: Any, owner: Any = None) -> T_co: ...


def _unary(operation: Any) -> Callable[[NamedArray], NamedArray]:
    """Return the operation unchanged, with the type that `abs` and the like require."""
    return operation


_Operator: TypeAlias = Callable[[NamedArray, NamedOrNumeric], R]


def _operator_and_reflection(operation: Callable[..., R]) -> tuple[_Operator[R], _Operator[R]]:
    """Return an operation as an operator, and as the one that Python calls on the second operand."""

    def operator(self: NamedArray, other: NamedOrNumeric) -> Any:
        return operation(self, other) if _is_operand(other) else NotImplemented

    def reflected(self: NamedArray, other: NamedOrNumeric) -> Any:
        return operation(other, self) if _is_operand(other) else NotImplemented

    return operator, reflected


def _refuse_matmul(self: NamedArray, other: Never) -> Any:
    # Typed so that a checker refuses every operand.
    shared = [name for name in self.names if name in getattr(other, "names", ())]
    axis = repr(shared[0]) if len(shared) == 1 else "..."
    raise TypeError(f"`@` does not say which axes to sum over. Use axonym.dot(x, y, axis={axis}).")


class Methods:
    """Everything `NamedArray` can do besides being an array with names."""

    __slots__ = ()

    # --- annotations ---
    matches_axes = matches_axes
    __class_getitem__ = classmethod(annotate)

    # --- axes and layout ---
    rename = shaping.rename
    rearrange = rearranging.rearrange
    broadcast_to = broadcasting.broadcast_to
    broadcast_axis = broadcasting.broadcast_axis
    flatten_axes = shaping.flatten_axes
    unflatten_axis = shaping.unflatten_axis
    flatten = shaping.flatten
    split = shaping.split
    unbind = shaping.unbind
    roll = joining.roll

    # --- parts ---
    __getitem__ = indexing.index
    at: _Property[updating.Indexer] = property(updating.Indexer)  # pyright: ignore[reportAssignmentType]
    slice = indexing.slice
    take = indexing.take

    # --- reductions ---
    all = reductions.all
    any = reductions.any
    argmax = reductions.argmax
    argmin = reductions.argmin
    cumprod = reductions.cumprod
    cumsum = reductions.cumsum
    max = reductions.max
    mean = reductions.mean
    min = reductions.min
    prod = reductions.prod
    ptp = reductions.ptp
    std = reductions.std
    sum = reductions.sum
    var = reductions.var
    trace = diagonals.trace

    # --- elements ---
    astype = elementwise.astype
    clip = selection.clip
    conj = elementwise.conj
    copy = elementwise.copy
    dot = contraction.dot
    round = elementwise.round
    sort = sorting.sort
    argsort = sorting.argsort
    real: _Property[NamedArray] = property(elementwise.real)  # pyright: ignore[reportAssignmentType]
    imag: _Property[NamedArray] = property(elementwise.imag)  # pyright: ignore[reportAssignmentType]

    # --- operators ---
    __neg__ = _unary(elementwise.negative)
    __pos__ = _unary(elementwise.positive)
    __abs__ = _unary(elementwise.abs)
    __invert__ = _unary(elementwise.invert)
    __add__, __radd__ = _operator_and_reflection(elementwise.add)
    __sub__, __rsub__ = _operator_and_reflection(elementwise.subtract)
    __mul__, __rmul__ = _operator_and_reflection(elementwise.multiply)
    __truediv__, __rtruediv__ = _operator_and_reflection(elementwise.divide)
    __floordiv__, __rfloordiv__ = _operator_and_reflection(elementwise.floor_divide)
    __divmod__, __rdivmod__ = _operator_and_reflection(elementwise.divmod)
    __mod__, __rmod__ = _operator_and_reflection(elementwise.mod)
    __pow__, __rpow__ = _operator_and_reflection(elementwise.power)
    __and__, __rand__ = _operator_and_reflection(elementwise.bitwise_and)
    __or__, __ror__ = _operator_and_reflection(elementwise.bitwise_or)
    __xor__, __rxor__ = _operator_and_reflection(elementwise.bitwise_xor)
    __lshift__, __rlshift__ = _operator_and_reflection(elementwise.left_shift)
    __rshift__, __rrshift__ = _operator_and_reflection(elementwise.right_shift)
    __lt__ = _operator_and_reflection(elementwise.less)[0]
    __le__ = _operator_and_reflection(elementwise.less_equal)[0]
    __gt__ = _operator_and_reflection(elementwise.greater)[0]
    __ge__ = _operator_and_reflection(elementwise.greater_equal)[0]
    __matmul__ = __rmatmul__ = _refuse_matmul

    # Methods rather than assignments: type checkers would give these names the types that they have on `object`.
    def __eq__(self: Any, other: Any) -> NamedArray:  # pyright: ignore[reportIncompatibleMethodOverride]
        return elementwise.equal(self, other) if _is_comparable(other) else NotImplemented

    def __ne__(self: Any, other: Any) -> NamedArray:  # pyright: ignore[reportIncompatibleMethodOverride]
        return elementwise.not_equal(self, other) if _is_comparable(other) else NotImplemented

    def __round__(self: Any, decimals: int | None = None) -> NamedArray:
        return elementwise.round(self, decimals or 0)

    # --- notebooks ---

    def _repr_html_(self: Any) -> str:
        from ._display import array_html

        return array_html(self)

    # --- refusal of positional functions ---

    @property
    def __jax_array__(self: Any) -> Callable[[], Any]:
        # `jax.grad` looks for this attribute on the result of the function, which it does not recognize as an array.
        if called_by_grad():
            end = ".scalar()" if not self.names else ".mean().scalar()"
            raise ValueError(  # JAX replaces the text of a TypeError
                f"The function to differentiate returned a named array, {describe_array(self)}: end it with `{end}`, "
                "or use `axonym.grad`, which takes named arrays without axes."
            )
        return functools.partial(_refuse_conversion, self)

    def __array__(self: Any, dtype: Any = None, copy: Any = None) -> Any:
        if self.names:
            raise TypeError(_CONVERT)
        return np.asarray(self.array, dtype, copy=copy)  # it has no names to lose

    def __array_function__(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if (unnamed := _without_names((args, kwargs))) is not None:
            return func(*unnamed[0], **unnamed[1])
        if (name := _calling_function()) is not None:
            raise TypeError(_use_instead(f"JAX's {name}", name))
        raise TypeError(_use_instead(f"numpy.{func.__name__}", func.__name__))

    def __array_ufunc__(self: Any, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        is_scalar = not is_named_array(inputs[0]) and np.ndim(inputs[0]) == 0
        if method == "__call__" and len(inputs) == 2 and inputs[1] is self and is_scalar and not kwargs:
            # `np.float32(2) * x` is indistinguishable from `np.multiply(np.float32(2), x)` here.
            name: str = ufunc.__name__
            operation = getattr(elementwise, {"remainder": "mod"}.get(name, name), None)
            if operation is not None:
                return operation(*inputs)
        if (unnamed := _without_names((inputs, kwargs))) is not None:
            return getattr(ufunc, method)(*unnamed[0], **unnamed[1])
        raise TypeError(_use_instead(f"numpy.{ufunc.__name__}", ufunc.__name__))


def attach() -> None:
    """Put the methods on `NamedArray`. Called once, on import of the package."""
    for name, method in vars(Methods).items():
        if name not in vars(object) or name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
            if name not in ("__slots__", "__module__", "__dict__", "__weakref__", "__firstlineno__"):
                setattr(NamedArray, name, method)


# --- suggestions instead of positional functions ---


def _refuse_conversion(x: NamedArray) -> Any:
    name = _calling_function()
    if name is None:  # an operator of a JAX array: return the named array, so that Python tries its reflected operator
        return x
    if name in ("array", "asarray"):
        if not x.names:
            return x.array
        raise TypeError("A NamedArray is not converted to a JAX array, which has no names: its array is `x.array`.")
    raise TypeError(_use_instead(f"JAX's {name}", name))


def _without_names(arguments: Any) -> Any:
    """Return the arguments of a NumPy function with NumPy arrays for named arrays without axes; None if one has any."""
    leaves, structure = jax.tree.flatten(arguments, is_leaf=is_named_array)
    if any(is_named_array(x) and x.names for x in leaves):
        return None
    return jax.tree.unflatten(structure, [np.asarray(x) if is_named_array(x) else x for x in leaves])


def _calling_function() -> str | None:
    """Return the public positional function that user code called on a named array, if any."""
    found = None
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("jax", "contextlib", "functools"):
            break
        name = frame.f_code.co_name
        if any(hasattr(module, name) for module in (jnp, jnp.linalg, jnp.fft, jax.nn, jax.lax)):
            found = name
        frame = frame.f_back
    return found


_CONVERT = (
    "A NamedArray is not converted to a NumPy array, which has no names: write `numpy.asarray(x.array)`, or "
    "`axonym.to_host(x).array` for an array that is sharded over several hosts."
)


def _use_instead(called: str, name: str) -> str:
    from . import fft, linalg, ops, poly  # loads everything, but only for programs that are about to stop
    from .core import foreign_names

    # The public path of the function with that name, if there is one.
    files = [module for file, module in vars(ops).items() if isinstance(module, ModuleType) and file[0] != "_"]
    modules = (*files, linalg, fft, poly)
    home = next((m for m in modules if getattr(getattr(m, name, None), "__module__", None) == m.__name__), None)
    found = home and (f"axonym.{name}" if home in files else f"{home.__name__}.{name}")
    more = f", in a loss of Optax `{foreign_names.LOSSES[name]}`" if name in foreign_names.LOSSES else ""
    way_out = f"use `{found}`{more}" if found else "axonym has none of that name; use `axonym.lift`"
    if not found and (hint := foreign_names.in_package("axonym", name)):
        return f"{called} works by position and does not take a NamedArray.{hint} Or pass the raw array, `x.array`."
    return f"{called} works by position and does not take a NamedArray: {way_out}, or pass the raw array, `x.array`."
