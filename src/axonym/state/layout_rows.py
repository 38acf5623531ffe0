"""Parse the table of a layout of weights: a row for each key, or for each pattern of keys.

| a row, `key: text`                             | the entry                                                      |
|------------------------------------------------|----------------------------------------------------------------|
| `head: "a.weight -> vocab embed"`              | the array at the path `a.weight` of a tree, in this order      |
| `mlp.{layers}.up: "a.weight -> mlp embed"`     | an entry for each element of the axis `layers`                 |
| `o: "a.weight -> embed (heads size)"`          | with axes that are merged, the major one first                 |
| `qkv: "q (heads), k -> (_ size) embed"`        | arrays one after the other along `_`, with their axes in it    |
| `q: "a.weight -> (heads=8 size) embed"`        | with zeros up to a size                                        |
| `q: "a.weight -> mlp embed as bfloat16"`       | in another dtype                                               |
| `head: "= table"`                              | the same as another entry                                      |
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..axis import Names
from ..core import errors, parsing

WHAT = "WeightLayout"

JOINED = "_"
"""The name, in a table, of the axis along which several arrays are joined."""

_AXIS_IN_KEY = re.compile(r"\{([^\W\d]\w*)\}")
_ARRAY = re.compile(r"\s*(?P<path>[^\s(),+]+)\s*(?:\((?P<own>[^()]*)\))?\s*")


class RowArray(NamedTuple):
    """An array of a row."""

    path: str
    own: tuple[parsing.Name, ...]
    """The axes that `_` stands for in it."""


class TableRow(NamedTuple):
    """A row of the table: the arrays that an entry is made of, and its axes."""

    key: str
    operands: tuple[RowArray, ...]
    elements: tuple[parsing.Name | parsing.Group, ...]
    """The axes of the entry, in order."""
    dtype: np.dtype | None

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(operand.path for operand in self.operands)

    @property
    def along(self) -> Names:
        """Return the axes in the key."""
        return tuple(_AXIS_IN_KEY.findall(self.key))

    @property
    def groups(self) -> tuple[parsing.Group, ...]:
        """Return the axes that are merged."""
        return tuple(e for e in self.elements if isinstance(e, parsing.Group))

    @property
    def variables(self) -> tuple[parsing.Name, ...]:
        """Return the axes of an entry, those that are merged one by one."""
        nested = ((e,) if isinstance(e, parsing.Name) else e.members for e in self.elements)
        return tuple(name for names in nested for name in names)

    @property
    def order(self) -> Names:
        """Return the axes of all entries of the row together, none of them merged."""
        return (*self.along, *(v.name for v in self.variables))

    @property
    def names(self) -> Names:
        """Return the axes of an entry. Merged axes have one name, as in the table, without sizes."""
        return tuple(e.name if isinstance(e, parsing.Name) else merged_name(e) for e in self.elements)

    def places(self, operand: RowArray) -> dict[str, int | None]:
        """Return the axes that the row has a place for in one of its arrays, with the sizes that it gives."""
        variables = (*operand.own, *(v for v in self.variables if v.name != JOINED))
        return dict.fromkeys(self.along) | {v.name: v.size for v in variables}

    def key_of(self, index: Sequence[int]) -> str:
        """Return the key of an element along the axes in the key."""
        numbers = iter(index)
        return _AXIS_IN_KEY.sub(lambda _: str(next(numbers)), self.key)


def merged_name(group: parsing.Group) -> str:
    """Return the name of the axis that the members of a group become: `(heads size)`."""
    return f"({' '.join(member.name for member in group.members)})"


def parse_row(key: str, text: str) -> TableRow:
    """Parse one row."""
    what = f"{WHAT}: {key!r}"
    head, arrow, tail = text.partition("->")
    operands = tuple(
        _operand_of(what, text, part) for part in re.split(r",(?![^()]*\))", head)
    )  # outside of parentheses
    if not arrow:
        raise ValueError(f"{what}: {text!r} has no `->`, with the axes of the entry behind it.")
    axes, _, dtype = tail.partition(" as ")
    (term,) = parsing.parse_terms(what, axes.strip(), comma="elements", sizes=True)
    named = [g for g in term.groups if g.name]
    if term.dots or named or not term.ordered:
        parsing.fail(
            what, axes.strip(), term.dots or (named or [term])[0], "only names and groups of names have a place."
        )
    try:
        known = np.dtype(dtype.strip()) if dtype else None
    except (TypeError, ValueError, SyntaxError):  # NumPy evaluates parts of a name
        raise ValueError(f"{what}: no dtype is called {dtype.strip()!r}: write bfloat16 or float8_e4m3fn.") from None
    if known is not None and np.issubdtype(known, np.integer):
        raise ValueError(f"{what}: a cast to {known} would cut off fractions; make integers and scales of the entry.")
    elements: tuple[parsing.Name | parsing.Group, ...] = term.elements  # pyright: ignore[reportAssignmentType]
    row = TableRow(key, operands, elements, known)
    _check_joined(what, text, row)
    return row


def _operand_of(what: str, text: str, part: str) -> RowArray:
    found = _ARRAY.fullmatch(part)
    if found is None:
        raise ValueError(
            f"{what}: expected the path of an array, and its own axes in parentheses, in {part.strip()!r} of {text!r}."
        )
    terms = parsing.parse_terms(what, found["own"], comma="elements", sizes=True) if found["own"] else ()
    return RowArray(found["path"], tuple(name for term in terms for name in term.variables))


def _check_joined(what: str, text: str, row: TableRow) -> None:
    """Check that several arrays are joined along `_`, and that each axis has one place in each array."""
    joined = JOINED in row.order
    if joined != (len(row.operands) > 1):
        raise ValueError(
            f"{what}: {text!r} has no `_`, the axis along which its {len(row.operands)} arrays are joined."
            if not joined
            else f"{what}: {text!r} has `_`, the axis along which several arrays are joined, but only one array."
        )
    for operand in row.operands:
        if operand.own and not joined:
            raise ValueError(
                f"{what}: the axes in parentheses after {operand.path} belong to `_`, which {text!r} lacks."
            )
        names = (*row.order, *(name.name for name in operand.own))
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{what}: {text!r} has {errors.quoted(twice)} twice in {operand.path}.")


def parse_split(split: Mapping[str, str]) -> dict[str, tuple[parsing.Name, ...]]:
    """Parse the axes that rows can split: by axis, its factors, one of which can have no size."""
    found = {}
    for axis, text in split.items():
        what = f"{WHAT}: the split of {axis!r}"
        (term,) = parsing.parse_terms(what, text, comma="elements", sizes=True)
        if not term.variables or term.groups or term.dots or sum(v.size is None for v in term.variables) > 1:
            raise ValueError(f"{what}, {text!r}, needs names, all but one of which have a size, as in 'two=2 half'.")
        found[axis] = term.variables
    return found
