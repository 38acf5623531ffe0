"""Token embeddings: `one_hot` and `Embedding`."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .. import random
from ..axis import Axis, AxisSpec, Names, axes_of_spec
from ..core import errors
from ..core.named_scope import named_call
from ..named_array import NamedArray, NamedOrNumeric
from ..ops import _kernels
from ..ops._operands import at_least_int32, distinct, dtype_key, one_axis, operand, require_named, require_positions
from ..ops.contraction import dot
from ..ops.indexing import look_up
from ..sharding.shard import shard_quietly
from ..state.module import ModuleWithStateDictSerialization
from ..tree import resize_axis
from .linear import BOUND, check_input, static_spec
from .mup import AbstractEmbeddingReparam, EmbeddingStandardParam, ReparamEnabled


@errors.say_how_to_call
def one_hot(x: NamedOrNumeric, class_axis: Axis, *, dtype: DTypeLike | None = None) -> NamedArray:
    """Encode classes along a new axis: one at the index of the class, zero elsewhere.

    Arguments:
        x: the classes, integers. In a named array, classes that are out of range give zeros. In a single number, a
            negative class counts from the end.
        class_axis: the axis of the classes, last in the result.
        dtype: the dtype of the result; by default JAX's default float.

    >>> axn.nn.one_hot(axn.named([2, 0], "x"), axn.Axis("class", 3))
    NamedArray(float32[x=2, class=3], [[0. 0. 1.] [1. 0. 0.]])
    """
    classes = one_axis("one_hot", "class_axis", class_axis)
    array, names = operand(x)
    if not isinstance(x, NamedArray) and np.ndim(array) == 0:
        if isinstance(array, jax.Array):
            array = at_least_int32(array)
            array = jnp.where(array < 0, array + classes.size, array)
        elif not -classes.size <= array < classes.size:
            described = errors.describe_axes((classes.name,), (classes.size,))
            raise ValueError(f"one_hot: class {array} is out of range for {described}.")
        else:
            array = array % classes.size
    return _one_hot_kernel(names, classes, dtype_key(dtype or float)).apply(array)


@_kernels.shared("names", "class_axis")
def _one_hot_kernel(names: Names, class_axis: Axis, dtype: Any) -> _kernels.Kernel:
    out_names = distinct("one_hot", (*names, class_axis.name))

    def positional(x):
        x = at_least_int32(x) if jnp.issubdtype(x.dtype, jnp.integer) else x
        return jax.nn.one_hot(x, class_axis.size, dtype=dtype)

    return _kernels.make_kernel("one_hot", positional, (names,), out_names)


@_kernels.shared("names", "id_names")
def _known_kernel(names: Names, id_names: Names, size: int) -> _kernels.Kernel:
    """Replace the embeddings of tokens outside the vocabulary by NaN, since indexing would clamp them to others."""

    def positional(found, ids):
        signed = not jnp.issubdtype(ids.dtype, jnp.unsignedinteger)
        ids = _kernels.align(at_least_int32(ids), id_names, names)
        return jnp.where((ids >= -size) & (ids < size) if signed else ids < size, found, jnp.nan)

    return _kernels.make_kernel("Embedding.embed", positional, (names, id_names), names, {})


@errors.say_how_to_make
class Embedding(ReparamEnabled, ModuleWithStateDictSerialization):
    """A learned embedding for each token of a vocabulary.

    The fields besides `weight` are arguments of `init`.

    >>> Pos, Vocab, Embed = axn.make_axes(pos=2, vocab=10, embed=4)
    >>> layer = axn.nn.Embedding.init(Vocab, Embed, key=jax.random.key(0))
    >>> x = layer.embed(axn.named([7, 3], Pos))
    >>> layer.weight.shape, x.shape, layer.unembed(x).shape
    ({'vocab': 10, 'embed': 4}, {'pos': 2, 'embed': 4}, {'pos': 2, 'vocab': 10})
    """

    weight: NamedArray
    Vocab: Axis = eqx.field(static=True)
    Embed: AxisSpec = eqx.field(static=True)
    _reparam_cls: type[AbstractEmbeddingReparam] = eqx.field(static=True, default=EmbeddingStandardParam)

    @staticmethod
    def init(
        Vocab: Axis,
        Embed: AxisSpec,
        *,
        init_scale: float = 1.0,
        key: jax.Array,
        initializer_range: float | None = None,
        reparam_cls: type[AbstractEmbeddingReparam] = EmbeddingStandardParam,
    ) -> Embedding:
        """Make a layer with random embeddings.

        The embeddings are drawn from a truncated normal distribution with the standard deviation of the
        parametrization: by default 1 / (size of Embed).

        Arguments:
            init_scale: multiplies the standard deviation.
            initializer_range: an older name of `init_scale`, which it overrides.
            reparam_cls: the parametrization: see `axonym.nn.mup`.

        >>> Vocab, Heads, Size = axn.make_axes(vocab=10, heads=2, size=3)
        >>> axn.nn.Embedding.init(Vocab, (Heads, Size), key=jax.random.key(0)).weight.shape
        {'vocab': 10, 'heads': 2, 'size': 3}
        """
        Vocab, Embed = one_axis("Embedding", "Vocab", Vocab), static_spec(Embed, "Embedding")
        scale = (init_scale if initializer_range is None else initializer_range) * reparam_cls.init_scale(Vocab, Embed)
        weight = random.truncated_normal(key, (Vocab, *axes_of_spec(Embed)), -BOUND, BOUND) * scale
        return Embedding(weight, Vocab, Embed, reparam_cls)

    @property
    def reparam(self) -> AbstractEmbeddingReparam:
        return self._reparam_cls(self.Embed, self.Vocab)

    def _export_axes(self) -> dict[str, dict[str, AxisSpec]]:
        return {"Embed": {"weight": self.Embed}}

    def __call__(self, input_ids: NamedArray, *, key: jax.Array | None = None) -> NamedArray:
        """Look up the embeddings of tokens, as `embed` does; `key` is not used."""
        return self.embed(input_ids)

    @named_call
    def embed(self, input_ids: NamedArray) -> NamedArray:
        """Look up the embeddings of tokens.

        Arguments:
            input_ids: the tokens, a named array of integers. Negative tokens count from the end of the vocabulary.
                Tokens that are out of range are an error outside jit, where they are checked, and give NaN in jit.

        >>> layer = axn.nn.Embedding.init(axn.Axis("vocab", 10), axn.Axis("embed", 4), key=jax.random.key(0))
        >>> layer.embed(axn.named([7, 3], "pos")).shape
        {'pos': 2, 'embed': 4}
        """
        ids, table = require_named("Embedding.embed", input_ids), self.weight
        found, _ = look_up(table, {self.Vocab.name: ids})
        kernel = _known_kernel(found.names, ids.names, table.axis_size(self.Vocab.name))
        found = kernel.apply(found.array, ids.array)
        require_positions("Embedding.embed", "a token", ids, table.resolve_axis(self.Vocab.name), from_end=True)
        scale = self.reparam.active_scale
        return shard_quietly(found if scale == 1 else found * scale, None, "Embedding.embed")

    @named_call
    def unembed(self, input_embeds: NamedArray) -> NamedArray:
        """Compute logits: the products of embeddings with the embedding of every token.

        >>> layer = axn.nn.Embedding.init(axn.Axis("vocab", 10), axn.Axis("embed", 4), key=jax.random.key(0))
        >>> layer.unembed(axn.ones({"pos": 2, "embed": 4})).shape
        {'pos': 2, 'vocab': 10}
        """
        embed = tuple(a.name for a in axes_of_spec(self.Embed))
        check_input("Embedding.unembed", input_embeds, self.weight, embed, embed, (self.Embed, self.Vocab))
        logits = dot(input_embeds, self.weight, axis=embed)
        scale = self.reparam.unembed_active_scale
        return shard_quietly(logits if scale == 1 else logits * scale, None, "Embedding.unembed")

    def resize_embeddings(self, new_size: int, key: jax.Array | None = None) -> Embedding:
        """Resize the vocabulary of the layer.

        A smaller vocabulary keeps the first tokens. In a larger one, the new embeddings are the mean of the old ones
        or, with a key, samples of a truncated normal distribution with their mean and standard deviation.

        >>> layer = axn.nn.Embedding.init(axn.Axis("vocab", 10), axn.Axis("embed", 4), key=jax.random.key(0))
        >>> layer.resize_embeddings(12).weight.shape
        {'vocab': 12, 'embed': 4}
        """
        weight = resize_axis(self.weight, self.Vocab, new_size, key)
        return dataclasses.replace(self, weight=weight, Vocab=self.Vocab.resize(new_size))
