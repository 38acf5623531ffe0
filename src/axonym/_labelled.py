"""An array and its coordinates as one value, whose coordinates an operation keeps, loses, or is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ._coordinates import Coordinates, merged
from .core import errors
from .core.unmoved_axes import unmoved_axes
from .distribution.active_settings import activate
from .distribution.mesh_axes import NO_MESH
from .named_array import NamedArray, is_named_array


class Labelled:
    """A named array, or a tree of them, and its coordinates, which are static.

    Operations are the library's own, called by `map`: arrays with other coordinates along an axis they share are an
    error, and results have the coordinates that still hold.

    Arguments:
        array: a named array, or a tree of them, such as a dictionary.
        coords: their coordinates: those along axes that no array has are left out, and other sizes are an error.

    >>> x = axn.Labelled(axn.named([[1., 2.], [3., 4.]], ("time", "lat")), {"time": [10, 20], "lat": [-45., 45.]})
    >>> x.map(lambda x: x - x.mean("time")).sel(time=20).array.tolist()
    [1.0, 1.0]
    >>> x.map(axn.flip, "lat").coords
    Coordinates(time (time=2))
    """

    __slots__ = ("array", "coords")

    array: Any
    coords: Coordinates

    def __init__(self, array: Any, coords: Any):
        self.array, self.coords = array, fitting("Labelled", Coordinates(coords), array)

    def __repr__(self) -> str:
        return f"Labelled({self.array!r}, {self.coords!r})"

    def isel(self, positions: Mapping[str, Any] | None = None, /, **more: Any) -> Labelled:
        """Select by position, as `x[...]` does: also by the positions that verbs of `Coordinates` return.

        >>> x = axn.Labelled(axn.arange({"lat": 3}), {"lat": [-60., 0., 60.]})
        >>> x.isel(x.coords.flip("lat")).coords["lat"].values.tolist()
        [60.0, 0.0, -60.0]
        """
        asked, several = {**(positions or {}), **more}, len(_named_arrays_in(self.array)) > 1

        def selected(x: NamedArray) -> NamedArray:
            return x[{n: at for n, at in asked.items() if not several or n in x.names}]

        own = {n: at for n, at in asked.items() if n in self.coords._data.sizes}
        return Labelled(jax.tree.map(selected, self.array, is_leaf=is_named_array), self.coords.isel(own))

    def sel(self, *, method: Any = None, tolerance: Any = None, **values: Any) -> Labelled:
        """Select by value, as `Coordinates.sel` does.

        >>> axn.Labelled(axn.arange({"lat": 3}), {"lat": [-60., 0., 60.]}).sel(lat=slice(0, 60)).array.tolist()
        [1, 2]
        """
        return self.isel(self.coords.sel(method=method, tolerance=tolerance, **values))

    def map(self, f: Callable[..., Any], *others: Any, coords: Any = None) -> Labelled:
        """Call a function with the array, and with those of other arguments that are labelled.

        Coordinates are kept along the axes of which each element of a result is computed from elements at the same
        place, or from all: by arithmetic, reductions over other axes, running totals. An axis that is selected from,
        reversed, rolled, padded, interpolated or sorted has none, unless `coords` gives them: `coords=x.coords` says
        that they hold all the same, as for a slope. The name and the attributes of this array stay, as in xarray.

        Arguments:
            f: a function of named arrays, such as `axn.add`, which returns one, or a tree of them. It is called, and
                traced once to see which elements it moves.
            others: further arguments. Coordinates must be equal along the axes that they share; see
                `Coordinates.align`. Of one without axes that differs, such as a selected time, nothing is left.
            coords: the coordinates of the result along axes that have changed.

        >>> a = axn.Labelled(axn.arange({"x": 2}), {"x": [0, 1]})
        >>> a.map(axn.add, a).array.tolist()
        [0, 2]
        >>> a.map(axn.add, axn.Labelled(axn.arange({"x": 2}), {"x": [1, 2]}))
        Traceback (most recent call last):
        ValueError: map: the coordinates 'x' are not the same: at position 0 the values are 0 (int64) and 1 (int64). ...
        """
        args = (self, *others)
        together = merged("map", *(a.coords for a in args if isinstance(a, Labelled)))
        result = f(*(a.array if isinstance(a, Labelled) else a for a in args))
        if not all(map(is_named_array, jax.tree.leaves(result, is_leaf=is_named_array))):
            raise TypeError(
                f"map: the function must return a named array, or a tree of them, got {type(result).__name__}."
            )
        data, new = together._data, Coordinates({} if coords is None else coords)._data.coords
        kept = _kept_axes(f, args, result) - {*new.dims}
        lost = [n for n, c in data.coords.items() if n in new or not kept.issuperset(c.dims)]
        return Labelled(result, Coordinates._from_dataset(data.drop_vars(lost).assign_coords(new)))


def _labelled_of_parts(coords: Coordinates, children: Any) -> Labelled:
    """Return a labelled array without checks, since trees are also made of what is no array."""
    found = object.__new__(Labelled)
    (found.array,), found.coords = children, coords
    return found


jax.tree_util.register_pytree_with_keys(
    Labelled, lambda x: (((jax.tree_util.GetAttrKey("array"), x.array),), x.coords), _labelled_of_parts
)


def _named_arrays_in(tree: Any) -> list[NamedArray]:
    """Return the named arrays of a tree, in order."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_named_array) if is_named_array(x)]


def _kept_axes(f: Callable[..., Any], args: Sequence[Any], result: Any) -> set[str]:
    """Return the axes of a result whose elements are where they were in labelled arguments.

    An axis of one element has only one place. The function is traced without a mesh, so the answer does not depend on
    how arrays are sharded.
    """
    at = {
        i: a.array if isinstance(a, Labelled) else a for i, a in enumerate(args) if isinstance(a, Labelled | NamedArray)
    }

    def call(arrays: Mapping[int, Any]) -> Any:
        return f(*(arrays.get(i, a) for i, a in enumerate(args)))

    with errors.handling_warnings(lambda _: True):  # of arrays that cannot be placed
        try:
            with activate(None), jax.sharding.use_abstract_mesh(NO_MESH):
                program = jax.make_jaxpr(call)(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), at))
        except (RuntimeError, ValueError):  # the function needs a mesh, or has arrays whose types do
            program = jax.make_jaxpr(call)(at)
    given = [(x, isinstance(args[i], Labelled)) for i, tree in at.items() for x in _named_arrays_in(tree)]
    found = unmoved_axes(program.jaxpr, [x.names if labelled else [""] * x.ndim for x, labelled in given])
    moved, kept = set[str](), set[str]()
    for x, own in zip(_named_arrays_in(result), found, strict=True):
        for name, axis in zip(x.names, own, strict=True):
            single = x.shape[name] == 1 and any(y.shape.get(name) == 1 for y, _ in given)
            (kept if axis == name or single else moved).add(name)
    return kept - moved


def fitting(what: str, coords: Coordinates, tree: Any) -> Coordinates:
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
