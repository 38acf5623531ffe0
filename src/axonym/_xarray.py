"""Convert between named arrays and xarray, whose arrays also have named axes, and coordinates along them.

Only names are converted, because a `NamedArray` has no coordinates. The coordinates stay in xarray, or come along as
`Coordinates`, and `to_xarray` puts them back.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .core import errors
from .named_array import NamedArray
from .sharding.placement import Placement, list_problems
from .sharding.shard import shard, to_host

if TYPE_CHECKING:
    import xarray


@jax.tree_util.register_static
class Coordinates(Mapping[str, Any]):
    """The coordinates of xarray data, as static metadata: hashable, and a tree without leaves.

    Equal coordinates are the same to `jax.jit`; a function that gets different ones is compiled again. So pass them to
    a compiled function only if it computes with them, and keep them outside otherwise.

    >>> import xarray
    >>> da = xarray.DataArray(np.ones((2, 3)), dims=("time", "x"), coords={"time": [10, 20]})
    >>> x, coords = axn.from_xarray(da, coords=True)
    >>> coords["time"].values.tolist(), hash(coords) == hash(axn.from_xarray(da, coords=True)[1])
    ([10, 20], True)
    """

    __slots__ = ("_data", "_hash")

    def __init__(self, coords: Any):
        """Arguments:
        coords: the `coords` of an xarray object, or anything that xarray takes for coordinates.
        """
        import xarray

        self._data = xarray.Dataset(coords=coords._data.coords if isinstance(coords, Coordinates) else coords)
        self._hash: int | None = None

    def __getitem__(self, name: str) -> xarray.DataArray:
        return self._data.coords[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._data.coords)

    def __len__(self) -> int:
        return len(self._data.coords)

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Coordinates):
            return self is other
        return hash(self) == hash(other) and self._data.identical(other._data)  # xarray takes 1 and 1.0 for identical

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(
                tuple((n, c.dims, str(c.dtype), zlib.crc32(repr(c.values.tolist()).encode())) for n, c in self.items())
            )
        return self._hash

    def __repr__(self) -> str:
        sizes = ", ".join(f"{n} {errors.describe_axes(c.dims, c.shape)}" for n, c in self.items())
        return f"Coordinates({sizes})"


# --- from xarray ---


def from_xarray(data: Any, *, coords: bool = False, placement: Placement = None) -> Any:
    """Convert a `DataArray` to a named array, or a `Dataset` to a dictionary of named arrays.

    JAX has only arrays of numbers and booleans: dates, durations and strings raise an error that lists them all.
    Missing values are NaN, as in xarray.

    Arguments:
        data: a `DataArray`, a `Variable`, or a `Dataset` or other mapping of them.
        coords: return a pair, the arrays and their `Coordinates`, for `to_xarray`.
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
    return (arrays, Coordinates(data.coords)) if coords else arrays


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
        tree: a named array, or a dictionary of them.
        coords: the `Coordinates` from `from_xarray`, the `coords` of an xarray object, or a dictionary.
        name: the name of the `DataArray`.

    >>> axn.to_xarray(axn.ones({"time": 2}), {"time": [10, 20]}).sel(time=10).item()
    1.0
    >>> axn.to_xarray({"u": axn.ones({"x": 2}), "v": axn.zeros({"x": 2})}).sizes["x"]
    2
    """
    import xarray

    single = isinstance(tree, NamedArray)
    arrays: Mapping[str, Any] = {"": tree} if single else tree
    wrong = [x for x in arrays.values() if not isinstance(x, NamedArray)] if isinstance(arrays, Mapping) else [tree]
    if wrong:
        kind = type(wrong[0]).__name__
        raise TypeError(f"to_xarray: expected a named array or a dictionary of them, got {kind}.")
    on_host = to_host(dict(arrays))
    sizes = {n: s for x in on_host.values() for n, s in x.shape.items()}
    fitting = _fitting_coordinates(Coordinates({} if coords is None else coords)._data, sizes)
    if single:
        return xarray.DataArray(on_host[""].array, dims=tree.names, coords=fitting, name=name)
    return xarray.Dataset({n: (on_host[n].names, on_host[n].array) for n in arrays}, coords=fitting)


def _fitting_coordinates(data: Any, sizes: Mapping[str, int]) -> Any:
    """Return the coordinates whose axes all exist."""
    left_out = [n for n, c in data.coords.items() if not sizes.keys() >= set(c.dims)]
    kept = data.drop_vars(left_out)
    for name, coordinate in kept.coords.items():
        for axis, size in zip(coordinate.dims, coordinate.shape, strict=True):
            if size != sizes[axis]:
                raise ValueError(
                    f"to_xarray: coordinate {name!r} has {size} values along {axis!r}, and the arrays have "
                    f"{sizes[axis]}. Select the same part of the coordinates, or leave the coordinates out."
                )
    return kept.coords
