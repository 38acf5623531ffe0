"""The interface of replacements for `jax.lax.dot_general`, which `axonym.dot` and `axonym.nn.Linear` take."""

from __future__ import annotations

from typing import Any, Protocol

import equinox as eqx
import jax

__all__ = ["DefaultDotGeneralOp", "DotGeneralOp"]


class DotGeneralOp(Protocol):
    """The call signature of a replacement for `jax.lax.dot_general`. Make it a module if it holds arrays.

    >>> op: axn.quantization.DotGeneralOp = axn.quantization.DefaultDotGeneralOp()
    >>> op(jnp.ones((1, 2)), jnp.ones((2, 1)), (((1,), (0,)), ((), ())))
    Array([[2.]], dtype=float32)
    """

    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
    ) -> jax.Array: ...

    @staticmethod
    def default() -> DefaultDotGeneralOp:
        """Return the operation of layers that are not quantised.

        >>> axn.quantization.DotGeneralOp.default()
        DefaultDotGeneralOp()
        """
        return DefaultDotGeneralOp()


class DefaultDotGeneralOp(eqx.Module):
    """`jax.lax.dot_general` itself.

    >>> axn.dot(axn.ones({"x": 2}), axn.ones({"x": 2}), axis="x", dot_general=axn.quantization.DefaultDotGeneralOp())
    NamedArray(float32[], 2.)
    """

    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
    ) -> jax.Array:
        return jax.lax.dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type)

    @staticmethod
    def init() -> DefaultDotGeneralOp:
        """Make the operation.

        >>> axn.quantization.DefaultDotGeneralOp.init()
        DefaultDotGeneralOp()
        """
        return DefaultDotGeneralOp()
