"""Differences between the supported versions of JAX, and what can only be guessed of its inner workings."""

from __future__ import annotations

import sys
from typing import Any

import jax
from jax.core import ShapedArray, Tracer

INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # pyright: ignore[reportAttributeAccessIssue]
"""The `inline` of `jax.jit` for what shall leave no trace in a program that is being traced.

From jax 0.12 on, `inline=True` inlines only when the program is lowered.
"""


def varying_axes(x: Any) -> frozenset[str]:
    """Return the mesh axes over which a value, or one of its type, is device-varying inside `shard_map`.

    JAX keeps no track with `check_vma=False`. The attribute changed its name before jax 0.10.2.
    """
    kind: Any = x if isinstance(x, ShapedArray) else jax.typeof(x)
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying


def is_about_devices(error: ValueError) -> bool:
    """Return whether `jax.jit` refused a call because arguments and mesh have different devices; its words say so."""
    return "incompatible devices" in str(error)


def called_by_grad() -> bool:
    """Return whether the calling function was called by `jax.grad`, where that checks that a result is a scalar."""
    return sys._getframe(2).f_code.co_name == "typeof" and sys._getframe(3).f_code.co_name == "_check_scalar"


def set_apart(x: jax.Array) -> jax.Array:
    """Return an array that XLA cannot simplify together with what it was made from, or with what is made from it.

    Before jax 0.12, XLA does three things wrongly where arrays are sharded. It pads an array only once for all
    operations that pad it alike, also where each pads it with another value. Where one position of a constant is
    updated (also of a cotangent that is constant), the other shards are updated too. And pieces that an all-to-all
    exchanges may get layouts of their own, which XLA then refuses.
    """
    return x if jax.__version_info__ >= (0, 12) else jax.lax.optimization_barrier(x)


def is_staged(x: Tracer) -> bool:
    """Return whether operations on a tracer become part of a program, and do not run at once.

    They run at once on the tracers with which `jax.grad`, `jax.jvp` and `jax.vmap` follow arrays outside of jit. Such a
    tracer refers to the array that it follows. With a version of JAX that does not tell, every tracer counts as staged.
    """
    referent: Any = getattr(x, "get_referent", None)
    return referent is None or isinstance(referent(), Tracer)


def active_platform() -> str:
    """Return the platform of the devices of the active mesh, or without one, that of JAX."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend()
    if hasattr(device, "platform"):
        return device.platform
    # Before jax 0.10.2, a device of a mesh has no platform.
    return "tpu" if device.device_kind.startswith("TPU") else jax.default_backend()
