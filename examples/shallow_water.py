"""Shallow water in a channel, on a staggered grid that devices share: `python examples/shallow_water.py`.

Water of depth `h` lies in the cells of a C grid. The velocity `u` lies on their left faces, and `v` on their lower
faces, so a difference of neighbors is a slope at the face between them. The channel is periodic along `x`, and has
walls at both ends of `y`: nothing flows through the lowest faces, where a mask makes `v` zero, nor through the faces
beyond the last cells, which are the boundary of `v`. With `--report`, it only prints the report of a step.
"""

from __future__ import annotations

import argparse
import sys

import jax
import jax.numpy as jnp

import axonym as axn
from axonym import NamedArray

jax.config.update("jax_num_cpu_devices", 8)  # simulate eight devices; without effect on accelerators

GRAVITY, DEPTH, TURNING, TIME = 9.81, 100.0, 0.02, 0.01
MAPPING = {"x": "cols", "y": "rows"}

Water = tuple[NamedArray, NamedArray, NamedArray]

ENDS = {"x": "periodic", "y": "edge"}
ENDS_OF_V = {"x": "periodic", "y": ("edge", 0.0)}


def accelerate(h, u, v, open_faces) -> tuple[NamedArray, NamedArray]:
    """Water flows down the slope, and the rotation of the Earth turns it."""
    v_at_u = (v() + v(y=1) + v(x=-1) + v(x=-1, y=1)) / 4
    u_at_v = (u() + u(x=1) + u(y=-1) + u(x=1, y=-1)) / 4
    new_u = u() + TIME * (TURNING * v_at_u - GRAVITY * (h() - h(x=-1)))
    new_v = v() - TIME * (TURNING * u_at_v + GRAVITY * (h() - h(y=-1)))
    return new_u, new_v * open_faces()


def carry(h, u, v) -> NamedArray:
    """What flows into a cell raises the water there."""
    left, right = u() * (h(x=-1) + h()), u(x=1) * (h() + h(x=1))
    below, above = v() * (h(y=-1) + h()), v(y=1) * (h() + h(y=1))
    return h() - TIME / 2 * (right - left + above - below)


def step(h: NamedArray, u: NamedArray, v: NamedArray, open_faces: NamedArray) -> Water:
    """Advance the water: first the velocities, then the depth with the new ones."""
    u, v = axn.stencil(accelerate, [ENDS, ENDS, ENDS_OF_V, ENDS])(h, u, v, open_faces)
    return axn.stencil(carry, [ENDS, ENDS, ENDS_OF_V])(h, u, v), u, v


def start(x: int, y: int) -> tuple[NamedArray, NamedArray, NamedArray, NamedArray]:
    """Return a hill of water at rest, and the mask of the faces that are no wall."""
    X, Y = axn.Axis("x", x), axn.Axis("y", y)
    distance = (axn.arange(X, dtype=float) - x / 2) ** 2 + ((axn.arange(Y, dtype=float) - y / 2) ** 2).broadcast_axis(X)
    rest = axn.zeros((X, Y))
    hill = DEPTH + axn.exp(-distance / (0.01 * x * y))
    return hill.rearrange(("x", "y")), rest, rest, (axn.arange(Y) > 0).astype(jnp.float32)


def energy(h: NamedArray, u: NamedArray, v: NamedArray) -> NamedArray:
    """Return the energy of waves, to first order."""
    return axn.sum(GRAVITY * (h - DEPTH) ** 2 + DEPTH * (u**2 + v**2)) / 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, nargs=2, default=(64, 32), metavar=("X", "Y"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--report", action="store_true", help="only say what a step sends")
    args = parser.parse_args()
    print(f"calculating {args.steps} steps", file=sys.stderr)
    mesh = axn.make_mesh({"cols": 4, "rows": 2})
    if args.report:
        print(axn.insight.explain(step, *start(*args.size), mesh=mesh, mapping=MAPPING, by="names"))
        return

    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        h, u, v, open_faces = axn.shard(start(*args.size))
        water = h, u, v
        total = float(axn.sum(water[0]).array)

        @jax.jit
        def advance(water: Water) -> Water:
            return jax.lax.fori_loop(0, args.steps, lambda _, now: step(now[0], now[1], now[2], open_faces), water)

        h, u, v = advance(water)
        print(f"energy {float(energy(*water).array):.0f} before, {float(energy(h, u, v).array):.0f} after")
        print(f"water lost: {abs(float(axn.sum(h).array) / total - 1):.0e} of all")
        print(
            f"highest wave: {float(axn.max(axn.abs(h - DEPTH)).array):.2f}, on {h.array.sharding.num_devices} devices"
        )


if __name__ == "__main__":
    main()
