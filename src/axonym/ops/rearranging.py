"""`rearrange`: reorder, split and merge axes by one expression.

An expression is planned once. The plan is at most a reshape that splits, a transpose, and a reshape that merges.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from types import EllipsisType
from typing import Any, NoReturn

import jax

from ..axis import Axis, AxisSelector, Names, name_of, rearrange_for_partial_order, selectors
from ..core import errors, parsing
from ..named_array import NamedArray
from . import _kernels
from ._operands import require_named


def rearrange(array: NamedArray, *args: Any, **kwargs: AxisSelector | int) -> NamedArray:
    """Reorder, split or merge the axes of an array.

    If only the order changes, give the axes in the new order, with `...` for the axes not named. Otherwise give an
    expression `lhs -> rhs`:

    - `x y z -> z x y` refers to the axes by position, with any names; `{z x} -> ... z x` refers to them by name.
    - `...` stands for the axes that are not named.
    - `(a b)` on the left splits the axis at that place, `{(x: a b)}` the axis `x`; the first factor is the major one.
      Give all sizes but one by keyword.
    - `(x: a b)` on the right merges axes into a new one, `x`.

    Arguments:
        *args: the expression, or the order: a sequence of axes or the axes one by one.
        **kwargs: the meaning of names in the expression: a size, the name of an axis, or an `Axis`.

    >>> x = axn.ones(axn.make_axes(batch=6, embed=4))
    >>> axn.rearrange(x, ("embed", ...)).shape
    {'embed': 4, 'batch': 6}
    >>> axn.rearrange(x, "(step row) e -> step e row", step=2).shape
    {'step': 2, 'embed': 4, 'row': 3}
    >>> axn.rearrange(x, "{embed batch} -> (flat: batch embed)").shape
    {'flat': 24}
    """
    require_named("rearrange", array)
    if len(args) == 1 and isinstance(args[0], str):
        return _expression_kernel(array.axes, args[0], _bindings_of_names(kwargs)).apply(array.array)
    if kwargs:
        given = ", ".join(f"{name}=" for name in kwargs)
        raise TypeError(f"rearrange: {given} has no meaning for an order of axes, only for an expression.")
    return _order_kernel(array.names, _order_of_axes(args)).apply(array.array)


# --- by an order of axes ---


def _order_of_axes(args: tuple[Any, ...]) -> tuple[AxisSelector | EllipsisType, ...]:
    if not args:
        raise TypeError('rearrange: expected an expression such as "a b -> b a", or the axes in their new order.')
    if len(args) == 1 and not isinstance(args[0], (Axis, EllipsisType)):
        if not isinstance(args[0], Iterable):
            raise TypeError(errors.not_a_selector(args[0]))
        args = selectors(args[0]) if isinstance(args[0], Mapping) else tuple(args[0])
    for s in args:
        if not isinstance(s, (Axis, str, EllipsisType)):
            raise TypeError(errors.not_a_selector(s))
    return args


@_kernels.shared("names", "order")
def _order_kernel(names: Names, order: tuple[AxisSelector | EllipsisType, ...]) -> _kernels.Kernel:
    named = tuple(s for s in order if not isinstance(s, EllipsisType))
    _kernels.select("rearrange", names, named)
    out_names = rearrange_for_partial_order(tuple(s if s is ... else name_of(s) for s in order), names)

    def positional(x):
        return _kernels.transpose_to(x, names, out_names)

    return _kernels.make_kernel("rearrange", positional, (names,), out_names, {}, selection=named)


# --- by an expression ---


def _bindings_of_names(kwargs: Mapping[str, Any]) -> tuple[tuple[str, AxisSelector | int], ...]:
    """Return the bindings of names, in a form that can be part of a cache key."""
    found: list[tuple[str, AxisSelector | int]] = []
    for name, value in sorted(kwargs.items()):
        if not isinstance(value, (str, Axis)):
            try:
                value = operator.index(value)
            except TypeError:
                raise TypeError(
                    f"rearrange: {name!r} stands for a size, a name or an Axis, got {type(value).__name__}."
                ) from None
            if value < 0:
                raise ValueError(f"rearrange: {name!r} stands for a size of {value}; sizes cannot be negative.")
        found.append((name, value))
    return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Factor:
    """A factor of one axis of the array, or the axis itself if it is not split. Compared by identity."""

    name: str
    size: int
    axis: str


@_kernels.cached
def _expression_kernel(
    axes: tuple[Axis, ...], text: str, bindings: tuple[tuple[str, AxisSelector | int], ...]
) -> _kernels.Kernel:
    plan = _Factors(parsing.parse("rearrange", text, comma="elements"), axes, dict(bindings))
    before, after = plan.factors, plan.outputs
    flat = [f for merged in after.values() for f in merged]
    # For each axis, the output axes that can take over its sharding, the one of the major factor first.
    place = {f: name for name, merged in after.items() for f in merged}
    axes_in_order = dict.fromkeys(f.axis for f in flat)
    successors = {n: tuple(dict.fromkeys(place[f] for f in before if f.axis == n)) for n in axes_in_order}
    order = tuple(before.index(f) for f in flat)
    transposed = order != tuple(range(len(order)))
    split = len(before) != len(axes)
    merged = len(flat) != len(after)
    return _reshape_kernel(
        tuple(a.name for a in axes),
        tuple(after),
        tuple(f.size for f in before) if split and (transposed or not merged) else None,
        order if transposed else None,
        tuple(math.prod(f.size for f in factors) for factors in after.values()) if merged else None,
        tuple(successors.items()),
    )


@_kernels.shared("names", "out_names", "successors")
def _reshape_kernel(
    names: Names,
    out_names: Names,
    split: tuple[int, ...] | None,
    order: tuple[int, ...] | None,
    merged: tuple[int, ...] | None,
    successors: tuple[tuple[str, Names], ...],
) -> _kernels.Kernel:
    """Make a kernel that splits, transposes and merges; None skips a step."""

    def positional(x):
        x = x if split is None else jax.lax.reshape(x, split)
        x = x if order is None else jax.lax.transpose(x, order)
        return x if merged is None else jax.lax.reshape(x, merged)

    uses = None if split or merged else {}
    return _kernels.make_kernel("rearrange", positional, (names,), out_names, uses, successors=dict(successors))


class _Factors:
    """The effect of an expression on an array with certain axes."""

    def __init__(
        self, expression: parsing.Expression, axes: tuple[Axis, ...], bindings: Mapping[str, AxisSelector | int]
    ):
        self.expression, self.axes, self.bindings = expression, axes, bindings
        self.described = errors.describe_selectors(axes)
        self.variables: dict[str, _Factor] = {}
        (lhs,), (rhs,) = expression.lhs, expression.rhs
        known = [v.name for term in (lhs, rhs) for v in term.variables]
        known += [g.name.name for term in (lhs, rhs) for g in term.groups if g.name is not None]
        if unused := [n for n in bindings if n not in known]:
            hints = errors.suggestions(unused, known)
            listed = ", ".join(f"{n}=" for n in unused)
            raise ValueError(f"rearrange: {listed} names nothing in {expression.text!r}.{hints}")
        matched = self.match_ordered(lhs) if lhs.ordered else self.match_unordered(lhs)
        self.factors = [f for axis in axes for f in self.split(axis, matched.get(axis))]
        """The factors of every axis of the array, in their order."""
        self.outputs = self.merge(rhs)
        """The axes of the result, each with its factors."""

    def fail(self, node: parsing.Node, message: str) -> NoReturn:
        self.expression.fail(node, message)

    def alias(self, name: parsing.Name) -> str | None:
        """Return the axis name that a name in the expression stands for, if given."""
        value = self.bindings.get(name.name)
        return name_of(value) if isinstance(value, (str, Axis)) else None

    def size(self, name: parsing.Name) -> int | None:
        """Return the size of a name in the expression, if given."""
        value = self.bindings.get(name.name)
        return value.size if isinstance(value, Axis) else value if isinstance(value, int) else None

    # --- the left-hand side ---

    def match_ordered(self, lhs: parsing.Term) -> dict[Axis, parsing.Element]:
        """Match the elements with the axes by position."""
        before = list(lhs.elements)
        after: list[parsing.Element] = []
        if lhs.dots is not None:
            where = before.index(lhs.dots)
            before, after = before[:where], before[where + 1 :]
        surplus = len(before) + len(after) - len(self.axes)
        if surplus > 0:
            self.fail((before + after)[-surplus], f"too many axes for an array with {self.described}.")
        if surplus < 0 and lhs.dots is None:
            end = parsing.Place(lhs.stop, lhs.stop)
            hint = parsing.split_words(self.expression, [len(self.axes)])
            way_out = f".{hint}" if hint else ": name all, or add `...` for the rest."
            self.fail(end, f"too few axes for an array with {self.described}{way_out}")
        places = [*zip(before, self.axes, strict=False)]
        places += zip(after, self.axes[len(self.axes) - len(after) :], strict=True)
        for element, axis in places:
            self.check_place(element, axis)
        return {axis: element for element, axis in places}

    def check_place(self, element: parsing.Element, axis: Axis) -> None:
        """Check that a name that is bound to an axis is at the position of that axis; other names are free."""
        name = element.name if isinstance(element, parsing.Group) else element
        if not isinstance(name, parsing.Name):
            return
        said = self.alias(name)
        if said is None and (isinstance(element, parsing.Group) or any(a.name == name.name for a in self.axes)):
            said = name.name
        if said is not None and said != axis.name:
            shown = repr(name.name) if said == name.name else f"{name.name!r}, that is {said!r},"
            self.fail(
                name,
                f"{shown} is at the position of {axis.name!r} in {self.described}. Put the left-hand side in braces "
                "to find axes by name.",
            )

    def match_unordered(self, lhs: parsing.Term) -> dict[Axis, parsing.Element]:
        """Match the elements with the axes by name."""
        known = {a.name: a for a in self.axes}
        found: dict[Axis, parsing.Element] = {}
        for element in lhs.elements:
            if isinstance(element, parsing.Dots):
                continue
            name = element.name if isinstance(element, parsing.Group) else element
            if name is None:
                self.fail(element, "in braces axes are found by name, so this needs one: `(name: a b)`.")
            wanted = self.alias(name) or name.name
            if wanted not in known:
                self.fail(name, f"no axis {wanted!r} in {self.described}.{errors.suggestion(wanted, known)}")
            if known[wanted] in found:
                self.fail(name, f"axis {wanted!r} is named a second time.")
            found[known[wanted]] = element
        return found

    def split(self, axis: Axis, element: parsing.Element | None) -> list[_Factor]:
        """Split one axis into factors, and record which name stands for which factor."""
        if isinstance(element, parsing.Name):
            size = self.size(element)
            if size not in (None, axis.size):
                self.fail(element, f"axis {axis.name!r} has size {axis.size}, not {size}.")
            self.variables[element.name] = _Factor(axis.name, axis.size, axis.name)
            return [self.variables[element.name]]
        if not isinstance(element, parsing.Group):
            return [_Factor(axis.name, axis.size, axis.name)]
        sizes = [self.size(member) for member in element.members]
        unknown = [m for m, size in zip(element.members, sizes, strict=True) if size is None]
        known = math.prod(size for size in sizes if size is not None)
        if len(unknown) > 1:
            listed = " and ".join(repr(m.name) for m in unknown)
            self.fail(element, f"the sizes of {listed} are not known: give all but one by keyword.")
        # A size of 0 leaves the rest open: nothing times anything is 0.
        rest, remainder = divmod(axis.size, known) if known else (0, axis.size)
        if remainder or (not unknown and rest != 1) or (unknown and not known):
            given = " * ".join("?" if size is None else str(size) for size in sizes)
            self.fail(element, f"axis {axis.name!r} of size {axis.size} does not split into {given}.")
        factors = [
            _Factor(self.alias(member) or member.name, rest if size is None else size, axis.name)
            for member, size in zip(element.members, sizes, strict=True)
        ]
        self.variables.update({m.name: f for m, f in zip(element.members, factors, strict=True)})
        return factors

    # --- the right-hand side ---

    def merge(self, rhs: parsing.Term) -> dict[str, list[_Factor]]:
        used = {v.name: self.variable(v) for v in rhs.variables}
        rest = [f for f in self.factors if f not in used.values()]
        if rest and rhs.dots is None:
            left = errors.describe_selectors(rest)
            end = parsing.Place(rhs.stop, rhs.stop)
            self.fail(end, f"{left} would be dropped: name every axis, or add `...` for the rest.")
        outputs: dict[str, list[_Factor]] = {}
        for element in rhs.elements:
            for name, factors in self.output(element, used, rest):
                if name in outputs:
                    self.fail(element, f"a second axis {name!r} in the result: give one another name.")
                outputs[name] = factors
        return outputs

    def variable(self, name: parsing.Name) -> _Factor:
        if name.name not in self.variables:
            if any(f.name == name.name for f in self.factors):
                hint = " Name the axis there too, or let `...` stand for it."
            else:
                hint = errors.suggestion(name.name, self.variables)
            self.fail(name, f"{name.name!r} is not on the left-hand side.{hint}")
        return self.variables[name.name]

    def output(
        self, element: parsing.Element, used: Mapping[str, _Factor], rest: Sequence[_Factor]
    ) -> list[tuple[str, list[_Factor]]]:
        """Return the axes of the result that one element stands for."""
        if isinstance(element, parsing.Dots):
            return [(f.name, [f]) for f in rest]
        if isinstance(element, parsing.Name):
            return [(used[element.name].name, [used[element.name]])]
        if element.name is None:
            self.fail(element, "a merged axis needs a name: `(name: a b)`.")
        factors = [used[m.name] for m in element.members]
        size, merged = self.size(element.name), math.prod(f.size for f in factors)
        # A name may stand for both a factor and the merged axis; its size is then the factor's.
        if size not in (None, merged) and element.name.name not in self.variables:
            self.fail(element, f"{element.name.name!r} is said to have size {size}, but its factors make {merged}.")
        return [(self.alias(element.name) or element.name.name, factors)]
