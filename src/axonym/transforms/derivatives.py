"""Derivatives of functions of named arrays: `jax.grad`, Jacobians and Hessians by name."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from ..axis import Names
from ..core import errors
from ..core.tree_spec import StaticLeaf, flatten_arrays
from ..distribution.padded_array import is_padded
from ..named_array import NamedArray, raw, wrap
from ._function_types import ToOtherAndSame, ToSame, ToSameAndOther

P = ParamSpec("P")
R = TypeVar("R")
X = TypeVar("X", bound=Any)
"""The argument to differentiate with respect to. The bound lets the parameter of a lambda be anything."""

ArgNums: TypeAlias = int | Sequence[int]


@overload
def grad(
    fn: Callable[Concatenate[X, P], Any], argnums: Literal[0] = 0, *, has_aux: Literal[False] = False
) -> ToSame[X, P]: ...
@overload
def grad(
    fn: Callable[Concatenate[X, P], tuple[Any, R]], argnums: Literal[0] = 0, *, has_aux: Literal[True]
) -> ToSameAndOther[X, P, R]: ...
@overload
def grad(fn: Callable[P, Any], argnums: ArgNums, *, has_aux: bool = False) -> Callable[P, Any]: ...
@overload
def grad(fn: Callable[P, Any], argnums: ArgNums = 0, *, has_aux: bool) -> Callable[P, Any]: ...
def grad(fn: Callable[..., Any], argnums: ArgNums = 0, *, has_aux: bool = False) -> Callable[..., Any]:
    """Make a function that computes the gradient of another: `jax.grad` by name.

    The function may return a named array without axes. Gradients are taken with respect to all floating-point arrays of
    an argument, which can be any tree, such as a model; the gradient is the same tree, with None in place of everything
    else.

    Arguments:
        fn: the function. It returns a scalar, named or raw.
        argnums: the position of the argument to differentiate with respect to, or several.
        has_aux: whether `fn` returns a pair (scalar, other); the gradient function then returns (gradient, other).

    >>> axn.grad(lambda x: (x * x).sum())(axn.named([1.0, 2.0], "x"))
    NamedArray(float32[x=2], [2. 4.])
    """
    both = value_and_grad(fn, argnums, has_aux=has_aux)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return functools.update_wrapper(gradient, fn, updated=())


@overload
def value_and_grad(
    fn: Callable[Concatenate[X, P], R], argnums: Literal[0] = 0, *, has_aux: bool = False
) -> ToOtherAndSame[X, P, R]: ...
@overload
def value_and_grad(fn: Callable[P, R], argnums: ArgNums, *, has_aux: bool = False) -> Callable[P, tuple[R, Any]]: ...
def value_and_grad(fn: Callable[..., Any], argnums: ArgNums = 0, *, has_aux: bool = False) -> Callable[..., Any]:
    """Make a function that computes the value and the gradient of another: `jax.value_and_grad` by name.

    Arguments:
        fn: the function, as for `grad`. Its value is returned as it is, named or raw.
        argnums: the position of the argument to differentiate with respect to, or several; as for `grad`.
        has_aux: whether `fn` returns a pair (scalar, other); the value is then that pair.

    >>> axn.value_and_grad(lambda x: (x * x).sum())(axn.named([1.0, 2.0], "x"))
    (NamedArray(float32[], 5.), NamedArray(float32[x=2], [2. 4.]))
    """

    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        argument = _Argument("grad", args, argnums)

        def scalar(arrays: Sequence[Any]) -> tuple[Any, Any]:
            result = fn(*argument.filled(arrays), **kwargs)
            if has_aux and not (isinstance(result, tuple) and len(result) == 2):
                raise TypeError(f"grad: with `has_aux`, the function returns a pair, got {type(result).__name__}.")
            return _raw_result(result[0] if has_aux else result), result

        # The result is auxiliary, so that it comes back as the function gave it: named, or in a pair.
        (_, result), gradients = jax.value_and_grad(scalar, has_aux=True)(argument.arrays)
        named = (x if n is None else wrap(x, n) for x, n in zip(gradients, argument.names, strict=True))
        return result, argument.like(named)

    return functools.update_wrapper(value_and_gradient, fn, updated=())


def jacobian(fn: Callable[P, Any], argnums: ArgNums = 0, *, prefix: str = "d_") -> Callable[P, Any]:
    """Make a function that computes the Jacobian of another, by name.

    The Jacobian of a named array with respect to another has the axes of the first, then the axes of the second with a
    prefix before their names. For trees, every array of the result becomes a tree like the argument. Derivatives are
    computed forward, or in reverse if the result has fewer elements than the argument.

    Arguments:
        fn: the function.
        argnums: the position of the argument to differentiate with respect to, or several; as for `grad`.
        prefix: what comes before the names of the axes of the argument.

    >>> axn.jacobian(lambda x: x * x)(axn.named([1.0, 2.0], "x"))
    NamedArray(float32[x=2, d_x=2], [[2. 0.] [0. 4.]])
    """

    def jacobian_of(*args: P.args, **kwargs: P.kwargs) -> Any:
        function: Callable[..., Any] = fn  # it gets traced arrays in place of arguments that P describes
        argument = _Argument("jacobian", args, argnums)
        specs = []

        def arrays_of(arrays: Sequence[Any]) -> list[Any]:
            outputs, spec = flatten_arrays(function(*argument.filled(arrays), **kwargs))
            specs[:] = [spec]
            return outputs

        # Forward mode costs a pass for each element of the argument, reverse mode one for each element of the result.
        results = jax.eval_shape(arrays_of, argument.arrays)
        elements = [sum(math.prod(x.shape) for x in arrays) for arrays in (results, argument.arrays)]
        rows = (jax.jacrev if elements[0] < elements[1] else jax.jacfwd)(arrays_of)(argument.arrays)
        spec = specs[0]
        entries = iter(
            argument.like(_jacobian_entry(x, of, by, prefix) for x, by in zip(row, argument.names, strict=True))
            for row, of in zip(rows, spec.names, strict=True)
        )
        leaves = [None if isinstance(slot, StaticLeaf) else next(entries) for slot in spec.slots]
        return jax.tree.unflatten(spec.structure, leaves)

    return functools.update_wrapper(jacobian_of, fn, updated=())


def hessian(fn: Callable[P, Any], argnums: ArgNums = 0, *, prefix: str = "d_") -> Callable[P, Any]:
    """Make a function that computes the Hessian of another: the Jacobian of its gradient, by name.

    Arguments:
        fn: the function, as for `grad`.
        argnums: the position of the argument to differentiate with respect to, or several; as for `grad`.
        prefix: what comes before the names of the axes that the second derivative adds.

    >>> axn.hessian(lambda x: (x**3).sum())(axn.named([1.0, 2.0], "x"))
    NamedArray(float32[x=2, d_x=2], [[ 6. 0.] [ 0. 12.]])
    """
    return jacobian(grad(fn, argnums), argnums, prefix=prefix)


class _Argument:
    """The arguments of a call, and the arrays among them to differentiate with respect to."""

    def __init__(self, what: str, args: tuple[Any, ...], argnums: ArgNums):
        self._args, self._single = args, not isinstance(argnums, Sequence)
        positions = list(map(operator.index, argnums if isinstance(argnums, Sequence) else [argnums]))
        if wrong := [i for i in positions if not -len(args) <= i < len(args)]:
            raise TypeError(f"{what}: there is no argument {wrong[0]} among {len(args)} positional ones.")
        self._positions = [i % len(args) for i in positions]
        if len(set(self._positions)) < len(positions):
            raise TypeError(f"{what}: `argnums` has an argument twice, {tuple(positions)}.")
        # An argument that is a number can be differentiated, as in `jax.grad`; numbers inside trees are static.
        numbers = (float, complex, np.inexact)
        chosen = [jnp.asarray(a) if isinstance(a, numbers) else a for a in (args[i] for i in self._positions)]
        # The derivative by an array that is stored padded is stored alike: trees are then flattened as in `jax.grad`.
        plain = not any(map(is_padded, jax.tree.leaves(chosen, is_leaf=is_padded)))
        self._all, self._spec = flatten_arrays(chosen, named=plain)
        self._changes = [jnp.issubdtype(x.dtype, jnp.inexact) for x in self._all]
        self.arrays = list(itertools.compress(self._all, self._changes))
        self.names = list(itertools.compress(self._spec.names, self._changes))
        if not self.arrays:
            raise TypeError(
                f"{what}: argument {', '.join(map(str, self._positions))} has no floating-point array to differentiate "
                "with respect to. `argnums` chooses another argument; `.astype(jnp.float32)` casts integers."
            )

    def filled(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the arguments with these arrays in place of the differentiated ones."""
        given = iter(arrays)
        mixed = [next(given) if changes else x for x, changes in zip(self._all, self._changes, strict=True)]
        filled = list(self._args)
        for i, argument in zip(self._positions, self._spec.unflatten(mixed), strict=True):
            filled[i] = argument
        return filled

    def like(self, leaves: Iterable[Any]) -> Any:
        """Return a tree like the chosen arguments, with these leaves in place of the differentiated arrays."""
        given, changes = iter(leaves), iter(self._changes)
        found = []
        for slot in self._spec.slots:
            changed = not isinstance(slot, StaticLeaf) and next(changes)
            # Empty named arrays stay, as `equinox.filter` leaves them, so that the tree matches an optimizer's state.
            found.append(next(given) if changed else wrap(None, slot) if isinstance(slot, tuple) else None)
        tree = jax.tree.unflatten(self._spec.structure, found)
        return tree[0] if self._single else tuple(tree)


def _raw_result(value: Any) -> Any:
    """Convert the result of a function to differentiate to a raw scalar."""
    shape = getattr(value, "shape", None) if not isinstance(value, (int, float, complex)) else ()
    if shape is None or len(shape):
        found = value if isinstance(value, NamedArray) else type(value).__name__ if shape is None else jax.typeof(value)
        raise TypeError(f"grad: the function returns one number, got {found}. Reduce it, as in `.mean()` or `.sum()`.")
    return raw(value)


def _jacobian_entry(x: Any, of: Names | None, by: Names | None, prefix: str) -> Any:
    """Name the axes of the Jacobian of one array with respect to another."""
    if of is None and by is None:
        return x
    if (of is None and x.ndim > len(by or ())) or (by is None and x.ndim > len(of or ())):
        raise TypeError(
            "jacobian: one of the result and the argument is named and the other is a raw array, so the Jacobian would "
            "have axes with and without names. Name the raw one with `axonym.named`."
        )
    names = (*(of or ()), *(prefix + n for n in by or ()))
    if len(set(names)) < len(names):
        raise ValueError(f"{errors.duplicate_names('jacobian', names)} Another `prefix` tells them apart.")
    return wrap(x, names)
