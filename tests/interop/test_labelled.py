"""Coordinates that refuse to mix: selections, joins and operations of labelled arrays, against xarray."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym import Labelled
from tests.helpers import spec

xr: Any = pytest.importorskip("xarray", reason="xarray is an optional dependency; the extra `dev` has it")
pd: Any = pytest.importorskip("pandas", reason="pandas comes with xarray")

MAPPING = {"lat": "data", "lon": "model"}


def field(seed: int = 0, north_first: bool = False) -> Any:
    lat = np.linspace(-70, 70, 8)
    return xr.DataArray(
        np.random.default_rng(seed).normal(size=(6, 8, 4)).astype(np.float32),
        dims=("time", "lat", "lon"),
        coords={
            "time": pd.date_range("2020-01-30", periods=6),
            "lat": lat[::-1] if north_first else lat,
            "lon": [0.0, 90.0, 180.0, 270.0],
            "run": 7,
        },
        name="t2m",
        attrs={"units": "K"},
    )


def labelled(da: Any) -> Any:
    return Labelled(*axn.from_xarray(da, coords=True))


def stencil(x: Any) -> Any:
    return axn.stencil(lambda u: u(lat=1) - u(lat=-1), {"lat": "periodic"})(x)


MONTHS = axn.groups(field()["time"].dt.month)
DAYS = axn.groups(field()["time"], every="2D")
FINE = np.linspace(-60, 60, 8)


def interpolated(x: Any) -> Any:
    return axn.interp(axn.named(FINE, "lat"), axn.named(field()["lat"].values, "lat"), x, axis="lat")


# What a user does to a labelled array, what xarray does, and the axes whose labels are lost where none are given.
OPERATIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], tuple[str, ...]]] = {
    "add": (lambda x: x.map(axn.add, x), lambda d: d + d, ()),
    "anomaly": (lambda x: x.map(lambda x: x - x.mean("time")), lambda d: d - d.mean("time"), ()),
    "mean": (lambda x: x.map(axn.mean, "lat"), lambda d: d.mean("lat"), ()),
    "deviation": (lambda x: x.map(lambda x: x - x.mean()), lambda d: d - d.mean(), ()),
    "where": (lambda x: x.map(lambda x: axn.where(x > 0, x, 0)), lambda d: d.where(d > 0, 0), ()),
    "cumsum": (lambda x: x.map(axn.cumsum, "time"), lambda d: d.cumsum("time"), ()),
    "transpose": (lambda x: x.map(axn.rearrange, ("lon", "lat", "time")), lambda d: d.transpose(), ()),
    "isel": (lambda x: x.isel(time=slice(1, 4), lat=3), lambda d: d.isel(time=slice(1, 4), lat=3), ()),
    "sel values": (lambda x: x.sel(lat=[10, -30]), lambda d: d.sel(lat=[10, -30]), ()),
    "sel slice": (lambda x: x.sel(lat=slice(-35, 35)), lambda d: d.sel(lat=slice(-35, 35)), ()),
    "sel nearest": (
        lambda x: x.sel(lat=[12.0, 48.0], lon=100, method="nearest", tolerance=15),
        lambda d: d.sel(lat=[12.0, 48.0], lon=100, method="nearest", tolerance=15),
        (),
    ),
    "sel dates": (lambda x: x.sel(time="2020-02"), lambda d: d.sel(time="2020-02"), ()),
    "flip": (lambda x: x.isel(x.coords.flip("lat")), lambda d: d.isel(lat=slice(None, None, -1)), ()),
    "sort": (
        lambda x: x.isel(x.coords.sort("lat", descending=True)),
        lambda d: d.sortby("lat", ascending=False),
        (),
    ),
    "flip by a function": (lambda x: x.map(axn.flip, "lat"), lambda d: d[:, ::-1], ("lat",)),
    "roll": (lambda x: x.map(axn.roll, 1, "lat"), lambda d: d.roll(lat=1), ("lat",)),
    "sort by values": (
        lambda x: x.map(axn.sort, "lat"),
        lambda d: d.copy(data=np.sort(d.values, 1)),
        ("lat",),
    ),
    "stencil": (
        lambda x: x.map(stencil, coords=x.coords),
        lambda d: d.roll(lat=-1, roll_coords=False) - d.roll(lat=1, roll_coords=False),
        (),
    ),
    "interp": (
        lambda x: x.map(interpolated, coords={"lat": FINE}),
        lambda d: d.interp(lat=FINE).astype(np.float32),
        (),
    ),
    "anomaly of groups": (
        lambda x: x.map(
            lambda x, c: x - c["month", MONTHS[1]],
            x.map(lambda x: axn.segment_mean(x, MONTHS[1], MONTHS[0]), coords=MONTHS[2]),
        ),
        lambda d: (d.groupby("time.month") - d.groupby("time.month").mean()).drop_vars("month").assign_coords(run=7),
        (),
    ),
    "group": (
        lambda x: x.map(lambda x: axn.segment_mean(x, MONTHS[1], MONTHS[0]), coords=MONTHS[2]),
        lambda d: d.groupby("time.month").mean(),
        (),
    ),
    "resample": (
        lambda x: x.map(lambda x: axn.segment_mean(x, DAYS[1], DAYS[0]), coords=DAYS[2]),
        lambda d: d.resample(time="2D").mean(),
        (),
    ),
}


@pytest.mark.parametrize("how", ["one", "auto", "explicit", "jit"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_as_xarray_or_without_labels(name: str, how: str) -> None:
    ours, theirs, lost = OPERATIONS[name]
    da = field()
    with contextlib.ExitStack() as stack:
        x = labelled(da)
        if how != "one":
            stack.enter_context(jax.set_mesh(axn.make_mesh({"data": 4, "model": 2}, explicit=how == "explicit")))
            stack.enter_context(axn.axis_mapping(MAPPING))
            x = axn.shard(x)
            assert spec(x.array) == (None, "data", "model")
        found = jax.block_until_ready(jax.jit(ours)(x) if how == "jit" else ours(x))
        got = axn.to_xarray(found)
    expected = theirs(da).drop_vars(lost)
    assert set(got.coords) == set(expected.coords) and not set(lost) & set(got.coords)
    xr.testing.assert_allclose(got.transpose(*expected.dims), expected, rtol=1e-4, atol=1e-5)
    assert (got.name, got.attrs) == (da.name, da.attrs)


OTHERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "shifted": (lambda d: d.assign_coords(lat=d.lat + 20), "at position 0 the values are -70.0 (float64) and -50.0"),
    "disjoint": (lambda d: d.assign_coords(lat=d.lat + 500), "at position 0 the values are -70.0"),
    "flipped": (lambda d: d.isel(lat=slice(None, None, -1)), "at position 0 the values are -70.0 (float64) and 70.0"),
    "sorted by something": (lambda d: d.isel(lat=[0, 1, 3, 2, 4, 5, 6, 7]), "at position 2 the values are -30.0"),
    "shorter": (lambda d: d.isel(lat=slice(4)), "they are along (lat=8) and (lat=4)"),
    "other days": (lambda d: d.assign_coords(time=d.time + np.timedelta64(1, "D")), "'time' are not the same"),
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_what_refuses_to_mix(name: str, sharded: bool, mesh: jax.sharding.Mesh) -> None:
    change, message = OTHERS[name]
    with jax.set_mesh(mesh) if sharded else contextlib.nullcontext():
        a, b = labelled(field()), labelled(change(field(1)))
        if sharded:
            a = axn.shard(a, {"lat": "data"})
        with pytest.raises(ValueError, match=re.escape(message)):
            a.map(axn.add, b)
        with pytest.raises(ValueError, match=re.escape(message)):
            a.coords.align(b.coords)
        at, beside = a.coords.align(b.coords, join="inner")
        if name != "disjoint":
            added = a.isel(at).map(axn.add, b.isel(beside))
            expected = field() + change(field(1))
            expected = expected.sel(lat=added.coords["lat"].values)
            xr.testing.assert_allclose(axn.to_xarray(added), expected)


@pytest.mark.parametrize("explicit", [False, True])
def test_functions_with_arrays_of_their_own(explicit: bool) -> None:
    """Which are sharded: their types have the axes of an Explicit mesh."""
    with jax.set_mesh(axn.make_mesh({"data": 4, "model": 2}, explicit=explicit)), axn.axis_mapping(MAPPING):
        x, weights = axn.shard((labelled(field()), axn.ones({"lat": 8})))
        for found in (
            x.map(lambda x: x * weights),
            x.map(axn.multiply, weights),
            jax.jit(lambda x, w: x.map(lambda x: x * w))(x, weights),
        ):
            xr.testing.assert_identical(axn.to_xarray(jax.block_until_ready(found)), field())
        assert {*x.map(lambda x: axn.flip(x, "lat") * weights).coords} == {"time", "lon", "run"}
        assert not {*x.map(lambda _, w: w, weights).coords} & {"lat"}


def test_days_that_were_selected_do_not_differ() -> None:
    """A time without an axis is left out, as by xarray."""
    x, da = labelled(field()), field()
    found = axn.to_xarray(x.sel(time="2020-02-01").map(axn.subtract, x.sel(time="2020-01-31")))
    xr.testing.assert_allclose(found, da.sel(time="2020-02-01") - da.sel(time="2020-01-31"))
    assert "time" not in found.coords and "run" in found.coords
    mixed = axn.to_xarray(x.map(axn.subtract, x.sel(time="2020-01-31")))
    xr.testing.assert_allclose(mixed, da - da.sel(time="2020-01-31"))


def test_selection_by_value_moves_nothing_along_other_axes() -> None:
    """The shards hold all days, so days are selected on each device."""
    x = labelled(field())
    for explicit in (False, True):
        with jax.set_mesh(axn.make_mesh({"data": 4, "model": 2}, explicit=explicit)), axn.axis_mapping(MAPPING):
            placed = axn.shard(x)
            compiled = jax.jit(lambda x: x.sel(time=slice("2020-01-31", "2020-02-03")).isel(x.coords.flip("lon")))
            text = compiled.lower(placed.isel(lon=[0])).compile().as_text()
            assert text is not None and not re.search("all-gather|all-to-all|all-reduce|collective-permute", text)
            found = jax.block_until_ready(jax.jit(lambda x: x.sel(time="2020-02"))(placed))
            assert spec(found.array) == (None, "data", "model")


def test_pointwise() -> None:
    x, da = labelled(field()), field()
    at = {n: xr.DataArray(v, dims="station") for n, v in {"lat": [50, -30, 10], "lon": [0, 0, 270]}.items()}
    xr.testing.assert_identical(axn.to_xarray(x.sel(**at)), da.sel(**at))


def test_what_sel_refuses() -> None:
    coords = axn.Coordinates(field(north_first=True).coords)
    for asked, message in (
        ({"lat": slice(-30, 30)}, "no value of 'lat' lies in slice(-30, 30). They go from 70.0 to -70.0"),
        ({"latt": 3}, "no coordinates 'latt' to select by"),
        ({"lat": 3}, "not all values found: lat=3 among values from 70.0 to -70.0"),
        (
            {"lat": 3, "method": "nearest", "tolerance": 1},
            "not all values found within 1: lat=3 among values from 70.0 to -70.0",
        ),
    ):
        with pytest.raises(KeyError, match=re.escape(message)):
            coords.sel(**asked)
    assert coords.sel(lat=slice(30, -30)) == {"lat": slice(2, 6, 1)}
    with pytest.raises(ValueError, match="latt"):
        coords.isel(latt=3)


def test_a_pair_is_one_static_tree() -> None:
    x = labelled(field())
    assert len(jax.tree.leaves(x)) == 1
    assert jax.tree_util.keystr(jax.tree_util.tree_flatten_with_path(x)[0][0][0]) == ".array.array"
    slope = jax.grad(lambda x: x.map(lambda a: (a * a).sum()).array.array)(x)
    np.testing.assert_allclose(slope.array.array, 2 * field().values)
    assert slope.coords == x.coords
    with pytest.raises(ValueError, match="coordinate 'lat' has 8 values along 'lat', and the arrays have 4"):
        Labelled(x.array["lat", :4], x.coords)
    with pytest.raises(ValueError, match="has 8 values along 'lat', and the arrays have 7"):
        x.map(axn.diff, "lat", coords=x.coords)
    with pytest.raises(TypeError, match="its own coordinates"):
        axn.to_xarray(x, x.coords)
    with pytest.raises(TypeError, match="must return a named array"):
        x.map(lambda x: x.array)


def test_a_dataset_comes_back() -> None:
    ds = xr.Dataset({"t2m": field(), "rain": field(1).isel(lon=0, drop=True)}, attrs={"source": "none"})
    x = labelled(ds)
    xr.testing.assert_identical(axn.to_xarray(x), ds)
    xr.testing.assert_identical(axn.to_xarray(x.sel(lat=slice(0, 90))), ds.sel(lat=slice(0, 90)))
    doubled = x.map(lambda arrays: jax.tree.map(lambda a: 2 * a, arrays))
    xr.testing.assert_identical(axn.to_xarray(doubled), 2 * ds)


FOLLOWED: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "scan": (lambda x: axn.scan(lambda c, a: (c + a, c * a), "time")(x["time", 0] * 0, x)[1], ("time", "lat", "lon")),
    "a loop that flips": (lambda x: axn.fori_loop(0, 3, lambda i, x: axn.flip(x, "lat"), x), ("time", "lon")),
    "a branch that flips": (
        lambda x: jax.lax.cond(x.sum().array > 0, lambda x: axn.flip(x, "lat"), lambda x: x, x),
        ("time", "lon"),
    ),
    "flipped and multiplied": (lambda x: axn.flip(x, "lat") * x, ("time", "lon")),
    "taken and multiplied": (lambda x: axn.take(x, "lat", axn.flip(axn.arange({"lat": 8}))) * x, ("time", "lon")),
    "by another axis": (
        lambda x: x - axn.ones({"month": 2, "lat": 8, "lon": 4})["month", MONTHS[1] * 0],
        ("time", "lat", "lon"),
    ),
    "split and joined": (
        lambda x: axn.flatten_axes(axn.unflatten_axis(x, "lat", {"a": 4, "b": 2}), ("b", "a"), "lat"),
        ("time", "lon"),
    ),
    "renamed": (lambda x: x.rename({"lat": "latitude"}), ("time", "lon")),
    "renamed in a circle": (lambda x: x.rename({"lat": "lon", "lon": "lat"}), ("time",)),
    "softmax": (lambda x: axn.nn.softmax(x, "lat"), ("time", "lat", "lon")),
    "a matrix": (lambda x: axn.dot(x, axn.ones({"lat": 8, "k": 3}), axis="lat"), ("time", "lon")),
    "filtered": (lambda x: axn.fft.ifft(axn.fft.fft(x, "lon"), "lon").real, ("time", "lat")),
    "one that is not followed": (lambda x: x + axn.flip(x, "lat").mean("lat"), ("time", "lat", "lon")),
    "padded and cut": (lambda x: axn.pad(x, {"lat": (1, 0)})["lat", :-1], ("time", "lon")),
    "other values": (lambda x: axn.arange({"lat": 8}) * 1.0, ()),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_labels_that_are_kept(name: str) -> None:
    change, kept = FOLLOWED[name]
    assert {n for n in labelled(field()).map(change).coords if n != "run"} == {*kept}


def test_groups() -> None:
    time = axn.Coordinates({"time": pd.to_datetime(["2020-01-01", "2020-01-05", "2020-04-01"])})
    axis, ids, labels = axn.groups(time["time"], every="MS")
    assert (axis, ids.tolist()) == (axn.Axis("time", 2), [0, 0, 1])
    assert [str(t)[:7] for t in labels["time"].values] == ["2020-01", "2020-04"]
    missing = xr.DataArray(["b", "a", None, "b"], dims="x", name="kind")
    axis, ids, labels = axn.groups(missing)
    assert (axis.size, ids.tolist(), labels["kind"].values.tolist()) == (2, [1, 0, -1, 1], ["a", "b"])
    both = xr.DataArray([[3, 1], [1, 3]], dims=("y", "x"), name="zone")
    axis, ids, _ = axn.groups(both)
    assert axn.segment_sum(axn.ones({"y": 2, "x": 2}), ids, axis).tolist() == [2, 2]
    with pytest.raises(ValueError, match="not in ascending order"):
        axn.groups(time.isel(time=[2, 0, 1])["time"], every="MS")
    with pytest.raises(TypeError, match="expected a DataArray with a name"):
        axn.groups(jnp.arange(3))


def test_areas() -> None:
    """Rows of cells of equal height have areas by the cosine of their latitudes."""
    lat = xr.DataArray(np.linspace(-87.5, 87.5, 36), dims="lat")
    cosines = np.cos(np.deg2rad(lat)) / np.cos(np.deg2rad(lat)).sum()
    for values in (lat, lat[::-1]):
        found = axn.Coordinates({"lat": values.values}).areas()
        np.testing.assert_allclose(found.array, cosines, rtol=1e-5)
        assert abs(found.sum().item() - 1) < 1e-6


def test_names_of_axes_have_any_characters() -> None:
    x = axn.Labelled(axn.arange({"~lat": 3, "#x": 2}), {"~lat": [1, 2, 3], "#x": [0, 1]})
    assert [*x.map(lambda x: x + 1).coords] == ["~lat", "#x"]
    assert [*x.map(axn.flip, "~lat").coords] == ["#x"]


@pytest.mark.parametrize("explicit", [False, True])
def test_interpolation_between_points_that_fall_is_refused(explicit: bool) -> None:
    """Latitudes from north to south gave values at the ends, without a word."""
    x = labelled(field(north_first=True))
    from_lat = axn.from_xarray(x.coords["lat"])
    with axn.set_mesh(axn.make_mesh({"data": 8}, explicit=explicit)), axn.axis_mapping({"lat": "data"}):
        for array in (x.array, axn.shard(x.array)):
            with pytest.raises(ValueError, match=r"rise along 'lat', and they go from 70\.0 to -70\.0"):
                axn.interp(axn.named(FINE, "lat"), from_lat, array, axis="lat")
    up = x.isel(x.coords.sort("lat"))
    found = up.map(interpolated, coords={"lat": FINE})
    xr.testing.assert_allclose(axn.to_xarray(found), field(north_first=True).interp(lat=FINE), rtol=1e-4)


def test_operations_are_no_methods() -> None:
    x: Any = labelled(field())
    with pytest.raises(AttributeError, match=r"no attribute 'groupby'\. Operations are called by `map`"):
        x.groupby("time.month")
