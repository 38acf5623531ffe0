"""Convert between named arrays and xarray, whose arrays also have named axes, and coordinates along them.

A `NamedArray` has no coordinates. They stay in xarray, or come along as `Coordinates`, with names and attributes, and
`to_xarray` puts them back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._coordinates import Coordinates
from ._labelled import Labelled, fitting
from .core import errors
from .named_array import NamedArray
from .sharding.placement import Placement, list_problems
from .sharding.shard import shard, to_host

# --- from xarray ---


def from_xarray(data: Any, *, coords: bool = False, placement: Placement = None) -> Any:
    """Convert a `DataArray` to a named array, or a `Dataset` to a dictionary of named arrays.

    JAX has only arrays of numbers and booleans: dates, durations and strings raise an error that lists them all.
    Missing values are NaN, as in xarray.

    Arguments:
        data: a `DataArray`, a `Variable`, or a `Dataset` or other mapping of them.
        coords: return a pair, the arrays and their `Coordinates`, which also keep names and attributes, for
            `to_xarray`; `axonym.Labelled(*pair)` keeps the two together.
        placement: how to shard the arrays, as in `axonym.shard`. Each device gets only its shard.

    >>> import xarray
    >>> da = xarray.DataArray(np.ones((2, 3)), dims=("time", "x"), coords={"time": [10, 20]})
    >>> axn.from_xarray(da).shape
    {'time': 2, 'x': 3}
    >>> x, coords = axn.from_xarray(da, coords=True)
    >>> axn.to_xarray(x.mean("x"), coords).sel(time=20).item()
    1.0
    """
    problems: list[str] = []
    found = _from_xarray(data, problems)
    if problems:
        raise TypeError(list_problems("from_xarray", problems, None))
    arrays = jax.tree.map(jnp.asarray, found) if placement is None else shard(found, placement)
    if isinstance(found, dict):
        arrays = {name: arrays[name] for name in found}  # JAX sorts the keys of trees
    if coords and not hasattr(data, "coords"):
        raise TypeError(f"from_xarray: {type(data).__name__} has no coordinates, as a DataArray or a Dataset has.")
    if not coords:
        return arrays
    # A variable without axes holds the attributes of each array.
    named = data.data_vars if isinstance(found, dict) else {} if data.name is None else {data.name: data}
    about = {name: ((), 0, array.attrs) for name, array in named.items() if name not in data.coords}
    return arrays, Coordinates._from_dataset(data.coords.to_dataset().assign(about).assign_attrs(data.attrs))


def _from_xarray(data: Any, problems: list[str]) -> Any:
    """Return named arrays in host memory, and append errors to the problems."""
    import xarray

    if isinstance(data, Mapping):  # as datasets are
        return {name: _from_xarray(value, problems) for name, value in data.items()}
    if not isinstance(data, (xarray.DataArray, xarray.Variable)):
        hint = " Call its `.to_xarray()` first." if hasattr(data, "to_xarray") else ""
        raise TypeError(f"from_xarray: expected a DataArray or a Dataset, got {type(data).__name__}.{hint}")
    if wrong := [dim for dim in data.dims if not isinstance(dim, str)]:
        raise TypeError(f"from_xarray: the name of an axis is a string, got {wrong[0]!r}. Use xarray's `rename`.")
    values, names = np.asarray(data.values), tuple(map(str, data.dims))
    what = f"{getattr(data, 'name', None) or 'the array'} {errors.describe_axes(names, values.shape)}"
    values = values.astype(values.dtype.newbyteorder("="), copy=False)  # files can have a different byte order
    known = values.dtype == bool or (jnp.issubdtype(values.dtype, jnp.number) and values.dtype.kind != "m")
    if not known or values.dtype in (np.longdouble, np.clongdouble):
        problems.append(f"{what} is {values.dtype}, a dtype that JAX does not have.{_dtype_instead(values.dtype)}")
        return None
    dtype = jax.dtypes.canonicalize_dtype(values.dtype)
    if values.dtype.kind in "iu" and dtype != values.dtype and values.size:
        low, high = values.min(), values.max()
        if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
            problems.append(
                f"{what} is {values.dtype} with values of {low} to {high}, which {dtype} cannot hold. Enable "
                "jax_enable_x64, or convert it."
            )
    return NamedArray(values, names)


def _dtype_instead(dtype: np.dtype) -> str:
    match dtype.kind:
        case "M":
            return " Subtract a date, and divide by a duration: `(t - t[0]) / np.timedelta64(1, 's')`."
        case "m":
            return " Divide by a duration: `t / np.timedelta64(1, 's')`."
        case "U" | "S" | "O" | "T":
            return " Keep it as a coordinate, or convert it: `pandas.factorize(a)` numbers strings."
    return ""


# --- to xarray ---


def to_xarray(tree: Any, coords: Any = None, *, name: str | None = None) -> Any:
    """Convert a named array to a `DataArray`, or a dictionary of named arrays to a `Dataset`.

    Sharded arrays are gathered; with several hosts, each must call this. Coordinates along axes that an array lacks,
    because they were reduced or indexed away, are left out, as xarray does. Coordinates along an axis whose size has
    changed are an error.

    Arguments:
        tree: a named array, a dictionary of them, or either as `Labelled`, which brings its own coordinates.
        coords: the `Coordinates` from `from_xarray`, the `coords` of an xarray object, or a dictionary.
        name: the name of the `DataArray`; by default that of the one that `coords` come from, as do attributes.

    >>> axn.to_xarray(axn.ones({"time": 2}), {"time": [10, 20]}).sel(time=10).item()
    1.0
    >>> axn.to_xarray({"u": axn.ones({"x": 2}), "v": axn.zeros({"x": 2})}).sizes["x"]
    2
    """
    import xarray

    if isinstance(tree, Labelled):
        if coords is not None:
            raise TypeError("to_xarray: a labelled array has its own coordinates; pass `x.array` to give it others.")
        tree, coords = tree.array, tree.coords
    single = isinstance(tree, NamedArray)
    arrays: Mapping[str, Any] = {"": tree} if single else tree
    wrong = [x for x in arrays.values() if not isinstance(x, NamedArray)] if isinstance(arrays, Mapping) else [tree]
    if wrong:
        kind = type(wrong[0]).__name__
        raise TypeError(f"to_xarray: expected a named array or a dictionary of them, got {kind}.")
    on_host = to_host(dict(arrays))
    data = fitting("to_xarray", Coordinates({} if coords is None else coords), on_host)._data
    if single:
        name = str(*data.data_vars) if name is None and len(data.data_vars) == 1 else name
        return xarray.DataArray(on_host[""].array, data.coords, tree.names, name, data.attrs)
    found = {n: (x.names, x.array, data[n].attrs if n in data.data_vars else {}) for n, x in on_host.items()}
    return xarray.Dataset({n: found[n] for n in arrays}, data.coords, data.attrs)
