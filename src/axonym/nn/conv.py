"""Convolutional layers: `Conv` and `ConvTranspose`, along any number of axes.

The spatial axes and the axis of channels are given by name. All other axes of the input are batch axes, in any number
and at any position. The result has the axes of the input in the same order, with `Out` in place of `In`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .. import random
from ..axis import Axis, AxisSelection, AxisSelector, AxisSpec, Names, name_of, selectors
from ..core import errors
from ..distribution import fsdp_ops
from ..named_array import NamedArray, is_jax_array_like
from ..ops import _kernels
from ..ops._operands import distinct, one_axis, private, require_named
from ..ops.joining import flip
from ..ops.rearranging import rearrange
from ..ops.shaping import flatten_axes, rename, unflatten_axis
from ..state.module import ModuleWithStateDictSerialization
from ._convolution import Known, Parameters, apply_convolution, known_shardings
from ._window_arguments import Padding, PaddingSpec, Pair, PerAxis, check_spans, parse_padding, per_axis
from .linear import stored_inputs

__all__ = ["Conv", "ConvTranspose"]


class _Convolution(ModuleWithStateDictSerialization):
    """The base class of the two layers."""

    Spatial: tuple[AxisSelector, ...] = eqx.field(static=True, converter=selectors)
    In: Axis = eqx.field(static=True)
    Out: Axis = eqx.field(static=True)
    weight: NamedArray
    bias: NamedArray | None
    kernel_size: tuple[int, ...] = eqx.field(static=True)
    stride: tuple[int, ...] = eqx.field(static=True)
    padding: Padding = eqx.field(static=True)

    @abc.abstractmethod
    def _parameters(self) -> Parameters: ...

    def __call__(self, inputs: NamedArray, *, key: jax.Array | None = None) -> NamedArray:
        """Apply the layer to an array with the axes `Spatial` and `In`; `key` is not used."""
        what = type(self).__name__
        require_named(what, inputs)
        spatial, channels = tuple(map(name_of, self.Spatial)), (self.In.name, self.Out.name)
        with jax.named_scope(what):
            x, weight = inputs.array, self.weight.array
            known = known_shardings(x, weight)
            of = self._parameters()
            kernel = _convolution_kernel(what, inputs.names, self.weight.names, spatial, channels, of, known)
            result = kernel.apply(x, weight)
            return result if self.bias is None else result + self.bias


@errors.say_how_to_make
class Conv(_Convolution):
    """A convolution along some axes: a learned product with every window of the input.

    As usual in machine learning, this is a correlation: the weight is not flipped. The weight has the axes of the
    output channels, of the input channels of one group, and the spatial axes with the sizes of the kernel. If `In` and
    `Out` have one name, the weight stores the axis of the input under another name, as in `Linear`.

    The fields besides `weight` and `bias` are the arguments of `init`, with a value for each axis.

    >>> H, W, In, Out = axn.make_axes(height=8, width=8, channels=3, features=4)
    >>> layer = axn.nn.Conv.init((H, W), In, Out, kernel_size=3, key=jax.random.key(0))
    >>> print(layer.weight)
    float32[features=4, channels=3, height=3, width=3]
    >>> print(layer(axn.ones({"batch": 2, "channels": 3, "height": 8, "width": 8})))
    float32[batch=2, features=4, height=6, width=6]
    """

    dilation: tuple[int, ...] = eqx.field(static=True)
    groups: int = eqx.field(static=True)

    @staticmethod
    def init(
        Spatial: AxisSelection,
        In: AxisSpec,
        Out: AxisSpec,
        kernel_size: PerAxis,
        *,
        stride: PerAxis = 1,
        padding: PaddingSpec = 0,
        dilation: PerAxis = 1,
        groups: int = 1,
        use_bias: bool = True,
        key: jax.Array,
    ) -> Conv:
        """Make a layer with random weights and bias, uniform up to 1 / sqrt(number of inputs to one output).

        Sizes are given as an integer for all axes, a sequence with one for each, or a mapping by name.

        Arguments:
            Spatial: the axes to convolve along. Only their names matter.
            kernel_size: the size of the kernel.
            stride: the step between windows.
            padding: zeros around the input: an integer, or for each axis an integer or a pair, before and after; or
                "SAME" or "VALID", as in `jax.lax`.
            dilation: the distance between the input elements of a window.
            groups: the number of groups of channels. Each group of outputs depends on one group of inputs.

        >>> In, Out = axn.make_axes(channels=4, features=6)
        >>> layer = axn.nn.Conv.init("time", In, Out, 3, padding="SAME", groups=2, key=jax.random.key(0))
        >>> layer.weight.shape, layer.bias.shape
        ({'features': 6, 'channels': 2, 'time': 3}, {'features': 6})
        """
        return Conv(
            **_init_fields("Conv", Spatial, In, Out, kernel_size, stride, padding, dilation, groups, use_bias, key)
        )

    def _parameters(self) -> Parameters:
        return Parameters(self.stride, (1,) * len(self.stride), self.dilation, self.padding, self.groups)


class ConvTranspose(_Convolution):
    """A transposed convolution along some axes: the transpose of a convolution, with its own weight.

    Every element of the input adds a scaled copy of the kernel to the output, `stride` elements apart, for example to
    upsample an image. The weight is stored as in `Conv`, and not flipped: each output is the correlation of the weight
    with the input, after `stride - 1` zeros are inserted between the elements of the input. PyTorch stores the weight
    flipped, with the input channels first; state dicts for PyTorch (`axonym.state.to_torch_compatible_state_dict` and
    its inverse) convert it.

    The fields besides `weight` and `bias` are the arguments of `init`, with a value for each axis.

    >>> H, W, In, Out = axn.make_axes(height=4, width=4, features=4, channels=3)
    >>> layer = axn.nn.ConvTranspose.init((H, W), In, Out, kernel_size=2, stride=2, key=jax.random.key(0))
    >>> print(layer(axn.ones({"batch": 2, "features": 4, "height": 4, "width": 4})))
    float32[batch=2, channels=3, height=8, width=8]
    """

    output_padding: tuple[int, ...] = eqx.field(static=True)
    dilation: tuple[int, ...] = eqx.field(static=True)
    groups: int = eqx.field(static=True)

    @staticmethod
    def init(
        Spatial: AxisSelection,
        In: AxisSpec,
        Out: AxisSpec,
        kernel_size: PerAxis,
        *,
        stride: PerAxis = 1,
        padding: PaddingSpec = 0,
        output_padding: PerAxis = 0,
        dilation: PerAxis = 1,
        groups: int = 1,
        use_bias: bool = True,
        key: jax.Array,
    ) -> ConvTranspose:
        """Make a layer with random weights and bias, uniform up to 1 / sqrt(channels of a group * kernel elements).

        The arguments are as for `Conv.init`, except:

        Arguments:
            stride: the distance between the copies of the kernel.
            padding: the number of elements cropped from the full output, in the forms of `Conv.init`; "SAME" and
                "VALID" as in `jax.lax.conv_transpose`.
            output_padding: the number of elements that are added at the end of the output.
            dilation: the distance between the output elements of a copy of the kernel.

        >>> In, Out = axn.make_axes(features=4, channels=6)
        >>> layer = axn.nn.ConvTranspose.init("time", In, Out, 3, stride=2, groups=2, key=jax.random.key(0))
        >>> layer.weight.shape, layer.bias.shape
        ({'channels': 6, 'features': 2, 'time': 3}, {'channels': 6})
        """
        what = "ConvTranspose"
        fields = _init_fields(what, Spatial, In, Out, kernel_size, stride, padding, dilation, groups, use_bias, key)
        more = per_axis(what, "output_padding", output_padding, tuple(map(name_of, fields["Spatial"])), at_least=0)
        if isinstance(fields["padding"], str) and any(more):
            raise ValueError(f"{what}: `output_padding` needs a padding in elements, not {fields['padding']!r}.")
        return ConvTranspose(**fields, output_padding=more)

    def _parameters(self) -> Parameters:
        pads = tuple(self._padding_of_input(i) for i in range(len(self.kernel_size)))
        return Parameters((1,) * len(self.stride), self.stride, self.dilation, pads, self.groups)

    def flatten_for_export(self) -> ConvTranspose:
        """Return the layer with its weight as PyTorch stores it: input channels first, every spatial axis reversed."""
        out, stored, spatial = self._weight_names()
        if not is_jax_array_like(self.weight):
            return self
        weight = rename(flip(self.weight, spatial), {out: _OUT, stored: _STORED_IN})
        weight = unflatten_axis(weight, _OUT, (Axis(_GROUPS, self.groups), Axis(_OUT, self.Out.size // self.groups)))
        weight = flatten_axes(weight, (_GROUPS, _STORED_IN), _IN)
        return dataclasses.replace(self, weight=rearrange(weight, (..., _IN, _OUT, *spatial)))

    def unflatten_from_export(self, template: Any) -> ConvTranspose:
        """Return the layer from PyTorch's form: the inverse of `flatten_for_export`."""
        out, stored, spatial = template._weight_names()
        if not is_jax_array_like(self.weight):
            return self
        of_group = template.In.size // template.groups
        weight = unflatten_axis(
            flip(self.weight, spatial), _IN, (Axis(_GROUPS, template.groups), Axis(stored, of_group))
        )
        weight = flatten_axes(weight, (_GROUPS, _OUT), out)
        return dataclasses.replace(self, weight=rearrange(weight, template.weight.names))

    def _weight_names(self) -> tuple[str, str, Names]:
        spatial = tuple(name_of(s) for s in self.Spatial)
        return self.Out.name, _stored_input("ConvTranspose", self.weight.names, self.Out.name, spatial), spatial

    def _padding_of_input(self, i: int) -> Pair:
        """Return the padding of the dilated input along one axis, for the equivalent convolution."""
        stride, reach = self.stride[i], self.dilation[i] * (self.kernel_size[i] - 1)
        if self.padding == "VALID":
            return reach, max(reach, stride - 1)
        if self.padding == "SAME":
            total = reach + stride - 1
            before = reach if stride > reach else -(-total // 2)
            return before, total - before
        before, after = self.padding[i]
        return reach - before, reach - after + self.output_padding[i]  # pyright: ignore[reportOperatorIssue]  # a pair


# The axes of a transposed convolution's weight in PyTorch's form, and on the way there.
_IN, _STORED_IN, _GROUPS, _OUT = "__IN__", "__STORED_IN__", "__GROUPS__", "__OUT__"


# --- parameters ---


def _init_fields(
    what: str,
    Spatial: AxisSelection,
    In: AxisSpec,
    Out: AxisSpec,
    kernel_size: PerAxis,
    stride: PerAxis,
    padding: PaddingSpec,
    dilation: PerAxis,
    groups: int,
    use_bias: bool,
    key: jax.Array,
) -> dict[str, Any]:
    """Return the fields of a layer with random parameters; raise an error if the arguments do not fit together."""
    In, Out, Spatial = one_axis(what, "In", In), one_axis(what, "Out", Out), selectors(Spatial)
    names = distinct(what, tuple(map(name_of, Spatial)))
    if not names:
        raise ValueError(f"{what}: `Spatial` has no axes. Without axes to convolve along, use `axonym.nn.Linear`.")
    clash = [f"{a.name!r} of `{argument}`" for argument, a in (("In", In), ("Out", Out)) if a.name in names]
    if clash:
        raise ValueError(f"{what}: {' and '.join(clash)} is also among the axes to convolve along.")
    wrong = [f"{a.size} of {a.name!r}" for a in (In, Out) if groups < 1 or a.size % groups]
    if wrong:
        raise ValueError(f"{what}: {groups} groups do not divide the channels: {', '.join(wrong)}.")
    kernel = per_axis(what, "kernel_size", kernel_size, names, at_least=1)
    of_group = In.resize(In.size // groups)
    limit = 1 / math.sqrt(of_group.size * math.prod(kernel))
    weight_axes = (Out, *stored_inputs((of_group,), (Out,)), *map(Axis, names, kernel))
    weight_key, bias_key = jax.random.split(key)
    return {
        "Spatial": Spatial,
        "In": In,
        "Out": Out,
        "weight": random.uniform(weight_key, weight_axes, minval=-limit, maxval=limit),
        "bias": random.uniform(bias_key, Out, minval=-limit, maxval=limit) if use_bias else None,
        "kernel_size": kernel,
        "stride": per_axis(what, "stride", stride, names, at_least=1),
        "padding": parse_padding(what, padding, names),
        "dilation": per_axis(what, "dilation", dilation, names, at_least=1),
        "groups": groups,
    }


# --- the operation ---


@_kernels.shared("names", "weight_names", "spatial", "channels")
def _convolution_kernel(
    what: str,
    names: Names,
    weight_names: Names,
    spatial: Names,
    channels: tuple[str, str],
    config: Parameters,
    known: Known,
) -> _kernels.Kernel:
    in_name, out_name = channels
    _kernels.select(what, names, (in_name, *spatial))
    out_names = distinct(what, tuple(out_name if n == in_name else n for n in names))
    stored_in = _stored_input(what, weight_names, out_name, spatial)
    batch = tuple(n for n in names if n != in_name and n not in spatial)
    # JAX takes one batch axis, at any position. Several are merged, at the position of the first.
    first = names.index(batch[0]) if batch else 0
    rest = [n for n in names if n not in batch]
    merged = (*rest[:first], *batch, *rest[first:])
    merged_out = tuple(out_name if n == in_name else n for n in merged)
    layout = (*rest[:first], None, *rest[first:])
    place = (first, layout.index(in_name), *(layout.index(n) for n in spatial))
    weight_place = tuple(weight_names.index(n) for n in (out_name, stored_in, *spatial))
    numbers = jax.lax.ConvDimensionNumbers(place, weight_place, place)

    def positional(x, weight, convolve):
        given, size = x.shape[names.index(in_name)], weight.shape[weight_place[1]] * config.groups
        if given != size:
            raise ValueError(errors.size_mismatch(what, in_name, [("the input", given), ("the layer", size)]))
        sizes = [x.shape[names.index(n)] for n in spatial]
        padding = config.padding
        if padding != "SAME":
            padding = ((0, 0),) * len(sizes) if isinstance(padding, str) else padding
            kernel = [weight.shape[i] for i in weight_place[2:]]
            spread = [(size - 1) * step + 1 for size, step in zip(sizes, config.input_dilation, strict=True)]
            spans = [(size - 1) * step + 1 for size, step in zip(kernel, config.dilation, strict=True)]
            check_spans(what, spatial, spread, spans, padding)
        dtype = jnp.result_type(x, weight)
        x, weight = x.astype(dtype), weight.astype(dtype)
        sizes = tuple(x.shape[names.index(n)] for n in batch)
        if len(batch) != 1:
            x = _kernels.transpose_to(x, names, merged)
            x = x.reshape(*x.shape[:first], math.prod(sizes), *x.shape[first + len(batch) :])
        y = convolve(x, weight, config._replace(padding=padding), numbers)
        if len(batch) != 1:
            y = y.reshape(*y.shape[:first], *sizes, *y.shape[first + 1 :])
            y = _kernels.transpose_to(y, merged_out, out_names)
        return y

    # Only the output channels of the weight are an axis of the result; its other axes get private names.
    own = tuple(n if n == out_name != in_name else private("the weight", (n,))[0] for n in weight_names)

    def placed(x, weight):
        weight = fsdp_ops.in_compute_sharding(weight_names, weight)
        return apply_convolution(
            what, positional, (names, own), out_names, in_name, spatial, config.groups, known, x, weight
        )

    return _kernels.make_kernel(what, placed, (names, own), out_names, mesh_aware=True)


def _stored_input(what: str, weight_names: Names, out_name: str, spatial: Names) -> str:
    """Return the name of the input channels in the weight: the axis that is neither spatial nor the output's."""
    left = [n for n in weight_names if n not in (out_name, *spatial)]
    if len(left) != 1 or len(weight_names) != len(spatial) + 2:
        raise ValueError(
            f"{what}: the axes of the weight are {errors.describe_axes(weight_names)}; they should be the "
            f"output channels {out_name!r}, the input channels, and {errors.describe_axes(spatial)}. Apply stacked "
            "layers with `axonym.vmap` or `axonym.scan` over their axis."
        )
    return left[0]
