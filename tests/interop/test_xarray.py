"""Conversion of named arrays from and to xarray, and through it from pandas and files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import axonym as axn
from tests.helpers import compilations, spec

xr: Any = pytest.importorskip("xarray", reason="xarray is an optional dependency; the extra `dev` has it")
pd: Any = pytest.importorskip("pandas", reason="pandas comes with xarray")


def weather(seed: int = 0) -> Any:
    """Return data with coordinates of every kind: dates, strings, one that is not an index, one without axes."""
    values = np.random.default_rng(seed).normal(size=(4, 3)).astype(np.float32)
    coords: Any = {
        "time": pd.date_range("2020-01-01", periods=4),
        "station": ["a", "b", "c"],
        "height": ("station", [1.0, 20.0, 300.0]),
        "run": 7,
    }
    return xr.DataArray(values, dims=("time", "station"), coords=coords, name="t2m")


# --- round trips ---


def test_a_data_array() -> None:
    da = weather()
    x = axn.from_xarray(da)
    assert isinstance(x.array, jax.Array)
    assert x.shape == {"time": 4, "station": 3}
    np.testing.assert_array_equal(x.array, da.values)
    xr.testing.assert_identical(axn.to_xarray(x, da.coords, name="t2m"), da)
    xr.testing.assert_identical(axn.to_xarray(x), xr.DataArray(da.values, dims=da.dims))


def test_a_dataset() -> None:
    ds = xr.Dataset({"t2m": weather(), "rain": weather(1).isel(station=0, drop=True)})
    arrays, coords = axn.from_xarray(ds, coords=True)
    assert {name: x.names for name, x in arrays.items()} == {"t2m": ("time", "station"), "rain": ("time",)}
    xr.testing.assert_identical(axn.to_xarray(arrays, coords), ds)


def test_order_is_that_of_the_array() -> None:
    x = axn.from_xarray(weather()).rearrange(("station", "time"))
    xr.testing.assert_identical(axn.to_xarray(x, weather().coords, name="t2m"), weather().transpose())


def test_pandas() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3, 4]}, index=pd.Index(["r", "s"], name="row"))
    columns, coords = axn.from_xarray(frame.to_xarray(), coords=True)
    found = axn.to_xarray(columns, coords).to_dataframe()
    pd.testing.assert_frame_equal(found.astype(frame.dtypes), frame)

    series: Any = frame["a"]
    x, coords = axn.from_xarray(series.to_xarray(), coords=True)
    pd.testing.assert_series_equal(
        axn.to_xarray(x * 2, coords).to_series(), series * 2, check_names=False, check_dtype=False
    )


def test_an_index_of_several_levels() -> None:
    stacked = weather().isel(time=slice(2)).drop_vars(["height", "run"]).stack(row=("time", "station"))
    x, coords = axn.from_xarray(stacked, coords=True)
    assert x.shape == {"row": 6}
    found = axn.to_xarray(x, coords, name="t2m").unstack("row")
    xr.testing.assert_identical(found, stacked.unstack("row"))


def test_sharded(mesh: jax.sharding.Mesh) -> None:
    da = weather()
    with jax.set_mesh(mesh):
        x = axn.from_xarray(da, placement={"time": "data"})
        assert spec(x) == ("data", None)
        xr.testing.assert_identical(axn.to_xarray(x, da.coords, name="t2m"), da)
        doubled = axn.named_jit(lambda x: x * 2, {"time": "data"})(x)
        xr.testing.assert_identical(axn.to_xarray(doubled, da.coords, name="t2m"), da * 2)


# --- files, and the table of docs/fields.md ---


def test_a_sharded_field_is_written_and_read(mesh: jax.sharding.Mesh, tmp_path: Path) -> None:
    """By SciPy, which JAX needs."""
    da = weather().drop_vars("run")
    with jax.set_mesh(mesh):
        x = axn.from_xarray(da, placement={"time": "data"})
        axn.to_xarray(2 * x, da.coords, name="t2m").to_netcdf(tmp_path / "t2m.nc")
    with xr.open_dataset(tmp_path / "t2m.nc") as found:
        np.testing.assert_array_equal(found["t2m"].values, 2 * da.values)
        np.testing.assert_array_equal(found["time"].values, da["time"].values)
        assert found["station"].values.astype(str).tolist() == ["a", "b", "c"]


PAGE = Path(__file__).parents[2] / "docs" / "fields.md"
ROWS = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", PAGE.read_text().partition("| xarray and dask")[2], re.MULTILINE)


@pytest.mark.oldest
@pytest.mark.parametrize(("theirs", "ours"), ROWS, ids=[theirs for theirs, _ in ROWS])
def test_what_the_page_says_to_write_here(theirs: str, ours: str) -> None:
    """Both give the same values: alone, and with the axis sharded."""
    n = 16
    spread = np.linspace(0, 1, n) ** 2
    values = np.random.default_rng(0).normal(size=n)
    month = np.arange(n) // 4
    da = xr.DataArray(values, dims="x", coords={"x": spread, "month": ("x", month)})
    known = {"axn": axn, "jnp": jax.numpy, "n": n, "da": da, "a": values, "x": axn.named(np.float32(values), "x")}
    known |= {"f": lambda u: axn.roll(u, 1, "x") * u}
    known |= {"coordinates": axn.named(np.float32(spread), "x"), "months": axn.named(month, "x")}
    known |= {"w": xr.DataArray(spread, dims="x"), "weights": axn.named(np.float32(spread), "x")}
    if "dask" in theirs:  # what it computes, without dask
        wide = np.pad(values, 1, mode="symmetric")
        wanted = (np.roll(wide, 1) * wide)[1:-1]
    elif "interp" in theirs:
        wanted = da.interp(x=np.linspace(0.1, 0.9, n)).values
        known["places"] = axn.named(np.linspace(0.1, 0.9, n, dtype=np.float32), "x")
    else:
        wanted = eval(theirs, known).values
    np.testing.assert_allclose(eval(ours, known).array, wanted, rtol=1e-4, atol=1e-4)
    with jax.set_mesh(axn.make_mesh({"data": 4, "model": 2})), axn.axis_mapping({"x": "data"}):
        sharded = {name: axn.shard(v) if isinstance(v, axn.NamedArray) else v for name, v in known.items()}
        np.testing.assert_allclose(eval(ours, sharded).array, wanted, rtol=1e-4, atol=1e-4)


# --- coordinates ---


def test_coordinates_of_axes_that_are_gone_are_left_out() -> None:
    x, coords = axn.from_xarray(weather(), coords=True)
    assert set(axn.to_xarray(x.mean("time"), coords).coords) == {"station", "height", "run"}
    assert set(axn.to_xarray(x["station", 0], coords).coords) == {"time", "run"}


def test_coordinates_that_do_not_fit() -> None:
    x, coords = axn.from_xarray(weather(), coords=True)
    with pytest.raises(
        ValueError, match=r"^to_xarray: coordinate 'time' has 4 values along 'time', and the arrays have 2\."
    ):
        axn.to_xarray(x["time", :2], coords)
    picked = weather().isel(time=slice(2))
    xr.testing.assert_identical(axn.to_xarray(x["time", :2], picked.coords, name="t2m"), picked)


def test_coordinates_are_static() -> None:
    _, coords = axn.from_xarray(weather(), coords=True)
    x, equal = axn.from_xarray(weather(1), coords=True)
    other = axn.Coordinates({"time": pd.date_range("2021-01-01", periods=4)})
    assert coords == equal and hash(coords) == hash(equal) and coords is not equal
    assert coords != other and jax.tree.leaves(coords) == []

    @jax.jit
    def above(x: axn.NamedArray, coords: axn.Coordinates) -> Any:
        return x * coords["height"].values.max(), coords

    y, kept = above(x, coords)
    assert kept == coords
    np.testing.assert_allclose(y.array, 300 * weather(1).values, rtol=1e-6)
    with compilations() as seen:
        above(x, equal)
    assert seen == []
    assert str(coords) == "Coordinates(time (time=4), station (station=3), height (station=3), run ())"
    assert axn.Coordinates(coords) == coords
    data = xr.Dataset({"height": ("station", [1.0, 2.0])}, {"station": [1, 2]})
    own = axn.Coordinates(data)
    data.coords["station"] = [3, 4]
    assert own["station"].values.tolist() == [1, 2] and {*own} == {"height", "station"}
    assert own.sort("station") == {"station": slice(0, 2, 1)}


def test_equal_coordinates_have_equal_hashes() -> None:
    """A number of another type, or of another sign, compiles another program."""
    found = {axn.Coordinates({"time": np.array([x], dtype)}) for x, dtype in ((0, "i4"), (0, "f4"), (-0.0, "f8"))}
    assert len(found) == 3
    pairs = [(a, b) for a in found for b in found if a == b]
    assert all(a is b for a, b in pairs)


# --- dtypes that JAX lacks ---


def test_dates_durations_and_strings_are_refused_together() -> None:
    da = weather()
    moments = da["time"] + np.timedelta64(1, "h")
    ds = xr.Dataset({"fine": da, "when": moments, "since": moments - moments[0], "who": da["station"] + "!"})
    with pytest.raises(TypeError) as caught:
        axn.from_xarray(ds)
    message = str(caught.value)
    assert message.startswith("from_xarray, 3 problems:\n") and "fine" not in message
    for line in (
        r"when \(time=4\) is datetime64\[\w+\], a dtype that JAX does not have\. Subtract a date, and divide",
        r"since \(time=4\) is timedelta64\[\w+\], a dtype that JAX does not have\. Divide by a duration",
        r"who \(station=3\) is \S+, a dtype that JAX does not have\. Keep it as a coordinate",
    ):
        assert re.search(line, message), message
    seconds = (moments - moments[0]) / np.timedelta64(1, "s")  # as the message says
    assert axn.from_xarray(seconds)["time", 1].item() == 86400


BAD: list[tuple[Any, str]] = [
    (pd.Series([1.0]), "expected a DataArray or a Dataset, got Series. Call its `.to_xarray()` first."),
    ([1.0], "expected a DataArray or a Dataset, got list."),
    (xr.DataArray(np.ones(2), dims=[0]), "the name of an axis is a string, got 0. Use xarray's `rename`."),
    (xr.DataArray(np.array([0, 2**40]), dims="i"), "int64 with values of 0 to 1099511627776, which int32 cannot hold."),
    (
        xr.DataArray(np.ones(2, np.longdouble), dims="i"),
        f"is {np.dtype(np.longdouble)}, a dtype that JAX does not have.",
    ),
]


@pytest.mark.parametrize(("data", "message"), BAD)
def test_what_is_refused(data: Any, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        axn.from_xarray(data)


def test_what_to_xarray_refuses() -> None:
    with pytest.raises(TypeError, match=r"to_xarray: expected a named array or a dictionary of them, got ArrayImpl\."):
        axn.to_xarray(jax.numpy.ones(3))
    with pytest.raises(TypeError, match=r"expected a named array or a dictionary of them, got int\."):
        axn.to_xarray({"a": 1})
    with pytest.raises(TypeError, match=r"from_xarray: Variable has no coordinates"):
        axn.from_xarray(weather().variable, coords=True)


def test_missing_values_are_nan_and_byte_orders_are_converted() -> None:
    da = weather().where(weather() > 0)
    assert int(axn.isnan(axn.from_xarray(da)).sum().item()) == int(da.isnull().sum())
    assert axn.from_xarray(xr.DataArray(np.arange(3, dtype=">f4"), dims="i")).tolist() == [0.0, 1.0, 2.0]


def test_xarray_loads_where_it_is_used() -> None:
    code = "import axonym, sys; axonym.from_xarray, axonym.Coordinates; print('xarray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
