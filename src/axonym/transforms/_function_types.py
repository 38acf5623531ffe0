"""The types of the functions that transforms return: what comes back has the type of the first argument.

That is the carry of a loop, or the argument that a gradient is taken with respect to. A checker takes its type from the
function that is transformed, so that a call with another type is an error. It does not know the parameters of a lambda,
and accepts them as `_OfLambda`, which no argument is: then it takes the type from the call, unless that passes a
number, which comes back as an array.
"""

from __future__ import annotations

from typing import Any, ParamSpec, Protocol, TypeVar, overload

X = TypeVar("X")
Y = TypeVar("Y")
P = ParamSpec("P")
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)


class _OfLambda: ...


class _Function(Protocol):
    @property
    def __name__(self) -> str: ...


class ToSame(_Function, Protocol[X, P]):  # pyright: ignore[reportInvalidTypeVarUse]
    """From a value and other arguments to another value of its type."""

    @overload
    def __call__(self: ToSame[_OfLambda, Q], x: complex, /, *args: Q.args, **kwargs: Q.kwargs) -> Any: ...
    @overload
    def __call__(self: ToSame[_OfLambda, Q], x: Y, /, *args: Q.args, **kwargs: Q.kwargs) -> Y: ...
    @overload
    def __call__(self, x: X, /, *args: P.args, **kwargs: P.kwargs) -> X: ...


class ToSameAndOther(_Function, Protocol[X, P, R_co]):  # pyright: ignore[reportInvalidTypeVarUse]
    """From a value and other arguments to another value of its type, and something else."""

    @overload
    def __call__(
        self: ToSameAndOther[_OfLambda, Q, R_co], x: complex, /, *args: Q.args, **kwargs: Q.kwargs
    ) -> tuple[Any, R_co]: ...
    @overload
    def __call__(
        self: ToSameAndOther[_OfLambda, Q, R_co], x: Y, /, *args: Q.args, **kwargs: Q.kwargs
    ) -> tuple[Y, R_co]: ...
    @overload
    def __call__(self, x: X, /, *args: P.args, **kwargs: P.kwargs) -> tuple[X, R_co]: ...


class ToOtherAndSame(_Function, Protocol[X, P, R_co]):  # pyright: ignore[reportInvalidTypeVarUse]
    """From a value and other arguments to something else, and another value of its type."""

    @overload
    def __call__(
        self: ToOtherAndSame[_OfLambda, Q, R_co], x: complex, /, *args: Q.args, **kwargs: Q.kwargs
    ) -> tuple[R_co, Any]: ...
    @overload
    def __call__(
        self: ToOtherAndSame[_OfLambda, Q, R_co], x: Y, /, *args: Q.args, **kwargs: Q.kwargs
    ) -> tuple[R_co, Y]: ...
    @overload
    def __call__(self, x: X, /, *args: P.args, **kwargs: P.kwargs) -> tuple[R_co, X]: ...
