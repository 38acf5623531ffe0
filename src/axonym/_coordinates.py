"""Coordinates along named axes, and groups of elements by their labels: static values, of which xarray does the work.

What a verb does to positions is asked of xarray, with the positions as data: so it means what it means there.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .axis import Axis
from .core import errors
from .named_array import NamedArray

if TYPE_CHECKING:
    import xarray

Positions = dict[str, Any]
"""The positions that `x[...]` takes: for each axis a slice, a number, or an array of numbers."""


@jax.tree_util.register_static
class Coordinates(Mapping[str, Any]):
    """The coordinates of xarray data, as static metadata: hashable, compared by value, and a tree without leaves.

    `sel`, `flip`, `sort` and `align` return positions, which both `x[...]` and `isel` take, so that an array and its
    coordinates stay in step; positions at equal distances are a slice, which is cheap on sharded arrays.
    `axonym.Labelled` keeps the two together.

    Equal coordinates are the same to `jax.jit`; a function that gets different ones is compiled again. So pass them to
    a compiled function only if it computes with them, and keep them outside otherwise.

    >>> coords = axn.Coordinates({"time": [10, 20], "lat": [-60., 0., 60.]})
    >>> x = axn.named([[1., 2., 3.], [4., 5., 6.]], ("time", "lat"))
    >>> at = coords.sel(lat=slice(-10, 90), time=20)
    >>> x[at].tolist(), coords.isel(at)["lat"].values.tolist()
    ([5.0, 6.0], [0.0, 60.0])
    """

    __slots__ = ("_data", "_hash")

    def __init__(self, coords: Any):
        """Arguments:
        coords: the `coords` of an xarray object, or anything that xarray takes for coordinates.
        """
        import xarray

        self._data = coords._data if isinstance(coords, Coordinates) else xarray.Dataset(coords=coords)
        self._hash: int | None = None

    @classmethod
    def _from_dataset(cls, data: Any) -> Coordinates:
        """Return the coordinates in a dataset, the variables of which hold the attributes of the arrays."""
        found = cls({})
        found._data = data
        return found

    def __getitem__(self, name: str) -> xarray.DataArray:
        """Return a coordinate, or a part of its dates: `coords["time.month"]`."""
        return self._data.coords[name] if name in self._data.coords or "." not in name else self._data[name]

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

    def isel(self, positions: Mapping[str, Any] | None = None, /, **more: Any) -> Coordinates:
        """Select by position, as `x[...]` does.

        >>> axn.Coordinates({"lat": [-60., 0., 60.]}).isel(lat=slice(0, 2))
        Coordinates(lat (lat=2))
        """
        import xarray

        asked = {**(positions or {}), **more}
        if missing := [n for n in asked if n not in self._data.sizes]:
            raise ValueError(errors.missing_axes("isel", missing, [*map(str, self._data.sizes)]))
        arrays = {n: a for n, a in asked.items() if isinstance(a, NamedArray)}
        return Coordinates._from_dataset(
            self._data.isel(asked | {n: xarray.Variable(a.names, np.asarray(a.array)) for n, a in arrays.items()})
        )

    def sel(self, *, method: Any = None, tolerance: Any = None, **values: Any) -> Positions:
        """Return the positions of values: one, several, or a slice from one to another, which is included.

        Arguments:
            method: `nearest` takes the nearest value; `pad` and `backfill` that before and after.
            tolerance: the largest distance to it.
            values: the values along each axis, as in xarray: a date may be a string such as `"2020-03"`.

        >>> axn.Coordinates({"lat": [-60., 0., 60.]}).sel(lat=55, method="nearest", tolerance=10)
        {'lat': 2}
        """
        for name in values:
            if name not in self._data.indexes:
                known = errors.suggestion(name, map(str, self._data.indexes))
                raise KeyError(f"sel: there are no coordinates {name!r} to select by in {self!r}.{known}")
        found = self._changed_positions(self._positions_as_data().sel(values, method=method, tolerance=tolerance))
        for name, asked in values.items():
            if isinstance(asked, slice) and self._data.indexes[name].size and found.get(name) == slice(0, 0, 1):
                index = self._data.indexes[name]
                raise KeyError(
                    f"sel: no value of {name!r} lies in slice({asked.start}, {asked.stop}). They go from {index[0]} "
                    f"to {index[-1]}, and a slice has to go the same way."
                )
        return found

    def flip(self, axis: str) -> Positions:
        """Return the positions along an axis in reverse order.

        >>> axn.Coordinates({"lat": [-60., 0., 60.]}).flip("lat")
        {'lat': slice(None, None, -1)}
        """
        return {axis: slice(None, None, -1)}

    def sort(self, name: str, *, descending: bool = False) -> Positions:
        """Return the positions that sort the values of a coordinate.

        >>> axn.Coordinates({"lat": [60., -60., 0.]}).sort("lat")
        {'lat': array([1, 2, 0])}
        """
        (axis,) = self[name].dims
        return {
            str(axis): _as_index(
                self._positions_as_data().sortby(name, ascending=not descending)[f"#{axis}"].variable, axis
            )
        }

    def align(self, *others: Coordinates, join: Literal["exact", "inner"] = "exact") -> tuple[Positions, ...]:
        """Return positions at which these and other coordinates are equal along all axes that they share.

        Arguments:
            others: the other coordinates.
            join: with `exact`, they must be equal, so there is nothing to select; the error shows the first difference.
                With `inner`, the positions of the values that all have.

        >>> a, b = axn.Coordinates({"x": [0, 1, 2, 3]}), axn.Coordinates({"x": [2, 3, 4]})
        >>> a.align(b, join="inner")
        ({'x': slice(2, 4, 1)}, {'x': slice(0, 2, 1)})
        """
        if join == "exact":
            merged("align", self, *others)
            return ({},) * (1 + len(others))
        import xarray

        every = (self, *others)
        places = xarray.align(*(c._positions_as_data()[[f"#{n}" for n in c._data.sizes]] for c in every), join="inner")
        return tuple([c._changed_positions(d) for c, d in zip(every, places, strict=True)])

    def areas(self, lat: str = "lat") -> NamedArray:
        """Return the shares of the area of a sphere that rows of cells around latitudes have, as weights.

        >>> axn.Coordinates({"lat": [-60., 0., 60.]}).areas().round(2).tolist()
        [0.25, 0.5, 0.25]
        """
        index = self[lat]
        order = np.argsort(index.values)
        rows = np.deg2rad(index.values.astype(float))[order]
        edges = np.concatenate([[-np.pi / 2], (rows[1:] + rows[:-1]) / 2, [np.pi / 2]])
        share = np.empty_like(rows)
        share[order] = np.diff(np.sin(edges)) / 2
        return NamedArray(jnp.asarray(share), tuple(map(str, index.dims)))

    def _positions_as_data(self) -> Any:
        """Return a dataset with the positions along each axis."""
        return self._data.coords.to_dataset().assign({f"#{n}": (n, np.arange(m)) for n, m in self._data.sizes.items()})

    def _changed_positions(self, places: Any) -> Positions:
        """Return the positions along the axes that have others than before."""
        found = {str(n): _as_index(places[f"#{n}"].variable, n) for n in self._data.sizes if f"#{n}" in places}
        return {
            n: at for n, at in found.items() if not (isinstance(at, slice) and at == slice(0, self._data.sizes[n], 1))
        }


def _as_index(places: Any, axis: Any) -> Any:
    """Return positions as what `x[...]` takes: a number, or a slice where they are at equal distances."""
    at = places.values
    if at.ndim == 0:
        return int(at)
    if places.dims != (axis,):
        return NamedArray(at, places.dims)
    step = int(at[1] - at[0]) if at.size > 1 else 1
    if step and (np.diff(at) == step).all():
        first, end = (int(at[0]), int(at[-1]) + (1 if step > 0 else -1)) if at.size else (0, 0)
        return slice(first, end if end >= 0 else None, step)
    return at


def merged(what: str, *several: Coordinates) -> Coordinates:
    """Return the coordinates of all, which must be equal along the axes that they share.

    Of a coordinate without axes, such as the time of a selected day, that differs, nothing is left.
    """
    first, *rest = (c._data for c in several)
    for other in rest:
        new, gone = {}, []
        for name, c in other.coords.items():
            mine = first.coords.get(name)
            if mine is None or (c.dims and not mine.dims):
                new[name] = c
            elif c.dims and not mine.variable.equals(c.variable):
                raise ValueError(f"{what}: the coordinates {name!r} are not the same: {_describe_difference(mine, c)}")
            elif not mine.dims and not mine.variable.equals(c.variable):
                gone.append(name)
        first = first.drop_vars([*gone, *first.coords.keys() & new.keys()]).assign_coords(new)
    return Coordinates._from_dataset(first)


def _describe_difference(a: Any, b: Any) -> str:
    """Say how coordinates differ first, and the way out."""
    if a.dims != b.dims or a.shape != b.shape:
        said = f"they are along {errors.describe_axes(a.dims, a.shape)} and {errors.describe_axes(b.dims, b.shape)}"
    else:
        at = tuple(np.argwhere(~((a.values == b.values) | (a.isnull().values & b.isnull().values)))[0])
        said = f"at position {', '.join(map(str, at))} the values are " + " and ".join(
            f"{x.values[at]} ({x.dtype})" for x in (a, b)
        )
    return f"{said}. `coords.align(other, join='inner')` gives the positions that both have."


def groups(labels: Any, every: str | None = None) -> tuple[Axis, NamedArray, Coordinates]:
    """Return the axis of groups of elements with the same label, the group of each element, and the groups' labels.

    `axonym.segment_mean` and its like take the first two. Groups are in the order of their labels; an element without a
    label has the group -1, which is none.

    Arguments:
        labels: labels as a `DataArray`, such as `coords["time.month"]`. Its name is the name of the axis of groups.
        every: put dates of one period into a group, named as in xarray's `resample`: `"1D"`, `"MS"`. The dates are in
            ascending order; periods without dates are left out.

    >>> coords = axn.Coordinates({"time": np.array(["2020-01-30", "2020-01-31", "2020-02-01"], "datetime64[s]")})
    >>> axis, ids, labels = axn.groups(coords["time.month"])
    >>> axn.segment_mean(axn.named([1., 3., 5.], "time"), ids, axis)
    NamedArray(float32[month=2], [2. 5.])
    >>> axn.groups(coords["time"], every="MS")[0]
    Axis(name='time', size=2)
    """
    import pandas
    import xarray

    if not isinstance(labels, xarray.DataArray) or labels.name is None:
        raise TypeError(f"groups: expected a DataArray with a name, got {type(labels).__name__}.")
    if every is None:
        numbers, found = pandas.factorize(labels.values.ravel(), sort=True)
    else:
        if not labels.indexes[labels.dims[0]].is_monotonic_increasing:
            raise ValueError(f"groups: the dates {labels.name!r} are not in ascending order. Sort them first.")
        count = xarray.ones_like(labels, dtype=int).resample({labels.dims[0]: every}).count()
        filled = count[count.values > 0]
        numbers, found = np.repeat(np.arange(filled.size), filled.values.astype(int)), filled[labels.dims[0]].values
    axis = Axis(str(labels.name), len(found))
    ids = NamedArray(jnp.asarray(numbers.reshape(labels.shape), jnp.int32), tuple(map(str, labels.dims)))
    return axis, ids, Coordinates({axis.name: found})
