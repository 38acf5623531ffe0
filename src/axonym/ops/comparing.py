"""Compare arrays, exactly or nearly.

The order of axes never matters. Functions with a single truth value as the result return a Python bool, or a traced one
inside a JAX transform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..axis import Names
from ..named_array import NamedArray, NamedOrNumeric
from . import _kernels
from ._operands import operand, require_named, scalar


def isclose(
    a: NamedOrNumeric,
    b: NamedOrNumeric,
    rtol: NamedOrNumeric = 1e-05,
    atol: NamedOrNumeric = 1e-08,
    equal_nan: bool = False,
) -> NamedArray:
    """Return whether the operands differ by at most `atol + rtol * abs(b)`, elementwise; they broadcast by name.

    With `equal_nan`, NaN is close to NaN.

    >>> axn.isclose(axn.named([1., 2.], "x"), 1.000001)
    NamedArray(bool[x=2], [ True False])
    """
    return _compare(jnp.isclose, "isclose", a, b, rtol=rtol, atol=atol, equal_nan=equal_nan)


def allclose(
    a: NamedOrNumeric,
    b: NamedOrNumeric,
    rtol: NamedOrNumeric = 1e-05,
    atol: NamedOrNumeric = 1e-08,
    equal_nan: bool = False,
) -> bool:
    """Return whether the operands are nearly equal everywhere. The arguments are as for `isclose`.

    >>> axn.allclose(axn.named([1., 2.], "x"), axn.named([1., 2.000001], "x"))
    True
    """
    return _truth(_compare(jnp.allclose, "allclose", a, b, rtol=rtol, atol=atol, equal_nan=equal_nan).array)


def array_equal(a: NamedOrNumeric, b: NamedOrNumeric, equal_nan: bool = False) -> bool:
    """Return whether two arrays have the same axes, in any order, and equal elements; `equal_nan` counts NaN as equal.

    >>> x = axn.named([[1, 2], [3, 4]], ("x", "y"))
    >>> axn.array_equal(x, axn.named([[1, 3], [2, 4]], ("y", "x")))
    True
    >>> axn.array_equal(x, axn.named([[1, 2], [3, 4]], ("x", "z")))
    False
    """
    return _shape("array_equal", a) == _shape("array_equal", b) and _all_equal("array_equal", a, b, equal_nan)


def array_equiv(a: NamedOrNumeric, b: NamedOrNumeric) -> bool:
    """Return whether two arrays have the same elements once they are broadcast by name; False if they cannot be.

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
    return _truth(_compare(_equal_everywhere, what, a, b, equal_nan=equal_nan).array)


def _equal_everywhere(a: jax.Array, b: jax.Array, equal_nan: bool) -> jax.Array:
    equal = a == b
    return jnp.all(equal | (jnp.isnan(a) & jnp.isnan(b)) if equal_nan else equal)


def _truth(x: Any) -> bool:
    return x if isinstance(x, Tracer) else bool(x)  # pyright: ignore[reportReturnType]  # traced, as promised


def _compare(fn: Callable[..., Any], what: str, a: Any, b: Any, *, equal_nan: bool, **tolerances: Any) -> NamedArray:
    (a, a_names), (b, b_names) = operand(a), operand(b)
    in_names = (a_names, b_names, *[()] * len(tolerances))
    numbers = [scalar(what, name, x) for name, x in tolerances.items()]
    return _compare_kernel(fn, what, in_names, bool(equal_nan)).apply(a, b, *numbers)


@_kernels.shared("in_names")
def _compare_kernel(fn: Callable[..., Any], what: str, in_names: tuple[Names, ...], equal_nan: bool) -> _kernels.Kernel:
    names = _kernels.broadcast_names(what, in_names)

    def positional(*arrays):
        aligned = [_kernels.align(x, own, names) for x, own in zip(arrays, in_names, strict=True)]
        return fn(*aligned, equal_nan=equal_nan)

    return _kernels.make_kernel(what, positional, in_names, names if what == "isclose" else ())
