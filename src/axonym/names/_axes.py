"""The model of names: axes are made of factors, and a program says which factors are the same.

An axis is a tuple of *factors*, from major to minor; an axis of size 1 has none. Factors are the nodes of a union-find
structure, so a name that is learnt late also names what came before. There are three relations:

- *same*: the two are one axis. Two names that meet here are a mix-up, which is recorded and not merged.
- *factor of*: a reshape, or two axes of one size with different factors, split a factor into others.
- *derived*: a slice, a padded or a windowed axis. It takes the name of its origin if nothing else names it, and never
  conflicts with it.

An axis that an array has twice, such as the positions of queries and of keys, is two *roles* of one axis: factors of
their own whose base is that axis. A role may meet its base, and two roles that one array has are apart.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias


class AxisFactor:
    """A factor of axes: a node that may be the same as others, have a name, or consist of smaller factors."""

    __slots__ = (
        "apart", "base", "kids", "like", "name", "part_of", "parts", "same_as", "side", "size", "source",
        "used_as", "wholes",
    )  # fmt: skip

    def __init__(self, size: int, name: str | None = None, source: str = "", base: AxisFactor | None = None):
        self.size = size
        self.name = name
        self.source = source
        self.base = base
        """The axis that this is a role of."""
        self.side: str | None = None
        """The side of this role, if that is known: `key` or `query`."""
        self.same_as: AxisFactor | None = None
        self.kids: tuple[AxisFactor, ...] = ()
        self.wholes: tuple[AxisFactor, ...] = ()
        """The factors that it is a kid of."""
        self.like: tuple[AxisFactor, ...] = ()
        """The factors that this is derived from, which give it a name if it has none."""
        self.used_as: tuple[AxisFactor, ...] = ()
        """The factors that stand for this one, which belongs to a constant, where it is used."""
        self.apart: tuple[AxisFactor, ...] = ()
        """The other roles in an array that has this one."""
        self.parts: dict[tuple[int, int], AxisFactor] | None = None
        """Its slices, by start and stop."""
        self.part_of: tuple[tuple[Axis, int], ...] = ()
        """The axes that it is a slice of, each with its start there."""

    def __repr__(self) -> str:
        return f"{self.name or '?'}={self.size}"


Axis: TypeAlias = tuple[AxisFactor, ...]
Dims: TypeAlias = tuple[Axis, ...]


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Two factors that a program treats as one axis, or two roles that it exchanges."""

    left: AxisFactor
    right: AxisFactor
    at: Any
    """The step of the program that does so."""
    kind: str = "names"


def find(x: AxisFactor) -> AxisFactor:
    """Return the factor that stands for all that are the same as this one."""
    root = x
    while root.same_as is not None:
        root = root.same_as
    while x is not root:
        x.same_as, x = root, x.same_as  # pyright: ignore[reportAssignmentType]
    return root


def leaves(axis: Iterable[AxisFactor]) -> Axis:
    """Return the smallest known factors of an axis."""
    if type(axis) is tuple and len(axis) == 1:  # most axes
        x = find(axis[0])
        if not x.kids and (x.base is None or not find(x.base).kids):
            return axis if x is axis[0] else (x,)
    found: list[AxisFactor] = []
    for x in axis:
        x = find(x)
        if not x.kids and x.base is not None and find(x.base).kids:
            split_role(x)
        found.extend(leaves(x.kids) if x.kids else (x,))
    return tuple(found)


def size_of(axis: Axis) -> int:
    return math.prod(x.size for x in axis)


def bases(x: AxisFactor) -> Iterator[AxisFactor]:
    """Yield a factor, the axis that it is a role of, and so on."""
    seen: AxisFactor | None = find(x)
    while seen is not None:
        yield seen
        seen = None if seen.base is None else find(seen.base)


def last_base(x: AxisFactor) -> AxisFactor:
    """Return the axis that a factor is a role of in the end, or itself."""
    *_, last = bases(x)
    return last


def are_apart(x: AxisFactor, y: AxisFactor) -> bool:
    """Return whether two roles stand beside each other in some array."""
    others = set(map(id, bases(y)))
    return any(id(find(z)) in others for a in bases(x) for z in a.apart)


def split_role(x: AxisFactor) -> None:
    assert x.base is not None
    _set_kids(x, tuple(AxisFactor(k.size, base=k) for k in find(x.base).kids))
    for other in x.apart:
        other = find(other)
        if other.kids:
            for a, b in zip(x.kids, other.kids, strict=False):
                a.apart += (b,)
                b.apart += (a,)


def _set_kids(x: AxisFactor, kids: tuple[AxisFactor, ...]) -> None:
    x.kids = kids
    for kid in kids:
        find(kid).wholes += (x,)


def _are_in_other_order(left: Sequence[AxisFactor], right: Sequence[AxisFactor]) -> bool:
    """Return whether two axes have a part of a named axis at different strides."""
    if any(f.base is not None or f.size == 0 for f in (*left, *right)):
        return False
    strides = [{f: math.prod(g.size for g in axis[i + 1 :]) for i, f in enumerate(axis)} for axis in (left, right)]
    shared = [f for f in left if f in strides[1] and strides[0][f] != strides[1][f]]
    return any(f.name is not None or any(find(w).name is not None for w in f.wholes) for f in shared)


class Axes:
    """The relations between the factors of a program."""

    def __init__(self, separate: frozenset[int] = frozenset(), renames: bool = True) -> None:
        self.separate = separate
        """Which of `equal_slices` are axes of their own."""
        self.renames = renames
        """Whether an axis gets the name by which a named operation calls it, if it has another one."""
        self.equal_slices: list[AxisFactor | None] = []
        """For each slice of an axis that is cut evenly, in the program's order, the factor that all its slices are."""
        self.convolutions: list[tuple[Any, Dims, Dims]] = []
        """The dimension numbers and the axes of the operands of each convolution."""
        self.named: dict[tuple[str, int], AxisFactor] = {}
        self.meetings: dict[tuple[int, int], Meeting] = {}
        """The mix-ups, by the two factors."""
        self.adopted: list[Meeting] = []
        """Roles that meet another named axis, which may be their declared name."""
        self.crossed: list[Meeting] = []
        """Roles of one axis that meet, although one array has both."""
        self.found: list[Meeting] = []
        """The mistakes found in masks and roles."""

    def axis(self, name: str, size: int, source: str) -> Axis:
        """Return the axis of a name: one factor for each name and size, unless it names factors, as in `a*b`."""
        if size == 1:
            return ()
        known = self.named.get((name, size))
        if known is None:
            base = self.axis(name[:-1], size, source)[0] if name.endswith("'") and len(name) > 1 else None
            known = self.named[name, size] = AxisFactor(size, name, source, base)
        return (known,)

    def check_given(self, arguments: Iterable[tuple[str, Sequence[AxisFactor]]]) -> None:
        """Record names that have two sizes in two arguments, and split axes such as `heads*head_dim` into known ones.

        Arguments:
            arguments: the name of each argument, with the factors of its axes.
        """
        owners: dict[str, dict[str, list[AxisFactor]]] = {}
        for argument, factors in arguments:
            for x in factors:
                if x.name is not None:
                    owners.setdefault(x.name, {}).setdefault(argument, []).append(x)
        for own in owners.values():
            for one, other in itertools.combinations(own.values(), 2):
                if set(one).isdisjoint(other):
                    self.found.append(Meeting(one[0], other[0], None, "sizes"))
                    break
        sizes = {name: {n for own, n in self.named if own == name} for name, _ in self.named}
        known = {name: own.pop() for name, own in sizes.items() if len(own) == 1}
        for (name, size), x in [*self.named.items()]:
            words = name.split("*")
            own = [known.get(word) for word in words]
            rest, left = divmod(size, math.prod(n for n in own if n is not None) or 1)
            if len(words) > 1 and x.base is None and size and not left and own.count(None) == (rest != 1):
                kids = [self.axis(word, n or rest, x.source) for word, n in zip(words, own, strict=True)]
                _set_kids(x, tuple(kid for own in kids for kid in own))

    def split(self, x: AxisFactor, sizes: Sequence[int]) -> None:
        """Split a factor into smaller ones."""
        x = find(x)
        if x.base is not None:
            base = find(x.base)
            if not base.kids:
                self.split(base, sizes)
            split_role(x)
            return
        names = self._parts(x, sizes)
        if names:
            kids = [self.axis(name, n, x.source) or (AxisFactor(n),) for name, n in zip(names, sizes, strict=True)]
            _set_kids(x, tuple(kid for (kid,) in kids))
        else:
            _set_kids(x, tuple(map(AxisFactor, sizes)))

    def _parts(self, x: AxisFactor, sizes: Sequence[int]) -> list[str]:
        """Return the names of the two factors of one that has a name such as `heads*head_dim`."""
        words = (x.name or "").split("*")
        found = [["*".join(words[:i]), "*".join(words[i:])] for i in range(1, len(words))]
        if len(found) > 1:  # only names that other arguments have tell which are together
            known = {(name, n) for name, n in self.named if "*" in name}
            found = [two for two in found if not known.isdisjoint(zip(two, sizes, strict=True))]
        return found[0] if len(found) == 1 else []

    def renamed(self, axis: Axis, name: str, size: int, at: Any) -> Axis:
        """Return the axis with a name that an operation gives to an axis. One without a name gets that one."""
        new = self.axis(name, size, "a named operation")
        if len(axis) == 1 and (x := find(axis[0])).name is None and x.base is None and not x.kids:
            self.merge(x, new[0], at)
            return new
        return new if self.renames else axis

    # --- the same ---

    def unify(self, a: Axis, b: Axis, at: Any) -> Axis:
        """Record that two axes are the same; return it. Roles stay roles: of a role and its base, return the role."""
        if len(a) == len(b) == 1:
            if a[0] is b[0]:
                return a
            x, y = find(a[0]), find(b[0])
            if x is y:
                return (x,)
            if x.size == y.size:
                return (self.same(x, y, at),)
        if not a or not b:
            return a or b
        left, right, found = [*leaves(a)], [*leaves(b)], list[AxisFactor]()
        if len(left) > 1 and len(right) > 1 and _are_in_other_order(left, right):
            self.differ(self.whole(a), self.whole(b), at)
            return a
        if size_of(a) == size_of(b) and (x := self._named(right)) is not None and (y := self._named(left)) is not None:
            if x.name != y.name:
                self.differ(y, x, at)
                return a
        while left and right:
            x, y = find(left[0]), find(right[0])
            if x is y or x.size == y.size:
                found.append(self.same(x, y, at))
                del left[0], right[0]
                continue
            large, of_large, small = (x, left, y) if x.size > y.size else (y, right, x)
            if small.size == 0 or large.size % small.size:
                return a  # the factors of the two do not fit
            self.split(large, (small.size, large.size // small.size))
            of_large[:1] = leaves((large,))
        return tuple(found)

    def same(self, x: AxisFactor, y: AxisFactor, at: Any) -> AxisFactor:
        """Record that two factors of one size are the same."""
        x, y = find(x), find(y)
        if x is y:
            return x
        if x.base is not None or y.base is not None:
            return self._same_role(x, y, at)
        if x.name is not None and y.name is not None and x.name != y.name:
            self.differ(x, y, at)
            return x
        return self.merge(x, y, at)

    def differ(self, x: AxisFactor, y: AxisFactor, at: Any) -> None:
        """Record a mix-up of two named factors, once."""
        key = (id(x), id(y)) if id(x) < id(y) else (id(y), id(x))
        self.meetings.setdefault(key, Meeting(x, y, at))

    def _same_role(self, x: AxisFactor, y: AxisFactor, at: Any) -> AxisFactor:
        if y in bases(x):
            return x
        if x in bases(y):
            return y
        if last_base(x) is last_base(y):
            if are_apart(x, y):
                self.crossed.append(Meeting(x, y, at))
                return x
            if x.name is not None and y.name is not None and x.name != y.name:
                self.adopted.append(Meeting(x, y, at))
                return x
            return self.merge(x, y, at)
        names = [n for n in (last_base(x).name, last_base(y).name) if n is not None]
        if len(names) == 2:
            self.adopted.append(Meeting(x, y, at))
            return x if x.base is not None else y
        if x.base is not None and y.base is not None:
            self.same(last_base(x), last_base(y), at)
            return x if are_apart(x, y) else self.merge(find(x), find(y), at)
        role, other = (x, y) if x.base is not None else (y, x)
        if other.name is not None:  # the base of the role has no name: it is this axis, or its roles are
            self.same(last_base(role), other, at)
            return role
        return self.merge(role, other, at)

    def merge(self, x: AxisFactor, y: AxisFactor, at: Any) -> AxisFactor:
        """Make two factors one."""
        if x is y:
            return x
        # The factor that is known better stays: from now on it answers for both.
        if (y.name is not None and x.name is None) or (y.base is not None and x.base is None):
            x, y = y, x
        y.same_as = x
        if x.name is None:
            x.name, x.source = y.name, y.source
        x.side = x.side or y.side
        kids = y.kids
        for field in ("wholes", "like", "used_as", "apart", "part_of"):
            if found := getattr(y, field):
                setattr(x, field, getattr(x, field) + found)
        parts, y.parts = y.parts, None
        x.parts = x.parts or parts
        for bounds, part in (parts or {}).items():
            if x.parts and (known := x.parts.setdefault(bounds, part)) is not part:
                self.same(known, part, at)
        if kids:
            if x.kids:
                self.unify(x.kids, kids, at)
            elif x.base is not None:
                self.unify(leaves((x,)), kids, at)
            else:
                x.kids = kids
        return find(x)

    # --- others ---

    def reshaped(self, dims: Dims, shape: Sequence[int]) -> Dims | None:
        """Return the axes of an array in another shape; None if its axes do not divide so."""
        if 0 in shape:
            return None
        # A reshape keeps the order of elements, so factors are taken from the left until they multiply to each size.
        left, found = [*leaves(f for axis in dims for f in axis)], list[Axis]()
        for n in shape:
            taken: list[AxisFactor] = []
            while n > 1:
                if not left or left[0].size == 0:
                    return None
                x = left.pop(0)
                if n % x.size == 0:
                    taken.append(x)
                    n //= x.size
                elif x.size % n == 0 and not x.kids:
                    self.split(x, (n, x.size // n))
                    left[:0] = leaves((x,))
                else:
                    return None
            found.append(tuple(taken))
        return tuple(found)

    def distinct(self, dims: Dims, instead: Iterable[Dims] = ()) -> Dims:
        """Give an array that has an axis twice a role of it for each time.

        Arguments:
            instead: the axes of operands. What one of them has twice already has its roles.
        """
        every = [f for axis in dims for f in leaves(axis)]
        roles = [f for f in every if f.base is not None]
        if not roles and len(set(every)) == len(every):
            return dims
        count = Counter(map(id, every))
        again = {f for f, n in count.items() if n > 1}
        again |= {id(b) for f in roles for b in bases(f) if b is not f} & set(count)
        if not again:
            return dims
        for own in instead:
            twice = Counter(id(f) for axis in own for f in leaves(axis))
            again -= {f for f, n in twice.items() if n > 1}
        made: dict[int, list[AxisFactor]] = {}
        for f in roles:
            made.setdefault(id(last_base(f)), []).append(f)

        def role(f: AxisFactor) -> AxisFactor:
            if id(f) not in again:
                return f
            new = AxisFactor(f.size, base=f)
            others = made.setdefault(id(last_base(f)), [])
            for other in others:
                if other is not f:
                    new.apart += (other,)
                    other.apart += (new,)
            others.append(new)
            return new

        return tuple(tuple(map(role, leaves(axis))) for axis in dims)

    def derived(self, axis: Axis, size: int, bounds: tuple[int, int] | None = None) -> Axis:
        """Return an axis of another size that is made from this one, such as a slice (`bounds`) of it."""
        if size == 1 or not axis:
            return fresh(size)
        x = self.whole(axis)
        if bounds is None:
            made = AxisFactor(size)
            made.like += (x,)
            return (made,)
        if x.parts is None:
            x.parts = {}
        if bounds not in x.parts:
            made = x.parts[bounds] = AxisFactor(size)
            made.like += (x,)
            made.part_of += (((x,), bounds[0]),)
        return leaves((x.parts[bounds],))

    def resized(self, axis: Axis, size: int) -> Axis:
        """Return an axis, or one of another size that is derived from it."""
        return axis if size_of(axis) == size else self.derived(axis, size)

    def slices_among(self, met: Iterable[Meeting]) -> frozenset[int]:
        """Return which equal slices have one of two names that are mixed up."""
        mixed_up = {last_base(x) for m in met if m.kind == "names" for x in (m.left, m.right)}
        found = enumerate(self.equal_slices)
        return frozenset(
            i for i, x in found if x is not None and not mixed_up.isdisjoint(map(last_base, (x, *leaves((x,)))))
        )

    def derive(self, axis: Axis, other: Axis) -> None:
        """Record that an axis has the name of another, if it has none."""
        if axis and other:
            self.whole(axis).like += (self.whole(other),)

    def of_size(self, axis: Axis, size: int, start: int) -> Axis | None:
        """Return the axis of a size of which this one is a slice with a start, if any."""
        part_of = self.whole(axis).part_of if axis else ()
        return next((leaves(w) for w, at in part_of if at == start and size_of(w) == size), None)

    def padded(self, axis: Axis, before: int, after: int) -> Axis:
        """Return the axis of which this one is a slice, if its ends are known; else one derived from it."""
        size = before + size_of(axis) + after
        return self.of_size(axis, size, before) or self.derived(axis, size)

    def joined(self, pieces: Sequence[Axis], sizes: Sequence[int]) -> Axis:
        """Return the axis along which pieces are concatenated. Its slices at the same places are the pieces."""
        if all(n == 1 for n in sizes):
            return fresh(len(sizes))
        if len(kept := [axis for axis, n in zip(pieces, sizes, strict=True) if n]) == 1:
            return kept[0]
        parts = [self.whole(axis) if axis else None for axis in pieces]
        # The same axis again and again: if these were the slices of one axis, that one is back.
        first = parts[0]
        if first is not None and all(p is first for p in parts):
            for whole, _ in first.part_of:
                if size_of(whole) == first.size * len(parts):
                    return leaves(whole)
            return (AxisFactor(len(parts)), *leaves((first,)))
        made, start = AxisFactor(sum(sizes)), 0
        made.parts = {}
        for part, n in zip(parts, sizes, strict=True):
            if part is not None:
                made.parts[start, start + n] = part
                made.like += (part,)
                part.part_of += (((made,), start),)
            start += n
        return (made,)

    def _named(self, axis: Sequence[AxisFactor]) -> AxisFactor | None:
        """Return the factor with a name that consists of these, unless it is a role or has the names of its factors."""
        for whole in axis[:1] if len(axis) == 1 else map(find, axis[0].wholes):
            if whole.name and whole.base is None and "*" not in whole.name and leaves((whole,)) == tuple(axis):
                return whole
        return None

    def named_parts(self, axis: Axis) -> list[AxisFactor]:
        """Return the factors of an axis, and in place of those that are parts of a named axis, that one."""
        if len(axis) == 1 and (name := last_base(axis[0]).name) is not None and "*" not in name:
            return [find(axis[0])]
        left, found = leaves(axis), list[AxisFactor]()
        while left:
            stop = next((i for i in range(len(left), 1, -1) if self._named(left[:i]) is not None), 1)
            found.append(self._named(left[:stop]) or find(left[0]))
            left = left[stop:]
        return found

    def whole(self, axis: Axis) -> AxisFactor:
        """Return one factor that consists of the factors of an axis."""
        axis = leaves(axis)
        if len(axis) == 1:
            return find(axis[0])
        for whole in axis[0].wholes:
            if leaves((whole,)) == axis:
                return find(whole)
        made = AxisFactor(size_of(axis))
        _set_kids(made, axis)
        return made


def fresh(size: int) -> Axis:
    """Return an axis about which nothing is known."""
    return () if size == 1 else (AxisFactor(size),)


class Copies(dict[AxisFactor, AxisFactor]):
    """Make fresh factors for one use of a constant: its uses say nothing about each other."""

    def __missing__(self, f: AxisFactor) -> AxisFactor:
        root = find(f)
        if root is not f:
            return self[root]
        made = self[f] = AxisFactor(f.size)
        f.used_as += (made,)
        # As for the axes of an identity matrix. Merges repeat factors, and each copy of a copy would repeat them again.
        made.like = tuple(dict.fromkeys(self[g] for g in f.like if g.size == f.size))
        return made

    def axis(self, axis: Axis) -> Axis:
        return tuple(self[f] for f in leaves(axis))


class NameReader:
    """Read the names of axes, once the whole program has been walked."""

    def __init__(self) -> None:
        self._of_factor: dict[AxisFactor, str | None] = {}
        self._of_axis: dict[Axis, str | None] = {}

    def array(self, dims: Dims) -> tuple[str | None, ...]:
        """Return the names of the axes of an array; a name that it has again gets a prime."""
        found, seen = [], set[str]()
        for axis in dims:
            name = self.axis(axis)
            while name is not None and name in seen:
                name += "'"
            found.append(name)
            if name is not None:
                seen.add(name)
        return tuple(found)

    def axis(self, axis: Axis) -> str | None:
        """Return the name of an axis: its own, or the names of its factors, as in `batch*pos`."""
        if not axis:
            return None
        if axis not in self._of_axis:
            apart = leaves(axis)
            if apart not in self._of_axis:
                self._of_axis[apart] = self._name(apart)
            self._of_axis[axis] = self._of_axis[apart]
        return self._of_axis[axis]

    def _name(self, axis: Axis) -> str | None:
        names, start = list[str](), 0
        while start < len(axis):
            for stop in range(len(axis), start, -1):
                name = self._together(axis[start:stop])
                if name is not None:
                    names.append(name)
                    start = stop
                    break
            else:
                return None
        return "*".join(names)

    def _together(self, axis: Axis) -> str | None:
        """Return the name of adjacent factors as one."""
        if len(axis) == 1 and (name := self.factor(axis[0])) is not None:
            return name
        roles_of = tuple(map(last_base, axis))
        wholes = [w for f in {axis[0], roles_of[0]} for w in map(find, f.wholes)
                  if tuple(map(last_base, leaves((w,)))) == roles_of]  # fmt: skip
        names = {name for w in wholes if (name := self.factor(w)) is not None}
        return min(names) if names else None

    def factor(self, x: AxisFactor) -> str | None:
        """Return the name of a factor: its own, or the one of which it is a role, derived or used."""
        x = find(x)
        if x.name is not None:
            return x.name
        if x not in self._of_factor:
            self._of_factor[x] = None  # for those that are derived from each other
            self._of_factor[x] = self._other_name(x)
        return self._of_factor[x]

    def _other_name(self, x: AxisFactor) -> str | None:
        if x.base is not None:
            return self.factor(x.base)
        for whole in map(find, x.wholes):
            names, parts = (whole.name or "").split("*"), leaves((whole,))
            if len(names) == len(parts) > 1 and x in parts:
                return names[parts.index(x)]
        for others in (x.like, x.used_as):
            names = {name for y in others if (name := self.axis((y,))) is not None}
            if len(names) == 1:
                return names.pop()
            if len(axes := {name.rstrip("'") for name in names}) == 1:  # roles of one axis
                return axes.pop()
        # A factor without a name of its own is part of one that has a name.
        names = {f"{w.name}.{[*map(find, w.kids)].index(x)}" for w in map(find, x.wholes) if w.name is not None}
        return names.pop() if len(names) == 1 else None
