"""Checking a whole mapping against a whole model, before anything runs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from .. import _errors
from .._mesh_axes import axes_in, mesh_axes, shard_count
from ..array import NamedArray
from .mapping import ResourceMapping
from .meshes import AnyMesh, current_mesh
from .placement import Leaf, leaves_of, mapping_of, spec_of_leaf

Kind = Literal["unused", "problem", "replicated"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is, or may be, wrong with a mapping.

    >>> axn.sharding.Finding("unused", "embd", "axis 'embd' ...").kind
    'unused'
    """

    kind: Kind
    """'unused': a key that names no axis of the tree; 'problem': what `shard` would refuse; 'replicated': a large array
    that is whole on every device."""
    where: str
    """The key of the mapping, or the path in the tree."""
    message: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What `lint_mapping` found; it reads well when printed, and is true when there is something in it.

    >>> bool(axn.lint_mapping({"x": None}, axn.ones({"x": 2}), axn.make_mesh({"data": 2})))
    False
    """

    findings: tuple[Finding, ...]
    arrays: int

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __iter__(self):
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        if not self.findings:
            return f"{self.arrays} arrays, nothing found."
        lines = "".join(f"\n  {f.kind}: {f.message}" for f in self.findings)
        return f"{self.arrays} arrays, {len(self.findings)} findings:{lines}"


def lint_mapping(
    mapping: ResourceMapping | None,
    tree: Any,
    mesh: AnyMesh | None = None,
    *,
    large: int = 1 << 20,
) -> Report:
    """Everything that is wrong or doubtful about a mapping for a model on a mesh.

    Arguments:
        mapping: the mapping; None for that in force.
        tree: a model; its arrays may be abstract, as `jax.eval_shape` gives them.
        mesh: the mesh; that in force by default.
        large: arrays of at least so many bytes that stay whole on every device are reported.

    >>> mesh = axn.make_mesh({"data": 2})
    >>> print(axn.lint_mapping({"embd": "data"}, {"w": axn.ones({"embed": 4})}, mesh))
    1 arrays, 1 findings:
      unused: axis 'embd' is in the mapping but not in the tree. Did you mean 'embed'?
    """
    entries = mapping_of(mapping)
    mesh = mesh if mesh is not None else current_mesh()
    leaves = [leaf for leaf in leaves_of(tree)[0] if leaf.shape is not None]
    known = {n for leaf in leaves for n in leaf.names or ()}
    findings = []
    for name in [n for n in entries if n not in known]:
        hint = _errors.suggestion(name, known)
        findings.append(Finding("unused", name, f"axis {name!r} is in the mapping but not in the tree.{hint}"))
        if mesh is not None:
            unknown = [a for a in mesh_axes(entries[name]) if a not in mesh.shape]
            texts = [_errors.unknown_mesh_axis("lint_mapping", name, a, mesh) for a in unknown]
            findings += [Finding("problem", name, text) for text in texts]
    for leaf in leaves:
        problems: list[str] = []
        spec = spec_of_leaf(leaf, entries, mesh, problems)
        findings += [Finding("problem", leaf.path, p) for p in problems]
        if mesh is None or problems or _bytes(leaf) < large or _devices(mesh) == 1:
            continue
        if shard_count(mesh, axes_in(spec or ())) == 1:
            findings.append(Finding("replicated", leaf.path, _replicated(leaf, _devices(mesh))))
    return Report(tuple(findings), len(leaves))


def _bytes(leaf: Leaf) -> int:
    array = leaf.value.array if isinstance(leaf.value, NamedArray) else leaf.value
    return math.prod(leaf.shape or ()) * array.dtype.itemsize


def _devices(mesh: AnyMesh) -> int:
    return math.prod(mesh.shape.values())


def _replicated(leaf: Leaf, devices: int) -> str:
    axes = _errors.describe_axes(leaf.names, leaf.shape) if leaf.names else str(leaf.shape)
    return f"{leaf.path} {axes}, {_bytes(leaf) / 2**20:.1f} MiB, stays whole on each of {devices} devices."
