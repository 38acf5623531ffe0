"""`Linear`: a layer that contracts the axes of its input with a learned weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .. import random
from ..axis import Axis, AxisSpec, Names, axes_of_spec, axis_spec_to_shape_dict
from ..core import errors
from ..core.named_scope import named_call
from ..named_array import NamedArray
from ..ops._operands import require_named
from ..ops.contraction import dot
from ..ops.creation import zeros
from ..ops.shaping import rename
from ..sharding.shard import shard_quietly
from ..state.module import ModuleWithStateDictSerialization
from .mup import (
    AbstractLinearReparam,
    HiddenLinearMup,
    InputLinearMup,
    LinearStandardParam,
    OutputLinearMup,
    ReparamEnabled,
)

# Initial weights are truncated at this many standard deviations.
BOUND = 3


def _as_tree(dot_general: Callable[..., jax.Array] | None) -> Any:
    """Turn a replacement for `jax.lax.dot_general` into a tree: plain functions would be leaves that are not arrays."""
    plain = dot_general is not None and jax.tree_util.all_leaves([dot_general])
    return jax.tree_util.Partial(dot_general) if plain else dot_general


def static_spec(spec: AxisSpec, what: str) -> Axis | tuple[Axis, ...]:
    """Return a spec in a form that can be a static field: a single axis, or a tuple of axes."""
    return spec if isinstance(spec, Axis) else axes_of_spec(spec, what)


@errors.say_how_to_make
class Linear(ReparamEnabled, ModuleWithStateDictSerialization):
    """A linear layer from the axes `In` of its input to the axes `Out`.

    All other axes of the input are kept, in front. If the input already has an axis of `Out`, both are matched, as in
    every operation: a layer from `head_size` to `(heads, mlp)`, applied to an input with `heads`, has a matrix for each
    head.

    An axis can be in both `In` and `Out`. An array has each name only once, so the weight then stores the axis of the
    input under another name, `embed_in` for `embed`. In a mapping, `embed` is the axis of the output and `embed_in`
    the axis of the input.

    The fields besides `weight` and `bias` are arguments of `init`.

    >>> Batch, Embed, Mlp = axn.make_axes(batch=2, embed=3, mlp=4)
    >>> layer = axn.nn.Linear.init(Embed, Mlp, key=jax.random.key(0))
    >>> layer.weight.shape, layer.bias.shape
    ({'mlp': 4, 'embed': 3}, {'mlp': 4})
    >>> layer(axn.ones((Batch, Embed))).shape
    {'batch': 2, 'mlp': 4}
    """

    weight: NamedArray
    bias: NamedArray | None
    In: AxisSpec = eqx.field(static=True)
    Out: AxisSpec = eqx.field(static=True)
    dot_general: Any = eqx.field(default=None, converter=_as_tree)
    _reparam_cls: type[AbstractLinearReparam] = eqx.field(static=True, default=LinearStandardParam)

    @staticmethod
    def init(
        In: AxisSpec,
        Out: AxisSpec,
        *,
        key: jax.Array,
        use_bias: bool = True,
        out_first: bool = True,
        dot_general: Callable[..., jax.Array] | None = None,
        init_scale: float = 1.0,
        reparam_cls: type[AbstractLinearReparam] = LinearStandardParam,
    ) -> Linear:
        """Make a layer with random weights and a bias of zeros.

        The weights are drawn from a truncated normal distribution with the standard deviation of the parametrization:
        by default 1 / sqrt(size of In).

        Arguments:
            out_first: whether the axes of the output come first in the weight, rather than the axes of the input.
            dot_general: a replacement for `jax.lax.dot_general`, such as a quantized one. If it is a module with
                arrays, these are part of the model's tree.
            init_scale: multiplies the standard deviation of the weights.
            reparam_cls: the parametrization: see `axonym.nn.mup`.

        >>> Embed, Heads, Size = axn.make_axes(embed=6, heads=2, size=3)
        >>> axn.nn.Linear.init(Embed, (Heads, Size), key=jax.random.key(0), use_bias=False).weight.shape
        {'heads': 2, 'size': 3, 'embed': 6}
        >>> axn.nn.Linear.init(Embed, Embed, key=jax.random.key(0)).weight.shape
        {'embed': 6, 'embed_in': 6}
        """
        In, Out = static_spec(In, "Linear"), static_spec(Out, "Linear")
        out_axes = axes_of_spec(Out)
        in_axes = stored_inputs(axes_of_spec(In), out_axes)
        axes = (*out_axes, *in_axes) if out_first else (*in_axes, *out_axes)
        weight = random.truncated_normal(key, axes, -BOUND, BOUND) * (init_scale * reparam_cls.init_scale(In, Out))
        bias = zeros(Out) if use_bias else None
        return Linear(weight, bias, In, Out, dot_general, reparam_cls)

    @property
    def reparam(self) -> AbstractLinearReparam:
        return self._reparam_cls(self.In, self.Out)

    @property
    def out_first(self) -> bool:
        """Return whether the axes of the output come before the axes of the input in the weight.

        >>> In, Out = axn.make_axes(embed=3, mlp=4)
        >>> axn.nn.Linear.init(In, Out, key=jax.random.key(0), out_first=False).out_first
        False
        """
        # Decided by the last axis, since stacked layers have a layer axis in front.
        out_axes = axes_of_spec(self.Out)
        return not out_axes or self.weight.names[-1] != out_axes[-1].name

    @property
    def weight_in(self) -> tuple[Axis, ...]:
        """Return the axes of the input under their names in the weight, which differ where `Out` has the same name.

        >>> Embed = axn.Axis("embed", 3)
        >>> axn.nn.Linear.init(Embed, Embed, key=jax.random.key(0)).weight_in
        (Axis(name='embed_in', size=3),)
        """
        return stored_inputs(axes_of_spec(self.In), axes_of_spec(self.Out))

    @named_call
    def __call__(self, inputs: NamedArray, *, key: jax.Array | None = None) -> NamedArray:
        """Contract an array with the axes `In` with the weight, and add the bias; `key` is not used."""
        names, stored = tuple(a.name for a in axes_of_spec(self.In)), tuple(a.name for a in self.weight_in)
        check_input("Linear", inputs, self.weight, names, stored, (self.In, self.Out))
        if names != stored:
            inputs = rename(inputs, {n: s for n, s in zip(names, stored, strict=True) if n != s})
        product = dot(inputs, self.weight, axis=stored, dot_general=self.dot_general or jax.lax.dot_general)
        scale = self.reparam.active_scale
        if scale != 1:
            product = product * scale
        product = shard_quietly(product, None, "Linear")
        return product if self.bias is None else product + self.bias

    # PyTorch has no parametrizations, and its layers have one input and one output axis.

    def _state_dict_scales(self) -> dict[str, float]:
        return {"weight": self.reparam.active_scale}

    def _export_axes(self) -> dict[str, dict[str, AxisSpec]]:
        return {"Out": {"weight": self.Out, "bias": self.Out}, "In": {"weight": self.weight_in}}

    @staticmethod
    def input_reparam(use_mup: bool = True) -> type[AbstractLinearReparam]:
        """Return the parametrization of a layer whose input does not grow with the width, or else the standard one.

        >>> axn.nn.Linear.input_reparam().__name__
        'InputLinearMup'
        """
        return InputLinearMup if use_mup else LinearStandardParam

    @staticmethod
    def hidden_reparam(use_mup: bool = True) -> type[AbstractLinearReparam]:
        """Return the parametrization of a layer whose input and output grow with the width, or else the standard one.

        >>> axn.nn.Linear.hidden_reparam().__name__
        'HiddenLinearMup'
        """
        return HiddenLinearMup if use_mup else LinearStandardParam

    @staticmethod
    def output_reparam(use_mup: bool = True) -> type[AbstractLinearReparam]:
        """Return the parametrization of a layer whose output does not grow with the width, or else the standard one.

        >>> axn.nn.Linear.output_reparam().__name__
        'OutputLinearMup'
        """
        return OutputLinearMup if use_mup else LinearStandardParam


def stored_inputs(in_axes: tuple[Axis, ...], out_axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Return the axes of the input under their names in the weight."""
    taken = {a.name for a in (*in_axes, *out_axes)}
    stored = []
    for axis in in_axes:
        name = axis.name
        if any(a.name == name for a in out_axes):
            while name in taken:
                name += "_in"
            taken.add(name)
        stored.append(axis.alias(name))
    return tuple(stored)


def check_input(
    what: str, inputs: NamedArray, weight: NamedArray, names: Names, stored: Names, maps: tuple[AxisSpec, AxisSpec]
) -> None:
    """Raise an error unless the input of a layer has the named axes, with the sizes that they have in the weight.

    The weight has them under the names `stored`. Its sizes can differ from the layer's own: inside `shard_map`, weight
    and input are local shards. `maps` are the axes of the layer's input and output, for the message.
    """
    shape = jnp.shape(require_named(what, inputs).array)
    missing = [n for n in names if n not in inputs.names]
    if missing:
        source, target = (errors.describe_shape(axis_spec_to_shape_dict(spec)) for spec in maps)
        problem = errors.missing_axes(what, missing, inputs.names, shape)
        raise ValueError(f"{problem} The layer maps {source} to {target}.")
    for name, own in zip(names, stored, strict=True):
        given, size = shape[inputs.names.index(name)], weight.array.shape[weight.names.index(own)]
        if given != size:
            raise ValueError(errors.size_mismatch(what, name, [("the input", given), ("the layer", size)]))
