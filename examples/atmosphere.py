"""Layers of air on a globe, on eight devices, from xarray to a file: `python examples/atmosphere.py`.

The dynamics are stencils on a grid that devices share along latitude and longitude. The physics couple the levels of a
column, and the filter needs whole circles of latitude. So each step changes the mapping and back: `axn.shard` under the
other mapping is an all-to-all. An ensemble is one more axis. With `--out FOLDER`, the last day is written, and drawn.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import jax
import numpy as np
import xarray as xr

import axonym as axn
from axonym import NamedArray

jax.config.update("jax_num_cpu_devices", 8)  # simulate eight devices; without effect on accelerators

RADIUS, GRAVITY, TURNING, TIME = 6.371e6, 1.0, 1.458e-4, 600.0
MIXING, DRAG, POLAR = 0.05, 1e-3, 0.7
GRID = {"member": "members", "lat": "rows", "lon": "cols"}
COLUMNS = {"member": "members", "lat": ("rows", "cols")}

AIR, EAST, NORTH, TRACER = range(4)
"""What a state holds along its axis `field`: the air of a layer, its two velocities, and the tracer in it."""
ENDS = {"lat": ("edge", "edge"), "lon": "periodic"}
ENDS_OF_NORTH = {"lat": ("edge", 0.0), "lon": "periodic"}


def along_latitude(lat: np.ndarray) -> dict[str, NamedArray]:
    """Return widths of cells by latitude: of their middles and their southern faces, of which the first is a wall."""
    south = np.cos(np.deg2rad(lat - (lat[1] - lat[0]) / 2))
    south[0] = 0
    values = {"middle": np.cos(np.deg2rad(lat)), "south": south, "turning": TURNING * np.sin(np.deg2rad(lat))}
    return {name: axn.named(x.astype(np.float32), "lat") for name, x in values.items()}


def dynamics(state: NamedArray, rows: dict[str, NamedArray]) -> NamedArray:
    """Move air down its slopes, and let the winds carry air and tracer from cell to cell, so that none is lost."""
    h, u, v, q = (state["field", i] for i in range(4))
    step = float(np.pi * RADIUS / h.axis_size("lat"))
    levels = np.arange(h.axis_size("level"))
    weights = axn.named(np.minimum.outer(levels, levels).astype(np.float32) + 1, ("level", "below"))
    pressure = GRAVITY * axn.dot(h.rename({"level": "below"}), weights, axis="below").rearrange(h.axes)

    def wind(p, u, v, middle, south, turning):
        v_at_u = (v() + v(lat=1) + v(lon=-1) + v(lat=1, lon=-1)) / 4
        u_at_v = (u() + u(lat=-1) + u(lon=1) + u(lat=-1, lon=1)) / 4
        east = u() + TIME * (turning() * v_at_u - (p() - p(lon=-1)) / (step * middle()))
        north = v() - TIME * (turning() * u_at_v + (p() - p(lat=-1)) / step)
        return east, axn.where(south() > 0, north, 0)

    def carried(h, q, u, v, middle, south):
        def change(x):
            """The wind takes what is in the cell that it leaves."""
            into, out = axn.maximum(u(), 0) * x(lon=-1), axn.minimum(u(), 0) * x()
            beyond = axn.maximum(u(lon=1), 0) * x() + axn.minimum(u(lon=1), 0) * x(lon=1)
            below = south() * (axn.maximum(v(), 0) * x(lat=-1) + axn.minimum(v(), 0) * x())
            above = south(lat=1) * (axn.maximum(v(lat=1), 0) * x() + axn.minimum(v(lat=1), 0) * x(lat=1))
            return x() - TIME / (step * middle()) * (beyond - into - out + above - below)

        return change(h), change(q)

    wall = {"lat": ("edge", 0.0)}
    edge = {"lat": "edge"}
    u, v = axn.stencil(wind, [ENDS, ENDS, ENDS_OF_NORTH, edge, edge, edge])(pressure, u, v, *rows.values())
    h, q = axn.stencil(carried, [ENDS, ENDS, ENDS, ENDS_OF_NORTH, edge, wall])(h, q, u, v, *list(rows.values())[:2])
    return axn.stack([h, u, v, q], "field")


def polar_filter(state: NamedArray, rows: dict[str, NamedArray]) -> NamedArray:
    """Take away the waves along longitude that are too short for the step where circles are small; the mean stays."""
    waves = axn.fft.fftfreq(state.resolve_axis("lon"), 2 / state.axis_size("lon"))
    size = axn.abs(waves).broadcast_axis(rows["middle"].axes)
    removed = axn.where(size * POLAR > rows["middle"], 1 - rows["middle"] / (size * POLAR + 1e-6), 0)
    removed = removed.rename({"lon": "wave"})
    return state - axn.fft.ifft(axn.fft.fft(state, {"lon": "wave"}) * removed, {"wave": "lon"}).real


def physics(state: NamedArray) -> NamedArray:
    """Mix the levels of each column, more by day, and slow the lowest winds. Mixing only moves air and tracer."""
    level, lon = state.resolve_axis("level"), state.resolve_axis("lon")
    day = axn.cos(axn.linspace(lon, start=-np.pi, stop=np.pi, endpoint=False))
    mixing = MIXING * axn.maximum(day, 0).broadcast_axis(level).rearrange(("level", "lon"))
    below = mixing * (axn.arange(level) > 0)
    above = mixing * (axn.arange(level) < level.size - 1)

    def pulled(x):
        return axn.stencil(lambda x, a, b: a() * (x(level=1) - x()) - b() * (x() - x(level=-1)), {"level": "edge"})(
            x, above, below
        )

    state = state + axn.linalg.tridiagonal_solve(-below, 1 + below + above, -above, pulled(state), "level")
    lowest = axn.arange(level) == 0
    winds = (axn.arange({"field": 4}) == EAST) | (axn.arange({"field": 4}) == NORTH)
    return state * (1 - DRAG * (winds.broadcast_axis(level) & lowest))


def to_columns(state: NamedArray) -> NamedArray:
    return axn.shard(axn.shard(state, GRID), COLUMNS)  # pinned: the dynamics are not to be computed in columns


def to_grid(state: NamedArray) -> NamedArray:
    return axn.shard(state, GRID)


def step(state: NamedArray, rows: dict[str, NamedArray]) -> NamedArray:
    """Advance ten minutes."""
    state = to_columns(dynamics(state, rows))
    with axn.axis_mapping(COLUMNS):
        state = physics(polar_filter(state, rows))
    return to_grid(state)


def analysis(levels: int, rows: int, cols: int) -> xr.Dataset:
    """Return what a file would hold: layers of air that are thicker in the tropics, and a plume."""
    lat, lon = (np.arange(rows) + 0.5) * 180 / rows - 90, np.arange(cols) * 360 / cols
    coords = {"level": np.linspace(1000, 100, levels), "lat": lat, "lon": lon}
    ones = xr.DataArray(np.ones((levels, rows, cols), np.float32), coords, ("level", "lat", "lon"))
    air = ones * (1000 + 60 * np.cos(np.deg2rad(ones.lat)) ** 2)
    plume = np.exp(-(((ones.lat - 20) / 15) ** 2) - ((ones.lon - 90) / 20) ** 2) * (ones.level > 500)
    fields = {"air": air, "east": 0 * ones, "north": 0 * ones, "tracer": air * plume}
    named = {name: x.astype(np.float32).assign_attrs(units="m") for name, x in fields.items()}
    return xr.Dataset(named, attrs={"source": "made up"})


def ensemble(start: axn.Labelled, members: int) -> axn.Labelled:
    """Return states that differ a little in their air."""

    def perturbed(fields: dict[str, NamedArray]) -> NamedArray:
        state = axn.stack([*fields.values()], "field")
        air = axn.named(np.array([1, 0, 0, 0], np.float32), "field")
        noise = axn.random.normal(jax.random.key(0), {"member": members} | dict(fields["air"].shape.items()))
        return state.broadcast_axis(axn.Axis("member", members)) + noise.broadcast_axis(air.axes) * air

    return start.map(perturbed, coords={**start.coords, "member": range(members), "field": [*start.array]})


def mass(state: NamedArray, rows: dict[str, NamedArray]) -> np.ndarray:
    """Return the air and the tracer of each member, added up in float64."""
    fields = axn.to_xarray(state).astype(np.float64) * axn.to_xarray(rows["middle"])
    return fields.sum(("level", "lat", "lon")).isel(field=[AIR, TRACER]).transpose("member", "field").values


def sent_by_phase(report: axn.insight.Report) -> dict[str, tuple[dict[str, int], int]]:
    """Return how often each function makes devices exchange something, by kind, and the bytes that a device sends."""
    kinds: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    sent: dict[str, int] = defaultdict(int)
    for c in report.collectives:
        phase = c.source.function if c.source else "elsewhere"
        kinds[phase][c.kind] += c.times or 1
        sent[phase] += (c.sent or 0) * (c.times or 1)
    return {phase: (dict(kinds[phase]), sent[phase]) for phase in kinds}


def say(report: axn.insight.Report) -> None:
    for phase, (kinds, sent) in sent_by_phase(report).items():
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        print(f"  {phase.split('.')[-1]}: {listed}; {sent / 1024:.1f} KiB")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, nargs=3, default=(8, 32, 64), metavar=("LEVELS", "ROWS", "COLS"))
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--out", type=Path, help="a folder for the last state and its map")
    args = parser.parse_args()

    mesh = axn.make_mesh({"members": 1, "rows": 4, "cols": 2})
    print(f"what a device sends in a step, on {mesh.size} devices:")
    start = axn.Labelled(*axn.from_xarray(analysis(*args.size), coords=True))
    rows = along_latitude(start.coords["lat"].values)
    with jax.set_mesh(mesh), axn.axis_mapping(GRID):
        state = axn.shard(ensemble(start, args.members))
        rows = axn.shard(rows)
        say(axn.insight.explain(step, state.array, rows, mesh=mesh, mapping=GRID, by="partitioner"))
        before = mass(state.array, rows)
        advance = jax.jit(step)
        for _ in range(args.steps):
            state = jax.block_until_ready(state.map(advance, rows, coords=state.coords))
        lost = np.abs(mass(state.array, rows) / before - 1).max()
        assert lost < 2e-7, lost
        print(f"less than 2e-7 of the air and the tracer is lost in {args.steps} steps")

    weather = axn.to_xarray(state).to_dataset("field")
    print(f"fastest wind: {float(abs(weather.east).max()):.1f} m/s; {dict(weather.sizes)}")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        weather.to_netcdf(args.out / "weather.nc")
        tracer = (weather.tracer / weather.air).sel(level=1000).mean("member")
        tracer.plot().figure.savefig(args.out / "tracer.png")


if __name__ == "__main__":
    main()
