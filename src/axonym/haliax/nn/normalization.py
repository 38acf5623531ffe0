"""Normalization: functions such as `softmax`, and layers whose results have the dtype of their input."""

import jax.numpy as jnp

from ... import logsumexp as _logsumexp
from ...named_array import NamedArray
from ...nn import LayerNorm as _LayerNorm, RmsNorm as _RmsNorm, standardize as _standardize
from ...nn.normalization import *  # noqa: F403  # the same names, but for those below  # pyright: ignore[reportAssignmentType]
from .._signatures import with_parameters as _with_parameters

logsumexp = _with_parameters(_logsumexp, array="a")
standardize = _with_parameters(_standardize, eps="epsilon")


class LayerNorm(_LayerNorm):
    """A layer normalization as in `axonym.nn`, but half precision stays, whatever dtype the scale and the shift have.

    >>> hax.nn.LayerNorm.init(hax.Axis("embed", 2))(hax.ones({"embed": 2}, jnp.bfloat16)).dtype
    dtype(bfloat16)
    """

    def __call__(self, x: NamedArray) -> NamedArray:
        return _like(x, super().__call__(x))


class RmsNorm(_RmsNorm):
    """A root-mean-square normalization as in `axonym.nn`, but half precision stays, as in `LayerNorm`.

    >>> hax.nn.RmsNorm.init(hax.Axis("embed", 2))(hax.ones({"embed": 2}, jnp.bfloat16)).dtype
    dtype(bfloat16)
    """

    def __call__(self, x: NamedArray) -> NamedArray:
        return _like(x, super().__call__(x))


def _like(x: NamedArray, result: NamedArray) -> NamedArray:
    return result.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else result
