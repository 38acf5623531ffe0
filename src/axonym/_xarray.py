"""Coordinates along named axes, arrays that carry them, and conversion from and to xarray.

A `NamedArray` has no coordinates. They stay in xarray, or come along as `Coordinates`, with names and attributes. What
a verb does to positions is asked of xarray, with the positions as data: so it means what it means there.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .axis import Axis
from .core import errors
from .core.unmoved_axes import unmoved_axes
from .distribution.active_settings import activate
from .distribution.mesh_axes import NO_MESH
from .named_array import NamedArray, is_named_array
from .sharding.placement import Placement, list_problems
from .sharding.shard import shard, to_host

if TYPE_CHECKING:
    import xarray

# --- coordinates ---


@jax.tree_util.register_static
class Coordinates(Mapping[str, Any]):
    """Coordinates, of xarray or of what it takes for them, as static metadata: hashable, and a tree without leaves.

    `sel`, `flip`, `sort` and `align` return positions, which both `x[...]` and `isel` take, so that an array and its
    coordinates stay in step; positions at equal distances are a slice, which is cheap on sharded arrays. A function of
    `jax.jit` is compiled again for other coordinates, so pass them only to one that computes with them.

    >>> coords = axn.Coordinates({"time": [10, 20], "lat": [-60., 0., 60.]})
    >>> x = axn.named([[1., 2., 3.], [4., 5., 6.]], ("time", "lat"))
    >>> at = coords.sel(lat=slice(-10, 90), time=20)
    >>> x[at].tolist(), coords.isel(at)["lat"].values.tolist()
    ([5.0, 6.0], [0.0, 60.0])
    """

    def __init__(self, coords: Any):
        import xarray

        self._data = coords._data if isinstance(coords, Coordinates) else xarray.Dataset(coords=coords)

    @classmethod
    def _from_dataset(cls, data: Any) -> Coordinates:
        """Return the coordinates of a dataset that nobody changes; its variables hold the attributes of arrays."""
        found = object.__new__(cls)
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

    @functools.cached_property
    def _hash(self) -> int:
        values = ((n, c.dims, str(c.dtype), zlib.crc32(repr(c.values.tolist()).encode())) for n, c in self.items())
        return hash(tuple(values))

    def __hash__(self) -> int:
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
        arrays = {n: (a.names, np.asarray(a.array)) for n, a in asked.items() if isinstance(a, NamedArray)}
        return Coordinates._from_dataset(self._data.isel(asked | {n: xarray.Variable(*a) for n, a in arrays.items()}))

    def sel(self, *, method: Any = None, tolerance: Any = None, **values: Any) -> dict[str, Any]:
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
        try:
            places = self._positions_as_data().sel(values, method=method, tolerance=tolerance)
        except KeyError:
            known = ((n, asked, self._data.indexes[n]) for n, asked in values.items() if self._data.indexes[n].size)
            listed = " or ".join(f"{n}={asked!r} among values from {i[0]} to {i[-1]}" for n, asked, i in known)
            within = "" if tolerance is None else f" within {tolerance!r}"
            raise KeyError(
                f"sel: not all values found{within}: {listed}. `method='nearest'` takes the nearest value, at most "
                "`tolerance` away."
            ) from None
        found = self._changed_positions(places)
        for name, asked in values.items():
            if isinstance(asked, slice) and self._data.indexes[name].size and found.get(name) == slice(0, 0, 1):
                index = self._data.indexes[name]
                raise KeyError(
                    f"sel: no value of {name!r} lies in slice({asked.start}, {asked.stop}). They go from {index[0]} "
                    f"to {index[-1]}, and a slice has to go the same way."
                )
        return found

    def flip(self, axis: str) -> dict[str, Any]:
        """Return the positions along an axis in reverse order.

        >>> axn.Coordinates({"lat": [-60., 0., 60.]}).flip("lat")
        {'lat': slice(None, None, -1)}
        """
        return {axis: slice(None, None, -1)}

    def sort(self, name: str, *, descending: bool = False) -> dict[str, Any]:
        """Return the positions that sort the values of a coordinate.

        >>> axn.Coordinates({"lat": [60., -60., 0.]}).sort("lat")
        {'lat': array([1, 2, 0])}
        """
        (axis,) = self[name].dims
        places = self._positions_as_data().sortby(name, ascending=not descending)
        return {str(axis): slice(0, self[name].size, 1)} | self._changed_positions(places)

    def align(self, *others: Coordinates, join: Literal["exact", "inner"] = "exact") -> tuple[dict[str, Any], ...]:
        """Return positions at which these and other coordinates are equal along all axes that they share.

        With `join="exact"`, they must be equal, so there is nothing to select; the error shows the first difference.
        With `"inner"`, these are the positions of the values that all have.

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

    def _changed_positions(self, places: Any) -> dict[str, Any]:
        """Return the positions along the axes that have others than before."""
        found: dict[str, Any] = {}
        for axis, size in self._data.sizes.items():
            place = places.get(f"#{axis}")
            if place is None or (place.dims == (axis,) and np.array_equal(place, np.arange(size))):
                continue
            at, step = place.values, int(place[1] - place[0]) if place.ndim == 1 and place.size > 1 else 1
            if at.ndim == 0:
                found[str(axis)] = int(at)
            elif place.dims != (axis,):
                found[str(axis)] = NamedArray(at, place.dims)
            elif step and (np.diff(at) == step).all():
                first, end = (int(at[0]), int(at[-1]) + (1 if step > 0 else -1)) if at.size else (0, 0)
                found[str(axis)] = slice(first, end if end >= 0 else None, step)
            else:
                found[str(axis)] = at
        return found


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
            elif not mine.dims and not mine.variable.equals(c.variable):
                gone.append(name)
            elif c.dims and not mine.variable.equals(c.variable):
                if mine.dims != c.dims or mine.shape != c.shape:
                    along = " and ".join(errors.describe_axes(a.dims, a.shape) for a in (mine, c))
                    said = f"they are along {along}"
                else:
                    same = (mine.values == c.values) | (mine.isnull().values & c.isnull().values)
                    at = tuple(np.argwhere(~same)[0])
                    values = " and ".join(f"{a.values[at]} ({a.dtype})" for a in (mine, c))
                    said = f"at position {', '.join(map(str, at))} the values are {values}"
                raise ValueError(
                    f"{what}: the coordinates {name!r} are not the same: {said}. "
                    "`coords.align(other, join='inner')` gives the positions that both have."
                )
        first = first.drop_vars([*gone, *first.coords.keys() & new.keys()]).assign_coords(new)
    return Coordinates._from_dataset(first)


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


# --- arrays with coordinates ---


class Labelled:
    """A named array, or a tree of them, and its coordinates, which are static.

    Arguments:
        array: a named array, or a tree of them, such as a dictionary.
        coords: their coordinates: those along axes that no array has are left out, and other sizes are an error.

    >>> x = axn.Labelled(axn.named([[1., 2.], [3., 4.]], ("time", "lat")), {"time": [10, 20], "lat": [-45., 45.]})
    >>> x.map(lambda x: x - x.mean("time")).sel(time=20).array.tolist()
    [1.0, 1.0]
    >>> x.map(axn.flip, "lat").coords
    Coordinates(time (time=2))
    """

    def __init__(self, array: Any, coords: Any):
        self.array: Any = array
        self.coords: Coordinates = _fitting_coordinates("Labelled", Coordinates(coords), array)

    def __repr__(self) -> str:
        return f"Labelled({self.array!r}, {self.coords!r})"

    if not TYPE_CHECKING:  # so that type checkers refuse an attribute that does not exist

        def __getattr__(self, name: str) -> Any:
            way_out = "Operations are called by `map`, as in `x.map(axonym.mean, 'lat')`; the array is `x.array`."
            raise AttributeError(f"'Labelled' object has no attribute {name!r}. {way_out}", name=name, obj=self)

    def isel(self, positions: Mapping[str, Any] | None = None, /, **more: Any) -> Labelled:
        """Select by position, as `x[...]` does: also by the positions that verbs of `Coordinates` return.

        >>> x = axn.Labelled(axn.arange({"lat": 3}), {"lat": [-60., 0., 60.]})
        >>> x.isel(x.coords.flip("lat")).coords["lat"].values.tolist()
        [60.0, 0.0, -60.0]
        """
        asked, several = {**(positions or {}), **more}, len(_named_arrays_in(self.array)) > 1

        def select(x: NamedArray) -> NamedArray:
            return x[{n: at for n, at in asked.items() if not several or n in x.names}]

        own = {n: at for n, at in asked.items() if n in self.coords._data.sizes}
        return Labelled(jax.tree.map(select, self.array, is_leaf=is_named_array), self.coords.isel(own))

    def sel(self, *, method: Any = None, tolerance: Any = None, **values: Any) -> Labelled:
        """Select by value, as `Coordinates.sel` does.

        >>> axn.Labelled(axn.arange({"lat": 3}), {"lat": [-60., 0., 60.]}).sel(lat=slice(0, 60)).array.tolist()
        [1, 2]
        """
        return self.isel(self.coords.sel(method=method, tolerance=tolerance, **values))

    def map(self, f: Callable[..., Any], *others: Any, coords: Any = None) -> Labelled:
        """Call a function with the array, and with the arrays of other labelled arguments.

        Coordinates are kept along axes of which each element of a result is computed from elements at the same place,
        or from all: by arithmetic, reductions over other axes, running totals. An axis that is selected from, reversed,
        rolled, padded, interpolated or sorted has none, unless `coords` gives them. Name and attributes stay.

        Arguments:
            f: a function of named arrays, such as `axn.add`, which returns one, or a tree of them. It is called, and
                traced once to see which elements it moves.
            others: further arguments. Coordinates must be equal along the axes that they share; one without axes that
                differs, such as a selected time, is left out.
            coords: the coordinates of the result along axes that have changed: `x.coords` if they hold all the same.

        >>> a = axn.Labelled(axn.arange({"x": 2}), {"x": [0, 1]})
        >>> a.map(axn.add, a).array.tolist()
        [0, 2]
        >>> a.map(axn.add, axn.Labelled(axn.arange({"x": 2}), {"x": [1, 2]}))
        Traceback (most recent call last):
        ValueError: map: the coordinates 'x' are not the same: at position 0 the values are 0 (int64) and 1 (int64). ...
        """
        args = (self, *others)
        data = merged("map", *(a.coords for a in args if isinstance(a, Labelled)))._data
        new = Coordinates({} if coords is None else coords)._data.coords
        at = {i: a.array if isinstance(a, Labelled) else a for i, a in enumerate(args)}
        result = f(*at.values())
        if not all(map(is_named_array, jax.tree.leaves(result, is_leaf=is_named_array))):
            raise TypeError(
                f"map: the function must return a named array, or a tree of them, got {type(result).__name__}."
            )
        traced = {i: x for i, x in at.items() if isinstance(args[i], Labelled | NamedArray)}
        trace = jax.make_jaxpr(lambda arrays: f(*(at | arrays).values()))
        with errors.handling_warnings(lambda _: True):  # of arrays that cannot be placed
            try:  # without a mesh, so that the answer does not depend on how arrays are sharded
                with activate(None), jax.sharding.use_abstract_mesh(NO_MESH):
                    program = trace(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), traced))
            except (RuntimeError, ValueError):  # the function needs a mesh, or has arrays whose types do
                program = trace(traced)
        given = [(x, isinstance(args[i], Labelled)) for i, tree in traced.items() for x in _named_arrays_in(tree)]
        found = unmoved_axes(program.jaxpr, [x.names if labelled else [""] * x.ndim for x, labelled in given])
        moved, kept = {*new.dims}, set[Any]()
        for x, own in zip(_named_arrays_in(result), found, strict=True):
            for name, axis in zip(x.names, own, strict=True):
                # An axis of one element has only one place.
                single = x.shape[name] == 1 and any(y.shape.get(name) == 1 for y, _ in given)
                (kept if axis == name or single else moved).add(name)
        lost = [n for n, c in data.coords.items() if n in new or not (kept - moved).issuperset(c.dims)]
        return Labelled(result, Coordinates._from_dataset(data.drop_vars(lost).assign_coords(new)))


def _labelled_of_parts(coords: Coordinates, children: Any) -> Labelled:
    found = object.__new__(Labelled)  # without checks, since JAX also makes trees of placeholders
    (found.array,), found.coords = children, coords
    return found


jax.tree_util.register_pytree_with_keys(
    Labelled, lambda x: (((jax.tree_util.GetAttrKey("array"), x.array),), x.coords), _labelled_of_parts
)


def _named_arrays_in(tree: Any) -> list[NamedArray]:
    """Return the named arrays of a tree, in order."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_named_array) if is_named_array(x)]


def _fitting_coordinates(what: str, coords: Coordinates, tree: Any) -> Coordinates:
    """Return the coordinates whose axes all exist."""
    data, sizes = coords._data, {n: s for x in _named_arrays_in(tree) for n, s in x.shape.items()}
    kept = data.drop_vars([n for n, c in data.coords.items() if not sizes.keys() >= {*c.dims}])
    for name, coordinate in kept.coords.items():
        for axis, size in zip(coordinate.dims, coordinate.shape, strict=True):
            if size != sizes[axis]:
                raise ValueError(
                    f"{what}: coordinate {name!r} has {size} values along {axis!r}, and the arrays have "
                    f"{sizes[axis]}. Select the same part of the coordinates by `coords.isel`, or leave them out."
                )
    return Coordinates._from_dataset(kept)


# --- from xarray ---


def from_xarray(data: Any, *, coords: bool = False, placement: Placement = None) -> Any:
    """Convert a `DataArray` to a named array, or a `Dataset` to a dictionary of named arrays.

    Dates, durations and strings, which JAX does not have, raise an error that lists them all.

    Arguments:
        data: a `DataArray`, a `Variable`, or a `Dataset` or other mapping of them.
        coords: return a pair, the arrays and their `Coordinates`, which also keep names and attributes.
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
        hint = _INSTEAD.get(values.dtype.kind, "")
        problems.append(f"{what} is {values.dtype}, a dtype that JAX does not have.{hint}")
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


_INSTEAD = {
    "M": " Subtract a date, and divide by a duration: `(t - t[0]) / np.timedelta64(1, 's')`.",
    "m": " Divide by a duration: `t / np.timedelta64(1, 's')`.",
    **dict.fromkeys("USOT", " Keep it as a coordinate, or convert it: `pandas.factorize(a)` numbers strings."),
}


# --- to xarray ---


def to_xarray(tree: Any, coords: Any = None, *, name: str | None = None) -> Any:
    """Convert a named array to a `DataArray`, or a dictionary of named arrays to a `Dataset`.

    Sharded arrays are gathered; with several hosts, each must call this. Coordinates along axes that are gone are left
    out, and those along an axis whose size has changed are an error.

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
    data = _fitting_coordinates("to_xarray", Coordinates({} if coords is None else coords), on_host)._data
    if single:
        name = str(*data.data_vars) if name is None and len(data.data_vars) == 1 else name
        return xarray.DataArray(on_host[""].array, data.coords, tree.names, name, data.attrs)
    found = {n: (x.names, x.array, data[n].attrs if n in data.data_vars else {}) for n, x in on_host.items()}
    return xarray.Dataset({n: found[n] for n in arrays}, data.coords, data.attrs)
