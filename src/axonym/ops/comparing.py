"""Compare arrays, exactly or nearly.

The order of axes never matters. Functions with a single truth value as the result return a Python bool, or a traced one
inside a JAX transform.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .. import _kernels
from ..array import NamedArray, NamedOrNumeric, wrap
from ..axis import Names
from ._operands import operand, require_named


def isclose(
    a: NamedOrNumeric, b: NamedOrNumeric, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False
) -> NamedArray:
    """Return whether the operands differ by at most `atol + rtol * abs(b)`, elementwise.

    Arguments:
        a: a named array or a scalar.
        b: a named array or a scalar. One of the two has all the axes of the other.
        rtol: the tolerance relative to `b`.
        atol: the absolute tolerance.
        equal_nan: whether NaN is close to NaN.

    >>> axn.isclose(axn.named([1., 2.], "x"), 1.000001)
    NamedArray(bool[x=2], [ True False])
    """
    (a, a_names), (b, b_names) = operand(a), operand(b)
    kernel = _close_kernel("isclose", a_names, b_names, bool(equal_nan))
    return wrap(kernel.call(a, b, rtol, atol), kernel.names)


def allclose(
    a: NamedOrNumeric, b: NamedOrNumeric, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False
) -> bool:
    """Return whether the operands are nearly equal everywhere.

    Arguments:
        a: a named array or a scalar.
        b: a named array or a scalar. One of the two has all the axes of the other.
        rtol: the tolerance relative to `b`.
        atol: the absolute tolerance.
        equal_nan: whether NaN is close to NaN.

    >>> axn.allclose(axn.named([1., 2.], "x"), axn.named([1., 2.000001], "x"))
    True
    """
    (a, a_names), (b, b_names) = operand(a), operand(b)
    kernel = _close_kernel("allclose", a_names, b_names, bool(equal_nan))
    return _truth(kernel.call(a, b, rtol, atol))


def array_equal(a: NamedOrNumeric, b: NamedOrNumeric, equal_nan: bool = False) -> bool:
    """Return whether two arrays have the same axes, in any order, and the same elements.

    Arguments:
        a: a named array or a scalar.
        b: a named array or a scalar.
        equal_nan: whether NaN is equal to NaN.

    >>> x = axn.named([[1, 2], [3, 4]], ("x", "y"))
    >>> axn.array_equal(x, axn.named([[1, 3], [2, 4]], ("y", "x")))
    True
    >>> axn.array_equal(x, axn.named([[1, 2], [3, 4]], ("x", "z")))
    False
    """
    return _shape("array_equal", a) == _shape("array_equal", b) and _all_equal("array_equal", a, b, equal_nan)


def array_equiv(a: NamedOrNumeric, b: NamedOrNumeric) -> bool:
    """Return whether two arrays have the same elements once they are broadcast by name.

    Arguments:
        a: a named array or a scalar.
        b: a named array or a scalar. False unless one of the two has all the axes of the other.

    >>> axn.array_equiv(axn.ones({"x": 2, "y": 3}), axn.ones({"y": 3}))
    True
    """
    inner, outer = sorted((_shape("array_equiv", a), _shape("array_equiv", b)), key=len)
    return inner.items() <= outer.items() and _all_equal("array_equiv", a, b, False)


def _shape(what: str, x: Any) -> dict[str, int]:
    if isinstance(x, NamedArray):
        return x.shape
    return {} if np.ndim(x) == 0 else require_named(what, x).shape


def _all_equal(what: str, a: Any, b: Any, equal_nan: bool) -> bool:
    (a, a_names), (b, b_names) = operand(a), operand(b)
    kernel = _equal_kernel(what, a_names, b_names, bool(equal_nan))
    return _truth(kernel.call(a, b))


def _truth(x: Any) -> bool:
    return x if isinstance(x, Tracer) else bool(x)  # pyright: ignore[reportReturnType]  # traced, as promised


@_kernels.cached
def _close_kernel(what: str, a_names: Names, b_names: Names, equal_nan: bool) -> _kernels.Kernel:
    names = _kernels.broadcast_names(what, (a_names, b_names))

    def positional(a, b, rtol, atol):
        close = jnp.isclose(*_aligned(a, a_names, b, b_names, names), rtol, atol, equal_nan)
        return jnp.all(close) if what == "allclose" else close

    return _kernels.make_kernel(what, positional, (a_names, b_names, (), ()), () if what == "allclose" else names)


@_kernels.cached
def _equal_kernel(what: str, a_names: Names, b_names: Names, equal_nan: bool) -> _kernels.Kernel:
    names = _kernels.broadcast_names(what, (a_names, b_names))

    def positional(a, b):
        a, b = _aligned(a, a_names, b, b_names, names)
        equal = a == b
        return jnp.all(equal | (jnp.isnan(a) & jnp.isnan(b)) if equal_nan else equal)

    return _kernels.make_kernel(what, positional, (a_names, b_names), ())


def _aligned(a: jax.Array, a_names: Names, b: jax.Array, b_names: Names, names: Names) -> tuple[jax.Array, jax.Array]:
    return _kernels.align(a, a_names, names), _kernels.align(b, b_names, names)
