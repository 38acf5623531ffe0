"""What differs between the versions of JAX that are supported."""

from __future__ import annotations

from typing import Any

import jax

INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # pyright: ignore[reportAttributeAccessIssue]
"""The `inline` of `jax.jit` for what shall leave no trace in a program that is being traced.

From jax 0.12 on, `inline=True` inlines only when the program is lowered.
"""
