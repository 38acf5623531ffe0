"""Reductions: one row each.

A reduction removes one, several or (by default) all axes. `where` selects the elements that take part; it broadcasts by
name to the array. A cumulative operation runs along one axis and keeps it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..axis import AxisSelector, Names
from ..core import errors
from ..named_array import NamedArray
from . import _kernels, _prefixes
from ._blocks import kernel_of_blocks, running_kernel
from ._op_types import (
    F,
    arg_reduction,
    cumulative,
    map_tree,
    publish,
    reduction,
    spread_reduction,
    typed_reduction,
)
from ._operands import (
    apply_along,
    at_least_float32,
    dtype_key,
    extreme,
    operand,
    require_named,
    require_subset,
    static_number,
)


@_kernels.shared("names", "axis", "where")
def _reduction_kernel(
    fn: Callable[..., Any], name: str, names: Names, axis: Any, where: Names | None, use: str, options: Any
) -> _kernels.Kernel:
    reduced = _kernels.select(name, names, axis)
    out_names = tuple(n for n in names if n not in reduced)
    positions = tuple(names.index(n) for n in reduced)
    keywords, uses = dict(options), dict.fromkeys(reduced, use)
    if where is None:
        return _kernels.make_kernel(
            name, lambda x: fn(x, axis=positions, **keywords), (names,), out_names, uses, selection=axis
        )
    require_subset(name, "where", where, names)

    def masked(x, mask):
        return fn(x, axis=positions, where=_kernels.align(mask, where, names), **keywords)

    return _kernels.make_kernel(name, masked, (names, where), out_names, uses, selection=axis)


def _reduce_leaf(fn: Callable[..., Any], name: str, array: Any, axis: Any, where: Any, use: str, options: Any) -> Any:
    if not isinstance(array, NamedArray):
        if axis is None and where is None:
            return fn(array, **dict(options))
        raise TypeError(
            f"{name}: expected a NamedArray, got {type(array).__name__}; only its axes have names.{errors.HOW_TO_NAME}"
        )
    axis = _kernels.hashable(axis)
    if where is None:
        kernel = _reduction_kernel(fn, name, array.names, axis, None, use, options)
        return kernel.apply(array.array)
    where, where_names = operand(where)
    return _reduction_kernel(fn, name, array.names, axis, where_names, use, options).apply(array.array, where)


def _static_options(op: Callable[..., Any], known: Sequence[str], array: Any, given: Mapping[str, Any]) -> Any:
    """Return the options of a reduction as part of a cache key; for keywords of NumPy and PyTorch, raise an error."""
    if unknown := {n: x for n, x in given.items() if n not in known}:
        from ..core import foreign_names

        error = f"{op.__name__}() got an unexpected keyword argument {next(iter(unknown))!r}"
        raise TypeError(foreign_names.in_call(op, error, [array], unknown))
    found = {n: dtype_key(x) if n == "dtype" else static_number(op.__name__, n, x) for n, x in given.items()}
    return tuple((n, found[n]) for n in known if found.get(n) is not None)


_OPTIONS = {"ddof": "the number to subtract from the count.", "dtype": "the dtype to compute in."}


def _make_reduction(
    like: F, name: str, fn: Callable[..., Any], summary: str, example: str, shown: str, use: str = "sum"
) -> F:
    parameters = inspect.signature(like).parameters
    known = [option for option in _OPTIONS if option in parameters]

    def op(array, axis=None, *, where=None, **options):
        static = _static_options(op, known, array, options) if options else ()
        if not isinstance(array, NamedArray):
            return map_tree(lambda leaf: _reduce_leaf(fn, name, leaf, axis, where, use, static), array)
        return _reduce_leaf(fn, name, array, axis, where, use, static)

    op.__signature__ = inspect.Signature([p.replace(annotation=p.empty) for p in parameters.values()])
    doc = f"""{summary}

    Arguments:
        array: a named array, or a tree of them.
        axis: the axes to reduce; all of them by default.
        where: which elements take part, by name.{"".join(f"{chr(10)}        {n}: {_OPTIONS[n]}" for n in known)}

    >>> axn.{name}(axn.named({example}, ("x", "y")), "y")
    NamedArray({shown})
    """
    return publish(op, name, __name__, doc)


# --- positional functions that JAX lacks, or whose masks need care ---


def _of_truth(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Compare complex numbers with 0 first: `jnp.all` and `jnp.any` look at the real parts alone."""

    def reduced(x: Any, axis: Any = None, where: Any = None) -> jax.Array:
        is_complex = jnp.issubdtype(jnp.result_type(x), jnp.complexfloating)
        return fn(jnp.not_equal(x, 0) if is_complex else x, axis=axis, where=where)

    return reduced


def _max(x: Any, axis: Any = None, where: Any = None) -> jax.Array:
    return jnp.max(x, axis=axis, where=where, initial=None if where is None else extreme(x.dtype, largest=False))


def _min(x: Any, axis: Any = None, where: Any = None) -> jax.Array:
    return jnp.min(x, axis=axis, where=where, initial=None if where is None else extreme(x.dtype, largest=True))


def _ptp(x: Any, axis: Any = None, where: Any = None) -> jax.Array:
    return _max(x, axis, where) - _min(x, axis, where)


def _without_nan(fn: Callable[..., Any], of_integers: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose result is NaN if all elements are masked."""

    def reduced(x: Any, axis: Any = None, where: Any = None) -> jax.Array:
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return of_integers(x, axis, where)
        return fn(x if where is None else jnp.where(where, x, jnp.nan), axis=axis)

    return reduced


def _wide(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Compute small floats in float32 unless a dtype is given: in float16, counts, sums and variances overflow."""

    def computed(x: Any, axis: Any = None, **options: Any) -> jax.Array:
        dtype = jnp.result_type(x)
        if options.get("dtype") is not None or not jnp.issubdtype(dtype, jnp.floating):
            return fn(x, axis=axis, **options)
        return fn(at_least_float32(x), axis=axis, **options).astype(dtype)

    return computed


# fmt: off
all = _make_reduction(reduction, "all", _of_truth(jnp.all), "Return whether every element is true.", "[[True, False], [True, True]]", "bool[x=2], [False True]", use="and")
any = _make_reduction(reduction, "any", _of_truth(jnp.any), "Return whether any element is true.", "[[True, False], [False, False]]", "bool[x=2], [ True False]", use="or")
max = _make_reduction(reduction, "max", _max, "Return the largest element.", "[[1, 2], [3, 4]]", "int32[x=2], [2 4]", use="max")
min = _make_reduction(reduction, "min", _min, "Return the smallest element.", "[[1, 2], [3, 4]]", "int32[x=2], [1 3]", use="min")
ptp = _make_reduction(reduction, "ptp", _ptp, "Compute the range: the largest element minus the smallest.", "[[1, 3], [3, 9]]", "int32[x=2], [2 6]", use="max")
nanmax = _make_reduction(reduction, "nanmax", _without_nan(jnp.nanmax, _max), "Return the largest element that is not NaN.", "[[1., jnp.nan], [3., 4.]]", "float32[x=2], [1. 4.]", use="max")
nanmin = _make_reduction(reduction, "nanmin", _without_nan(jnp.nanmin, _min), "Return the smallest element that is not NaN.", "[[1., jnp.nan], [3., 4.]]", "float32[x=2], [1. 3.]", use="min")

mean = _make_reduction(typed_reduction, "mean", jnp.mean, "Compute the mean.", "[[1., 2.], [3., 4.]]", "float32[x=2], [1.5 3.5]")
nanmean = _make_reduction(typed_reduction, "nanmean", _wide(jnp.nanmean), "Compute the mean of the elements that are not NaN.", "[[1., jnp.nan], [3., 4.]]", "float32[x=2], [1. 3.5]")
nanprod = _make_reduction(typed_reduction, "nanprod", jnp.nanprod, "Compute the product of the elements that are not NaN.", "[[2., jnp.nan], [3., 4.]]", "float32[x=2], [ 2. 12.]", use="prod")
nansum = _make_reduction(typed_reduction, "nansum", jnp.nansum, "Compute the sum of the elements that are not NaN.", "[[1., jnp.nan], [3., 4.]]", "float32[x=2], [1. 7.]")
# The gradient of a product reshapes, for which Explicit axes need an output sharding.
prod = _make_reduction(typed_reduction, "prod", jnp.prod, "Compute the product.", "[[1, 2], [3, 4]]", "int32[x=2], [ 2 12]", use="prod")
sum = _make_reduction(typed_reduction, "sum", jnp.sum, "Compute the sum.", "[[1, 2], [3, 4]]", "int32[x=2], [3 7]")

nanstd = _make_reduction(spread_reduction, "nanstd", _wide(jnp.nanstd), "Compute the standard deviation of the elements that are not NaN.", "[[1., jnp.nan], [3., 5.]]", "float32[x=2], [0. 1.]")
nanvar = _make_reduction(spread_reduction, "nanvar", _wide(jnp.nanvar), "Compute the variance of the elements that are not NaN.", "[[1., jnp.nan], [3., 5.]]", "float32[x=2], [0. 1.]")
std = _make_reduction(spread_reduction, "std", _wide(jnp.std), "Compute the standard deviation.", "[[1., 5.], [3., 5.]]", "float32[x=2], [2. 1.]")
var = _make_reduction(spread_reduction, "var", jnp.var, "Compute the variance.", "[[1., 5.], [3., 5.]]", "float32[x=2], [4. 1.]")
logsumexp = _make_reduction(reduction, "logsumexp", jax.nn.logsumexp, "Compute the logarithm of the sum of the exponentials without overflow.", "[[0., 0.], [1., 1.]]", "float32[x=2], [0.6931 1.6931]")
# fmt: on


# --- the index of an element ---


@_kernels.shared("names", "axis")
def _arg_kernel(fn: Callable[..., Any], name: str, names: Names, axis: Any) -> _kernels.Kernel:
    if axis is None:
        return _kernels.make_kernel(name, lambda x: fn(x.reshape(-1), axis=0), (names,), ())
    chosen = _kernels.select_one(name, names, axis)
    position = names.index(chosen)
    out_names = tuple(n for n in names if n != chosen)
    return _kernels.make_kernel(
        name, lambda x: fn(x, axis=position), (names,), out_names, {chosen: "index of"}, selection=axis
    )


def _make_arg_reduction(like: F, name: str, fn: Callable[..., Any], summary: str, example: str, shown: str) -> F:
    def op(array, axis: AxisSelector | None = None):
        kernel = _arg_kernel(fn, name, require_named(name, array).names, _kernels.one_selector(name, axis))
        return kernel.apply(array.array)

    doc = f"""{summary}

    Arguments:
        axis: the axis to search; by default all axes, and the result is an index into the flattened array.

    >>> axn.{name}(axn.named({example}, ("x", "y")), "y")
    NamedArray({shown})
    """
    return errors.say_how_to_call(publish(op, name, __name__, doc))


# fmt: off
argmax = _make_arg_reduction(arg_reduction, "argmax", jnp.argmax, "Return the index of the largest element.", "[[1, 2], [4, 3]]", "int32[x=2], [1 0]")
argmin = _make_arg_reduction(arg_reduction, "argmin", jnp.argmin, "Return the index of the smallest element.", "[[1, 2], [4, 3]]", "int32[x=2], [0 1]")
nanargmax = _make_arg_reduction(arg_reduction, "nanargmax", jnp.nanargmax, "Return the index of the largest element that is not NaN.", "[[1., jnp.nan], [4., 3.]]", "int32[x=2], [0 0]")
nanargmin = _make_arg_reduction(arg_reduction, "nanargmin", jnp.nanargmin, "Return the index of the smallest element that is not NaN.", "[[1., jnp.nan], [4., 3.]]", "int32[x=2], [0 1]")
# fmt: on


# --- along an axis ---


def _make_cumulative(
    like: F, name: str, fn: Callable[..., Any], of_totals: Any, combine: Any, summary: str, example: str, shown: str
) -> F:
    def op(a, axis: AxisSelector, dtype=None):
        dtype = dtype_key(dtype)
        kernel = kernel_of_blocks(running_kernel, name, require_named(name, a), axis, fn, of_totals, combine, dtype)
        return apply_along(fn, name, a, axis, dtype=dtype) if kernel is None else kernel.apply(a.array)

    doc = f"""{summary}

    Arguments:
        axis: the axis to run along.
        dtype: the dtype to compute in.

    >>> axn.{name}(axn.named({example}, "x"), "x")
    NamedArray({shown})
    """
    return errors.say_how_to_call(publish(op, name, __name__, doc))


# fmt: off
cumsum = _make_cumulative(cumulative, "cumsum", jnp.cumsum, jnp.cumsum, jnp.add, "Compute the running sum.", "[1, 2, 3]", "int32[x=3], [1 3 6]")
cumprod = _make_cumulative(cumulative, "cumprod", _prefixes.cumprod, _prefixes.cumprod, jnp.multiply, "Compute the running product.", "[1, 2, 3]", "int32[x=3], [1 2 6]")
nancumsum = _make_cumulative(cumulative, "nancumsum", jnp.nancumsum, jnp.cumsum, jnp.add, "Compute the running sum, with NaN as zero.", "[1., jnp.nan, 3.]", "float32[x=3], [1. 1. 4.]")
nancumprod = _make_cumulative(cumulative, "nancumprod", _prefixes.nancumprod, _prefixes.cumprod, jnp.multiply, "Compute the running product, with NaN as one.", "[2., jnp.nan, 3.]", "float32[x=3], [2. 2. 6.]")
# fmt: on
