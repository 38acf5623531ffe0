"""Give operations on Explicit mesh axes the output sharding that is decided by name.

On an Explicit mesh, the sharding of an array is part of its type, and JAX refuses every operation whose output sharding
it cannot infer. `axonym.distribution.policy` decides it by name. `call_with_output_sharding` carries that out for any
positional function: it calls the function directly if JAX can infer its output sharding, and otherwise hands it to the
partitioner together with the output sharding.

An axis that is split, merged or renamed has other names in the output. The operation then declares which of them are
its *successors*, which take over its mesh axes, major to minor. So no data moves whenever shards stay contiguous: if
`batch` is split into `(step, row)`, `step` takes over its mesh axes, and `row` takes any that do not divide `step`.

If its mesh axes do not divide the new size of an axis (a slice of a sharded axis, say), it comes out replicated: JAX
has no type for uneven shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from ..axis import Names
from . import policy
from .active_settings import Entry, active_mapping, is_mapped
from .axis_rules import AxisRule
from .mesh_axes import NO_MESH, entries_of, entry_of, explicit_mesh, mapped_on, mesh_axes, spec_of
from .per_device import with_auto_axes
from .policy import Mappings, PlacedAxes, Successors, Undecided


def infer_output_spec(
    what: str,
    out_names: Names,
    out_shape: Sequence[int],
    operands: Sequence[tuple[Names, Sequence[Entry]]],
    mesh: Any,
    successors: Successors = MappingProxyType({}),
    summed: Names = (),
) -> PartitionSpec:
    """Return the partition spec of an output, which `axonym.distribution.policy` decides.

    Arguments:
        operands: names and spec entries of each operand.
        successors: the output axes that take over the sharding of an operand's axis; by default the axis of that name.
        summed: the axes that a product sums over.
    """
    known = active_mapping()
    # Types have only Explicit mesh axes; the partitioner decides about Auto ones.
    compute = {n: entry_of(mapped_on(what, n, mesh, AxisType.Explicit)) for n in out_names if n in known}
    sizes, by = dict(zip(out_names, out_shape, strict=True)), Mappings(mesh.shape, compute, {})
    placed = [PlacedAxes(names, [*map(mesh_axes, entries)]) for names, entries in operands]
    try:
        if summed:
            return spec_of(policy.combine(what, placed, out_names, sizes, by, summed).result.over)
        return spec_of(policy.settle(what, out_names, sizes, placed, by, successors).over)
    except Undecided as undecided:
        raise ValueError(str(undecided)) from None


def call_with_output_sharding(what: str, fn: Callable[..., Any], rule: AxisRule, arrays: Sequence[Any]) -> Any:
    """Call a positional function so that it works on any mesh.

    Arguments:
        fn: the positional function, from arrays to an array or a tuple of arrays.
        rule: what it does to the axes of these arrays.
    """
    mesh = explicit_mesh(arrays)
    if mesh is None:
        # No type shows a mapped axis, so arrays that look unsharded may be sharded over it.
        around = None if rule.native or not is_mapped() else explicit_mesh(arrays, sharded=False)
        if around is None:
            return fn(*arrays)
        # For some functions, such as a look-up by mapped indices in an array that is not mapped, JAX cannot infer the
        # sharding of the result, but it adds the mapped axis to a sharding that is given.
        return with_auto_axes(fn, around, PartitionSpec())(*arrays)
    several, specs = infer_output_specs(what, fn, rule, arrays, mesh)
    if rule.native and not several and _operands_agree(rule.results, specs[0], _placed_operands(rule, arrays)):
        return fn(*arrays)
    if several:
        return with_auto_axes(lambda *xs: tuple(fn(*xs)), mesh, specs)(*arrays)
    return with_auto_axes(fn, mesh, specs[0])(*arrays)


def infer_output_specs(
    what: str, fn: Callable[..., Any], rule: AxisRule, arrays: Sequence[Any], mesh: Any
) -> tuple[bool, list[PartitionSpec]]:
    """Return whether a positional function has several outputs, and the partition spec of each."""
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=jax.typeof(x).weak_type) for x in arrays]
    with jax.sharding.use_abstract_mesh(NO_MESH):  # otherwise arrays that `fn` creates would be on the mesh
        shapes = jax.eval_shape(fn, *abstract)
    several = isinstance(shapes, (tuple, list))
    each = zip(rule.results, shapes, strict=True) if several else ((rule.results, shapes),)
    operands = _placed_operands(rule, arrays)
    summed = tuple(rule.uses or ()) if rule.product else ()
    specs = [infer_output_spec(what, names, s.shape, operands, mesh, rule.successors, summed) for names, s in each]
    return several, specs


def _placed_operands(rule: AxisRule, arrays: Sequence[Any]) -> list[tuple[Names, tuple[Entry, ...]]]:
    return [(names, entries_of(x)) for names, x in zip(rule.operands, arrays, strict=True)]


def _operands_agree(out_names: Any, spec: PartitionSpec, operands: Sequence[tuple[Names, Sequence[Entry]]]) -> bool:
    """Return whether each operand is sharded like the output, and no new axis of the output is sharded."""
    want = dict(zip(out_names, spec, strict=True))
    pairs = [(n, e) for names, entries in operands for n, e in zip(names, entries, strict=True)]
    new = want.keys() - {n for n, _ in pairs}
    # JAX infers a new axis as replicated.
    return all(want.get(n, e) == e for n, e in pairs) and all(want[n] is None for n in new)
