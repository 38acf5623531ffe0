"""Normalization: functions such as `softmax`, and layers with a learned scale and shift."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Self, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..axis import Axis, AxisSelection, AxisSelector, AxisSpec, Names, selectors
from ..core import errors
from ..core.named_scope import named_call
from ..named_array import NamedArray, NamedOrNumeric
from ..ops import _kernels
from ..ops._operands import as_float, at_least_float32, one_axis, operand, require_named, require_subset
from ..ops.creation import ones, zeros
from ..ops.elementwise import rsqrt, square
from ..ops.reductions import mean
from ..ops.shaping import flatten_axes, unflatten_axis
from ..state.module import ModuleWithStateDictSerialization
from .linear import static_spec

__all__ = ["GroupNorm", "LayerNorm", "LayerNormBase", "RmsNorm", "log_softmax", "softmax", "standardize"]

# --- functions ---


@_kernels.shared("names", "axis", "where")
def _along_kernel(
    fn: Callable[..., Any], name: str, names: Names, axis: AxisSelection | None, *where: Names
) -> _kernels.Kernel:
    chosen = _kernels.select(name, names, axis)
    positions = tuple(map(names.index, chosen))
    for own in where:
        require_subset(name, "where", own, names)

    def positional(x, *masks):
        masked = {"where": _kernels.align(masks[0], where[0], names)} if masks else {}
        return fn(as_float(x), axis=positions, **masked)

    return _kernels.make_kernel(name, positional, (names, *where), names, dict.fromkeys(chosen, "sum"), selection=axis)


def _normalize_along(fn: Callable[..., Any], name: str, a: Any, axis: AxisSelection | None, where: Any) -> NamedArray:
    names, axis = require_named(name, a).names, _kernels.hashable(axis)
    masks = [] if where is None else [operand(where)]
    kernel = _along_kernel(fn, name, names, axis, *(own for _, own in masks))
    return kernel.apply(a.array, *(mask for mask, _ in masks))


@errors.say_how_to_call
def softmax(a: NamedArray, axis: AxisSelection | None = None, *, where: NamedOrNumeric | None = None) -> NamedArray:
    """Divide the exponential of each element by their sum along some axes.

    Arguments:
        axis: the axes to sum along; all of them by default.
        where: the elements to include, by name; the others become zero.

    >>> axn.nn.softmax(axn.named([[0., 0.], [1., 1.]], ("x", "y")), "y")
    NamedArray(float32[x=2, y=2], [[0.5 0.5] [0.5 0.5]])
    """
    return _normalize_along(jax.nn.softmax, "softmax", a, axis, where)


@errors.say_how_to_call
def log_softmax(a: NamedArray, axis: AxisSelection | None = None, *, where: NamedOrNumeric | None = None) -> NamedArray:
    """Compute the logarithm of `softmax` without overflow. Elements that `where` leaves out become minus infinity.

    >>> axn.nn.log_softmax(axn.named([[0., 0.], [1., 1.]], ("x", "y")), "y")
    NamedArray(float32[x=2, y=2], [[-0.6931 -0.6931] [-0.6931 -0.6931]])
    """
    return _normalize_along(jax.nn.log_softmax, "log_softmax", a, axis, where)


def standardize(
    x: NamedArray,
    axis: AxisSelection,
    *,
    mean: NamedOrNumeric | None = None,
    variance: NamedOrNumeric | None = None,
    eps: float = 1e-5,
    where: NamedOrNumeric | None = None,
) -> NamedArray:
    """Subtract the mean from each element, and divide by the standard deviation, along some axes.

    Arguments:
        axis: the axes to compute mean and variance along.
        mean: the mean to use, by name; by default the mean of `x`.
        variance: the variance to use, by name; by default the mean of the squares less the square of the mean.
        eps: added to the variance, so that nothing is divided by zero.
        where: the elements to include in mean and variance, by name.

    >>> axn.nn.standardize(axn.named([[1., 3.], [2., 6.]], ("x", "y")), "y", eps=0)
    NamedArray(float32[x=2, y=2], [[-1. 1.] [-1. 1.]])
    """
    given = {"mean": mean, "variance": variance, "where": where}
    labels = tuple(label for label, value in given.items() if value is not None)
    arrays, all_names = zip(operand(require_named("standardize", x)), *(operand(given[n]) for n in labels), strict=True)
    kernel = _standardize_kernel(all_names, labels, _kernels.hashable(axis))
    return kernel.apply(*arrays, eps)


@_kernels.shared("all_names", "axis")
def _standardize_kernel(all_names: tuple[Names, ...], labels: tuple[str, ...], axis: AxisSelection) -> _kernels.Kernel:
    names = all_names[0]
    positions = tuple(names.index(n) for n in _kernels.select("standardize", names, axis))
    for label, own in zip(labels, all_names[1:], strict=True):
        require_subset("standardize", label, own, names)

    def positional(x, *rest):
        *arrays, eps = rest
        aligned = [_kernels.align(a, own, names) for a, own in zip(arrays, all_names[1:], strict=True)]
        x = as_float(x)
        wide = at_least_float32(x)  # squares overflow in float16
        result = jax.nn.standardize(wide, positions, epsilon=eps, **dict(zip(labels, aligned, strict=True)))
        return result.astype(jnp.result_type(x, *aligned))

    return _kernels.make_kernel("standardize", positional, (*all_names, ()), names, selection=axis)


# --- layers ---


@errors.say_how_to_make
class LayerNormBase(ModuleWithStateDictSerialization):
    """The base class of normalization layers: axes, and a scale and shift along them. Subclasses define `__call__`.

    Arguments:
        axis: the axes to normalize along, one or several.
        weight: the scale, with these axes, or None.
        bias: the shift, with these axes, or None.
        eps: added to the variance or mean square, to avoid division by zero.
        dtype: the dtype to normalize in; by default the input's, but at least float32. The result is cast back to
            the dtype of the input before it is scaled and shifted.

    >>> class Scale(axn.nn.normalization.LayerNormBase):
    ...     def __call__(self, x):
    ...         return x * self.weight
    >>> Scale.init(axn.Axis("embed", 2))(axn.arange({"embed": 2}))
    NamedArray(float32[embed=2], [0. 1.])
    """

    axis: AxisSpec = eqx.field(static=True)
    weight: NamedArray | None
    bias: NamedArray | None
    eps: float = eqx.field(default=1e-5, static=True)
    dtype: Any = eqx.field(default=None, static=True)

    @classmethod
    def init(
        cls,
        axis: AxisSpec,
        eps: float = 1e-5,
        *,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
    ) -> Self:
        """Make a layer with a scale of one and a shift of zero. `axis`, `eps` and `dtype` are the fields of the layer.

        Arguments:
            use_bias: whether there is a learned shift. True by default for `RmsNorm`, too, which has none in PyTorch
                or in most models: pass False for that.

        >>> axn.nn.LayerNorm.init(axn.Axis("embed", 4), use_bias=False).weight.shape
        {'embed': 4}
        """
        axis = static_spec(axis, cls.__name__)
        return cls(axis, ones(axis) if use_weight else None, zeros(axis) if use_bias else None, eps, dtype)

    def _export_axes(self) -> dict[str, dict[str, AxisSpec]]:
        return {"axis": {"weight": self.axis, "bias": self.axis}}

    @abc.abstractmethod
    def __call__(self, x: NamedArray) -> NamedArray:
        """Normalize an array with the axes of the layer, and scale and shift the result."""

    def _apply(self, normalize: Callable[[NamedArray], NamedArray], x: NamedArray) -> NamedArray:
        dtype = require_named(type(self).__name__, x).dtype
        # In half precision, squares of large numbers overflow, and means of many elements are inexact.
        wide = jnp.promote_types(dtype, jnp.float32) if self.dtype is None else self.dtype
        x = normalize(x.astype(wide))
        x = x.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else x
        if self.weight is not None:
            x = x * self.weight
        return x if self.bias is None else x + self.bias


@errors.say_how_to_make
class LayerNorm(LayerNormBase):
    """Layer normalization: subtract the mean, divide by the standard deviation, then scale and shift.

    The fields are as in `LayerNormBase`.

    >>> layer = axn.nn.LayerNorm.init(axn.Axis("embed", 2))
    >>> layer(axn.named([[1., 3.], [2., 6.]], ("batch", "embed")))
    NamedArray(float32[batch=2, embed=2], [[-1. 1.] [-1. 1.]])
    """

    @named_call
    def __call__(self, x: NamedArray) -> NamedArray:
        def normalize(x: NamedArray) -> NamedArray:
            x = x - mean(x, self.axis)
            return x * rsqrt(_mean_square(x, self.axis) + self.eps)

        return self._apply(normalize, x)


@errors.say_how_to_make
class RmsNorm(LayerNormBase):
    """Root-mean-square normalization: divide by the root of the mean square, then scale and shift.

    The fields are as in `LayerNormBase`.

    >>> layer = axn.nn.RmsNorm.init(axn.Axis("embed", 2), use_bias=False)
    >>> layer(axn.named([[1., 1.], [-2., 2.]], ("batch", "embed")))
    NamedArray(float32[batch=2, embed=2], [[ 1. 1.] [-1. 1.]])
    """

    @named_call
    def __call__(self, x: NamedArray) -> NamedArray:
        return self._apply(lambda x: x * rsqrt(_mean_square(x, self.axis) + self.eps), x)


@errors.say_how_to_make
class GroupNorm(LayerNormBase):
    """Group normalization: normalize each group of channels together with the axes of space, then scale and shift.

    With as many groups as channels, it is instance normalization.

    Arguments:
        axis: the axis of the channels; consecutive ones form a group.
        weight, bias, eps, dtype: as in `LayerNormBase`.
        groups: the number of groups.
        Spatial: the other axes to normalize along. All remaining axes are batch axes.

    >>> layer = axn.nn.GroupNorm.init(axn.Axis("channels", 4), 2, ())
    >>> layer(axn.named([1., 3., 20., 60.], "channels"))
    NamedArray(float32[channels=4], [-1. 1. -1. 1.])
    """

    groups: int = eqx.field(default=1, static=True)
    Spatial: tuple[AxisSelector, ...] = eqx.field(default=(), static=True, converter=selectors)

    @classmethod
    def init(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        axis: Axis,
        groups: int,
        Spatial: AxisSelection,
        eps: float = 1e-5,
        *,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: Any = None,
    ) -> Self:
        """Make a layer with a scale of one and a shift of zero. The arguments are the fields of the layer.

        Arguments:
            Spatial: the spatial axes, such as `("height", "width")`; `()` if there are none.

        >>> axn.nn.GroupNorm.init(axn.Axis("channels", 4), 2, ("height", "width")).weight.shape
        {'channels': 4}
        """
        axis = one_axis("GroupNorm", "axis", axis)
        if groups < 1 or axis.size % groups:
            raise ValueError(f"GroupNorm: axis {axis.name!r} of size {axis.size} has no {groups} groups of one size.")
        weight, bias = ones(axis) if use_weight else None, zeros(axis) if use_bias else None
        return cls(axis, weight, bias, eps, dtype, groups, Spatial)  # pyright: ignore[reportArgumentType]

    @named_call
    def __call__(self, x: NamedArray) -> NamedArray:
        axis = cast(Axis, self.axis)
        channels, size = axis.name, axis.size // self.groups  # inside `shard_map`, a device may have some of the groups
        group, member = f"groups of {channels}", f"{channels} of a group"

        def normalize(x: NamedArray) -> NamedArray:
            if x.axis_size(channels) % size:
                raise ValueError(
                    f"GroupNorm: a shard of axis {channels!r} has {x.axis_size(channels)} channels, which is no "
                    f"multiple of the {size} channels of a group. Shard the axis over fewer devices."
                )
            x = unflatten_axis(x, channels, {group: x.axis_size(channels) // size, member: size})
            along = (member, *self.Spatial)
            x = x - mean(x, along)
            return flatten_axes(x * rsqrt(_mean_square(x, along) + self.eps), (group, member), channels)

        return self._apply(normalize, x)


def _mean_square(x: NamedArray, axis: AxisSelection) -> NamedArray:
    return mean(square(abs(x) if jnp.iscomplexobj(x.array) else x), axis)
