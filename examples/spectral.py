"""Turbulence in two dimensions, with Fourier transforms along a sharded axis: `python examples/spectral.py`.

The vorticity of a periodic flow is a field of waves. Each step goes from waves to values, multiplies velocities and
slopes there, and goes back. A transform along a sharded axis exchanges it for another one, by two all-to-alls; the
program says what a step sends, and checks that the energy falls only as fast as friction lets it.
"""

from __future__ import annotations

import argparse
import sys

import jax

import axonym as axn
from axonym import NamedArray, fft

jax.config.update("jax_num_cpu_devices", 8)  # simulate eight devices; without effect on accelerators

MAPPING = {"x": "devices"}
FRICTION, TIME = 2e-3, 5e-3


def wave_numbers(size: int) -> tuple[NamedArray, NamedArray]:
    """Return the wave numbers along `x`, and along the shortened axis `ky`."""
    return fft.fftfreq(axn.Axis("x", size), 1 / size), fft.rfftfreq(axn.Axis("y", size), 1 / size).rename({"y": "ky"})


def to_values(w: NamedArray, size: int) -> NamedArray:
    return fft.irfft(w, {"x": None, "ky": axn.Axis("y", size)})


def to_waves(w: NamedArray) -> NamedArray:
    return fft.rfft(w, {"x": None, "y": "ky"})


def stream(w: NamedArray, kx: NamedArray, ky: NamedArray) -> NamedArray:
    """Return the stream function of a vorticity."""
    square = (kx**2).broadcast_axis(ky.axes) + ky**2
    return -w / axn.where(square == 0, 1, square)


def change(w: NamedArray, size: int) -> NamedArray:
    """Return how fast the vorticity changes: the flow carries it, and friction takes it."""
    kx, ky = wave_numbers(size)
    psi = stream(w, kx, ky)
    u, v = to_values(-1j * ky * psi, size), to_values(1j * kx * psi, size)
    carried = to_waves(u * to_values(1j * kx * w, size) + v * to_values(1j * ky * w, size))
    # Products of the shortest waves would appear as longer ones.
    resolved = (axn.abs(kx) < size / 3).broadcast_axis(ky.axes) & (ky < size / 3)
    return -axn.where(resolved, carried, 0) - FRICTION * w * ((kx**2).broadcast_axis(ky.axes) + ky**2)


def step(w: NamedArray, size: int) -> NamedArray:
    """Advance by the midpoint rule."""
    return w + TIME * change(w + TIME / 2 * change(w, size), size)


def start(size: int) -> NamedArray:
    """Return the waves of a random vorticity with few short ones."""
    kx, ky = wave_numbers(size)
    noise = axn.random.normal(jax.random.key(0), axn.make_axes(x=size, y=size))
    square = (kx**2).broadcast_axis(ky.axes) + ky**2
    return to_waves(noise) * axn.exp(-square / 32) * 20


def energy(w: NamedArray, size: int) -> NamedArray:
    kx, ky = wave_numbers(size)
    return -axn.mean(to_values(stream(w, kx, ky), size) * to_values(w, size)) / 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    print(f"calculating {args.steps} steps", file=sys.stderr)

    with jax.set_mesh(axn.make_mesh({"devices": 8})), axn.axis_mapping(MAPPING):
        w = axn.shard(jax.jit(start, static_argnums=0)(args.size))
        report = axn.insight.explain(lambda w: step(w, args.size), w, by=axn.insight.explaining.quickest_exact())
        kinds = [c.kind for c in report.collectives]
        sent = sum((c.sent or 0) * (c.times or 1) for c in report.collectives)
        listed = ", ".join(f"{kinds.count(kind)} times {kind}" for kind in dict.fromkeys(kinds))
        print(f"a step: {listed}; each device sends {sent / 1024:.0f} KiB")
        new = jax.jit(lambda w: jax.lax.fori_loop(0, args.steps, lambda _, w: step(w, args.size), w))(w)
        before, after = (float(energy(x, args.size).array) for x in (w, new))
        print(f"energy {before:.3f} before, {after:.3f} after {args.steps} steps")
        assert 0 < after < before


if __name__ == "__main__":
    main()
