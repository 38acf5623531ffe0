"""Check a placement against a model, before anything runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from .. import _errors
from .._mesh_axes import active_mapping, axes_in, mapped_axes, shard_count
from ..array import NamedArray
from .mapping import normalize_mapping
from .meshes import AnyMesh, current_mesh
from .placement import Leaf, Placement, examine, is_placement, leaves_of, unused_in

Kind = Literal["unused", "problem", "replicated"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A fault, or possible fault, of a mapping.

    >>> axn.sharding.Finding("unused", "embd", "axis 'embd' ...").kind
    'unused'
    """

    kind: Kind
    """'unused': a key that names no axis of the tree, or a pattern found in no path; 'problem': what `shard` would
    refuse; 'replicated': a large array that is replicated."""
    where: str
    """The key, the pattern, or the path in the tree."""
    message: str


@dataclasses.dataclass(frozen=True)
class Report:
    """The findings of `lint_mapping`, as a text when printed; true if there are any.

    >>> bool(axn.lint_mapping(axn.ones({"x": 2}), {"x": None}, axn.make_mesh({"data": 2})))
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
    tree: Any, placement: Placement = None, mesh: AnyMesh | None = None, *, large: int = 1 << 20
) -> Report:
    """Find everything that is wrong or doubtful about a mapping, or another placement, for a model on a mesh.

    Arguments:
        tree: a model; its arrays may be abstract, as `jax.eval_shape` gives them.
        placement: a resource mapping, a rule, a `PartitionSpec`, a sharding, or a tree prefix of these. By default the
            active mapping.
        mesh: the mesh; the active one by default.
        large: arrays of at least so many bytes that are replicated are reported.

    >>> mesh = axn.make_mesh({"data": 2})
    >>> print(axn.lint_mapping({"w": axn.ones({"embed": 4})}, {"embd": "data"}, mesh))
    1 arrays, 1 findings:
      unused: axis 'embd' is in the mapping but not in the tree. Did you mean 'embed'?
    >>> rule = axn.sharding.TreePathShardingRule(("norms", jax.P()), (".*", jax.P("data")))
    >>> print(axn.lint_mapping({"norm": jnp.ones(4)}, rule, mesh))
    1 arrays, 1 findings:
      unused: pattern 'norms' is found in no path of the tree. Did you mean 'norm'?
    """
    mesh = mesh if mesh is not None else current_mesh()
    arrays = [leaf for leaf in leaves_of(tree)[0] if leaf.shape is not None]
    try:
        examined = examine(tree, placement, mesh, "lint_mapping")
    except ValueError as problem:  # it cannot be asked leaf by leaf
        return Report((Finding("problem", "the placement", str(problem)),), len(arrays))
    given: dict[int, tuple[Placement, list[Leaf]]] = {}
    if is_placement(placement):
        given[id(placement)] = placement, []
    for of_leaf, leaf in examined.given:
        _, its_leaves = given.setdefault(id(of_leaf), (of_leaf, []))
        its_leaves += [leaf] if leaf.shape is not None else []
    findings = []
    for part, its_leaves in given.values():
        part = active_mapping() if part is None else part
        for name, message in unused_in(part, its_leaves):
            findings.append(Finding("unused", name, message))
            if mesh is not None and isinstance(part, Mapping):
                unknown = [a for a in mapped_axes(name, normalize_mapping(part)) if a not in mesh.shape]
                texts = [_errors.unknown_mesh_axis("lint_mapping", name, a, mesh) for a in unknown]
                findings += [Finding("problem", name, text) for text in texts]
    findings += [Finding("problem", path, problem) for path, problem in examined.problems]
    wrong = {path for path, _ in examined.problems}
    for leaf in examined.leaves:
        its_mesh = leaf.mesh or mesh
        if leaf.shape is None or its_mesh is None or leaf.path in wrong or _bytes(leaf) < large:
            continue
        if (devices := math.prod(its_mesh.shape.values())) > 1 and shard_count(its_mesh, axes_in(leaf.spec or ())) == 1:
            findings.append(Finding("replicated", leaf.path, _replicated(leaf, devices)))
    return Report(tuple(findings), len(arrays))


def _bytes(leaf: Leaf) -> int:
    array = leaf.value.array if isinstance(leaf.value, NamedArray) else leaf.value
    return math.prod(leaf.shape or ()) * array.dtype.itemsize


def _replicated(leaf: Leaf, devices: int) -> str:
    axes = _errors.describe_axes(leaf.names, leaf.shape) if leaf.names else str(leaf.shape)
    return f"{leaf.path} {axes}, {_bytes(leaf) / 2**20:.1f} MiB, is replicated on {devices} devices."
