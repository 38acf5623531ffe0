"""Compare what a program gives with what it should give."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def tolerance(dtype: Any) -> float:
    return 64 * float(jnp.finfo(dtype).eps) ** 0.9


def differs(found: Any, expected: Any, *, weak: bool = True, exact: bool = False, rtol: float = 0) -> str | None:
    """Describe how two positional arrays differ; return None if they agree.

    Arguments:
        found: an array.
        expected: the expected array.
        weak: compare weak types.
        exact: allow no rounding errors.
        rtol: the tolerance, if that of the dtype is smaller. In jit, XLA may omit rounding to a smaller dtype, so
        intermediate results in bfloat16 matter too.
    """
    found, expected = jnp.asarray(found), jnp.asarray(expected)
    weak = weak and expected.dtype != bool  # which promotes alike, weak or not
    if found.dtype != expected.dtype or (weak and found.weak_type != expected.weak_type):
        return f"dtype {found.dtype} weak={found.weak_type} for {expected.dtype} weak={expected.weak_type}"
    if found.shape != expected.shape:
        return f"shape {found.shape} for {expected.shape}"
    if not expected.size:  # and jax 0.10 cannot copy it to the host if it was computed sharded over Explicit axes
        return None
    a, b = np.asarray(found), np.asarray(expected)
    if exact or not jnp.issubdtype(expected.dtype, jnp.inexact):
        return None if np.array_equal(a, b, equal_nan=exact) else f"values {a.tolist()} for {b.tolist()}"
    wide = np.complex128 if jnp.issubdtype(expected.dtype, jnp.complexfloating) else np.float64
    rtol = max(rtol, tolerance(expected.dtype))
    a, b = a.astype(wide), b.astype(wide)
    scale = float(np.max(np.abs(b[np.isfinite(b)]), initial=0.0))
    if np.allclose(a, b, rtol=rtol, atol=rtol * max(scale, 1e-3), equal_nan=True):
        return None
    return f"values {a.tolist()} for {b.tolist()}"


def expect(what: str, found: Any, expected: Any, **options: Any) -> None:
    words = differs(found, expected, **options)
    assert words is None, f"{what}: {words}"
