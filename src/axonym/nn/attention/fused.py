"""Fused attention, by the kernels of `jax.nn.dot_product_attention` and splash attention.

A kernel takes arrays of a fixed layout: batch, position, head, feature. The role of each axis follows from its name
(see `AxisRoles`). Several axes with one role are merged for the kernel, and unflattened in its result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from ...axis import Names
from ...core import errors
from ...core.jax_versions import active_device_kind, active_platform
from ...distribution.active_settings import active_mapping
from ...distribution.mesh_axes import axes_of_type, current_mesh
from ...named_array import NamedArray, wrap
from ...ops import _kernels
from ...ops._operands import require_subset
from ._axis_roles import AttentionOperands, AxisRoles, find_roles, merge_axes, split_axes
from .masks import Causal

Implementation: TypeAlias = Literal["named", "xla", "cudnn", "splash", "fused"]
"""Named operations, and the fused kernels: see `dot_product_attention`."""

PLATFORMS = {"cudnn": "gpu", "splash": "tpu"}
"""The platforms of the kernels that need one."""

CUDNN_DTYPES = (jnp.float16, jnp.bfloat16)
"""The dtypes that the kernel for GPUs takes."""

BY_DEFAULT = "cudnn"
"""The kernel that is the default where it applies: on these kinds of devices it was found faster, or is like one."""
KINDS = ("A100", "H100", "H200", "B200")
LARGEST_HEAD = 128


def fused_attention(implementation: str, of: AttentionOperands, refused: Sequence[str]) -> NamedArray:
    """Compute `dot_product_attention` with a fused kernel; `refused` are given arguments that no kernel takes."""
    what = f"dot_product_attention by implementation={implementation!r}"
    if refused:
        raise ValueError(
            f"{what}: a fused kernel takes no {' and no '.join(refused)}. Omit these, or use implementation='named', "
            "which takes every argument."
        )
    query, key, value, KPos, Key, mask, bias, _ = of
    platform, chosen = active_platform(), implementation
    needed = PLATFORMS.get(implementation, platform)
    if implementation == "fused":
        chosen = next((name for name, needed in PLATFORMS.items() if needed == platform), "xla")
        chosen = "xla" if chosen == "cudnn" and query.dtype not in CUDNN_DTYPES else chosen
    elif implementation != "xla" and implementation not in PLATFORMS:
        listed = errors.quoted((None, "named", "fused", "xla", *PLATFORMS))
        hint = errors.suggestion(implementation, ("named", "fused", "xla", *PLATFORMS))
        raise ValueError(f"{what}: no such implementation; choose one of {listed}.{hint}")
    elif needed != platform:
        raise ValueError(
            f"{what}: this kernel needs a {needed.upper()}, and the devices here are {platform.upper()}s. Use "
            "implementation='fused' for the kernel of any platform."
        )
    elif implementation == "cudnn" and query.dtype not in CUDNN_DTYPES:
        raise ValueError(
            f"{what}: this kernel takes float16 and bfloat16, and got {query.dtype}. Use implementation='fused', which "
            "then computes by XLA, or cast the arrays."
        )
    problems: list[str] = []
    roles = find_roles(of, problems)
    sizes = [value.axis_size(n) for n in roles.values]
    if sizes != [key.axis_size(Key)]:
        problems.append(
            f"values should have one axis of features, as long as {Key!r}={key.axis_size(Key)}, and have "
            f"{errors.describe_axes(roles.values, sizes)}"
        )
    if problems:
        given = {"query": query, "key": key, "value": value}
        described = ", ".join(f"{label} {errors.describe_shape(x.shape)}" for label, x in given.items())
        raise ValueError(
            f"{what}: {'; and '.join(problems)}. Got {described}. implementation='named' has no such limits."
        )
    extra = {"mask": mask.further(KPos[0]) if isinstance(mask, Causal) else mask, "bias": bias}
    extra = {label: x for label, x in extra.items() if x is not None}
    for label, x in extra.items():
        require_subset(what, label, x.names, roles.of_scores)
    query, scale = of.scaled()
    if chosen == "splash":
        if bias is not None:
            raise ValueError(f"{what}: splash attention takes no bias. Use implementation='named', which does.")
        for further in extra.values():
            if lacking := [n for n in further.names if n not in (*roles.batch, *roles.keys)]:
                raise ValueError(
                    "dot_product_attention by splash attention: a mask must be `Causal`, or the same for all queries "
                    f"of an example; got one with {errors.describe_axes(lacking)}. Use implementation='named', which "
                    "takes any mask."
                )
        # The partitioner cannot shard a Pallas kernel, so this is a custom-partitioned operation. Operands can be
        # sharded over batch axes and heads and, without a causal mask, over the positions of queries.
        operation = _splash_operation((*roles.values, *roles.positions) if roles.causal else roles.values)
        return operation(query * scale, key, value, *extra.values(), roles=roles)
    operands = (query, key, value, *extra.values())
    names = tuple(x.names for x in operands)
    return _jax_kernel(what, chosen, names, tuple(extra), roles, scale).apply(*(x.array for x in operands))


# --- the kernel that is the default ---


def why_named(of: AttentionOperands, given: Sequence[str]) -> str:
    """Return why named operations compute attention by default on a GPU; empty if a fused kernel does.

    `given` are the arguments that are given and that no kernel takes.
    """
    query, key, value, _, Key, mask, *_ = of
    kind, size = active_device_kind(), key.axis_size(Key)
    dtypes = dict.fromkeys(str(x.dtype) for x in (query, key, value))
    problems: list[str] = []
    roles = find_roles(of._replace(mask=mask if isinstance(mask, Causal) else None), problems)
    around = current_mesh()
    manual = {*jax.sharding.get_abstract_mesh().manual_axes}
    is_auto = around is not None and any(around.shape[a] > 1 for a in axes_of_type(around, AxisType.Auto))
    reasons = {
        f"a kernel takes no {' and no '.join(given)}": given,
        f"{kind} is none of {', '.join(KINDS)}": not any(known in kind for known in KINDS),
        f"the dtype is {' and '.join(dtypes)}": len(dtypes) > 1 or query.dtype not in CUDNN_DTYPES,
        f"the size of a head, {size}, is no multiple of 8 up to {LARGEST_HEAD}": size % 8 or size > LARGEST_HEAD,
        "the mask is an array": mask is not None
        and (not isinstance(mask, Causal) or mask.also is not None or mask.segments is not None),
        "; ".join(problems): problems,
        "values have other features than keys": [value.axis_size(n) for n in roles.values] != [size],
        "some mesh axes are manual, and some are not": manual and around is not None and manual != {*around.axis_names},
        "no mapping says how the mesh shards it": is_auto and not manual and not active_mapping(),
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def default_attention(of: AttentionOperands, named: Callable[..., NamedArray]) -> NamedArray:
    """Compute attention by the kernel of the platform on shards; derivatives of its gradient are those of `named`."""
    roles = find_roles(of, [])
    query, scale = of.scaled()
    operation = _default_operation((*roles.values, *roles.positions) if roles.causal else roles.values)
    return operation(query, of.key, of.value, roles=roles, scale=scale, kernel=BY_DEFAULT, named=named)


@functools.lru_cache(maxsize=512)
def _default_operation(replicated: Names) -> Callable[..., NamedArray]:
    from ...custom_partitioning import partitioned

    return partitioned(_default_attention, replicated=replicated)


def _default_attention(
    query: NamedArray, key: NamedArray, value: NamedArray, *, roles: AxisRoles, scale: float, kernel: str,
    named: Callable[..., NamedArray],
) -> NamedArray:  # fmt: skip
    names = query.names, key.names, value.names
    mask = Causal(roles.positions[0], roles.window) if roles.causal else None

    def by_names(*arrays: jax.Array) -> jax.Array:
        given = [wrap(x, n) for x, n in zip(arrays, names, strict=True)]
        options: Any = {"mask": mask, "scaling_factor": scale, "attention_dtype": jnp.float32}
        found = named(*given, roles.keys, roles.features[0], implementation="named", **options)
        return found.rearrange(roles.out).array

    fused = _by_jax(kernel, names, (), roles, scale)
    return wrap(_with_further_derivatives(fused, by_names)(query.array, key.array, value.array), roles.out)


def _with_further_derivatives(fused: Callable[..., Any], named: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the value and the gradient of one, and further derivatives of another.

    Fused kernels can be differentiated once.
    """

    pullbacks: list[Any] = []  # their structure holds a program, and no two programs are equal

    @jax.custom_jvp
    def forward(*xs: Any) -> Any:
        result, pullback = jax.vjp(fused, *xs)
        residuals, structure = jax.tree.flatten(pullback)
        pullbacks.append(structure)
        return result, residuals

    @forward.defjvp
    def _(xs: Any, tangents: Any) -> Any:
        found = forward(*xs)
        # `backward` does not depend on these: it is a function of the operands.
        constant = jax.tree.map(
            lambda x: np.zeros(x.shape, jax.dtypes.float0) if x.dtype.kind in "iub" else x * 0, found
        )
        return found, (jax.jvp(named, xs, tangents)[1], constant[1])

    @jax.custom_jvp
    def backward(xs: Any, residuals: Any, cotangent: Any) -> Any:
        return jax.tree.unflatten(pullbacks[-1], residuals)(cotangent)

    @backward.defjvp
    def _(given: Any, tangents: Any) -> Any:
        (xs, _, cotangent), (moved, _, turned) = given, tangents

        def gradient(xs: Any, cotangent: Any) -> Any:
            return jax.vjp(named, *xs)[1](cotangent)

        return backward(*given), jax.jvp(gradient, (xs, cotangent), (moved, turned))[1]

    @jax.custom_vjp
    def attend(*xs: Any) -> Any:
        return fused(*xs)

    def kept(*xs: Any) -> Any:
        result, residuals = forward(*xs)
        return result, (xs, residuals)

    attend.defvjp(kept, lambda kept, cotangent: backward(*kept, cotangent))
    return attend


# --- the kernels of jax.nn ---


@_kernels.cached
def _jax_kernel(
    what: str, implementation: Any, in_names: tuple[Names, ...], extra: tuple[str, ...], roles: AxisRoles, scale: float
) -> _kernels.Kernel:
    return _kernels.make_kernel(what, _by_jax(implementation, in_names, extra, roles, scale), in_names, roles.out)


def _by_jax(
    implementation: Any, in_names: tuple[Names, ...], extra: tuple[str, ...], roles: AxisRoles, scale: float
) -> Callable[..., jax.Array]:
    """Return `jax.nn.dot_product_attention` as a function of arrays of these names."""
    heads = (*roles.heads, *roles.group)
    layouts = [
        (roles.batch, roles.positions, heads, roles.features),
        (roles.batch, roles.keys, roles.heads, roles.features),
        (roles.batch, roles.keys, roles.heads, roles.values),
        *[(roles.batch, heads, roles.positions, roles.keys)] * len(extra),
    ]
    options: dict[str, Any] = {"scale": scale, "is_causal": roles.causal, "implementation": implementation}
    if roles.window is not None:
        options["local_window_size"] = (roles.window - 1, 0)  # JAX does not count the query's own position

    def positional(*arrays):
        sizes = {n: s for names, x in zip(in_names, arrays, strict=True) for n, s in zip(names, x.shape, strict=True)}
        dtype = jnp.result_type(*arrays[:3])
        merged = [
            merge_axes(x.astype(dtype), names, layout) if i < 3 else merge_axes(x, names, layout, sizes)
            for i, (x, names, layout) in enumerate(zip(arrays, in_names, layouts, strict=True))
        ]
        result = jax.nn.dot_product_attention(*merged[:3], **dict(zip(extra, merged[3:], strict=True)), **options)
        return split_axes(result, (*layouts[0][:3], roles.values), sizes, roles.out)

    return positional


# --- splash attention ---


@functools.lru_cache(maxsize=512)
def _splash_operation(replicated: Names) -> Callable[..., NamedArray]:
    from ...custom_partitioning import partitioned

    return partitioned(_splash_attention, replicated=replicated)


def _splash_attention(
    query: NamedArray, key: NamedArray, value: NamedArray, mask: NamedArray | None = None, *, roles: AxisRoles
) -> NamedArray:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    sizes = {**query.shape, **value.shape}
    layout = (roles.batch, (*roles.heads, *roles.group), roles.positions)
    q = merge_axes(query.array, query.names, (*layout, roles.features))
    k = merge_axes(key.array, key.names, (roles.batch, roles.heads, roles.keys, roles.features))
    v = merge_axes(value.array, value.names, (roles.batch, roles.heads, roles.keys, roles.values))
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    if not roles.causal:
        pattern: Any = splash.FullMask((queries, keys))
    elif roles.window is None:
        pattern = splash.CausalMask((queries, keys))
    else:
        pattern = splash.LocalMask((queries, keys), (roles.window - 1, 0), 0)
    block_q, block_k = _block_size("queries", queries), _block_size("keys", keys)
    blocks = splash.BlockSizes(
        block_q=block_q,
        block_kv=block_k,
        block_q_dkv=block_q,
        block_kv_dkv=block_k,
        block_kv_dkv_compute=block_k,
        block_q_dq=block_q,
        block_kv_dq=block_k,
    )
    attend: Any = splash.make_splash_mha_single_device(splash.MultiHeadMask([pattern] * heads), block_sizes=blocks)
    if mask is None and (roles.window is None or queries <= keys):
        result = jax.vmap(attend)(q, k, v)
    else:
        allowed = jnp.ones((batch, keys), bool)
        if mask is not None:
            allowed &= merge_axes(mask.array, mask.names, (roles.batch, roles.keys), sizes | key.shape)
        # Queries are in segment 0, and so are the keys that they attend to.
        segments = splash.SegmentIds(jnp.zeros((batch, queries), jnp.int32), (~allowed).astype(jnp.int32))
        result = jax.vmap(attend)(q, k, v, segments)
        # Whether a query attends to any key: the number of allowed keys before each position says so.
        counts = jnp.pad(jnp.cumsum(allowed, 1), ((0, 0), (1, 0)))
        ends = np.arange(1, queries + 1) if roles.causal else np.full(queries, keys)
        starts = np.zeros(queries, int) if roles.window is None else ends - roles.window
        first, last = (np.clip(x, 0, keys) for x in (starts, ends))
        has_keys = counts[:, last] > counts[:, first]
        # The kernel's result for a query without keys has a wrong gradient.
        mean = jnp.repeat(jnp.mean(v, 2, keepdims=True), heads // v.shape[1], axis=1)
        result = jnp.where(has_keys[:, None, :, None], result, mean)
    return wrap(split_axes(result, (*layout, roles.values), sizes, roles.out), roles.out)


def _block_size(label: str, size: int) -> int:
    """Return the block size of the kernel."""
    for block in (512, 256, 128):
        if size % block == 0:
            return block
    raise ValueError(
        f"dot_product_attention by splash attention: the number of positions of {label} on one device must be a "
        f"multiple of 128, got {size}. Pad them, or use implementation='named'."
    )
