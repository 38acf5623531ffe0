"""Solvers on fields, each with the elements that a device receives in a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import axonym as axn
from axonym import NamedArray
from examples import shallow_water

X, Y = axn.Axis("x", 16), axn.Axis("y", 16)

Fields = tuple[NamedArray, ...]


@dataclasses.dataclass(frozen=True)
class Solver:
    """A step of a solver on fields with axes `x` and `y`."""

    step: Callable[..., Fields]
    fields: tuple[tuple[axn.Axis, ...], ...]
    received: Callable[[int, int], int]
    """The elements that a device receives, from the sizes of a shard: of `x` and of `y`."""

    def start(self) -> Fields:
        draw = np.random.default_rng(0).uniform
        return tuple(
            axn.named(jnp.asarray(draw(0.5, 1.5, [a.size for a in axes]), "float32"), axes) for axes in self.fields
        )


def laplacian(u: Any) -> NamedArray:
    return u(x=-1) + u(x=1) + u(y=-1) + u(y=1) - 4 * u()


def heat(u: NamedArray) -> Fields:
    return (axn.stencil(lambda u: u() + 0.1 * laplacian(u), {"x": "edge", "y": (0.0, "reflect")})(u),)


def wave(u: NamedArray, v: NamedArray) -> Fields:
    v = v + 0.1 * axn.stencil(laplacian, {"x": "periodic", "y": lambda edge: -edge})(u)
    return u + 0.1 * v, v


def vorticity(w: NamedArray, psi: NamedArray) -> Fields:
    """Navier and Stokes: two sweeps for the stream function, then the vorticity moves along it, and diffuses."""
    ends = {"x": "periodic", "y": 0.0}
    for _ in range(2):
        psi = axn.stencil(lambda psi, w: (laplacian(psi) + 4 * psi() - w()) / 4, [ends, {}])(psi, w)

    def move(w: Any, psi: Any) -> NamedArray:
        turns = (psi(x=1) - psi(x=-1)) * (w(y=1) - w(y=-1)) - (psi(y=1) - psi(y=-1)) * (w(x=1) - w(x=-1))
        return w() + 0.1 * (turns / 4 + 0.05 * laplacian(w))

    return axn.stencil(move, ends)(w, psi), psi


def weno5(u: NamedArray, least: float = 1e-2) -> Fields:
    def flux(a: Any, b: Any, c: Any, d: Any, e: Any) -> NamedArray:
        parts = (2 * a - 7 * b + 11 * c) / 6, (-b + 5 * c + 2 * d) / 6, (2 * c + 5 * d - e) / 6
        smooth = (
            13 / 12 * (a - 2 * b + c) ** 2 + (a - 4 * b + 3 * c) ** 2 / 4,
            13 / 12 * (b - 2 * c + d) ** 2 + (b - d) ** 2 / 4,
            13 / 12 * (c - 2 * d + e) ** 2 + (3 * c - 4 * d + e) ** 2 / 4,
        )
        weights = [w / (least + s) ** 2 for w, s in zip((0.1, 0.6, 0.3), smooth, strict=True)]
        total = weights[0] + weights[1] + weights[2]
        return (weights[0] * parts[0] + weights[1] * parts[1] + weights[2] * parts[2]) / total

    def move(u: Any) -> NamedArray:
        left, right = (flux(*[u(x=i + j) for j in range(-2, 3)]) for i in (-1, 0))
        return u() - 0.1 * (right - left)

    return (axn.stencil(move, {"x": "periodic"})(u),)


Q = axn.Axis("q", 9)
PLACES = [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)]


def boltzmann(f: NamedArray) -> Fields:
    """The lattice Boltzmann method with nine velocities: particles move, and collide."""

    def stream(f: Any) -> NamedArray:
        return axn.stack([f(x=-i, y=-j)["q", k] for k, (i, j) in enumerate(PLACES)], "q")

    f = axn.stencil(stream, {"x": "periodic", "y": "symmetric"})(f)
    ex, ey = (axn.named(jnp.asarray([p[i] for p in PLACES], "float32"), "q") for i in (0, 1))
    weights = axn.named(jnp.asarray([4 / 9, *[1 / 9] * 4, *[1 / 36] * 4], "float32"), "q")
    rho = f.sum("q")
    ux, uy = (f * ex).sum("q") / rho, (f * ey).sum("q") / rho
    along = ux.broadcast_axis(Q) * ex + uy.broadcast_axis(Q) * ey
    rest = rho.broadcast_axis(Q) * weights * (1 + 3 * along + 4.5 * along**2 - 1.5 * (ux**2 + uy**2).broadcast_axis(Q))
    return (f + 0.6 * (rest - f),)


def sphere(q: NamedArray, v: NamedArray, cosine: NamedArray) -> Fields:
    """Advection on a sphere: `x` is the longitude, `y` the latitude, and `cosine` belongs to the lower face of a cell.

    Nothing flows through the poles.
    """

    def move(q: Any, v: Any, cosine: Any) -> NamedArray:
        below = v() * cosine() * axn.where(v() > 1, q(y=-1), q())
        above = v(y=1) * cosine(y=1) * axn.where(v(y=1) > 1, q(), q(y=1))
        return q() - 0.1 * (q() - q(x=-1)) - 0.1 * (above - below)

    return axn.stencil(move, {"x": "periodic", "y": ("edge", 0.0)})(q, v, cosine), v, cosine


SOLVERS = {
    "heat": Solver(heat, ((X, Y),), lambda x, y: 2 * y + 2 * x),
    "wave": Solver(wave, ((X, Y), (Y, X)), lambda x, y: 2 * y + 2 * x),
    # The depth, `u` and `v` for the velocities, with a corner each, then for the depth.
    "shallow water": Solver(
        shallow_water.step, ((X, Y), (X, Y), (X, Y), (Y,)), lambda x, y: (y + x) + 2 * (y + x + 1) + 2 * (x + y) + y + x
    ),
    "vorticity": Solver(vorticity, ((X, Y), (X, Y)), lambda x, y: 4 * (2 * x + 2 * y)),
    "WENO5": Solver(weno5, ((X, Y),), lambda x, y: 5 * y),
    "Boltzmann": Solver(boltzmann, ((Q, X, Y),), lambda x, y: 9 * (2 * y + 2 * (x + 2))),
    "sphere": Solver(sphere, ((X, Y), (X, Y), (Y,)), lambda x, y: y + 2 * x + x + 1),
}
