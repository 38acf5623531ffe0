"""Trees as a list of raw arrays and a *form*, for what JAX traces.

`jax.lax.scan` and its kin take trees of arrays only, and say by position what is wrong with them. So the transforms
hand them lists of raw arrays and keep the rest, which is static, as a form: the structure, the names of the axes, and
the leaves that are not arrays. Forms can be hashed, so what was compiled for one is found again; and two of them can be
compared leaf by leaf, so what is wrong can be said by path and name.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .. import _kernels
from .._mesh_axes import entry_of, mesh_axes
from .._static import Static
from ..array import NamedArray, wrap
from ..axis import Names
from . import _mapped_axis

_NUMBERS = (bool, int, float, complex, np.generic)


class Lent:
    """A leaf that is static and known by its identity, such as a function. It is not kept alive.

    So a form can be part of a key: what is kept under it does not outlive what it was made for.
    """

    __slots__ = ("_hash", "_reference")

    def __init__(self, value: Any):
        self._reference = weakref.ref(value)
        self._hash = hash(self._reference)

    @property
    def value(self) -> Any:
        """The leaf. Whoever lent it holds it while it is in use."""
        value = self._reference()
        assert value is not None, "the caller holds its arguments while they are used"
        return value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lent) and self._reference == other._reference


def by_identity(value: Any) -> bool:
    """Whether something is equal to itself alone, and need not be kept alive to be known again."""
    return type(value).__eq__ is object.__eq__ and type(value).__weakrefoffset__ != 0


Constant: TypeAlias = Static | Lent
"""A leaf that is not an array."""
Slot: TypeAlias = Names | Constant | None
"""What a form knows of a leaf: the names of a named array, None for a raw array, or the leaf itself if it is static."""


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """What a tree is, apart from its arrays."""

    structure: Any
    slots: tuple[Slot, ...]

    @property
    def names(self) -> list[Names | None]:
        """The names of each array; None for a raw one."""
        return [slot for slot in self.slots if not isinstance(slot, Constant)]

    @property
    def constants(self) -> list[Constant]:
        """The leaves that are not arrays."""
        return [slot for slot in self.slots if isinstance(slot, Constant)]

    def with_names(self, names: Iterable[Names | None]) -> Form:
        """The same form with other axes."""
        new = iter(names)
        return Form(self.structure, tuple(s if isinstance(s, Constant) else next(new) for s in self.slots))

    def lent(self, *lenders: Form) -> Form:
        """The same form, which keeps alive no leaf that can be known by its identity.

        Arguments:
            *lenders: only leaves that these forms have lent already are lent; the others are kept.
        """
        if not lenders and not any(isinstance(s, Static) for s in self.slots):
            return self
        known = {id(c.value) for lender in lenders for c in lender.constants if isinstance(c, Lent)}
        return Form(self.structure, tuple(_lent(s) if not lenders or _is_known(s, known) else s for s in self.slots))

    def join(self, arrays: Iterable[Any]) -> Any:
        """The tree with these arrays."""
        left = iter(arrays)
        return jax.tree.unflatten(self.structure, [_leaf(slot, left) for slot in self.slots])

    def paths(self) -> list[str]:
        """Where each leaf stands, as in `['h'].weight`. Slow: for messages."""
        numbered = jax.tree.unflatten(self.structure, range(len(self.slots)))
        return [jax.tree_util.keystr(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(numbered)[0]]


def _lent(slot: Slot) -> Slot:
    return Lent(slot.value) if isinstance(slot, Static) and by_identity(slot.value) else slot


def _is_known(slot: Slot, known: set[int]) -> bool:
    return isinstance(slot, Static) and id(slot.value) in known


def _leaf(slot: Slot, left: Iterator[Any]) -> Any:
    if isinstance(slot, Constant):
        return slot.value
    return next(left) if slot is None else wrap(next(left), slot)


def split(tree: Any, *, numbers: bool) -> tuple[list[Any], Form]:
    """The raw arrays of a tree, and its form.

    Arguments:
        tree: the tree.
        numbers: Python's numbers count as arrays.
    """
    leaves, structure = _mapped_axis.flatten(tree)
    arrays: list[Any] = []
    slots: list[Slot] = []
    for leaf in leaves:
        if isinstance(leaf, NamedArray) and _mapped_axis.is_array(leaf.array):
            _mapped_axis.check_rank(leaf)
            arrays.append(leaf.array)
            slots.append(leaf.names)
        elif _mapped_axis.is_array(leaf) or (numbers and isinstance(leaf, _NUMBERS)):
            arrays.append(leaf)
            slots.append(None)
        else:
            slots.append(Static(leaf))
    return arrays, Form(structure, tuple(slots))


@jax.tree_util.register_pytree_node_class
class Packed:
    """Arrays and their form as one tree, for what a compiled function returns."""

    def __init__(self, arrays: list[Any], form: Form):
        self.arrays, self.form = arrays, form

    def tree_flatten(self) -> tuple[list[Any], Form]:
        return self.arrays, self.form

    @classmethod
    def tree_unflatten(cls, form: Form, arrays: Iterable[Any]) -> Packed:
        return cls(list(arrays), form)

    def tree(self) -> Any:
        """The tree they make up."""
        return self.form.join(self.arrays)


@dataclasses.dataclass(frozen=True, slots=True)
class Words:
    """How to speak of a tree that must have the form of another."""

    tree: str
    """What both are, as in "carry"."""
    before: str
    """What comes before the type it must have, as in "goes in as"."""
    after: str
    """What comes before the type it has, as in "comes out as"."""
    only_before: str
    """What is said of a leaf that it lacks."""
    only_after: str
    """What is said of a leaf that it should not have."""
    remedy: str
    """What to do where it is placed differently; {before} and {after} stand for the placements."""


CARRY = Words(
    "carry",
    "goes in as",
    "comes out as",
    "goes in but does not come out",
    "comes out but does not go in",
    "Start with a carry that is placed like that, `axonym.shard(..., {after})`, or put it back in the body.",
)


def conform(
    what: str, words: Words, form: Form, types: Sequence[Any], tree: Any, *, promoted: bool = False
) -> list[Any]:
    """The arrays of a tree that must have a given form, in the layout of that form.

    The order of axes is only layout, so it is made to agree. All else must: what does not is one error that lists every
    leaf, what it was and what it became.

    Arguments:
        what: the operation, for messages.
        words: how to speak of the tree.
        form: the form it must have.
        types: the types its arrays must have.
        tree: the tree.
        promoted: JAX gives a weak type among `types`, that of a Python number, the dtype it meets here.
    """
    arrays, found = split(tree, numbers=True)
    if found.structure != form.structure:
        raise TypeError(_other_structure(what, words, form, found))
    expected, given = iter(types), iter(arrays)
    result, problems = [], []
    for i, (slot, new) in enumerate(zip(form.slots, found.slots, strict=True)):
        if isinstance(slot, Constant) or isinstance(new, Constant):
            before = slot if isinstance(slot, Constant) else next(expected)
            after = new if isinstance(new, Constant) else next(given)
            if not _same(before, after):
                problems.append((i, f"{_kind(slot, before)} and {words.after} {_kind(new, after)}", _STATIC))
            continue
        before, after = next(expected), next(given)
        if slot and new and set(slot) == set(new):
            after, new = _kernels.transpose_to(after, new, slot), slot
        after = _as_varying(after, before)
        remedy = _difference(words, slot, before, new, jax.typeof(after), promoted)
        if remedy:
            shown = f"{_described(slot, before)} and {words.after} {_described(new, jax.typeof(after))}"
            problems.append((i, shown, remedy))
        result.append(after)
    if problems:
        paths = form.paths()
        raise TypeError(_listed(what, words, [(paths[i], shown, remedy) for i, shown, remedy in problems]))
    return result


def _same(before: Any, after: Any) -> bool:
    """Whether two leaves are the same constant."""
    if not isinstance(before, Constant) or not isinstance(after, Constant):
        return False
    return before.value is after.value or before == after


def _difference(
    words: Words, slot: Names | None, before: Any, new: Names | None, after: Any, promoted: bool
) -> str | None:
    """What to do about two arrays of different types; None where they agree."""
    if (slot or new) and slot != new:
        return _AXES
    if before.shape != after.shape:
        return _SIZES
    if before.dtype != after.dtype and not (promoted and _yields(before, after)):
        return f"Cast it with `.astype({before.dtype})`, or the other to {after.dtype}."
    if _entries(before) != _entries(after):
        return _moved(new, before, after) + words.remedy.format(
            before=_placement(slot, before), after=_placement(new, after)
        )
    if axes := sorted(_varying(after) - _varying(before)):
        return f"Inside `shard_map`, make the other differ, too: `jax.lax.pcast(..., {tuple(axes)}, to='varying')`."
    return None


def _varying(aval: Any) -> frozenset[str]:
    """The mesh axes along which an array inside `shard_map` differs from device to device."""
    return aval.manual_axis_type.varying


def _as_varying(x: Any, other: Any) -> Any:
    """An array as one that may differ along the mesh axes along which another does. Being equal is a case of that."""
    axes = sorted(_varying(other) - _varying(jax.typeof(x)))
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x


_AXES = "Both need the same axes: `broadcast_axis` adds one, and a reduction or an index takes one away."
_SIZES = "Both need the same sizes."
_STATIC = "What is not an array cannot change."


def _moved(names: Names | None, before: Any, after: Any) -> str:
    """Why a placement is another one: the axes that are not where they were."""
    moves = []
    for i, (was, now) in enumerate(zip(_entries(before), _entries(after), strict=True)):
        if was != now:
            axis = repr(names[i]) if names else f"dimension {i}"
            moves.append(f"{axis} is {_over(now)} where it was {_over(was)}")
    return f"Here {' and '.join(moves)}, and on Explicit mesh axes that is part of the type. "


def _over(axes: tuple[str, ...]) -> str:
    return f"split over {' and '.join(map(repr, axes))}" if axes else "whole"


def _placement(names: Names | None, aval: Any) -> str:
    """The placement of an array as users write it."""
    entries = [entry_of(axes) for axes in _entries(aval)]
    if not names:
        return str(jax.sharding.PartitionSpec(*entries))
    return str(dict(zip(names, entries, strict=True)))


def _yields(weak: Any, other: Any) -> bool:
    """Whether the weak type of a Python number becomes that of another."""
    kinds = (jnp.bool_, bool), (jnp.integer, int), (jnp.floating, float), (jnp.complexfloating, complex)
    number = next((number for kind, number in kinds if jnp.issubdtype(weak.dtype, kind)), None)
    return weak.weak_type and number is not None and jnp.result_type(number, other.dtype) == other.dtype


def _entries(aval: Any) -> tuple[tuple[str, ...], ...]:
    """The Explicit mesh axes over which each axis of an array is split."""
    spec = tuple(aval.sharding.spec)
    return tuple(mesh_axes(spec[i]) if i < len(spec) else () for i in range(len(aval.shape)))


def _described(names: Names | None, aval: Any) -> str:
    """`float32[batch=8 over 'data', embed=4]`."""
    axes = []
    for i, (size, entry) in enumerate(zip(aval.shape, _entries(aval), strict=True)):
        axis = f"{names[i]}={size}" if names else str(size)
        axes.append(axis + (f" over {' and '.join(map(repr, entry))}" if entry else ""))
    varying = sorted(_varying(aval))
    differs = f" that differs along mesh axis {', '.join(map(repr, varying))}" if varying else ""
    kind = "" if names is not None or not aval.shape else "raw "
    return f"{kind}{aval.dtype}[{', '.join(axes)}]{differs}"


def _kind(slot: Slot, leaf: Any) -> str:
    if isinstance(slot, Constant):
        value = slot.value
        if value is None or isinstance(value, (bool, int, float, complex, str)):
            return repr(value)
        return f"a {type(value).__name__}" + (f" {value.__name__}" if hasattr(value, "__name__") else "")
    return _described(slot, leaf if hasattr(leaf, "manual_axis_type") else jax.typeof(leaf))


def _listed(what: str, words: Words, problems: Sequence[tuple[str, str, str]]) -> str:
    lines = [f"{words.tree}{path} {words.before} {shown}. {remedy}" for path, shown, remedy in problems]
    return f"{what}: {lines[0]}" if len(lines) == 1 else f"{what}:" + "".join(f"\n  {line}" for line in lines)


def _other_structure(what: str, words: Words, form: Form, found: Form) -> str:
    before, after = form.paths(), found.paths()
    gone = [p for p in before if p not in after]
    new = [p for p in after if p not in before]
    start = f"{what}: the {words.tree} must keep one structure"
    if not gone and not new:
        was, became = _where_they_differ(form.structure, found.structure)
        return f"{start}, but a part of it {words.before} {was} and {words.after} {became}."
    parts = [f"{_paths(words, gone)} {words.only_before}"] if gone else []
    parts += [f"{_paths(words, new)} {words.only_after}"] if new else []
    return f"{start}, but {' and '.join(parts)}."


def _where_they_differ(a: Any, b: Any) -> tuple[Any, Any]:
    """The smallest parts in which two structures differ."""
    while True:
        pairs = list(zip(a.children(), b.children(), strict=False))
        differing = [(x, y) for x, y in pairs if x != y]
        if a.node_data() != b.node_data() or not differing:
            return a, b
        a, b = differing[0]


def _paths(words: Words, paths: Sequence[str]) -> str:
    return ", ".join(f"{words.tree}{path}" for path in paths)
