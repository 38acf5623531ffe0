"""Creation, comparing, choosing, padding, diagonals and sets."""

from __future__ import annotations

# ruff: noqa: I001
# fmt: off
import functools
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from jax.typing import DTypeLike
import jax
import jax.numpy as jnp

from .. import (
    Axis, NamedArray, allclose as allclose, arange as _arange, argsort as _argsort, array_equal as array_equal,
    array_equiv as array_equiv, axis_mapping, bincount as bincount, clip as clip, concatenate as _concatenate,
    dot as _dot, einsum as _einsum, full as _full, geomspace as _geomspace, isclose as isclose, linspace as _linspace,
    logspace as _logspace,
    nonzero as nonzero, ones as _ones, packbits as packbits, pad as pad, pad_left as pad_left, rearrange as _rearrange,
    roll as _roll, searchsorted as searchsorted, shard as _shard, stack as _stack, trace as trace, tril as _tril,
    triu as _triu, unique as unique, unpackbits as unpackbits, where as _where, zeros as _zeros,
)
from ..axis import name_of
from ..fft import fftfreq as _fftfreq, rfftfreq as _rfftfreq
from ..named_array import raw
from ..sharding import Placement, current_mapping
from ..typing import AxisSelector, NamedOrNumeric
from ._signatures import with_parameters
from .partitioning import auto_sharded, get_pspec_for_manual_mesh
from .util import ensure_tuple
# fmt: on

raw_array_or_scalar = raw
F = TypeVar("F", bound=Callable[..., Any])


def unsharded(fn: F) -> F:
    """Wrap a function so that JAX places the array that it makes, whatever mapping is active."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with axis_mapping({}):
            return fn(*args, **kwargs)

    call.__module__ = sys._getframe(1).f_globals["__name__"]  # where pickle looks it up
    return cast(F, call)


arange, full, ones, zeros = unsharded(_arange), unsharded(_full), unsharded(_ones), unsharded(_zeros)
geomspace, linspace, logspace = unsharded(_geomspace), unsharded(_linspace), unsharded(_logspace)
fftfreq, rfftfreq = unsharded(_fftfreq), unsharded(_rfftfreq)


def argsort(a: NamedArray, axis: AxisSelector | None, *, stable: bool = False) -> Any:
    """Return the positions that sort an axis; without an axis, the positions that sort all elements, as a raw array.

    >>> hax.argsort(hax.named([[3, 1], [2, 0]], ("x", "y")), None)
    Array([3, 1, 2, 0], dtype=int32)
    """
    return jnp.argsort(a.array, axis=None, stable=stable) if axis is None else _argsort(a, axis, stable=stable)


@functools.wraps(_dot, assigned=("__name__", "__qualname__", "__doc__"))
def dot(*arrays: NamedArray | AxisSelector, out_sharding: Placement = None, **kwargs: Any) -> NamedArray:
    if "axis" not in kwargs:
        warnings.warn("dot: `axis` is a keyword argument now.", DeprecationWarning, stacklevel=2)
    elif kwargs["axis"] is not None:
        arrays, kwargs["axis"] = _summed_alone(arrays, [name_of(s) for s in ensure_tuple(kwargs["axis"])])
    return _placed(_dot(*arrays, **kwargs), out_sharding)


def _summed_alone(arrays: Sequence[Any], names: Sequence[str]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Sum over the axes to contract that one of several operands has, and return the others; Axonym refuses them."""
    named = [x for x in arrays if isinstance(x, NamedArray)]
    alone = {n for n in names if sum(n in x.names for x in named) == 1 < len(named)}
    return tuple(
        x.sum(own, dtype=x.dtype) if isinstance(x, NamedArray) and (own := tuple(alone.intersection(x.names))) else x
        for x in arrays
    ), tuple(n for n in names if n not in alone)


def _placed(result: NamedArray, out_sharding: Placement) -> NamedArray:
    """Shard a product: on Explicit mesh axes as the active mapping says, if nothing else does."""
    if out_sharding is None and current_mapping() and any(get_pspec_for_manual_mesh(result.names) or ()):
        return auto_sharded(result)
    return result if out_sharding is None else _shard(result, out_sharding)


def einsum(
    equation: str,
    *arrays: NamedArray,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    _dot_general: Callable[..., jax.Array] | None = jax.lax.dot_general,
    out_sharding: Placement = None,
    **axis_aliases: AxisSelector,
) -> NamedArray:
    """Contract as `axonym.einsum` does; `_dot_general` replaces `jax.lax.dot_general`, `out_sharding` places it.

    A keyword that the equation does not use is a ValueError. After axes in braces, `...` in the output keeps all axes.

    >>> hax.einsum("{a b} -> a", hax.ones({"a": 2, "b": 3})).shape
    {'a': 2}
    """
    options: Any = {"precision": precision, "preferred_element_type": preferred_element_type}
    dot_general = jax.lax.dot_general if _dot_general is None else _dot_general
    options |= {"dot_general": dot_general}
    before, _, after = equation.partition("->") if isinstance(equation, str) else ("", "", "")
    order: tuple[Any, ...] = (...,)
    if before.strip().startswith("{") and "..." in after:
        if unused := [k for k in axis_aliases if not re.search(rf"\b{k}\b", equation)]:
            raise ValueError(f"einsum: {', '.join(unused)} is given by keyword but does not appear in {equation!r}.")
        order, equation, axis_aliases = order_of(after, axis_aliases), "-> ...", {}
        if order.count(...) == 1:  # otherwise it is only layout, and a transpose
            words = [f"a{i}" for i in range(len(order))]
            equation = "-> " + " ".join("..." if s is ... else w for w, s in zip(words, order, strict=True))
            axis_aliases = {w: s for w, s in zip(words, order, strict=True) if s is not ...}
    elif before.strip().startswith("{"):
        words, kept = (
            {w: name_of(axis_aliases[w] if w in axis_aliases else w) for w in re.findall(r"\w+", text)}
            for text in (before, after)
        )
        arrays, names = _summed_alone(arrays, [n for n in words.values() if n not in kept.values()])
        gone = {w for w, n in words.items() if n not in (*kept.values(), *names)}
        equation = re.sub(r"\w+", lambda w: "" if w[0] in gone else w[0], equation)
        axis_aliases = {w: s for w, s in axis_aliases.items() if w not in gone}
    options |= axis_aliases
    try:
        result = _einsum(equation, *arrays, **options)
    except TypeError as error:
        if not isinstance(equation, str):
            raise
        raise ValueError(str(error)) from None
    result = _rearrange(result, order) if order.count(...) > 1 else result
    return _placed(result, out_sharding)


def order_of(output: str, aliases: Mapping[str, AxisSelector]) -> tuple[Any, ...]:
    """Return the axes and ellipses of the output of an expression."""
    return tuple(... if word == "..." else aliases.get(word, word) for word in re.findall(r"\.\.\.|\w+", output))


def allowing_raw(fn: F) -> F:
    """Wrap an operation on two operands: a raw array and a named one without axes give a raw array."""

    @functools.wraps(fn)
    def call(a: Any, b: Any) -> Any:
        if isinstance(a, NamedArray) is not isinstance(b, NamedArray) and (jnp.ndim(raw(a)) or jnp.ndim(raw(b))):
            named = a if isinstance(a, NamedArray) else b
            a, b = (raw(a), raw(b)) if not named.names else (a, b)
        return fn(a, b)

    call.__module__ = sys._getframe(1).f_globals["__name__"]  # where pickle looks it up
    return cast(F, call)


def where(
    condition: NamedOrNumeric,
    x: NamedOrNumeric | None = None,
    y: NamedOrNumeric | None = None,
    fill_value: NamedOrNumeric | None = None,
    new_axis: Axis | None = None,
) -> Any:
    """Choose as `axonym.where` does; the condition alone gives positions. One without axes counts as a scalar.

    >>> hax.where(hax.named(True, ()), -1, 3)
    Array(-1, dtype=int32, weak_type=True)
    """
    if x is None and y is None and fill_value is not None and new_axis is not None:
        return nonzero(cast(NamedArray, condition), size=new_axis, fill_value=fill_value)
    if x is None or y is None or fill_value is not None or new_axis is not None:
        raise ValueError("where: pass either `x` and `y`, or `fill_value` and `new_axis` for a condition alone.")
    return _where(raw(condition) if isinstance(condition, NamedArray) and not condition.names else condition, x, y)


def _with_axes_last(fn: F) -> F:
    """Wrap `tril` or `triu` so that its two axes come last in the result."""

    @functools.wraps(fn)
    def call(array: NamedArray, axis1: AxisSelector, axis2: AxisSelector, k: int = 0) -> NamedArray:
        return _rearrange(fn(array, axis1, axis2, k), (..., axis1, axis2))

    call.__module__ = __name__  # where pickle looks it up
    return cast(F, call)


tril, triu = _with_axes_last(_tril), _with_axes_last(_triu)


def roll(
    array: NamedArray, shift: NamedOrNumeric | Sequence[int], axis: AxisSelector | Sequence[AxisSelector]
) -> NamedArray:
    """Roll as `axonym.roll` does; a shift with axes is a TypeError.

    >>> hax.roll(hax.arange(hax.Axis("x", 3)), 1, "x")
    NamedArray(int32[x=3], [2 0 1])
    """
    if isinstance(shift, NamedArray) and shift.names:
        raise TypeError(f"roll: `shift` is a scalar, got an array with axes {shift.names}.")
    return _roll(array, shift, axis)


def _unique_with(name: str, said: str, *returned: str) -> Callable[..., Any]:
    def call(array: NamedArray, Unique: Axis, *, axis: AxisSelector | None = None, fill_value: Any = None) -> Any:
        return unique(array, Unique, axis=axis, fill_value=fill_value, **dict[str, Any].fromkeys(returned, True))

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"""Return the values of `unique`{said}.

    >>> found = hax.{name}(hax.named([3, 1, 3], "x"), hax.Axis("value", 2))
    """
    return call


unique_values = _unique_with("unique_values", " alone")
unique_counts = _unique_with("unique_counts", ", and how often each is found", "return_counts")
unique_inverse = _unique_with("unique_inverse", ", and where the value of each element is among them", "return_inverse")
unique_all = _unique_with(
    "unique_all",
    ", where each is found first, where each element is among them, and how often",
    *("return_index", "return_inverse", "return_counts"),
)

concatenate = with_parameters(_concatenate, "axis")
stack = with_parameters(_stack, "axis")
