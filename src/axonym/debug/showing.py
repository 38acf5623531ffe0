"""Show a tree in a notebook: its arrays with their bytes and shards, and how a mapping shards them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from .._display import ShownArray, placed_array, shown_array, styled, tree_html
from ..core.errors import counted, describe_bytes, suggestion
from ..core.html import Html, Words, code, element, html, joined
from ..distribution.mesh_axes import AnyMesh, current_mesh, mesh_axes
from ..sharding.leaves import Leaf, leaves_of
from ..sharding.mapping import is_resource_mapping, normalize_mapping
from ..sharding.placement import ParameterOrComputeMapping, Placement, examine

__all__ = ["Shown", "show"]

_NAMED = 6
"""At most so many arrays that a mapping does not reach are named."""


def show(tree: Any, mapping: Placement = None, mesh: AnyMesh | None = None) -> Shown:
    """Show the arrays of a model, an optimizer state or any other tree, with the bytes and the shards of each.

    In a notebook, a cell that ends with it shows a tree that opens and closes, with a picture of each array: filled is
    what the first device holds, and a cut has the color of its mesh axis. Elsewhere it is text. Nothing is computed or
    moved.

    Arguments:
        tree: the tree; its arrays may be abstract, as `jax.eval_shape` gives them. Or a resource mapping, to show it
            alone.
        mapping: a mapping, or another placement, to show where it puts the arrays, and what it does not reach. For
            FSDP, the two mappings of `axonym.fsdp`: `(parameter_mapping, compute_mapping)`; two mappings always mean
            that, also for a tree that is a pair. By default, the arrays are shown where they lie.
        mesh: the mesh of the mapping; the active one by default.

    >>> mesh = axn.make_mesh({"data": 2, "model": 4})
    >>> model = {"up": axn.ones({"embed": 8, "mlp": 32}), "norm": axn.ones({"embed": 8})}
    >>> axn.debug.show(model, {"mlp": "model", "heads": "model"}, mesh)
    dict: 2 arrays, 1 KiB; 288 B on each of 8 CPU devices
    norm: float32[embed=8], 32 B, 8 copies along data and model
    up: float32[embed=8, mlp=32/model], 256 B, 2 copies along data
    mlp: over model=4, 1 array
    heads: over model=4, no array
    not reached: norm, 32 B on each device
    """
    mesh = current_mesh() if mesh is None else mesh
    sizes = {} if mesh is None else dict(mesh.shape)
    if mapping is None and isinstance(tree, Mapping) and tree and is_resource_mapping(tree):
        return _mapping_alone(tree, sizes)
    title = type(tree).__name__
    if mapping is None:
        arrays = tuple(shown_array(leaf) for leaf in leaves_of(tree)[0] if leaf.shape is not None)
        return Shown(title, arrays, sizes, {}, (), False)
    if mesh is None:
        raise ValueError("debug.show: a mapping is shown on a mesh, and none is active: pass `mesh`.")
    given = mapping if isinstance(mapping, tuple) and len(mapping) == 2 else (mapping,)
    mappings = [normalize_mapping(m, "debug.show") for m in given if is_resource_mapping(m)]
    placement = ParameterOrComputeMapping(*mappings) if len(mappings) == 2 else mapping
    examined = examine(tree, placement, mesh, "debug.show")
    leaves, wrong = [leaf for leaf in examined.leaves if leaf.shape is not None], dict(examined.problems)
    arrays = tuple(
        shown_array(leaf) if leaf.spec is None or leaf.path in wrong else _placed(leaf, leaf.spec, leaf.mesh or mesh)
        for leaf in leaves
    )
    entries = _entries(mappings, [set(leaf.names or ()) for leaf in leaves])
    return Shown(title, arrays, sizes, entries, tuple(dict.fromkeys(wrong.values())), True)


def _mapping_alone(mapping: Mapping[Any, Any], mesh: Mapping[str, int]) -> Shown:
    entries = _entries([normalize_mapping(mapping, "debug.show")], None)
    unknown = {a for over, _ in entries.values() for axes in over for a in axes if mesh and a not in mesh}
    problems = tuple(f"The mesh has no axis {a!r}.{suggestion(a, mesh)}" for a in sorted(unknown))
    return Shown("", (), mesh, entries, problems, False)


@dataclasses.dataclass(frozen=True, repr=False)
class Shown:
    """Show a tree or a mapping, in HTML in a notebook and as text elsewhere; `axonym.debug.show` returns it.

    >>> print(axn.debug.show({"batch": "data"}, mesh=axn.make_mesh({"data": 8})))
    batch: over data=8
    """

    title: str
    """The kind of tree."""
    arrays: tuple[ShownArray, ...]
    mesh: Mapping[str, int]
    """The sizes of the mesh axes; empty without a mesh."""
    entries: Mapping[str, tuple[tuple[tuple[str, ...], ...], str]]
    """For each axis of the mapping: its mesh axes, for FSDP in compute and in storage, and how many arrays have it."""
    problems: tuple[str, ...]
    """The reasons why the mapping cannot place arrays."""
    placed: bool
    """True if the arrays are shown as a mapping places them."""

    def __str__(self) -> str:
        lines = [f"{self.title}: {self._sum()}"] if self.title else []
        lines += [
            ", ".join(filter(None, (f"{x.path}: {x}", describe_bytes(x.bytes), x.replicated()))) for x in self.arrays
        ]
        for name, (over, has) in self.entries.items():
            places = [f"over {self._over(axes)}" if axes else "replicated" for axes in over]
            how = places[0] if len(set(places)) == 1 else f"computed {places[0]}, stored {places[1]}"
            lines.append(f"{name}: {how}{', ' if has else ''}{has}")
        lines += self.problems
        if left := self._unreached():
            lines.append(left)
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        meshes = [self.mesh, *(x.mesh for x in self.arrays)]
        words = Words(dict.fromkeys(axis for mesh in meshes for axis in mesh))
        parts = list[Html]()
        if self.title:
            parts += [element("p", element("b", self.title), " ", self._sum()), tree_html(self.arrays, words)]
        if self.entries:
            parts.append(self._table(words))
        parts += [element("p", words.said(problem)) for problem in self.problems]
        if left := self._unreached():
            parts.append(element("p", left))
        return styled(*parts)

    def _sum(self) -> str:
        total, held = sum(x.total for x in self.arrays), sum(x.bytes for x in self.arrays if x.copies)
        places = {(x.where, x.devices) for x in self.arrays}
        each = (
            f"; {describe_bytes(held)} on {self.arrays[0].where}" if len(places) == 1 and self.arrays[0].copies else ""
        )
        return f"{counted(len(self.arrays), 'array')}, {describe_bytes(total)}{each}"

    def _over(self, axes: Sequence[str]) -> str:
        return " and ".join(f"{a}={self.mesh[a]}" if a in self.mesh else a for a in axes)

    def _table(self, words: Words) -> Html:
        """Write the mapping as a table."""
        columns = max(len(over) for over, _ in self.entries.values())
        header = ["axis", *(["over"] if columns == 1 else ["computed over", "stored over"]), ""]
        rows = [
            [code(name), *(self._cell(axes, words) for axes in over), html(has)]
            for name, (over, has) in self.entries.items()
        ]
        head = element("tr", *(element("th", cell, align="left") for cell in header))
        body = [element("tr", *(element("td", cell, align="left") for cell in row)) for row in rows]
        mesh = element("p", "mesh: ", words.mesh(self.mesh)) if self.mesh else None
        return joined([mesh, element("table", element("thead", head), element("tbody", *body))])

    def _cell(self, axes: Sequence[str], words: Words) -> Html:
        return joined([words.axis(a, self._over([a])) for a in axes], " and ") if axes else html("replicated")

    def _unreached(self) -> str:
        """Name the arrays without an axis of the mapping."""
        has_entries = self.placed and bool(self.entries)
        left = [x for x in self.arrays if has_entries and x.sizes and self.entries.keys().isdisjoint(x.axes)]
        if not left:
            return ""
        paths = [x.path for x in left[:_NAMED]] + ([f"{len(left) - _NAMED} more"] if len(left) > _NAMED else [])
        return f"not reached: {', '.join(paths)}, {describe_bytes(sum(x.bytes for x in left))} on each device"


def _placed(leaf: Leaf, spec: PartitionSpec, mesh: AnyMesh) -> ShownArray:
    return placed_array(leaf, NamedSharding(mesh, spec), "")  # pyright: ignore[reportArgumentType]  # both kinds of mesh


def _entries(
    mappings: Sequence[Mapping[str, Any]], names: Sequence[set[str]] | None
) -> dict[str, tuple[tuple[tuple[str, ...], ...], str]]:
    """Return the mesh axes of each axis of one mapping, or of storage and compute, and how many arrays have it."""
    known = {n for found in names or () for n in found}
    entries = {}
    for name in dict.fromkeys(n for mapping in mappings[::-1] for n in mapping):
        compute = mappings[-1].get(name)
        over = tuple(mesh_axes(entry) for entry in (compute, mappings[0].get(name, compute))[: len(mappings)])
        count = sum(name in found for found in names or ())
        hint = suggestion(name, known)
        has = counted(count, "array") if count else f"no array.{hint}" if hint else "no array"
        entries[name] = over, has if names is not None else ""
    return entries
