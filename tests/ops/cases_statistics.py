"""Statistics: order statistics, and differences and integrals along an axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import axonym as axn
from tests.helpers import public_name
from tests.ops.case import Case, f, of

BPE, BP = ("batch", "pos", "embed"), ("batch", "pos")


def _median(name: str, kind: str, fn: Callable[..., Any]) -> list[Case]:
    op, x, grad = public_name(name), of(kind, *BPE), kind == "float"
    return [
        Case(name, (x,), lambda a: op(a, "pos"), lambda a: fn(a, axis=1), "one", grad=grad, names=("batch", "embed")),
        Case(
            name,
            (x,),
            lambda a: op(a, ("embed", axn.Axis("batch", 8))),
            lambda a: fn(a, axis=(0, 2)),
            "two",
            grad=grad,
            names=("pos",),
        ),
        Case(name, (x,), op, fn, "every", grad=grad, names=()),
    ]


def _quantile(name: str, kind: str, whole: int, fn: Callable[..., Any]) -> list[Case]:
    op, x, grad = public_name(name), of(kind, *BPE), kind == "float"
    several = np.array([0.1, 0.5, 1.0], np.float32) * whole
    return [
        Case(
            name,
            (x,),
            lambda a: op(a, 0.3 * whole, "embed"),
            lambda a: fn(a, np.float32(0.3 * whole), axis=2),
            "one",
            grad=grad,
            names=BP,
        ),
        Case(
            name,
            (x,),
            lambda a: op(a, axn.named(several, "q"), ("pos", "embed")),
            lambda a: fn(a, several, axis=(1, 2)),
            "several",
            grad=grad,
            names=("q", "batch"),
        ),
        Case(
            name,
            (x,),
            lambda a: op(a, axn.named(several, "batch"), "batch", method="lower"),
            lambda a: fn(a, several, axis=0, method="lower"),
            "same name",
            grad=False,
            names=BPE,
        ),
        Case(
            name,
            (of(kind, *BP),),
            lambda a: op(a, whole, method="higher"),
            lambda a: fn(a, np.float32(whole), method="higher"),
            "every",
            grad=grad,
            names=(),
        ),
    ]


ORDER = [
    *_median("median", "float", jnp.median),
    *_quantile("quantile", "float", 1, jnp.quantile),
]

ALONG = [
    Case("diff", (f(*BPE),), lambda x: axn.diff(x, "pos"), lambda x: jnp.diff(x, axis=1), names=BPE),
    Case(
        "diff",
        (of("int", *BP),),
        lambda x: axn.diff(x, axn.Axis("batch", 8), n=4),
        lambda x: np.diff(x, 4, 0),
        "fourth",
        grad=False,
        names=BP,
    ),
    Case("diff", (f(*BP),), lambda x: axn.diff(x, "pos", n=0), lambda x: x + 0, "none", names=BP, grad=False),
    Case("gradient", (f(*BPE),), lambda x: axn.gradient(x, "pos"), lambda x: jnp.gradient(x, axis=1), names=BPE),
    Case(
        "gradient",
        (of("int", *BP),),
        lambda x: axn.gradient(x, "batch", spacing=0.5),
        lambda x: np.gradient(x, 0.5, axis=0).astype(np.float32),
        "spacing",
        grad=False,
        names=BP,
    ),
    Case(
        "gradient",
        (f(*BP), of("positive", "pos")),
        lambda x, d: axn.gradient(x, "pos", spacing=axn.cumsum(d, "pos")),
        lambda x, d: jnp.gradient(x, jnp.cumsum(d), axis=1),
        "places",
        names=BP,
        rtol=1e-4,
        atol=1e-4,
    ),
]

CASES: list[Case] = [*ORDER, *ALONG]
