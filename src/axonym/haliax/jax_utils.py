"""Small helpers around JAX."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from equinox import combine as combine, filter_checkpoint as filter_checkpoint, filter_eval_shape as filter_eval_shape
from jax.core import Tracer
from jax.experimental import multihost_utils

from .. import tree_checkpoint_name as _tree_checkpoint_name
from ..axis import Axis
from ..core.named_scope import named_call as named_call
from ..named_array import NamedArray, describe_array, is_jax_array_like as is_jax_array_like
from ..tree import maybe_rng_split as maybe_rng_split
from ._signatures import with_parameters

F = TypeVar("F", bound=Callable[..., Any])


tree_checkpoint_name = with_parameters(_tree_checkpoint_name, tree="x")
broadcast_prefix = jax.tree.broadcast
broadcast_one_to_all, sync_global_devices = multihost_utils.broadcast_one_to_all, multihost_utils.sync_global_devices

# --- trees ---


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """Wraps a hashable value so that trees have it in their structure, not among their leaves.

    >>> jax.tree.leaves([hax.jax_utils.Static("mean"), 3])
    [3]
    >>> jax.jit(lambda how, x: getattr(jnp, how.value)(x))(hax.jax_utils.Static("mean"), jnp.ones(2))
    Array(1., dtype=float32)
    """

    value: Any


# --- processes ---


def assert_equal(in_tree: Any, fail_message: str = "") -> None:
    """Check that all processes have the same values in a tree; the error starts with the message.

    >>> hax.jax_utils.assert_equal({"step": np.ones(2)}, "The processes disagree")
    """
    if _equal(in_tree):
        return
    # Every process got the same answer, so all of them ask once more, leaf by leaf.
    differing = [
        jax.tree_util.keystr(path, simple=True, separator="/") or "the array"
        for path, leaf in jax.tree.leaves_with_path(in_tree)
        if not _equal(leaf)
    ]
    listed = ", ".join(differing)
    raise AssertionError(f"{fail_message or 'assert_equal'}: the processes have different values of {listed}.")


def _equal(tree: Any) -> bool:
    try:
        multihost_utils.assert_equal(tree)
    except AssertionError:
        return False
    return True


# --- functions ---


def multilevel_scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    outer_size: int,
    length: int,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Any, Any]:
    """Scan as `jax.lax.scan` does, in a scan of scans, which keeps less for the gradient.

    Only the carries between the inner scans are kept, and each inner scan is computed again when its gradient is. If
    `outer_size`, the number of inner scans, is near the square root of the length, memory grows with that root. This is
    a function of positions, like `jax.lax.scan`; `axonym.scan` does the same for a named axis with `remat="nested"`.

    >>> hax.jax_utils.multilevel_scan(lambda c, x: (c + x, c), 0.0, jnp.arange(4.0), outer_size=2, length=4)
    (Array(6., dtype=float32), Array([0., 0., 1., 3.], dtype=float32, weak_type=True))
    """
    if length % outer_size:
        raise ValueError(f"multilevel_scan: {length} steps do not divide into {outer_size} scans of one length.")
    wrong = {x.shape[0] for x in jax.tree.leaves(xs)} - {length}
    if wrong:
        raise ValueError(f"multilevel_scan: {length} steps, but `xs` has {sorted(wrong)} elements.")
    inner_size = length // outer_size

    # JAX's protection against a compiler that undoes the recomputation is not necessary inside a loop.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def inner(carry: Any, xs: Any) -> tuple[Any, Any]:
        return jax.lax.scan(f, carry, xs, length=inner_size, reverse=reverse, unroll=unroll)

    blocks = jax.tree.map(lambda x: jnp.reshape(x, (outer_size, inner_size, *x.shape[1:])), xs)
    carry, ys = jax.lax.scan(inner, carry, blocks, length=outer_size, reverse=reverse)
    return carry, jax.tree.map(lambda y: jnp.reshape(y, (length, *y.shape[2:])), ys)


# --- keys and shapes ---


def shaped_rng_split(key: jax.Array, split_shape: int | Axis | Sequence[int | Axis] = 2) -> jax.Array:
    """Split a random key into an array of keys of any shape; a shape with one element holds the key itself.

    >>> hax.jax_utils.shaped_rng_split(jax.random.key(0), (2, 3)).shape
    (2, 3)
    """
    shape = to_jax_shape(split_shape)
    if math.prod(shape) == 1:
        return jnp.reshape(key, shape + key.shape)  # an old-style key has an axis of its own
    return jax.random.split(key, shape)


def to_jax_shape(shape: int | Axis | Sequence[int | Axis]) -> tuple[int, ...]:
    """Return the positional shape that an axis, a size, or a sequence of both stands for.

    >>> hax.jax_utils.to_jax_shape((axn.Axis("batch", 8), 3))
    (8, 3)
    """
    items = shape if isinstance(shape, Sequence) else (shape,)
    return tuple(s.size if isinstance(s, Axis) else operator.index(s) for s in items)


# --- questions ---


def is_scalarish(x: Any) -> bool:
    """Return whether something is a number or an array without axes.

    >>> hax.jax_utils.is_scalarish(3), hax.jax_utils.is_scalarish(axn.ones({"x": 2}))
    (True, False)
    """
    return isinstance(x, (bool, int, float, complex)) or getattr(x, "ndim", None) == 0


def ensure_scalar(x: Any, *, name: str = "value") -> Any:
    """Return the raw array of a named array without axes, and anything else as it is. `name` is for the error.

    >>> hax.jax_utils.ensure_scalar(axn.sum(axn.ones({"x": 2})))
    Array(2., dtype=float32)
    """
    if not isinstance(x, NamedArray):
        return x
    if x.names:
        raise TypeError(f"{name} must be a scalar, got {describe_array(x)}.")
    return x.array


def is_in_jit() -> bool:
    """Return whether a program is being traced by `jax.jit`, or by a function that uses it.

    >>> hax.jax_utils.is_in_jit()
    False
    >>> jax.jit(lambda x: x + hax.jax_utils.is_in_jit())(0)
    Array(1, dtype=int32, weak_type=True)
    """
    return isinstance(jax.lax.full((), 0), Tracer)  # an operation without operands is staged by the trace


def is_on_mac_metal() -> bool:
    """Return whether JAX runs on the GPU of a Mac.

    >>> hax.jax_utils.is_on_mac_metal()
    False
    """
    return jax.default_backend().lower() == "metal"


def is_pallas_dslice(x: object) -> bool:
    """Return whether something is a slice as Pallas writes it, `pl.ds(start, size)`.

    >>> hax.jax_utils.is_pallas_dslice(slice(0, 3))
    False
    """
    pallas = sys.modules.get("jax.experimental.pallas")  # slow to import; if it is not, there is no such slice
    return pallas is not None and isinstance(x, pallas.Slice)
