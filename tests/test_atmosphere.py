"""Columns and halos, `examples/atmosphere.py`: one step on eight devices, what it sends, and what it conserves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn

xr: Any = pytest.importorskip("xarray", reason="xarray is an optional dependency; the extra `dev` has it")

from examples import atmosphere  # noqa: E402  # needs xarray

SIZE, MEMBERS = (8, 32, 64), 2
MESH = {"members": 1, "rows": 4, "cols": 2}
LARGE = {"members": 8, "rows": 16, "cols": 4}


def start() -> tuple[Any, Any]:
    given = axn.Labelled(*axn.from_xarray(atmosphere.analysis(*SIZE), coords=True))
    return atmosphere.ensemble(given, MEMBERS), atmosphere.along_latitude(given.coords["lat"].values)


def abstract(members: int, levels: int, rows: int, cols: int) -> Any:
    """Return arguments of a step without values."""
    state = {"field": 4, "member": members, "level": levels, "lat": rows, "lon": cols}
    of_rows = axn.NamedArray(jax.ShapeDtypeStruct((rows,), jnp.float32), ("lat",))
    array = jax.ShapeDtypeStruct(tuple(state.values()), jnp.float32)
    return axn.NamedArray(array, tuple(state)), dict.fromkeys(("middle", "south", "turning"), of_rows)


def report(step: Any, args: Any, sizes: dict[str, int], by: str) -> Any:
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    return axn.insight.explain(step, *args, mesh=mesh, mapping=atmosphere.GRID, by=by)


@pytest.mark.parametrize("explicit", [False, True])
def test_devices_compute_the_same(explicit: bool) -> None:
    state, rows = start()
    alone = jax.jit(atmosphere.physics)(atmosphere.polar_filter(atmosphere.dynamics(state.array, rows), rows))
    with jax.set_mesh(axn.make_mesh(MESH, explicit=explicit)), axn.axis_mapping(atmosphere.GRID):
        placed, beside = axn.shard((state, rows))
        found = jax.block_until_ready(jax.jit(atmosphere.step)(placed.array, beside))
        assert {*found.array.sharding.spec} >= {"rows", "cols"}
    for a, b in zip(axn.unbind(found, "field"), axn.unbind(alone, "field"), strict=True):
        np.testing.assert_allclose(a.array, b.rearrange(a.names).array, atol=3e-6 * float(axn.abs(b).max().array))


@pytest.mark.parametrize(("sizes", "shape"), [(MESH, (MEMBERS, *SIZE)), (LARGE, (64, 64, 512, 1024))])
def test_a_change_of_mapping_sends_what_it_must(sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    """A device keeps its part of what it has: one over the size of `cols`.

    There and back are one call of `shard` each, which newer versions of JAX trace once, and give the first line.
    """
    args = abstract(*shape)
    phases = atmosphere.sent_by_phase(report(atmosphere.step, args, sizes, "partitioner"))
    here = 4 * 4 * np.prod(shape) // np.prod([*sizes.values()])
    least = here * (sizes["cols"] - 1) // sizes["cols"]
    changes = [phases.pop(name) for name in ("to_columns", "to_grid") if name in phases]
    assert all({*kinds} == {"all-to-all"} for kinds, _ in changes)
    assert (sum(kinds["all-to-all"] for kinds, _ in changes), sum(sent for _, sent in changes)) == (2, 2 * least)
    assert {*phases} == {"dynamics"}, "the physics and the filter exchange nothing"
    assert {*phases["dynamics"][0]} == {"collective-permute"}


def test_names_know_the_halos_of_512_devices() -> None:
    """Without a compiler; each is a row or a column of the fields that are looked up, which the partitioner joins."""
    args = abstract(64, 64, 512, 1024)
    by_names = report(atmosphere.dynamics, args, LARGE, "names").collectives
    row, column = (8 * 64 * n * 4 for n in (1024 // 4, 512 // 16))
    assert {c.kind for c in by_names} == {"collective-permute"}
    sent = {c.sent for c in by_names}
    assert sent <= {4, 8, row, column, 8 * 64 * 33 * 4, 8 * 64 * 257 * 4}, sent


@pytest.mark.parametrize(("sizes", "shape"), [(MESH, (MEMBERS, *SIZE)), (LARGE, (64, 64, 512, 1024))])
def test_names_know_what_the_step_sends(sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    """Each phase under its own mapping; constants of the physics lie by the mapping that is active there."""
    early, true = (report(atmosphere.step, abstract(*shape), sizes, by) for by in ("names", "partitioner"))
    kinds = ("collective-permute", "all-to-all")
    assert early.total_sent() == true.total_sent()
    for kind in kinds:
        own, other = ([c.sent for c in r.collectives if c.kind == kind] for r in (early, true))
        assert sorted(own) == sorted(other)
    assert {c.kind for c in early.collectives} == {*kinds}
    assert {*atmosphere.sent_by_phase(early)} == {"dynamics", "to_columns", "to_grid"}


def test_a_plan_does_not_choose_the_axes_of_a_mapping_inside() -> None:
    with pytest.raises(ValueError, match=r"plan: step has a mapping inside, \{'lat': .*atmosphere.py:\d+.* `compare`"):
        axn.insight.plan(atmosphere.step, *abstract(2, 8, 32, 64), chips=8)


def test_the_compiled_step() -> None:
    state, rows = start()
    with jax.set_mesh(axn.make_mesh(MESH)), axn.axis_mapping(atmosphere.GRID):
        placed, beside = axn.shard((state.array, rows))
        text = jax.jit(atmosphere.step).lower(placed, beside).compile().as_text()
    assert text is not None
    assert text.count(" all-to-all(") == 2 and "all-gather" not in text and "all-reduce" not in text


def test_from_a_dataset_to_a_file_and_a_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency; the extra `plot`")
    matplotlib.use("agg")
    small = "--size 4 16 32 --members 2 --steps 3".split()
    monkeypatch.setattr(sys, "argv", ["atmosphere.py", *small, "--out", str(tmp_path)])
    atmosphere.main()
    assert "less than 2e-7" in capsys.readouterr().out
    assert (tmp_path / "tracer.png").stat().st_size > 1000
    with xr.open_dataset(tmp_path / "weather.nc") as found:
        assert dict(found.sizes) == {"member": 2, "level": 4, "lat": 16, "lon": 32}
        np.testing.assert_array_equal(found.lat, atmosphere.analysis(4, 16, 32).lat)


def test_nothing_is_lost_in_two_days() -> None:
    state, rows = start()
    step = jax.jit(lambda x: atmosphere.physics(atmosphere.polar_filter(atmosphere.dynamics(x, rows), rows)))
    after = state.array
    for _ in range(288):
        after = step(after)
    lost = atmosphere.mass(after, rows) / atmosphere.mass(state.array, rows) - 1
    assert np.abs(lost).max() < 2e-7
    assert float(axn.abs(after - state.array).max().array) > 1
