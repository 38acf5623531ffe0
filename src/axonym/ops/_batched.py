"""Operations that run along some axes and treat the others as batches: transforms, decompositions, convolutions.

The partitioner knows little about them: it gathers batches that could stay sharded, and is unreliable for axes that
such an operation runs along. The names say what to do on Explicit mesh axes: the axes that the operation runs along are
replicated, each device computes its shard of the batch, and the result is sharded as for every operation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from .. import _kernels, _output_sharding
from .._mesh_axes import entries_of, explicit_mesh, reshard
from .._per_device import run_per_device
from ..axis import AxisSelection, Names


def make_along_kernel(
    what: str,
    fn: Callable[..., Any],
    in_names: Sequence[Names],
    out_names: Any,
    along: Collection[str],
    *,
    selection: AxisSelection | None = None,
    successors: _output_sharding.Successors = MappingProxyType({}),
) -> _kernels.Kernel:
    """Make a kernel for an operation along some axes, which does the same for each element of the others.

    Arguments:
        what: the operation as users know it.
        fn: the positional function. It is called with a shard of the batch, so it takes sizes from its operands.
        in_names: the axes of each operand.
        out_names: the axes of the result, or a tuple of them where `fn` returns a tuple.
        along: the axes of the operands that the operation runs along. All others are batch axes, which
            every result has.
        selection: the axes that the user selected, whose sizes, if given, are checked.
        successors: see `axonym._output_sharding.infer_output_spec`.
    """

    def positional(*arrays):
        mesh = explicit_mesh(arrays)
        if mesh is None:
            return fn(*arrays)
        if any(t != AxisType.Explicit for t in mesh.axis_types):
            # JAX cannot differentiate a `shard_map` over some of the mesh axes only.
            return _output_sharding.call_with_output_sharding(
                what, fn, in_names, out_names, arrays, successors=successors
            )
        operands = [(names, entries_of(x)) for names, x in zip(in_names, arrays, strict=True)]
        shapes = jax.eval_shape(fn, *(jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in arrays))
        several = isinstance(shapes, tuple)
        each = tuple(zip(out_names, shapes, strict=True)) if several else ((out_names, shapes),)
        placed = [
            (names, _output_sharding.infer_output_spec(what, names, s.shape, operands, mesh, successors))
            for names, s in each
        ]
        batch = {n for names in in_names for n in names if n not in along}
        where = {n: entry for names, spec in placed for n, entry in zip(names, spec, strict=True) if n in batch}

        def local(names: Names) -> PartitionSpec:
            return PartitionSpec(*(where.get(n) for n in names))

        in_specs = tuple(local(names) for names in in_names)
        out_specs = tuple(local(names) for names, _ in placed)
        found = run_per_device(fn, arrays, in_specs, out_specs if several else out_specs[0], mesh)
        results = [reshard(y, spec, mesh) for y, (_, spec) in zip(found if several else [found], placed, strict=True)]
        return tuple(results) if several else results[0]

    return _kernels.make_kernel(what, positional, in_names, out_names, mesh_aware=True, selection=selection)
