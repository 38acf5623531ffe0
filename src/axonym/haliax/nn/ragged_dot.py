"""`ragged_dot`: the product of each group of rows with the group's own matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import jax

Implementation: TypeAlias = Literal["auto", "megablox", "triton", "triton_group_grid", "triton_tile_map", "xla"]
"""Haliax's kernels; here `jax.lax.ragged_dot` computes the product whichever is asked for."""


def ragged_dot(
    lhs_: jax.Array,
    rhs_: jax.Array,
    group_sizes_: jax.Array,
    ar: bool = False,
    implementation: Implementation = "auto",
    *,
    op: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Multiply each group of rows with the group's own matrix, as `jax.lax.ragged_dot` does.

    Arguments:
        lhs_: the rows, of shape (rows, in).
        rhs_: the matrices, of shape (groups, in, out).
        group_sizes_: the number of rows of each group.
        ar: whether to add up the result over the mesh axis `model`, inside `shard_map`.
        implementation: a kernel of Haliax. It has no effect, since XLA has its own.
        op: a function that computes the product, such as `quantization.Fp8RaggedDotOp`.

    >>> hax.nn.ragged_dot(jnp.ones((3, 2)), jnp.ones((2, 2, 4)), jnp.array([1, 2])).shape
    (3, 4)
    """
    if implementation not in get_args(Implementation):
        raise ValueError(f"ragged_dot: `implementation` is one of {get_args(Implementation)}, got {implementation!r}.")
    if op is not None and implementation != "auto":
        raise ValueError("ragged_dot: `op` computes the product itself: pass it without `implementation`.")
    out = jax.lax.ragged_dot(lhs_, rhs_, group_sizes_) if op is None else op(lhs_, rhs_, group_sizes_)
    return jax.lax.psum(out, "model") if ar else out
