"""Scaled dot-product attention by axis names.

The role of an axis follows from its name:

| an axis of                             | is                                                                     |
|----------------------------------------|------------------------------------------------------------------------|
| `Key`                                  | summed over in the product of query and key: the size of a head        |
| `KPos`                                 | attended to: the positions of keys and values                          |
| query, key and value                   | a batch axis: examples, heads                                          |
| query alone                            | kept in the result: positions, the heads that share a key              |
| value alone                            | kept in the result                                                     |

So grouped-query attention needs no repeated keys. The query has an axis of key-value heads and an axis of the heads in
a group, as `query.unflatten_axis("heads", (KVHeads, "heads_per_group"))` makes of consecutive heads; the key and the
value have only the axis of key-value heads. Keys and values without an axis of heads are shared by all heads of the
query.

A query that cannot attend to anything gets the mean of all values, as in `jax.nn.dot_product_attention`, never NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ...axis import AxisSelection, AxisSelector, Names, name_of, selectors
from ...core import errors
from ...core.jax_versions import active_platform
from ...distribution.kept_shards import exchange, is_kept
from ...distribution.mesh_axes import (
    axes_in,
    entries_of,
    entry_of,
    explicit_mesh,
    mapped_axes,
    mesh_axes,
    reshard,
)
from ...distribution.operation_scope import CHOICE, operation_scope
from ...named_array import NamedArray, resolve_axes
from ...ops import _kernels
from ...ops._operands import dtype_key, require_named, require_subset
from ...ops.contraction import dot
from ...ops.elementwise import astype
from ...ops.selection import where
from ..dropout import dropout
from ..normalization import softmax
from ._axis_roles import AttentionOperands
from .context import Context, attend_along_sequence
from .fused import BY_DEFAULT, Implementation, default_attention, fused_attention, why_named
from .masks import Causal, Mask, as_truth_values


@errors.say_how_to_call
def dot_product_attention(
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    KPos: AxisSelection,
    Key: AxisSelector,
    mask: Mask = None,
    bias: NamedArray | None = None,
    attention_dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    pdrop: float = 0.0,
    *,
    scaling_factor: float | None = None,
    inference: bool = False,
    prng: jax.Array | None = None,
    implementation: Implementation | None = None,
    context: Context | None = None,
) -> NamedArray:
    """Compute scaled dot-product attention: for each query, the mean of values weighted by how well their keys match.

    The result has the layout of the query.

    Arguments:
        KPos: the axis of key positions, or several. The query must not have it: for self-attention, rename the axis of
            key and value.
        Key: the axis of features that query and key are multiplied along.
        mask: true where attention is allowed; an array with any axes of the scores, or `Causal`.
        bias: added to the scores before they are masked.
        attention_dtype: the dtype of scores and softmax; by default the dtype of query and key. With float32,
            half-precision queries and keys are multiplied without a cast, and accumulated in float32.
        precision: the precision of the products, as in `jax.lax.dot_general`.
        pdrop: the probability that a weight is dropped in training.
        scaling_factor: the factor of the scores; one over the square root of the size of `Key` by default.
        inference: whether to turn dropout off.
        prng: a random key for dropout.
        implementation: "named" computes with named operations, on any mesh and differentiable any number of times.
            "cudnn" and "splash" are kernels for GPUs and TPUs that never store all scores; "fused" is the kernel of the
            platform, or "xla" if there is none for the dtype. "xla" and "cudnn" call
            `jax.nn.dot_product_attention`. All kernels compute the softmax in float32. Arguments that a kernel does not
            support are an error. By default, "cudnn" where it applies: half-precision arrays on an A100, H100, H200 or
            B200, heads of a multiple of 8 up to 128, no mask or a `Causal` one of positions alone, and none of the
            arguments that kernels lack. Its gradient can be differentiated again, by named operations; forward mode
            alone needs "named". Otherwise, named operations: reports say which ran on a GPU, and why.
        context: how devices attend to the keys of others if the positions are sharded, without storing all scores:
            "ring" sends keys and values around, "all_to_all" exchanges heads for positions, and "all_gather" gathers
            keys and values. `("all_to_all", "ring")` is for more devices than heads: it exchanges heads over the last
            mesh axis of the positions, and sends keys and values around over those before it. By default, if `KPos` and
            the query's positions are sharded over the same mesh axes, the ring, the exchange or both, whichever moves
            least. The softmax is in float32. Such a result can be differentiated in reverse mode, as often as one
            likes, and not in forward mode.

    >>> q = axn.ones({"pos": 2, "heads": 2, "head_size": 4})
    >>> k = q.rename({"pos": "key_pos"})
    >>> v = axn.arange(axn.Axis("key_pos", 2), dtype=float).broadcast_axis(axn.Axis("heads", 2))
    >>> axn.nn.attention.dot_product_attention(q, k, v, "key_pos", "head_size", mask=axn.nn.attention.Causal("pos"))
    NamedArray(float32[pos=2, heads=2], [[0. 0. ] [0.5 0.5]])
    """
    what = "dot_product_attention"
    features, positions = _checked_axes(what, Key, KPos, query, key, value)
    if bias is not None:
        require_named(what, bias, "bias")
    mask = as_truth_values(what, mask)
    dropping = inference is not True and not (isinstance(pdrop, (int, float)) and pdrop == 0)
    # In code that is traced for all of a sequence, along which queries and keys are sharded alike?
    over = mapped_axes(positions[0]) if len(positions) == 1 and is_kept(positions[0]) else ()
    alike = over and any(is_kept(n) and mapped_axes(n) == over for n in query.names if n not in (*key.names, features))
    if implementation in (None, "named") and not dropping and alike:
        options: Any = {"attention_dtype": attention_dtype, "precision": precision, "context": context}
        options["implementation"] = implementation

        def attend(xs: Any) -> NamedArray:
            q, k, v, mask, bias, scale = xs
            return dot_product_attention(q, k, v, KPos, Key, mask, bias, scaling_factor=scale, **options)

        return exchange(what, attend, (query, key, value, mask, bias, scaling_factor))
    float32 = attention_dtype is None or dtype_key(attention_dtype) == jnp.float32
    given = {"dropout": dropping, "attention_dtype": not float32}
    refused = [argument for argument, is_given in given.items() if is_given]
    operands = AttentionOperands(query, key, value, positions, features, mask, bias, scaling_factor)
    if implementation not in (None, "named"):
        refused += ["precision"] * (precision is not None) + ["context"] * (context is not None)
        return fused_attention(implementation, operands, refused)
    attended = attend_along_sequence(context, operands, precision, refused)
    if attended is not None:
        return attended
    if implementation is None and active_platform() == "gpu":
        refused += ["precision"] * (precision is not None) + ["bias"] * (bias is not None)
        why = why_named(operands, refused)
        what_runs = CHOICE + (f"named operations: {why}" if why else BY_DEFAULT)
        with jax.named_scope(operation_scope(what_runs, (query.names,), (), (query.array,))):
            if not why:
                return default_attention(operands, dot_product_attention)
            return dot_product_attention(
                query, key, value, KPos, Key, mask, bias, attention_dtype, precision, pdrop,
                scaling_factor=scaling_factor, inference=inference, prng=prng, implementation="named",
            )  # fmt: skip
    key, value = (_gather_shared_positions(x, positions, query) for x in (key, value))
    weights = _attention_weights(
        what, query, key, features, positions, mask, bias, attention_dtype, precision, scaling_factor
    )
    if dropping:
        if prng is None:
            raise ValueError(
                f"{what}: dropout of {pdrop} needs a random key: pass `prng`, or `inference=True` to turn it off."
            )
        weights = dropout(weights, pdrop, inference=inference, key=prng)
    # Features of values with the same name take the place of the query's features, which are summed.
    kept = query.names if features in value.names else tuple(n for n in query.names if n != features)
    own = tuple(n for n in (*weights.names, *value.names) if n not in positions and n not in kept)
    return dot(weights, value, axis=positions, precision=precision, out_axes=(*kept, *dict.fromkeys(own)))


def dot_product_attention_weights(
    query: NamedArray,
    key: NamedArray,
    KPos: AxisSelection,
    Key: AxisSelector,
    mask: Mask = None,
    bias: NamedArray | None = None,
    attention_dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    scaling_factor: float | None = None,
) -> NamedArray:
    """Compute the attention weights: for each query, the weight of each value.

    The result has the layout of the query, with `KPos` at the end. The arguments are as in `dot_product_attention`.

    >>> q, k = axn.ones({"pos": 1, "head_size": 4}), axn.ones({"key_pos": 2, "head_size": 4})
    >>> axn.nn.attention.dot_product_attention_weights(q, k, "key_pos", "head_size")
    NamedArray(float32[pos=1, key_pos=2], [[0.5 0.5]])
    """
    what = "dot_product_attention_weights"
    features, positions = _checked_axes(what, Key, KPos, query, key)
    if bias is not None:
        require_named(what, bias, "bias")
    mask = as_truth_values(what, mask)
    key = _gather_shared_positions(key, positions, query)
    weights = _attention_weights(
        what, query, key, features, positions, mask, bias, attention_dtype, precision, scaling_factor
    )
    kept = tuple(n for n in query.names if n != features)
    own = tuple(n for n in key.names if n not in (*kept, *positions, features))
    return weights.rearrange((*kept, *own, *positions))


# --- scores and weights ---


def _attention_weights(
    what: str,
    query: NamedArray,
    key: NamedArray,
    Key: str,
    KPos: Names,
    mask: Mask,
    bias: NamedArray | None,
    attention_dtype: Any,
    precision: jax.lax.PrecisionLike,
    scaling_factor: float | None,
) -> NamedArray:
    """Compute the weights: batch axes first, then the other axes of the query, then the other axes of the key."""
    dtype = jnp.result_type(query.dtype, key.dtype)
    wide = dtype if attention_dtype is None else dtype_key(attention_dtype)
    # Only a narrower dtype needs a cast: the product itself accumulates in a wider one.
    if jnp.promote_types(dtype, wide) != wide:
        query, key = astype(query, wide), astype(key, wide)
    batch = tuple(n for n in query.names if n in key.names and n != Key)
    own = tuple(n for n in (*query.names, *key.names) if n not in batch and n != Key)
    scores = dot(query, key, axis=Key, precision=precision, preferred_element_type=wide, out_axes=(*batch, *own))
    scores = scores * (query.axis_size(Key) ** -0.5 if scaling_factor is None else scaling_factor)
    if bias is not None:
        require_subset(what, "bias", bias.names, scores.names)
        scores = scores + bias
    if isinstance(mask, Causal):
        if len(KPos) != 1:
            raise ValueError(
                f"{what}: a Causal mask needs one axis of key positions, got {errors.describe_axes(KPos)}."
            )
        mask = mask.written_out(query.resolve_axis(mask.QPos), key.resolve_axis(KPos[0]))
    if mask is not None:
        require_subset(what, "mask", mask.names, scores.names)
        # A finite number, so that softmax and its gradient are finite for a query that cannot attend to any key.
        scores = where(mask, scores, float(jnp.finfo(scores.dtype).min))
    return astype(softmax(scores, KPos), dtype)


def _checked_axes(what: str, Key: AxisSelector, KPos: AxisSelection, *arrays: NamedArray) -> tuple[str, Names]:
    """Return the names of `Key` and `KPos`; raise an error if an array lacks them or the query has `KPos`."""
    needed = {"query": (Key,), "key": (Key, KPos), "value": (KPos,)}
    for x, (label, selections) in zip(arrays, needed.items(), strict=False):
        require_named(what, x, label)
        for selection in selections:
            resolve_axes(x.names, jnp.shape(x.array), selection, f"{what}, {label}")
    positions = tuple(name_of(s) for s in selectors(KPos))
    taken = [n for n in positions if n in arrays[0].names]
    if taken:
        n = taken[0]
        raise ValueError(
            f"{what}: {errors.describe_axes(taken)} of KPos is an axis of the query, too: "
            f"{errors.describe_shape(arrays[0].shape)}. The positions of keys need another name. For self-attention, "
            f"rename the axis of key and value, as in `key.rename({{{n!r}: 'key_{n}'}})`."
        )
    return name_of(Key), positions


def _gather_shared_positions(x: NamedArray, KPos: Names, query: NamedArray) -> NamedArray:
    """All-gather keys or values along positions, over the mesh axes that the query is sharded over.

    If the positions of queries and keys are sharded over one mesh axis, the scores cannot be sharded over this axis
    twice. The result is sharded like the query. On Auto mesh axes, the partitioner decides.
    """
    if explicit_mesh((x.array, query.array)) is None:
        return x
    return _gather_kernel(x.names, query.names, KPos).apply(x.array, query.array)


@_kernels.cached
def _gather_kernel(names: Names, query_names: Names, KPos: Names) -> _kernels.Kernel:
    def positional(x: jax.Array, query: jax.Array) -> jax.Array:
        taken = axes_in(entries_of(query))
        entries = dict(zip(names, entries_of(x), strict=True))
        for n in KPos:
            entries[n] = entry_of([a for a in mesh_axes(entries[n]) if a not in taken])
        return reshard(x, entries.values(), jax.typeof(x).sharding.mesh)

    return _kernels.make_kernel("attention", positional, (names, query_names), names, mesh_aware=True)
