"""Describe an operation by its axes, in profiles and compiled programs."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..axis import Names
from .active_settings import Settings, active_settings
from .axis_rules import AxisRule, names_of_results
from .mesh_axes import Axes, mapped_axes, storage_axes

_PLAIN = re.compile(r"[^\w.\- ]")
"""Matches characters that a name must not have in a scope."""

CHOICE = "attention by "
"""The beginning of the names of operations that say which implementation runs, and why."""

_NUMBER = re.compile(r"#\d")
"""Matches a number that stands for a name: see `shared` in `axonym.ops._kernels`."""


class DerivedName(str):
    """The name of an axis in one kernel, made of the name of an axis; no name of a user is equal to it."""

    __slots__ = ("axis", "private")

    axis: str
    private: bool
    """Whether it stands for any axis; otherwise for the axis that it is made of."""

    def __new__(cls, axis: str, text: str, private: bool = False) -> DerivedName:
        found = super().__new__(cls, text)
        found.axis, found.private = getattr(axis, "axis", axis), private
        return found

    def __getnewargs__(self) -> Any:
        return self.axis, str(self), self.private

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DerivedName) and str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


@dataclasses.dataclass(frozen=True)
class NamedAxis:
    """An axis of an operand or a result."""

    name: str
    size: int | None
    compute: Axes
    """The mesh axes that the active mapping shards it over."""
    stored: Axes | None
    """The mesh axes that the parameter mapping shards it over, if they differ."""
    axis: str
    """The name of the axis that a private name is made of, or its own name."""


Term = tuple[NamedAxis, ...]


@dataclasses.dataclass(frozen=True)
class ScopedOperation:
    """A named operation, with the axes of its operands and results."""

    name: str
    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    has_own_gradients: bool = False
    """Whether its gradients are operations with scopes of their own. Otherwise they have its scope."""
    idle: float | None = None
    """Of a pipeline, the share of the time in which a stage waits."""
    turns: tuple[int, int] | None = None
    """Of a condition in a loop, in how many turns it holds, and how many there are."""
    rule: AxisRule = dataclasses.field(default=AxisRule((), ()), repr=False, compare=False)
    """The declared use of these axes."""

    @property
    def axes(self) -> Axes:
        return tuple(dict.fromkeys(a.name for term in (*self.operands, *self.results) for a in term))

    @property
    def over(self) -> frozenset[str]:
        """Return the mesh axes that the operation has axes sharded over."""
        return frozenset(m for term in (*self.operands, *self.results) for a in term for m in a.compute)

    def looks_up(self, term: Term) -> bool:
        """Return whether the operation looks up values, and an operand with indices has these axes."""
        return self.name == "index" and term in self.operands[1:] and term != self.operands[0]

    def __str__(self) -> str:
        def listed(terms: Sequence[Term]) -> str:
            return "; ".join(", ".join(a.name for a in term) for term in terms)

        return f"{self.name}[{listed(self.operands)} -> {listed(self.results)}]"


RECORD = re.compile(r"#([0-9a-f]{12})(?![0-9a-f])")
"""Matches the end of a scope, by which its record is found."""

_MOST_RECORDS = 2**16
_records: collections.OrderedDict[str, ScopedOperation] = collections.OrderedDict()


def operations_in(scopes: str) -> list[ScopedOperation]:
    """Return the named operations of a text with scopes, from the outermost."""
    return [found for key in RECORD.findall(scopes) if (found := _records.get(key)) is not None]


def operation_scope(
    what: str,
    in_names: Sequence[Names],
    out_names: Any,
    arrays: Sequence[Any],
    has_own_gradients: bool = False,
    **more: Any,
) -> str:
    """Return the scope of an operation, which describes it in profiles and compiled programs.

    An example is `dot[batch=16|data,embed=64~data;embed,mlp=128->batch,mlp]#0a3f5c7e9b1d`: the axes of each operand and
    each result. Where an axis is first named, its size follows, then the mesh axes that the active mapping shards it
    over (`|`), and the mesh axes of the parameter mapping (`~`), if they differ. People read this, and programs the
    record of it, which `operations_in` finds by the number at the end: names may have any characters. The number is a
    hash, so it is the same in every process. There is no `@`, since XLA drops everything after one. A record can have
    `more`, as of a pipeline.
    """
    layouts = tuple(names_of_results(out_names))
    if any(_NUMBER.match(n) for names in (*in_names, *layouts) for n in names):
        return _PLAIN.sub("_", what)  # the kernel is for any names
    shapes = tuple([jnp.shape(x) for x in arrays])
    text, key, record = _scope_and_record(
        what, tuple(in_names), layouts, shapes, has_own_gradients, active_settings(), **more
    )
    _records[key] = record
    _records.move_to_end(key)
    if len(_records) > _MOST_RECORDS:
        _records.popitem(last=False)
    return text


@functools.lru_cache(maxsize=4096)
def _scope_and_record(
    what: str,
    in_names: tuple[Names, ...],
    out_names: tuple[Names, ...],
    shapes: tuple[tuple[int, ...], ...],
    has_own_gradients: bool,
    settings: Settings | None,
    **more: Any,
) -> tuple[str, str, ScopedOperation]:
    """Return the scope of an operation under the active settings, and the number and the record that it ends with."""
    mapping, stored_by = ({}, {}) if settings is None else (settings.mapping, settings.parameter_mapping)
    seen: dict[str, NamedAxis] = {}

    def term(names: Names, shape: Sequence[int | None]) -> tuple[str, Term]:
        pairs = [*map(axis, names, shape)]
        return ",".join(text for text, _ in pairs), tuple(found for _, found in pairs)

    def axis(name: str, size: int | None) -> tuple[str, NamedAxis]:
        name = unmarked(name)
        text = _PLAIN.sub("_", name)
        if name in seen and size in (None, seen[name].size):
            return text, seen[name]
        over, stored = mapped_axes(name, mapping), storage_axes(name, stored_by, mapping)
        differ = stored if stored and stored != over else None
        seen[name] = NamedAxis(str(name), size, over, differ, getattr(name, "axis", name))
        text += "" if size is None else f"={size}"
        return text + (f"|{'+'.join(over)}" if over else "") + (f"~{'+'.join(differ)}" if differ else ""), seen[name]

    inputs = [term(names, shape) for names, shape in zip(in_names, shapes, strict=True)]
    results = [term(names, (None,) * len(names)) for names in out_names]
    record = ScopedOperation(what, tuple(t for _, t in inputs), tuple(t for _, t in results), has_own_gradients, **more)
    key = hashlib.sha256(repr(record).encode()).hexdigest()[:12]
    operands, made = (";".join(text for text, _ in found) for found in (inputs, results))
    return f"{_PLAIN.sub('_', what)}[{operands}->{made}]#{key}", key, record


def unmarked(name: str) -> str:
    """Return the name of an axis without the mark that indexed axes have."""
    return name.axis if isinstance(name, DerivedName) and not name.private else name
