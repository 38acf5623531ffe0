"""Weights that are stored in few bits, and multiplied in the dtype of the input.

A weight is stored as small numbers and scales: each output of a layer has a scale that maps its largest weight to the
largest small number. The inputs can be cut into groups that have scales of their own, which 4 bits need to be accurate.
Scales have the names of the weight's axes, so a mapping shards them as it shards the weight.

This saves memory, and the time to read it, which is most of the time of generating text one token at a time. Products
are still computed in the input's dtype: see `Int8DotGeneralOp` and `Fp8DotGeneralOp` for products in 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..axis import Axis, AxisSelection, AxisSpec, Names, axes_of_spec
from ..core import errors
from ..core.named_scope import named_call
from ..distribution.mesh_axes import check_mesh_axes, current_mesh, shard_count, storage_axes
from ..named_array import NamedArray
from ..nn.embedding import Embedding
from ..nn.linear import Linear, check_input
from ..ops.contraction import dot
from ..ops.elementwise import abs, round
from ..ops.reductions import max
from ..ops.selection import clip, where
from ..ops.shaping import flatten_axes, rename, unflatten_axis
from ..sharding.shard import shard_quietly
from ..state.module import ModuleWithStateDictSerialization
from .layers import replace_layers

__all__ = ["SmallEmbedding", "SmallLinear", "quantize_weights"]

T = TypeVar("T")


class SmallLinear(ModuleWithStateDictSerialization):
    """A linear layer whose weight is stored in few bits: see `quantize_weights`.

    Arguments:
        weight: the small numbers, with the axes of the layer's weight.
        scale: the factors of these numbers, with the axes of the output; with groups, also the last axis of the input,
            one element for each group.
        bias, In, Out: as in `Linear`.
        active_scale: the factor of the product, from the layer's parametrization.

    >>> layer = axn.nn.Linear.init(axn.Axis("embed", 8), axn.Axis("mlp", 4), key=jax.random.key(0))
    >>> small = axn.quantization.quantize_weights(layer, "int4", group=4)
    >>> small.weight.dtype, small.weight.shape, small.scale.shape
    (dtype(int4), {'mlp': 4, 'embed': 8}, {'mlp': 4, 'embed': 2})
    >>> small(axn.ones({"batch": 2, "embed": 8})).shape
    {'batch': 2, 'mlp': 4}
    """

    weight: NamedArray
    scale: NamedArray
    bias: NamedArray | None
    In: AxisSpec = eqx.field(static=True)
    Out: AxisSpec = eqx.field(static=True)
    active_scale: float = eqx.field(static=True, default=1.0)
    _stored: Names = eqx.field(static=True, default=())

    @named_call
    def __call__(self, inputs: NamedArray, *, key: jax.Array | None = None) -> NamedArray:
        """Contract an array with the axes `In` with the weight, and add the bias; `key` is not used."""
        names, stored = tuple(a.name for a in axes_of_spec(self.In)), self._stored
        check_input("SmallLinear", inputs, self.weight, names, stored, (self.In, self.Out))
        if names != stored:
            inputs = rename(inputs, {n: s for n, s in zip(names, stored, strict=True) if n != s})
        if set(stored).isdisjoint(self.scale.names):
            # One scale for each output: it multiplies the sum, so no weight is scaled before the product.
            product = dot(inputs, self.weight.astype(inputs.dtype), axis=stored) * self.scale.astype(inputs.dtype)
        else:
            groups = self.scale.axis_size(stored[-1])
            inputs, weight = (
                _split_into_groups(x, stored[-1], groups) for x in (inputs, self.weight.astype(inputs.dtype))
            )
            product = dot(inputs, weight * self.scale.astype(inputs.dtype), axis=(*stored, _WITHIN))
        product = product if self.active_scale == 1 else product * self.active_scale
        product = shard_quietly(product, None, "SmallLinear")
        return product if self.bias is None else product + self.bias


class SmallEmbedding(ModuleWithStateDictSerialization):
    """An embedding whose table is stored in few bits, with a scale for each token: see `quantize_weights`.

    Arguments:
        weight: the small numbers, with the axes of the table.
        scale: the factor of each token's numbers.
        Vocab, Embed: as in `Embedding`.
        active_scale, unembed_active_scale: the factors of embeddings and logits, from the layer's parametrization.

    >>> layer = axn.nn.Embedding.init(axn.Axis("vocab", 10), axn.Axis("embed", 4), key=jax.random.key(0))
    >>> small = axn.quantization.quantize_weights(layer, "int8")
    >>> small.weight.dtype, small.scale.shape, small(axn.named([7, 3], "pos")).shape
    (dtype('int8'), {'vocab': 10}, {'pos': 2, 'embed': 4})
    """

    weight: NamedArray
    scale: NamedArray
    Vocab: Axis = eqx.field(static=True)
    Embed: AxisSpec = eqx.field(static=True)
    active_scale: float = eqx.field(static=True, default=1.0)
    unembed_active_scale: float = eqx.field(static=True, default=1.0)

    def __call__(self, input_ids: NamedArray, *, key: jax.Array | None = None) -> NamedArray:
        """Look up the embeddings of tokens, as `embed` does; `key` is not used."""
        return self.embed(input_ids)

    @named_call
    def embed(self, input_ids: NamedArray) -> NamedArray:
        """Look up the embeddings of tokens, as `axonym.nn.Embedding.embed` does.

        >>> layer = axn.nn.Embedding.init(axn.Axis("vocab", 10), axn.Axis("embed", 4), key=jax.random.key(0))
        >>> axn.quantization.quantize_weights(layer, "int8").embed(axn.named([7, 3], "pos")).shape
        {'pos': 2, 'embed': 4}
        """
        scale = Embedding(self.scale, self.Vocab, ()).embed(input_ids)  # NaN for tokens that are out of range
        found = self.weight[self.Vocab.name, input_ids].astype(scale.dtype) * scale
        return shard_quietly(found * self.active_scale, None, "SmallEmbedding.embed")

    @named_call
    def unembed(self, input_embeds: NamedArray) -> NamedArray:
        """Compute logits: the products of embeddings with the embedding of every token.

        >>> layer = axn.nn.Embedding.init(axn.Axis("vocab", 10), axn.Axis("embed", 4), key=jax.random.key(0))
        >>> axn.quantization.quantize_weights(layer, "int8").unembed(axn.ones({"pos": 2, "embed": 4})).shape
        {'pos': 2, 'vocab': 10}
        """
        embed, dtype = tuple(a.name for a in axes_of_spec(self.Embed)), input_embeds.dtype
        check_input("SmallEmbedding.unembed", input_embeds, self.weight, embed, embed, (self.Embed, self.Vocab))
        logits = dot(input_embeds, self.weight.astype(dtype), axis=embed) * self.scale.astype(dtype)
        return shard_quietly(logits * self.unembed_active_scale, None, "SmallEmbedding.unembed")


def quantize_weights(
    tree: T, dtype: DTypeLike = "int8", *, targets: Sequence[str] | str | None = None, group: int | None = None
) -> T:
    """Store the weights of a model's linear layers and embeddings in few bits, each with the scales that it needs.

    Biases, norms and other arrays stay as they are. The layers become `SmallLinear` and `SmallEmbedding`, for use
    rather than for training.

    Arguments:
        tree: the model, in which layers can be stacked. With abstract arrays, the result has abstract arrays.
        dtype: "int8", "int4", an 8-bit float such as "float8_e4m3fn", or another of at most 8 bits.
        targets: the layers, as in `QuantizationConfig`; by default all.
        group: the number of consecutive inputs, along the last axis of the input, that share a scale; by default all.
            Embeddings have no groups. If the active mapping shards that axis, each device has complete groups.

    >>> layer = axn.nn.Linear.init(axn.Axis("embed", 8), axn.Axis("mlp", 4), key=jax.random.key(0), use_bias=False)
    >>> small = axn.quantization.quantize_weights(layer, "int8")
    >>> small.weight.dtype, small.weight.shape, small.scale.shape
    (dtype('int8'), {'mlp': 4, 'embed': 8}, {'mlp': 4})
    """
    try:
        small = jnp.dtype(dtype)
    except TypeError:
        raise TypeError(
            f"quantize_weights: no dtype is called {dtype!r}: write 'int8', 'int4' or 'float8_e4m3fn'."
        ) from None
    number = jnp.issubdtype(small, jnp.signedinteger) or jnp.issubdtype(small, jnp.floating)
    if not number or small.itemsize > 1 or small == jnp.float8_e8m0fnu:  # which has no negative numbers
        raise ValueError(
            f"quantize_weights: weights are stored in at most 8 bits, as int8 or float8_e4m3fn, not {small}."
        )

    if small in (jnp.int4, jnp.int2) and jax.default_backend() == "gpu":
        errors.warn(  # seen on an H100 with jaxlib 0.11.2
            f"quantize_weights: a model with {small} weights gave wrong results on a GPU. Compare its results with "
            "'int8' before you rely on it."
        )

    def replace(name: str, layer: Any) -> Any:
        if isinstance(layer, Embedding):
            embed = tuple(a.name for a in axes_of_spec(layer.Embed))
            weight, scale = _quantized_weight(name, layer.weight, embed, small, None)
            scales = layer.reparam.active_scale, layer.reparam.unembed_active_scale
            return SmallEmbedding(weight, scale, layer.Vocab, layer.Embed, *scales)
        stored = tuple(a.name for a in layer.weight_in)
        weight, scale = _quantized_weight(name, layer.weight, stored, small, group)
        return SmallLinear(weight, scale, layer.bias, layer.In, layer.Out, layer.reparam.active_scale, stored)

    return replace_layers("quantize_weights", tree, (Linear, Embedding), targets, replace)


def _quantized_weight(
    name: str, weight: NamedArray, summed: Names, dtype: Any, group: int | None
) -> tuple[NamedArray, NamedArray]:
    """Quantize a weight; return the small numbers and their scales."""
    if group is None or not summed:
        return _rounded(weight, summed, dtype)
    axis = summed[-1]
    size = weight.axis_size(axis)
    if group < 1 or size % group:
        raise ValueError(
            f"quantize_weights: axis {axis!r} of {name}, of size {size}, cannot be cut into groups of {group}."
        )
    mesh, axes = current_mesh(), storage_axes(axis)
    if mesh is not None and axes:  # the scales have an element for each group, and are sharded like the weight
        check_mesh_axes("quantize_weights", {axis: axes}, mesh)
        shards = shard_count(mesh, axes)
        if size % shards == 0 and size // group % shards:
            raise ValueError(
                f"quantize_weights: {name} has {size // group} groups of {group} along axis {axis!r}, of size {size}, "
                f"which the active mapping shards over {errors.describe_shape({a: mesh.shape[a] for a in axes})}, so a "
                f"group would lie on several devices. Write `group={math.gcd(group, size // shards)}`."
            )
    values, scale = _rounded(_split_into_groups(weight, axis, size // group), (*summed[:-1], _WITHIN), dtype)
    return flatten_axes(values, (axis, _WITHIN), axis), scale


def _rounded(x: NamedArray, summed: AxisSelection, dtype: Any) -> tuple[NamedArray, NamedArray]:
    """Return small numbers and the scales that they are multiplied with, one for all elements along some axes."""
    numbers: Any = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    low, high, half = float(numbers.min), float(numbers.max), 0.5 if jnp.issubdtype(dtype, jnp.integer) else 0
    largest = max(abs(x), summed)
    # Half a step beyond the largest integer is rounded to it. The scale of NaN is NaN, since small integers have none.
    scale = where(largest == 0, 1, largest / (high + half))
    wide = jnp.promote_types(x.dtype, jnp.float32)  # in bfloat16, quotients would be rounded twice
    values = x.astype(wide) / scale.astype(wide)
    return clip(round(values) if half else values, low, high).astype(dtype), scale


_WITHIN = "number within a group"
"""The axis of the elements of a group, while they have one."""


def _split_into_groups(x: NamedArray, axis: str, groups: int) -> NamedArray:
    """Split an axis into groups; the axis of that name counts them."""
    return unflatten_axis(x, axis, (Axis(axis, groups), Axis(_WITHIN, x.axis_size(axis) // groups)))
