"""Dropout: set elements to zero at random during training."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer

from ..axis import AxisSelection, Names
from ..core import errors
from ..core.named_scope import named_call
from ..named_array import NamedArray, NamedOrNumeric
from ..ops import _kernels
from ..ops._operands import at_least_float32, require_named, scalar
from ..ops.creation import zeros_like
from ..ops.selection import where
from ..random._draw import one_key


@errors.say_how_to_call
def dropout(
    x: NamedArray,
    pdrop: NamedOrNumeric,
    broadcast_axes: AxisSelection | None = None,
    *,
    inference: NamedOrNumeric,
    key: jax.Array | None = None,
) -> NamedArray:
    """Set randomly chosen elements to zero, and scale the others to keep the mean.

    Arguments:
        pdrop: the probability that an element is dropped.
        broadcast_axes: the axes along which elements are dropped together.
        inference: whether to return the array unchanged instead.
        key: a random key; not needed if nothing is dropped.

    >>> x = axn.ones({"batch": 2, "embed": 3})
    >>> axn.nn.dropout(x, 0.5, "embed", inference=False, key=jax.random.key(1))
    NamedArray(float32[batch=2, embed=3], [[2. 2. 2.] [0. 0. 0.]])
    """
    require_named("dropout", x)
    fixed = isinstance(pdrop, (int, float))
    if fixed and not 0 <= pdrop <= 1:
        raise ValueError(f"dropout: `pdrop` is a probability, between 0 and 1, got {pdrop}.")
    decided = not isinstance(inference, Tracer)
    if (decided and inference) or (fixed and pdrop == 0):
        return x
    if key is None:
        raise RuntimeError(
            "dropout: a random key is needed to choose the elements to drop: pass `key`, or `inference=True` to drop "
            "none."
        )
    if fixed and pdrop == 1:
        dropped = zeros_like(x)  # all elements are dropped, so there are none to scale
    else:
        one = one_key("dropout", key)
        keep = 1 - scalar("dropout", "pdrop", pdrop)
        kernel = _dropout_kernel(x.names, _kernels.hashable(broadcast_axes), one.ndim, fixed)
        dropped = kernel.apply(x.array, one, keep)
    return dropped if decided else where(inference, x, dropped)


@_kernels.shared("names", "broadcast_axes")
def _dropout_kernel(names: Names, broadcast_axes: AxisSelection | None, key_rank: int, fixed: bool) -> _kernels.Kernel:
    together = () if broadcast_axes is None else _kernels.select("dropout", names, broadcast_axes)

    def positional(x, key, keep):
        shape = [1 if n in together else size for n, size in zip(names, x.shape, strict=True)]
        kept = jnp.broadcast_to(jax.random.bernoulli(key, at_least_float32(keep), shape), x.shape)
        if not fixed:
            keep = jnp.where(keep > 0, keep, 1)  # the gradient of a division by zero is NaN, even where it is not used
        return jnp.where(kept, x / keep, 0)

    key_names = ("words of the key",)[:key_rank]  # an old-style key is an array of numbers
    return _kernels.make_kernel("dropout", positional, (names, key_names, ()), names, selection=broadcast_axes)


@errors.say_how_to_make
class Dropout(eqx.Module):
    """A layer that drops elements during training, and does nothing in inference.

    `equinox.nn.inference_mode` switches all such layers of a model. For that, `inference` is a leaf of the tree, which
    `axonym.named_jit` treats as static. Under plain `jax.jit` it is traced, and the program computes both results and
    selects one.

    Arguments:
        pdrop, broadcast_axes: as in `dropout`.
        inference: whether the layer does nothing.

    >>> layer = axn.nn.Dropout(0.5)
    >>> layer(axn.ones({"embed": 4}), key=jax.random.key(0))
    NamedArray(float32[embed=4], [0. 0. 2. 2.])
    >>> layer(axn.ones({"embed": 4}), inference=True)
    NamedArray(float32[embed=4], [1. 1. 1. 1.])
    """

    init = errors.NoInit("Dropout(0.1)")

    pdrop: float = eqx.field(static=True, default=0.5)
    broadcast_axes: AxisSelection | None = eqx.field(static=True, default=None, converter=_kernels.hashable)
    inference: bool = False

    @property
    def is_active(self) -> bool:
        """Return whether the layer drops any elements.

        >>> axn.nn.Dropout(0.5).is_active, axn.nn.Dropout(0.0).is_active, axn.nn.Dropout(inference=True).is_active
        (True, False, False)
        """
        return not self.inference and self.pdrop > 0

    @named_call
    def __call__(self, x: NamedArray, *, inference: bool | None = None, key: jax.Array | None = None) -> NamedArray:
        """Set randomly chosen elements to zero; `inference` overrides the layer's setting."""
        inference = self.inference if inference is None else inference
        return dropout(x, self.pdrop, self.broadcast_axes, inference=inference, key=key)
