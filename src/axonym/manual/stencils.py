"""Stencils by name: operations on the neighbors of each element, along axes that may be sharded.

`stencil` looks up neighbors by their offsets, and `map_overlap` gives a function blocks with halos. Both know how wide
a halo is, so each device sends its neighbors exactly the elements that they need. On one device, on Auto and Explicit
mesh axes and inside `shard_map` the code is the same.
"""

from __future__ import annotations

import collections
import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType

from ..axis import Axis, AxisSelector, name_of
from ..core import errors
from ..core.jax_versions import is_staged
from ..distribution.active_settings import activate, active_mapping, active_settings, changed
from ..distribution.mesh_axes import axes_of_type, entry_of, has_manual, mesh_around
from ..distribution.padded_array import refuse_padded
from ..named_array import NamedArray, is_named_array, wrap
from ..ops._blocks import WORDS, Blocks, Widths, blocks_of, edge_kernel, halo_kernel, neighbors_kernel
from ..ops._kernels import check_selection
from ..ops._operands import by_axis, one_axis, require_named
from ..ops.joining import stack
from ._axis_environment import axes_of_sharded, count, declared, possible_shardings

_NONE: Widths = (0, 0)

Boundary: TypeAlias = Mapping[Any, Any]
"""For each axis, by its name or as an `Axis`, the values beyond its ends."""


def stencil(fn: Callable[..., Any], boundary: Boundary | Sequence[Boundary], *, steps: int = 1) -> Callable[..., Any]:
    """Return a function of fields that computes each element from its neighbors, which `fn` looks up by offsets.

    `fn` gets a look-up function for each field: `u()` is the field, and `u(x=-1, y=1)` has for each element the
    neighbor one place before it along `x` and one after it along `y`. All of them have the axes of the field, so
    they combine with each other, and with other arrays, as any named arrays do.

    Along a sharded axis, each device receives from its neighbors the elements that `fn` looks up, and nothing else:
    from one side only if it looks only there, and from devices at corners only if an offset has several axes.
    The backward pass sends as much.

    Fields on staggered grids have equal sizes, too: `u(x=1) - u()` is the difference at the right face of a cell if `u`
    lies in cells, and at the center of a cell if `u` lies on left faces. Of `N + 1` faces beside `N` cells, the last
    one is beyond the boundary, and the boundary of the field gives its value.

    Arguments:
        fn: the function. It returns arrays, in any tree.
        boundary: for each axis along which `fn` looks up neighbors, the values beyond its ends, or a pair for the two
            ends. With a sequence of such mappings, each field has its own. Where boundaries meet, the axis that comes
            later decides. One of:

            - `"periodic"`: the other end of the axis; `"edge"`: the last element; `"symmetric"`: the elements before
              the end, mirrored; `"reflect"`: the same without the last one;
            - a number, or an array without the axis, such as a profile;
            - a function, which gets the elements next to the end, mirrored as for `"symmetric"`, as a named array, and
              returns the values beyond the end: `lambda edge: -edge` makes the field zero between them. Devices that
              have no end of the axis call it with ones.

            The dtype of the field must hold the values beyond its ends: integers have no NaN.
        steps: how often to apply `fn`, which then returns its first fields with new values. Devices exchange halos
            only once, with all elements that these steps need. They compute some elements twice.

    >>> laplacian = axn.stencil(lambda u: u(x=-1) - 2 * u() + u(x=1), {"x": "edge"})
    >>> laplacian(axn.named([0.0, 1.0, 4.0, 9.0], "x"))
    NamedArray(float32[x=4], [ 1. 2. 2. -5.])
    >>> smooth = axn.stencil(lambda u: (u(x=-1) + u() + u(x=1)) / 3, {"x": "periodic"}, steps=2)
    >>> smooth(axn.named([9.0, 0.0, 0.0, 0.0, 0.0], "x"))
    NamedArray(float32[x=5], [3. 2. 1. 1. 2.])
    """
    what = "stencil"
    if not callable(fn):
        raise TypeError(f"{what}: expected a function of fields first, got {type(fn).__name__}.")
    if not isinstance(steps, (int, np.integer)):
        raise TypeError(f"{what}: `steps` is an integer, got {type(steps).__name__}.")
    if steps < 1:
        raise ValueError(f"{what}: `steps` says how often to apply the function, got {steps}.")

    def computed(*fields: NamedArray) -> Any:
        given = _Fields(what, fields, boundary)
        offsets = _looked_up(fn, given)
        return given.one_step(fn, offsets) if steps == 1 else given.several_steps(fn, offsets, steps)

    return computed


def map_overlap(
    fn: Callable[..., Any], depth: Mapping[AxisSelector, Widths | int], boundary: Boundary | Sequence[Boundary]
) -> Callable[..., Any]:
    """Return a function of fields that calls `fn` with the shard of each field and a halo around it.

    Use it for whatever works on neighbors and is no sum over a few of them, such as convolutions and look-ups. What
    `fn` returns has every axis of `depth`, either without halo, or with it: then it is cut off.

    On several devices, each axis that is sharded comes with another one that counts the shards, and `fn` must treat
    their elements independently, as named operations do. So it can use no other array with that axis: pass all of them
    as fields.

    Arguments:
        fn: the function. It returns arrays, in any tree.
        depth: how many elements the halo has along each axis, before and after the shard; one number is for both.
        boundary: the values beyond the ends of these axes, as for `stencil`.

    >>> blurred = axn.map_overlap(lambda u: axn.convolve(u, kernel, "x", mode="valid"), {"x": 1}, {"x": "edge"})
    >>> kernel = axn.named([0.25, 0.5, 0.25], "x")
    >>> blurred(axn.named([0.0, 4.0, 8.0, 8.0], "x"))
    NamedArray(float32[x=4], [1. 4. 7. 8.])
    """
    what = "map_overlap"
    widths: dict[str, Widths] = {}
    for axis, given in by_axis(what, "depth", depth, "{'x': 1}").items():
        name, both = name_of(axis), _pair_for_ends(given)
        if len(both) != 2 or not all(isinstance(width, (int, np.integer)) for width in both):
            raise TypeError(f"{what}: the halo of axis {name!r} is a number of elements, or a pair, got {given!r}.")
        widths[name] = before, after = int(both[0]), int(both[1])
        if before < 0 or after < 0:
            raise ValueError(f"{what}: the halo of axis {name!r} cannot have {(before, after)} elements.")

    def computed(*fields: NamedArray) -> Any:
        given = _Fields(what, fields, boundary)
        given.check_axes(depth)
        return given.apply(fn, widths)

    return computed


def rolling(array: NamedArray, axis: AxisSelector, window: Axis, boundary: Any, *, center: bool = True) -> NamedArray:
    """Return for each element along an axis the elements around it, along a new axis, which comes first.

    Whatever is computed along the new axis is a rolling statistic. In jit the windows are not stored, but read from the
    array. Along a sharded axis, devices receive from their neighbors what reaches into their windows.

    Arguments:
        window: the new axis, with the size of a window.
        boundary: the values beyond the ends of the axis, as for `stencil`. With `jnp.nan`, an incomplete window has no
            value, or with `nanmean` and its kin the value of its elements. Convert integers to floats.
        center: whether the element is in the middle of its window, after the middle if there is none, rather than last.

    >>> x = axn.named([1.0, 2.0, 6.0, 0.0], "t")
    >>> axn.rolling(x, "t", axn.Axis("window", 3), "edge").sum("window")
    NamedArray(float32[t=4], [4. 9. 8. 6.])
    >>> axn.rolling(x, "t", axn.Axis("window", 2), 0.0, center=False).max("window")
    NamedArray(float32[t=4], [1. 2. 6. 6.])
    """
    what = "rolling"
    name, window = name_of(axis), one_axis(what, "window", window)
    if name not in require_named(what, array).names:
        raise ValueError(errors.missing_axes(what, [name], array.names, array.array.shape))
    if not window.size:
        raise ValueError(f"{what}: a window has at least one element, got {window}.")
    first = -(window.size // 2) if center else 1 - window.size
    given = _Fields(what, [array], {axis: boundary})

    def windows(u: Callable[..., NamedArray]) -> NamedArray:
        return stack([u(**{name: first + i}) for i in range(window.size)], window)

    return given.one_step(windows, _looked_up(windows, given))


def _pair_for_ends(given: Any) -> tuple[Any, ...]:
    """Return a pair for the ends of an axis, from one value for both or a pair."""
    return tuple(given) if isinstance(given, (tuple, list)) else (given, given)


# --- look-ups ---


def _looked_up(fn: Callable[..., Any], given: _Fields) -> list[list[tuple[int, ...]]]:
    """Return the offsets at which a function looks up each field."""
    found: list[dict[tuple[int, ...], None]] = [{} for _ in given.fields]

    def trace(*arrays: Any) -> None:
        def record(i: int, offset: tuple[int, ...]) -> NamedArray:
            found[i].setdefault(offset)
            # The field stands in for its neighbors, which have its axes and dtype: the trace needs no more.
            return wrap(arrays[i], given.fields[i].names)

        fn(*given.look_ups(record))

    jax.eval_shape(trace, *[f.array for f in given.fields])
    return [list(each) for each in found]


def _needed_widths(offsets: Sequence[tuple[int, ...]], rank: int) -> list[Widths]:
    """Return the widths of the halo along each axis that has all neighbors at some offsets."""
    return [(max([0, *(-o[i] for o in offsets)]), max([0, *(o[i] for o in offsets)])) for i in range(rank)]


# --- fields ---


class _Fields:
    """The fields of a call, their boundaries, and the blocks in which they lie."""

    def __init__(self, what: str, fields: Sequence[Any], boundary: Any):
        self.what, self.fields = what, [require_named(what, f) for f in fields]
        first: dict[str, tuple[int, int]] = {}
        for i, f in enumerate(self.fields):
            for n, size in f.shape.items():
                known = first.setdefault(n, (i, size))
                if known[1] != size:
                    raise ValueError(
                        f"{what}: axis {n!r} has size {known[1]} in field {known[0]}, and {size} in field {i}. "
                        "Fields on staggered grids have equal sizes: of N + 1 faces beside N cells, leave out the last "
                        "one, and let the boundary of the field supply its values."
                    )
        several = isinstance(boundary, Sequence) and not isinstance(boundary, str)
        every = boundary if several else [boundary] * len(fields)
        if len(every) != len(fields):
            raise ValueError(
                f"{what}: {len(every)} boundaries for {len(fields)} fields: pass one mapping for all, or each."
            )
        self.boundaries = [
            {
                name_of(axis): _values_beyond(what, axis, b)
                for axis, b in by_axis(what, "boundary", own, "{'x': 'edge'}").items()
            }
            for own in every
        ]
        for own in every:
            self.check_axes(own)
        self._widened: dict[tuple[int, str, int], tuple[NamedArray, Mapping[str, Widths]]] = {}
        """For each array beyond a boundary, by field, axis and end: with the widest halos that it was needed with."""
        refuse_padded(f.array for f in self.fields)
        self.blocks: dict[str, Blocks] = collections.defaultdict(Blocks)
        for f in reversed(self.fields):  # where fields disagree, the first one counts
            self.blocks |= _blocks_of_field(what, f)

    def check_axes(self, axes: Iterable[AxisSelector]) -> None:
        """Check that fields have some axes, in their sizes."""
        known = {n for f in self.fields for n in f.names}
        for axis in axes:
            if name_of(axis) not in known:
                raise ValueError(
                    f"{self.what}: no field has axis {name_of(axis)!r}.{errors.suggestion(name_of(axis), known)}"
                )
        names, arrays = [f.names for f in self.fields], [f.array for f in self.fields]
        check_selection(self.what, names, arrays, [axis for axis in axes if isinstance(axis, Axis)])

    def look_ups(self, get: Callable[[int, tuple[int, ...]], NamedArray]) -> list[Callable[..., NamedArray]]:
        return [functools.partial(self.look_up, i, get) for i in range(len(self.fields))]

    def look_up(self, i: int, get: Callable[[int, tuple[int, ...]], NamedArray], /, **offsets: int) -> NamedArray:
        """Look up the neighbors in a field at an offset."""
        what, names = self.what, self.fields[i].names
        for name, offset in offsets.items():
            if name not in names:
                raise ValueError(
                    f"{what}: field {i} has no axis {name!r}, only {errors.describe_axes(names)}."
                    + errors.suggestion(name, names)
                )
            if not isinstance(offset, (int, np.integer)):
                raise TypeError(f"{what}: the offset {name}= is an integer, got {type(offset).__name__}.")
            if offset:
                self.require_boundaries(i, [name])
        return get(i, tuple(int(offsets.get(n, 0)) for n in names))

    def require_boundaries(self, i: int, axes: Iterable[str]) -> None:
        """Check that a field has boundaries along some axes."""
        if lacking := [n for n in axes if n not in self.boundaries[i]]:
            raise ValueError(
                f"{self.what}: which values are beyond the ends of axis {lacking[0]!r} in field {i}? Add it to "
                f"`boundary`, as in {{{lacking[0]!r}: 'edge'}}."
            )

    def one_step(self, fn: Callable[..., Any], offsets: Sequence[Sequence[tuple[int, ...]]]) -> Any:
        neighbors = []
        for i, (f, every) in enumerate(zip(self.fields, offsets, strict=True)):
            found = {(0,) * len(f.names): f}
            # One halo for all offsets would send corners that offsets along single axes do not use.
            for group in _groups_of_offsets(every):
                widths = _needed_widths(group, len(f.names))
                wide = self.with_halo(i, f, dict(zip(f.names, widths, strict=True)))
                found |= self.at(wide, widths, [_NONE] * len(widths), group)
            neighbors.append(found)
        return fn(*self.look_ups(lambda i, offset: neighbors[i][offset]))

    def several_steps(self, fn: Callable[..., Any], offsets: Sequence[Sequence[tuple[int, ...]]], steps: int) -> Any:
        once: dict[str, Widths] = {}
        for f, every in zip(self.fields, offsets, strict=True):
            for n, (before, after) in zip(f.names, _needed_widths(every, len(f.names)), strict=True):
                least = once.get(n, _NONE)
                once[n] = max(before, least[0]), max(after, least[1])

        def widths(f: NamedArray, left: int) -> list[Widths]:
            return [(once[n][0] * left, once[n][1] * left) for n in f.names]

        def halos(fields: Sequence[NamedArray], left: int, held: bool) -> list[NamedArray]:
            every = [dict(zip(f.names, widths(f, left), strict=True)) for f in fields]
            return [self.with_halo(i, f, w, held) for i, (f, w) in enumerate(zip(fields, every, strict=True))]

        # One exchange serves all steps: the halo has the neighbors of all of them, and each step uses up a part of it.
        wide, result = halos(self.fields, steps, held=False), None
        for left in range(steps, 0, -1):
            if left < steps:  # beyond a boundary, the step before has computed something else
                wide = halos(wide, left, held=True)
            neighbors = [
                self.at(f, widths(f, left), widths(f, left - 1), [*every, (0,) * len(f.names)])
                for f, every in zip(wide, offsets, strict=True)
            ]
            result = fn(*self.look_ups(lambda i, offset, found=neighbors: found[i][offset]))
            unchanged = [found[(0,) * len(f.names)] for f, found in zip(self.fields, neighbors, strict=True)]
            wide = self.updated(result, unchanged)
        return result

    def updated(self, result: Any, fields: Sequence[NamedArray]) -> list[NamedArray]:
        """Return the fields, the first of them with new values."""
        new = list(result) if isinstance(result, (tuple, list)) else [result]
        if not all(map(is_named_array, new)) or len(new) > len(fields):
            raise TypeError(
                f"{self.what}: with several steps, the function returns its first fields with new values, as a named "
                f"array or a tuple of them; got {type(result).__name__}."
            )
        for i, (x, f) in enumerate(zip(new, fields, strict=False)):
            if x.shape != f.shape:
                raise ValueError(
                    f"{self.what}: a step changes field {i} from {errors.describe_shape(f.shape)} to "
                    f"{errors.describe_shape(x.shape)}; the next step needs the axes of the field."
                )
        return [*(x.rearrange(f.names) for x, f in zip(new, fields, strict=False)), *fields[len(new) :]]

    def apply(self, fn: Callable[..., Any], depth: Mapping[str, Widths]) -> Any:
        given = [
            self.with_halo(i, f, {n: w for n, w in depth.items() if n in f.names}) for i, f in enumerate(self.fields)
        ]
        split = [n for n in depth if self.blocks[n].local > 1]
        given = [self.apart(x, (n for n in split if n in x.names)) for x in given]
        sizes = {n: x.axis_size(n) for x in given for n in x.names}
        with self.apart_mapping(split):
            result = fn(*given)

        def whole(x: Any) -> Any:
            if not isinstance(x, NamedArray):
                return x
            for n, (before, after) in depth.items():
                if lost := [a for a in (n, _name_of_blocks(n) if n in split else n) if a not in x.names]:
                    raise ValueError(
                        f"{self.what}: a result {errors.describe_shape(x.shape)} has no axis {lost[0]!r}. Every result "
                        f"has the axes of `depth` and depends on the fields; reduce {n!r} afterwards."
                    )
                if x.axis_size(n) == sizes[n]:
                    x = x[n, before : sizes[n] - after]
                elif x.axis_size(n) != sizes[n] - before - after:
                    raise ValueError(
                        f"{self.what}: axis {n!r} has size {x.axis_size(n)} in a result. The function got "
                        f"{sizes[n] - before - after} elements with a halo of {before} before and {after} after, and "
                        f"returns {sizes[n]}, of which the halo is cut off, or {sizes[n] - before - after}."
                    )
                if n in split:
                    x = x.flatten_axes((_name_of_blocks(n), n), n)
            return x

        return jax.tree.map(whole, result, is_leaf=is_named_array)

    def apart_mapping(self, axes: Collection[str]) -> AbstractContextManager[Any]:
        """Activate the mapping for axes that are split into blocks: the blocks are sharded, and not their elements."""
        over = {_name_of_blocks(n): entry_of(self.blocks[n].axes) for n in axes} | dict.fromkeys(axes)
        return activate(changed(active_settings(), mapping={**active_mapping(), **over})) if axes else nullcontext()

    def apart(self, x: NamedArray, axes: Iterable[str]) -> NamedArray:
        """Split axes into blocks, which have an axis of their own, and elements of a block."""
        for n in axes:
            x = x.unflatten_axis(n, (Axis(_name_of_blocks(n), self.blocks[n].shards), n))
        return x

    def at(
        self, x: NamedArray, held: Sequence[Widths], kept: Sequence[Widths], offsets: Sequence[tuple[int, ...]]
    ) -> dict[tuple[int, ...], NamedArray]:
        """Return the neighbors at some offsets, given an array with halos."""
        blocks, every = tuple([self.blocks[n] for n in x.names]), tuple(dict.fromkeys(offsets))
        kernel = neighbors_kernel(x.names, blocks, tuple(held), tuple(kept), every)
        return dict(zip(every, kernel.apply(x.array), strict=True))

    def with_halo(self, i: int, x: NamedArray, widths: Mapping[str, Widths], held: bool = False) -> NamedArray:
        """Return a field whose blocks have halos; with `held`, refill only the halos beyond boundaries."""
        own, widths = self.boundaries[i], {n: w for n, w in widths.items() if any(w)}
        self.require_boundaries(i, widths)
        wide = set(widths) if held else set[str]()
        for n in self.in_order(own, widths):
            if held and _is_word(own[n][0], "periodic"):
                continue
            blocks = self.blocks[n]
            size = x.axis_size(n) // blocks.local
            needed = max(w + _is_word(side, "reflect") for w, side in zip(widths[n], own[n], strict=True))
            if not held and needed > size:
                several = f" on each of {blocks.shards} devices along {' and '.join(blocks.axes)}"
                raise ValueError(
                    f"{self.what}: the halo of axis {n!r} has {widths[n][0]} elements before and {widths[n][1]} after, "
                    f"but the axis has {size}{several if blocks.shards > 1 else ''}. Shard it over fewer devices, or "
                    "use fewer steps or a smaller depth."
                )
            values = [self.beyond(i, x, n, last, widths, wide, held) for last in (0, 1)]
            arrays = [v.array if isinstance(v, NamedArray) else v for v in values if v is not None]
            names = tuple([None if v is None else getattr(v, "names", ()) for v in values])
            kinds = tuple([side if isinstance(side, str) else None for side in own[n]])
            x = halo_kernel(x.names, n, names, blocks, widths[n], kinds, held).apply(x.array, *arrays)
            wide.add(n)
        return x

    def beyond(
        self, i: int, x: NamedArray, n: str, last: int, widths: Mapping[str, Widths], wide: Collection[str], held: bool
    ) -> Any:
        """Return the array or number beyond an end of an axis, if its boundary has no name; `wide` axes have halos."""
        side, width = self.boundaries[i][n][last], widths[n][last]
        if isinstance(side, str) or not width:
            return None
        if isinstance(side, NamedArray) or not callable(side):
            if isinstance(side, NamedArray) and not side.shape.items() <= self.fields[i].shape.items():
                raise ValueError(
                    f"{self.what}: the array {errors.describe_shape(side.shape)} beyond the ends of axis {n!r} can "
                    f"have only axes of field {i}, which is {errors.describe_shape(self.fields[i].shape)}."
                )
            self.check_dtype(n, side, x)
            along = {m: w for m, w in widths.items() if m in wide and m in getattr(side, "names", ())}
            return self.widened((i, n, last), side, along) if along else side
        blocks = self.blocks[n]
        edge = edge_kernel(x.names, n, blocks, widths[n] if held else _NONE, width, bool(last)).apply(x.array)
        return self.from_edge(side, edge, n, blocks)

    def from_edge(self, side: Callable[..., Any], edge: NamedArray, n: str, blocks: Blocks) -> NamedArray:
        """Return the values of the function of a boundary; it sees the edge of each block as if that were all."""
        if blocks.local == 1:
            return self.checked(n, side(edge), edge)
        names = list[str]()

        def of_one(x: jax.Array) -> jax.Array:
            one = wrap(x, edge.names)
            value = self.checked(n, side(one), one)
            value = (value if n in value.names else value.broadcast_axis(Axis(n, 1))).rearrange((n, ...))
            names[:] = value.names
            return value.array

        with self.apart_mapping([n]):
            found = jax.vmap(of_one, in_axes=edge.names.index(n))(self.apart(edge, [n]).array)
        return wrap(found, (_name_of_blocks(n), *names)).flatten_axes((_name_of_blocks(n), n), n)

    def in_order(self, own: Mapping[str, Any], widths: Mapping[str, Widths]) -> list[str]:
        """Return the axes in the order of their boundaries, or sharded ones first if the order does not matter.

        Then what devices exchange has no halo along axes that are not sharded.
        """
        order = [n for n in own if n in widths]
        given = {n: [side for side in own[n] if not isinstance(side, str)] for n in order}
        values = [side for sides in given.values() for side in sides]
        if sum(map(bool, given.values())) > 1 or any(callable(v) or getattr(v, "names", ()) for v in values):
            return order
        return sorted(order, key=lambda n: not self.blocks[n].axes)

    def widened(self, place: tuple[int, str, int], value: NamedArray, widths: Mapping[str, Widths]) -> NamedArray:
        """Return an array beyond a boundary, with the halos that the field has along its other axes."""
        if place not in self._widened or self._widened[place][1].keys() != widths.keys():
            wide = value
            for n, w in widths.items():
                kind = "periodic" if _is_word(self.boundaries[place[0]][n][0], "periodic") else "edge"
                kernel = halo_kernel(wide.names, n, (None, None), self.blocks[n], w, (kind, kind), False)
                wide = kernel.apply(wide.array)
            self._widened[place] = wide, widths
        wide, held = self._widened[place]
        if held == widths:
            return wide
        held, kept = ([w.get(n, _NONE) for n in wide.names] for w in (held, widths))
        return next(iter(self.at(wide, held, kept, [(0,) * len(held)]).values()))

    def check_dtype(self, n: str, value: Any, x: NamedArray) -> None:
        """Check that a value beyond an end of an axis has a dtype that the field holds."""
        value = getattr(value, "array", value)
        kind = jnp.result_type(value, x.array)
        if kind != x.dtype:
            raise TypeError(
                f"{self.what}: a value beyond the ends of axis {n!r} has dtype {jnp.result_type(value)}, which a field "
                f"of {x.dtype} cannot hold. Convert the field to {kind} first, or the boundary to {x.dtype}."
            )

    def checked(self, n: str, value: Any, edge: NamedArray) -> NamedArray:
        """Return the values beyond a boundary, which a function computed from the elements next to it."""
        if isinstance(value, NamedArray) and edge.shape.items() >= value.shape.items():
            self.check_dtype(n, value, edge)
            return value
        got = errors.describe_shape(value.shape) if isinstance(value, NamedArray) else type(value).__name__
        raise ValueError(
            f"{self.what}: the function of a boundary gets the elements next to it, with axes "
            f"{errors.describe_shape(edge.shape)}, and returns an array with these axes or fewer; got {got}."
        )


def _name_of_blocks(n: str) -> str:
    """Return the name of the axis that counts the blocks of an axis."""
    return f"blocks of {n}"


def _groups_of_offsets(offsets: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Return offsets in groups, each along axes of its own: within a group, neighbors at corners are needed, too."""
    groups: list[tuple[set[int], list[tuple[int, ...]]]] = []
    for offset in offsets:
        along = {i for i, o in enumerate(offset) if o}
        if along:
            joined = [g for g in groups if g[0] & along]
            groups = [g for g in groups if not g[0] & along]
            groups.append((along.union(*(g[0] for g in joined)), [*itertools.chain(*(g[1] for g in joined)), offset]))
    return [found for _, found in groups]


def _is_word(side: Any, word: str) -> bool:
    """Return whether a boundary is this word; it may be an array, which compares element by element."""
    return isinstance(side, str) and side == word


def _values_beyond(what: str, axis: AxisSelector, given: Any) -> tuple[Any, Any]:
    """Return the values beyond each end of an axis."""
    sides, name = _pair_for_ends(given), name_of(axis)
    if len(sides) != 2:
        raise ValueError(
            f"{what}: the boundary of axis {name!r} is one for both ends, or one for each, got {len(sides)}."
        )
    for side in sides:
        if side is None:
            raise TypeError(
                f"{what}: the boundary of axis {name!r} cannot be None: each end needs values beyond it. Pass one of "
                f"{errors.quoted(WORDS)}, or a number: NaN marks what does not exist."
            )
        if isinstance(side, str) and side not in WORDS:
            hint = " (`axonym.pad` calls it so.)" if side == "wrap" else ""
            raise ValueError(
                f"{what}: the boundary of axis {name!r} cannot be {side!r}, only {errors.quoted(WORDS)}.{hint}"
            )
        if isinstance(side, NamedArray) and name in side.names:
            raise ValueError(
                f"{what}: an array beyond the ends of axis {name!r} has no such axis, got "
                f"{errors.describe_shape(side.shape)}."
            )
        if not (isinstance(side, (str, NamedArray)) or callable(side) or np.ndim(side) == 0):
            raise TypeError(
                f"{what}: the boundary of axis {name!r} cannot be {type(side).__name__}: name the array's axes."
            )
    if _is_word(sides[0], "periodic") != _is_word(sides[1], "periodic"):
        raise ValueError(f"{what}: axis {name!r} is periodic at both ends or at none: pass 'periodic' alone.")
    return sides


def _blocks_of_field(what: str, x: NamedArray) -> dict[str, Blocks]:
    """Return the blocks of each sharded axis of a field."""
    mesh = mesh_around([x.array])
    if has_manual(mesh):
        found: dict[str, Blocks] = {}
        for n, size in x.shape.items():
            known = {sharding.now for sharding in possible_shardings(n, size)} if declared(n) else {()}
            axes = known.pop() if len(known) == 1 else axes_of_sharded(what, n)
            if axes and count(axes) > 1:
                found[n] = Blocks(count(axes), axes, True)
        return found
    auto = [a for a in axes_of_type(mesh, AxisType.Auto) if mesh.shape[a] > 1]
    if auto and not active_mapping() and isinstance(x.array, Tracer) and is_staged(x.array):
        warnings.warn(
            f"{what}: no mapping is active, so it is not known here which axes of {errors.describe_shape(x.shape)} "
            f"are sharded over {' and '.join(auto)}, and more than the halos may be sent. Activate one with "
            f"`axonym.axis_mapping({{{x.names[0]!r}: {auto[0]!r}}})`.",
            stacklevel=4,
        )
    return blocks_of(what, x)
