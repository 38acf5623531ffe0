"""Fourier transforms, polynomials, convolutions and products of whole arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn
from axonym import fft, poly
from tests.ops.case import Case, f, of

BPE = ("batch", "pos", "embed")
A3 = f(*BPE)
HALF = of("complex", *BPE)
LONG = axn.Axis("pos", 6)


# --- Fourier transforms ---


def _fft(name: str, operand: Any = A3) -> list[Case]:
    """Make cases for the forms of the axis argument of every transform, along an axis that is not the last one."""
    operation, along = getattr(fft, name), getattr(jnp.fft, name)
    grad = operand is A3
    return [
        Case(
            f"fft.{name}", (operand,), lambda a: operation(a, "pos"), lambda a: along(a, axis=1), names=BPE, grad=grad
        ),
        Case(
            f"fft.{name}",
            (operand,),
            lambda a: operation(a, LONG),
            lambda a: along(a, n=6, axis=1),
            label="longer",
            names=BPE,
            grad=grad,
            sharded=False,
        ),
        Case(
            f"fft.{name}",
            (operand,),
            lambda a: operation(a, {"pos": axn.Axis("freq", 3)}, "ortho"),
            lambda a: along(a, n=3, axis=1, norm="ortho"),
            label="renamed",
            names=("batch", "freq", "embed"),
            grad=grad,
        ),
        Case(
            f"fft.{name}",
            (operand,),
            lambda a: operation(a),
            lambda a: along(a, axis=-1),
            label="last",
            names=BPE,
            grad=grad,
            layout=False,
            sharded=False,
        ),
    ]


FFT = [
    *_fft("fft"),
    *_fft("ifft"),
    *_fft("rfft"),
    *_fft("irfft", HALF),
    *_fft("hfft", HALF),
    *_fft("ihfft"),
    Case(
        "fft.fft",
        (HALF,),
        lambda a: fft.fft(a, {"embed": None, "batch": "freq"}),
        lambda a: np.fft.fftn(a, axes=(2, 0)),
        label="several",
        names=("freq", "pos", "embed"),
        grad=False,
        atol=1e-4,
    ),
    Case(
        "fft.fft",
        (f("batch", "pos", "embed", "heads"),),
        lambda a: fft.fft(a, ("embed", "heads", "batch", "pos")),
        lambda a: jnp.fft.fftn(a),
        label="four",
        names=(*BPE, "heads"),
        atol=1e-3,
    ),
    Case(
        "fft.rfft",
        (A3,),
        lambda a: fft.rfft(a, ("embed", LONG)),
        lambda a: jnp.fft.rfftn(a, s=(8, 6), axes=(2, 1)),
        label="several",
        names=BPE,
        atol=1e-4,
    ),
    Case(
        "fft.irfft",
        (HALF,),
        lambda a: fft.irfft(a, (axn.Axis("batch", 5), "embed")),
        lambda a: np.fft.irfftn(a, s=(5, 14), axes=(0, 2)),
        label="several",
        names=BPE,
        grad=False,
    ),
    Case(
        "fft.irfft",
        (A3,),
        lambda a: fft.irfft(fft.rfft(a, "pos"), axn.Axis("pos", 4)),
        lambda a: a,
        label="roundtrip",
        names=BPE,
    ),
    Case("fft.fftshift", (A3,), lambda a: fft.fftshift(a), lambda a: jnp.fft.fftshift(a), names=BPE),
    Case(
        "fft.fftshift",
        (A3,),
        lambda a: fft.fftshift(a, "pos"),
        lambda a: jnp.fft.fftshift(a, 1),
        label="one",
        names=BPE,
    ),
    Case(
        "fft.ifftshift",
        (f("batch", "xyz"),),
        lambda a: fft.ifftshift(a, ("xyz", "batch")),
        lambda a: jnp.fft.ifftshift(a),
        names=("batch", "xyz"),
    ),
]


def _frequencies(name: str, size: int) -> Case:
    operation, numpy = getattr(fft, name), getattr(np.fft, name)
    return Case(
        f"fft.{name}",
        (),
        lambda: operation(axn.Axis("t", size), 0.5),
        lambda: numpy(size, 0.5).astype(np.float32),
        label=str(size),
        names=("t",),
        grad=False,
        vmap=False,
        sharded=False,
    )


FREQUENCIES = [_frequencies(name, size) for name in ("fftfreq", "rfftfreq") for size in (5, 6)]


# --- polynomials ---

X, Y = f("x"), f("y")


def _roots(p: Any) -> Any:
    return jnp.roots(p, strip_zeros=False)


def _fit(x: np.ndarray, y: np.ndarray) -> Any:
    """Fit each polynomial of `y`, with axes (batch, x, y), by position."""
    flat = jnp.moveaxis(y, 1, 0).reshape(8, -1)
    return jnp.moveaxis(jnp.asarray(jnp.polyfit(x, flat, 2)).reshape(3, 8, 4), 0, 1)


def _fit_error(x: np.ndarray, y: np.ndarray) -> Any:
    return jnp.polyfit(x, y, 2, cov=True)


def _arithmetic(name: str) -> Case:
    operation, positional = getattr(poly, name), getattr(jnp, name)
    return Case(
        f"poly.{name}",
        (X, Y),
        lambda p, q: (operation(p, q), operation(q, p)),
        lambda p, q: (positional(p, q), positional(q, p)),
        names=(("x",), ("y",)),
    )


POLY = [
    _arithmetic("polyadd"),
    _arithmetic("polysub"),
    _arithmetic("polymul"),
    Case(
        "poly.polyadd",
        (of("int", "x"),),
        lambda p: poly.polyadd([1, 2], p),
        lambda p: np.polyadd([1, 2], p),
        label="raw",
        names=("x",),
        grad=False,
    ),
    Case("poly.polymul", (X,), lambda p: poly.polymul(p, p), lambda p: jnp.polymul(p, p), label="square", names=("x",)),
    Case(
        "poly.polydiv",
        (of("positive", "x"), of("positive", "y")),
        poly.polydiv,
        lambda p, q: jnp.polydiv(p, q),
        names=(("x",), ("x",)),
        rtol=1e-3,
        atol=1e-3,
    ),
    Case("poly.polyder", (X,), lambda p: poly.polyder(p, 2), lambda p: jnp.polyder(p, 2), names=("x",)),
    Case("poly.polyint", (X,), poly.polyint, lambda p: jnp.polyint(p), names=("x",)),
    Case(
        "poly.polyint",
        (X, f("heads")),
        lambda p, k: poly.polyint(p, 2, k),
        lambda p, k: jnp.polyint(p, 2, k),
        label="constants",
        names=("x",),
    ),
    Case(
        "poly.polyval",
        (Y, f("batch", "x")),
        poly.polyval,
        lambda p, x: jnp.polyval(p, x),
        names=("batch", "x"),
        rtol=1e-4,
        atol=1e-4,
    ),
    Case(
        "poly.polyval",
        (Y,),
        lambda p: poly.polyval(p, p),
        lambda p: np.polyval(p, p),
        label="same-axis",
        names=("y",),
        rtol=1e-4,
        atol=1e-4,
    ),
    Case("poly.poly", (Y,), poly.poly, lambda z: jnp.poly(z), names=("y",)),
    Case(
        "poly.roots",
        (of("positive", "y"),),
        poly.roots,
        _roots,
        names=("y",),
        jit=False,
        grad=False,
        rtol=1e-4,
        atol=1e-4,
    ),
    Case(
        "poly.roots",
        (of("positive", "y"),),
        lambda p: poly.roots(p, strip_zeros=False),
        _roots,
        label="traced",
        names=("y",),
        rtol=1e-3,
        atol=1e-3,
    ),
    Case("poly.trim_zeros", (of("index", "x"),), poly.trim_zeros, np.trim_zeros, names=("x",), jit=False, grad=False),
    Case(
        "poly.trim_zeros",
        (of("index", "x"),),
        lambda p: poly.trim_zeros(p, "b"),
        lambda p: np.trim_zeros(p, "b"),
        label="behind",
        names=("x",),
        jit=False,
        grad=False,
    ),
    Case(
        "poly.polyfit",
        (X, f("batch", "x", "y")),
        lambda x, y: poly.polyfit(x, y, 2),
        _fit,
        names=("batch", "x", "y"),
        rtol=1e-3,
        atol=1e-3,
    ),
    Case(
        "poly.polyfit",
        (X, X),
        lambda x, y: poly.polyfit(x, y, 2, cov=True),
        _fit_error,
        label="cov",
        names=(("x",), ("x", "x_cov")),
        rtol=1e-3,
        atol=1e-3,
    ),
    Case(
        "poly.polyfit",
        (of("int", "x"), of("int", "x"), of("positive", "x")),
        lambda x, y, w: poly.polyfit(x, y, 1, w=w),
        lambda x, y, w: jnp.asarray(np.polyfit(x, y, 1, w=w), jnp.float32),
        label="integers",
        names=("x",),
        grad=False,
        rtol=1e-3,
        atol=1e-3,
    ),
]


# --- convolutions and products ---


def _each(positional: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Apply a function along x of (batch, x, heads) and y of (heads, y, pos): heads match, the others are combined."""
    fn = lambda a, v: positional(a, v, mode)
    fn = jax.vmap(fn, (None, 1), 1)  # pos
    fn = jax.vmap(fn, (1, 0), 1)  # heads
    return jax.vmap(fn, (0, None), 0)  # batch


def _along_x(operation: Callable[..., Any], mode: str) -> Callable[..., Any]:
    def call(a: axn.NamedArray, v: axn.NamedArray) -> axn.NamedArray:
        return operation(a, axn.rename(v, {"y": "x"}), "x", mode)

    return call


SIGNAL = [
    *(
        Case(
            "convolve",
            (f("batch", "x", "heads"), f("heads", "y", "pos")),
            _along_x(axn.convolve, mode),
            _each(jnp.convolve, mode),
            label=mode,
            names=("batch", "x", "heads", "pos"),
            rtol=1e-4,
            atol=1e-4,
        )
        for mode in ("full", "same", "valid")
    ),
    Case(
        "convolve",
        (f("x"), f("x")),
        lambda a, v: axn.convolve(a, v, "x"),
        lambda a, v: np.convolve(a, v),
        label="plain",
        names=("x",),
    ),
]

CASES = [*FFT, *FREQUENCIES, *POLY, *SIGNAL]
