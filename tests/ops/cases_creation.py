"""Creation from another array; `test_creation.py` tests creation from axes alone."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import axonym as axn
from tests.ops.case import Case, f, of

BP = ("batch", "pos")

CASES: list[Case] = [
    Case("zeros_like", (f(*BP),), axn.zeros_like, np.zeros_like, grad=False, names=BP),
    Case(
        "ones_like",
        (of("int", *BP),),
        lambda x: axn.ones_like(x, float),
        lambda x: np.ones_like(x, np.float32),
        grad=False,
        names=BP,
    ),
    Case(
        "full_like",
        (f(*BP),),
        lambda x: axn.full_like(x, 3),
        lambda x: np.full_like(x, 3),
        grad=False,
        names=BP,
    ),
    Case("vander", (f("batch"),), lambda x: axn.vander(x, "power"), jnp.vander, names=("batch", "power"), rtol=1e-4),
    Case(
        "vander",
        (f(*BP),),
        lambda x: axn.vander(x, axn.Axis("power", 3), increasing=True),
        lambda x: jnp.stack([x**0, x, x**2], -1),
        "batched",
        names=(*BP, "power"),
    ),
]
