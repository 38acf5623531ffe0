"""Read the names of axes, once a program has been walked."""

from __future__ import annotations

from ._axes import Axis, AxisFactor, Dims, find, last_base, leaves


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
