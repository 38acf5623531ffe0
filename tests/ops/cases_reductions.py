"""Reductions over one axis, several, all, with a mask; and cumulative ones, which keep their axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn
from tests.helpers import public_name
from tests.ops.case import Case, f, of

NAMES = ("batch", "pos", "embed")

# Name, positional function, kind of values, whether there is a gradient.
REDUCTIONS: list[tuple[str, Callable[..., Any], str, bool]] = [
    ("all", np.all, "bool", False),
    ("any", np.any, "bool", False),
    ("max", jnp.max, "float", True),
    ("min", jnp.min, "float", True),
    ("ptp", jnp.ptp, "float", True),
    ("nanmax", np.nanmax, "nan", False),
    ("nanmin", np.nanmin, "nan", False),
    ("mean", jnp.mean, "float", True),
    ("nanmean", np.nanmean, "nan", False),
    ("nanprod", np.nanprod, "nan", False),
    ("nansum", np.nansum, "nan", False),
    ("prod", jnp.prod, "positive", True),
    ("sum", jnp.sum, "float", True),
    ("nanstd", np.nanstd, "nan", False),
    ("nanvar", np.nanvar, "nan", False),
    ("std", jnp.std, "float", True),
    ("var", jnp.var, "float", True),
    ("logsumexp", jax.nn.logsumexp, "float", True),
]

# The value of masked elements, where NumPy's function has no `where` or needs an initial value.
NEUTRAL: dict[str, float] = {
    "max": -np.inf,
    "min": np.inf,
    "nanmax": -np.inf,
    "nanmin": np.inf,
    "logsumexp": -np.inf,
}


def _masked(name: str, fn: Callable[..., Any], x: Any, mask: Any) -> Any:
    """Reduce the elements of `x` that `mask` selects over the last two axes, by position."""
    xp = np if isinstance(x, np.ndarray) else jnp
    if name == "ptp":
        return _masked("max", jnp.max, x, mask) - _masked("min", jnp.min, x, mask)
    if name in NEUTRAL:
        return fn(xp.where(mask, x, xp.asarray(NEUTRAL[name], x.dtype)), axis=(1, 2))
    return fn(x, axis=(1, 2), where=mask)


def _reduction(name: str, fn: Callable[..., Any], kind: str, grad: bool) -> list[Case]:
    op = public_name(name)
    x = of(kind, *NAMES)
    # The first position is never masked, so that every element of the result has a value to reduce.
    mask = of("bool", "embed", "pos")

    def selected(m: Any) -> axn.NamedArray:
        return axn.logical_or(m, axn.named(np.arange(4) == 0, "pos"))

    def reference(a: Any, m: Any) -> Any:
        return _masked(name, fn, a, (m.T | (np.arange(4) == 0)[:, None])[None])

    return [
        Case(name, (x,), lambda a: op(a, "embed"), lambda a: fn(a, axis=2), "one", grad=grad, names=("batch", "pos")),
        Case(
            name,
            (x,),
            lambda a: op(a, ("pos", "batch")),
            lambda a: fn(a, axis=(0, 1)),
            "two",
            grad=grad,
            names=("embed",),
            rtol=1e-4,
        ),
        Case(name, (of(kind, "batch", "embed"),), op, fn, "every", grad=grad, names=(), rtol=1e-4),
        Case(
            name,
            (x, mask),
            lambda a, m: op(a, ("embed", axn.Axis("pos", 4)), where=selected(m)),
            reference,
            "where",
            grad=grad,
            names=("batch",),
            rtol=1e-4,
        ),
    ]


def _option(name: str, label: str, options: dict[str, Any], reference: Callable[..., Any], kind: str = "float") -> Case:
    op = public_name(name)
    return Case(
        name,
        (of(kind, *NAMES),),
        lambda a: op(a, "batch", **options),
        reference,
        label,
        grad=kind == "float",
        names=("pos", "embed"),
    )


def _imaginary(name: str, fn: Callable[..., Any]) -> Case:
    op = public_name(name)
    return Case(
        name,
        (of("bool", *NAMES),),
        lambda a: op(1j * a, "pos"),
        lambda a: fn(1j * a, axis=1),
        "imaginary",
        grad=False,
        names=("batch", "embed"),
    )


def _arg(name: str, kind: str) -> list[Case]:
    op, fn = public_name(name), getattr(np, name)
    x = of(kind, *NAMES)
    return [
        Case(name, (x,), lambda a: op(a, "embed"), lambda a: fn(a, axis=2), "last", grad=False, names=("batch", "pos")),
        Case(
            name,
            (x,),
            lambda a: op(a, axn.Axis("batch", 8)),
            lambda a: fn(a, axis=0),
            "first",
            grad=False,
            names=("pos", "embed"),
        ),
        Case(name, (of(kind, "batch", "embed"),), op, fn, "every", grad=False, names=(), layout=False),
    ]


def _cumulative(name: str, kind: str) -> list[Case]:
    op, fn = public_name(name), getattr(np, name) if kind == "nan" else getattr(jnp, name)
    x, grad = of(kind, *NAMES), kind != "nan"
    return [
        Case(name, (x,), lambda a: op(a, "embed"), lambda a: fn(a, axis=2), "last", grad=grad, names=NAMES),
        Case(name, (x,), lambda a: op(a, "batch"), lambda a: fn(a, axis=0), "first", grad=grad, names=NAMES),
        Case(
            name,
            (of("int", "batch", "embed"),),
            lambda a: op(a, "batch", dtype=jnp.float32),
            lambda a: fn(a, axis=0, dtype=np.float32),
            "dtype",
            grad=False,
            names=("batch", "embed"),
        ),
    ]


CASES: list[Case] = [
    *(case for row in REDUCTIONS for case in _reduction(*row)),
    _option("sum", "dtype", {"dtype": np.float32}, lambda a: np.sum(a, axis=0, dtype=np.float32), "int"),
    _option("mean", "dtype", {"dtype": jnp.float32}, lambda a: np.mean(a, axis=0, dtype=np.float32), "int"),
    _option("var", "ddof", {"ddof": 1}, lambda a: jnp.var(a, axis=0, ddof=1)),
    _option("std", "ddof", {"ddof": 2}, lambda a: jnp.std(a, axis=0, ddof=2)),
    _option("nanvar", "ddof", {"ddof": 1}, lambda a: jnp.nanvar(a, axis=0, ddof=1)),
    _option("nanstd", "dtype", {"dtype": "float32"}, lambda a: jnp.nanstd(a, axis=0)),
    *(_imaginary(name, fn) for name, fn, *_ in REDUCTIONS[:2]),
    _option("max", "where_number", {"where": True}, lambda a: jnp.max(a, axis=0)),
    Case(
        "sum",
        (f("batch", "embed"),),
        lambda a: axn.sum({"a": a, "b": [a]}, "embed"),
        lambda a: (jnp.sum(a, axis=1), jnp.sum(a, axis=1)),
        "tree",
        names=(("batch",), ("batch",)),
    ),
    Case("sum", (f("batch"),), lambda a: axn.sum(a, ()), lambda a: a, "nothing", names=("batch",)),
    *_arg("argmax", "float"),
    *_arg("argmin", "int"),
    *_arg("nanargmax", "nan"),
    *_arg("nanargmin", "nan"),
    *_cumulative("cumsum", "float"),
    *_cumulative("cumprod", "positive"),
    *_cumulative("nancumsum", "nan"),
    *_cumulative("nancumprod", "nan"),
]
