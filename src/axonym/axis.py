"""Axes and the algebra on them.

An *axis* is a name and a size. Functions that look an axis up take a *selector*: an `Axis` or its name. Functions that
look several up take a *selection*: a selector, a sequence of them, or a mapping from names to sizes (or to `None` for
an unknown size). Functions that create axes need a *spec*: the same, with every size known.

| word      | one                | several                                                     |
|-----------|--------------------|-------------------------------------------------------------|
| selector  | `Axis` or `str`    |                                                             |
| selection | `Axis` or `str`    | sequence of selectors, or mapping `name -> size or None`    |
| spec      | `Axis`             | sequence of `Axis`, or mapping `name -> size`               |

The functions below keep the form of their argument: they return a mapping for a mapping, and else a tuple.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import EllipsisType
from typing import Any, Never, TypeAlias, TypeVar, overload

import jax

from .core import errors

Names: TypeAlias = tuple[str, ...]
"""The names of the axes of an array, in order."""

__all__ = [
    "Axis",
    "AxisSelection",
    "AxisSelector",
    "AxisSpec",
    "PartialShapeDict",
    "ShapeDict",
    "axis_name",
    "axis_size",
    "axis_spec_to_shape_dict",
    "concat_axes",
    "intersect_axes",
    "is_axis_compatible",
    "make_axes",
    "rearrange_for_partial_order",
    "replace_axis",
    "resolve_axis",
    "selects_axis",
    "union_axes",
    "unsize_axes",
    "without_axes",
]


@dataclasses.dataclass(frozen=True, init=False, eq=False)
class Axis:
    """A named dimension of known size.

    Axes are interned: two axes of the same name and size are the same object, so that comparing and hashing them as
    static data costs nothing.

    >>> Batch = axn.Axis("batch", 8)
    >>> Batch is axn.Axis("batch", 8)
    True
    >>> Batch.resize(4), Batch.alias("rows")
    (Axis(name='batch', size=4), Axis(name='rows', size=8))
    """

    name: str
    size: int

    __slots__ = ("__weakref__", "name", "size")

    def __new__(cls, name: str, size: int) -> Axis:
        # Exactly an int: 8.0 is equal to 8 as a key, but must be refused.
        found = _INTERNED.get((name, size)) if type(size) is int else None
        if found is not None:
            return found
        if not isinstance(name, str):
            raise TypeError(f"Axis: a name is a string, got {name!r} of type {type(name).__name__}.")
        if not jax.export.is_symbolic_dim(size):
            try:
                size = operator.index(size)
            except TypeError:
                raise TypeError(f"Axis {name!r}: a size is an integer, got {type(size).__name__}.") from None
            if size < 0:
                raise ValueError(f"Axis {name!r}: a size cannot be negative, got {size}.")
        axis = object.__new__(cls)
        object.__setattr__(axis, "name", name)
        object.__setattr__(axis, "size", size)
        with _INTERNING:  # two threads must not create two axes of the same name and size
            return _INTERNED.setdefault((name, size), axis)

    def alias(self, new_name: str) -> Axis:
        """Return an axis of the same size with another name.

        >>> axn.Axis("pos", 3).alias("key_pos")
        Axis(name='key_pos', size=3)
        """
        return Axis(new_name, self.size)

    def resize(self, size: int) -> Axis:
        """Return an axis of the same name with another size.

        >>> axn.Axis("pos", 3).resize(5)
        Axis(name='pos', size=5)
        """
        return Axis(self.name, size)

    def __str__(self) -> str:
        return f"{self.name}({self.size})"

    def __reduce__(self):
        return Axis, (self.name, self.size)


_INTERNED: weakref.WeakValueDictionary[tuple[str, Any], Axis] = weakref.WeakValueDictionary()
_INTERNING = threading.Lock()


AxisSelector: TypeAlias = Axis | str
ShapeDict: TypeAlias = Mapping[str, int]
PartialShapeDict: TypeAlias = Mapping[str, int | None]
AxisSpec: TypeAlias = Axis | Sequence[Axis] | ShapeDict
AxisSelection: TypeAlias = AxisSelector | Sequence[AxisSelector] | PartialShapeDict

_Ax = TypeVar("_Ax", bound=AxisSelector)


def selectors(
    selection: AxisSelection | None, refusal: Callable[[Any], str] = errors.not_a_selector
) -> tuple[AxisSelector, ...]:
    """Return a selection of any form as a tuple of selectors; `refusal` words the error for anything else."""
    if isinstance(selection, (Axis, str)):
        return (selection,)
    if selection is None:
        return ()
    if isinstance(selection, Mapping):
        return tuple(n if s is None else Axis(n, s) for n, s in selection.items())
    found = tuple(selection) if isinstance(selection, Iterable) else (selection,)
    for s in found:
        if not isinstance(s, (Axis, str)):
            raise TypeError(refusal(s))
    return found


def axes_of_spec(spec: AxisSpec, what: str = "This") -> tuple[Axis, ...]:
    """Return a spec of any form as a tuple of axes; an axis without a size is an error."""
    found = selectors(spec, errors.not_an_axis)
    if unsized := errors.quoted([s for s in found if isinstance(s, str)]):
        raise ValueError(f"{what} needs axes with sizes, got only the name {unsized}: pass Axis(name, size).")
    return found  # pyright: ignore[reportReturnType]  # no str is left


def name_of(selector: AxisSelector) -> str:
    """Return the name of a selector."""
    if isinstance(selector, str):
        return selector
    if isinstance(selector, Axis):
        return selector.name
    raise TypeError(errors.not_a_selector(selector))


def interned(selector: AxisSelector) -> str:
    """Return the name of a selector. Equal names are one object, except those that kernels make of names."""
    name = name_of(selector)
    return sys.intern(name) if type(name) is str else name


def names_without(names: Names, *removed: str) -> Names:
    """Return the names without some."""
    return tuple(n for n in names if n not in removed)


def _in_form_of(original: Any, found: Sequence[AxisSelector]) -> Any:
    """Return `found` in the form of `original`: a mapping for a mapping, else a tuple."""
    return axis_spec_to_shape_dict(found) if isinstance(original, Mapping) else tuple(found)


def _by_name(selection: AxisSelection) -> dict[str, AxisSelector]:
    return {name_of(s): s for s in selectors(selection)}


def _check_sizes(what: str, first: Mapping[str, AxisSelector], second: Mapping[str, AxisSelector]) -> None:
    for name, a in first.items():
        b = second.get(name)
        if isinstance(a, Axis) and isinstance(b, Axis) and a.size != b.size:
            raise ValueError(errors.size_mismatch(what, name, [("the first", a.size), ("the second", b.size)]))


def make_axes(*names: Never, **sizes: int) -> tuple[Axis, ...]:
    """Make several axes from keywords, each the name and the size of one axis.

    >>> Batch, Embed = axn.make_axes(batch=8, embed=16)
    >>> Embed
    Axis(name='embed', size=16)
    """
    if names:
        call = ", ".join(f"{name}=8" for name in names if isinstance(name, str) and name.isidentifier()) or "batch=8"
        raise TypeError(f"make_axes: each axis has a name and a size, as in make_axes({call}).")
    return tuple(Axis(name, size) for name, size in sizes.items())


@overload
def axis_name(ax: AxisSelector) -> str: ...
@overload
def axis_name(ax: Sequence[AxisSelector] | PartialShapeDict) -> tuple[str, ...]: ...
def axis_name(ax: AxisSelection) -> str | tuple[str, ...]:
    """Return the name of an axis, or the names of several.

    >>> axn.axis.axis_name(axn.Axis("batch", 8)), axn.axis.axis_name(["batch", axn.Axis("embed", 4)])
    ('batch', ('batch', 'embed'))
    """
    if isinstance(ax, (Axis, str)):
        return name_of(ax)
    return tuple(name_of(s) for s in selectors(ax))


def axis_size(ax: AxisSpec) -> int:
    """Return the number of elements of an array with these axes: the product of the sizes.

    >>> axn.axis.axis_size(axn.make_axes(batch=8, embed=4))
    32
    """
    return math.prod(a.size for a in axes_of_spec(ax, "axis_size"))


def axis_spec_to_shape_dict(axis_spec: AxisSelection) -> dict[str, int | None]:
    """Return the sizes by name; `None` for a selector that is only a name.

    >>> axn.axis.axis_spec_to_shape_dict((axn.Axis("batch", 8), "embed"))
    {'batch': 8, 'embed': None}
    """
    return {name_of(s): None if isinstance(s, str) else s.size for s in selectors(axis_spec)}


def concat_axes(a1: AxisSelection, a2: AxisSelection) -> Any:
    """Return the axes of `a1`, then the axes of `a2`; an axis in both is an error.

    >>> axn.axis.concat_axes(axn.Axis("batch", 8), axn.Axis("embed", 4))
    (Axis(name='batch', size=8), Axis(name='embed', size=4))
    """
    both = selectors(a1) + selectors(a2)
    errors.distinct("concat_axes", tuple(map(name_of, both)))
    return _in_form_of(a1, both)


def union_axes(a1: AxisSelection, a2: AxisSelection) -> Any:
    """Return the axes of `a1`, then the axes of `a2` that `a1` lacks.

    >>> axn.axis.union_axes(axn.make_axes(batch=8, pos=3), axn.make_axes(pos=3, embed=4))
    (Axis(name='batch', size=8), Axis(name='pos', size=3), Axis(name='embed', size=4))
    """
    first, second = _by_name(a1), _by_name(a2)
    _check_sizes("union_axes", first, second)
    return _in_form_of(a1, tuple({**second, **first}[n] for n in {**first, **second}))


def intersect_axes(ax1: AxisSelection, ax2: AxisSelection) -> Any:
    """Return the axes in both, in the order of `ax1`; a size known on either side is kept.

    >>> axn.axis.intersect_axes(axn.make_axes(batch=8, pos=3), "pos")
    (Axis(name='pos', size=3),)
    """
    first, second = _by_name(ax1), _by_name(ax2)
    _check_sizes("intersect_axes", first, second)
    return _in_form_of(ax1, tuple(second[n] if isinstance(a, str) else a for n, a in first.items() if n in second))


def without_axes(axis_spec: AxisSelection, to_remove: AxisSelection) -> Any:
    """Return the axes that are not in `to_remove`, which may include axes that do not exist.

    >>> axn.axis.without_axes(axn.make_axes(batch=8, pos=3), ("pos", "embed"))
    (Axis(name='batch', size=8),)
    """
    first, second = _by_name(axis_spec), _by_name(to_remove)
    _check_sizes("without_axes", first, second)
    return _in_form_of(axis_spec, tuple(a for n, a in first.items() if n not in second))


def replace_axis(axis_spec: AxisSelection, old: AxisSelector, new: AxisSelection) -> Any:
    """Replace the axis `old` with `new`, which can be one axis or several.

    >>> Batch, Embed = axn.make_axes(batch=8, embed=4)
    >>> axn.axis.replace_axis((Batch, Embed), "embed", axn.make_axes(heads=2, size=2))
    (Axis(name='batch', size=8), Axis(name='heads', size=2), Axis(name='size', size=2))
    """
    known = _by_name(axis_spec)
    check_present("replace_axis", [name_of(old)], axis_spec)
    _check_sizes("replace_axis", known, _by_name(old))
    found = [s for n, a in known.items() for s in (selectors(new) if n == name_of(old) else (a,))]
    errors.distinct("replace_axis", tuple(map(name_of, found)))
    return _in_form_of(axis_spec, found)


@overload
def resolve_axis(axis_spec: AxisSelection, axis_selection: AxisSelector) -> Axis: ...
@overload
def resolve_axis(axis_spec: AxisSelection, axis_selection: Sequence[AxisSelector]) -> tuple[Axis, ...]: ...
@overload
def resolve_axis(axis_spec: AxisSelection, axis_selection: PartialShapeDict) -> dict[str, int]: ...
def resolve_axis(axis_spec: AxisSelection, axis_selection: AxisSelection) -> Any:
    """Return the selected axes, with their sizes in `axis_spec`.

    >>> axn.axis.resolve_axis(axn.make_axes(batch=8, pos=3), "pos")
    Axis(name='pos', size=3)
    """
    known = _by_name(axis_spec)
    wanted = _by_name(axis_selection)
    check_present("resolve_axis", wanted, axis_spec)
    _check_sizes("resolve_axis", known, wanted)
    if isinstance(axis_selection, (Axis, str)):
        return known[name_of(axis_selection)]
    return _in_form_of(axis_selection, tuple(known[n] for n in wanted))


def selects_axis(selector: AxisSelection, selected: AxisSelection) -> bool:
    """Return whether `selector` includes every axis of `selected`: it has the names, and known sizes agree.

    >>> axn.axis.selects_axis(("batch", "pos"), axn.Axis("pos", 3))
    True
    >>> axn.axis.selects_axis(axn.Axis("pos", 4), axn.Axis("pos", 3))
    False
    """
    known = _by_name(selector)
    return all(n in known and (isinstance(s, str) or known[n] in (n, s)) for n, s in _by_name(selected).items())


def is_axis_compatible(ax1: AxisSelector, ax2: AxisSelector) -> bool:
    """Return whether two selectors can mean the same axis: the names are equal.

    >>> axn.axis.is_axis_compatible("pos", axn.Axis("pos", 3))
    True
    """
    return name_of(ax1) == name_of(ax2)


def unsize_axes(axis_spec: AxisSelection, to_unsize: AxisSelection | None = None) -> Any:
    """Remove the sizes from a selection: of every axis, or of the axes in `to_unsize`.

    >>> axn.axis.unsize_axes(axn.make_axes(batch=8, pos=3), "pos")
    (Axis(name='batch', size=8), 'pos')
    """
    if isinstance(axis_spec, (Axis, str)) and to_unsize is None:
        return name_of(axis_spec)
    chosen = None if to_unsize is None else _by_name(to_unsize)
    known = _by_name(axis_spec)
    check_present("unsize_axes", chosen or (), axis_spec)
    return _in_form_of(axis_spec, tuple(n if chosen is None or n in chosen else a for n, a in known.items()))


def rearrange_for_partial_order(
    partial_order: Sequence[AxisSelector | EllipsisType], axes: Sequence[_Ax]
) -> tuple[_Ax, ...]:
    """Reorder `axes` as `partial_order` says.

    The axes that are not named take the place of `...`, in their order. If there are several `...`, a named axis ends
    the run of axes for one of them: the axes after it take the place of the next free `...` behind it. Without `...`,
    every axis must be named.

    >>> axn.axis.rearrange_for_partial_order(("c", ..., "a"), ("a", "b", "c"))
    ('c', 'b', 'a')
    """
    known = {name_of(a): a for a in axes}
    named = tuple(name_of(s) for s in partial_order if not isinstance(s, EllipsisType))
    check_present("rearrange", named, axes)
    errors.distinct("rearrange", named)
    _check_sizes("rearrange", known, _by_name([s for s in partial_order if not isinstance(s, EllipsisType)]))
    rest = [n for n in known if n not in named]
    if rest and ... not in partial_order:
        listed, shown = errors.quoted(rest), errors.describe_selectors(axes)
        lacking = "is missing; name it" if len(rest) == 1 else "are missing; name them"
        raise ValueError(f"rearrange: {listed} of {shown} {lacking}, or add `...`.")
    order = [[] if isinstance(s, EllipsisType) else [name_of(s)] for s in partial_order]
    place = next((i for i, s in enumerate(partial_order) if s is ...), 0)
    # The unnamed axes fill one `...` until a named axis comes, and then the next free one behind that.
    for n in known:
        if n in rest:
            order[place].append(n)
        else:
            after = max(order.index([n]) + 1, place)
            place = next((i for i in range(after, len(order)) if not order[i]), place)
    return tuple(known[n] for names in order for n in names)


def check_present(what: str, names: Iterable[str], selection: AxisSelection) -> None:
    """Check that a selection has all these names."""
    known = axis_spec_to_shape_dict(selection)
    if missing := [n for n in names if n not in known]:
        sizes = None if None in known.values() else list(known.values())
        raise ValueError(errors.missing_axes(what, missing, list(known), sizes))
