"""`snapshot`: what a step does on a mesh, as a short text that is kept with the tests and compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding

from .. import _errors
from .._mesh_axes import AnyMesh, mesh_axes
from .._parameter_names import parameter_names
from ..named_array import raw
from ..sharding._compiled_function import CompiledFunction
from ..sharding.placement import Leaf, leaves_of
from ._text import aligned
from .comparing import counted
from .explaining import active, distributed, explain


def snapshot(
    step: Callable[..., Any], *args: Any, mapping: Any = None, mesh: AnyMesh | None = None, **kwargs: Any
) -> str:
    """Write how a step's arguments are sharded, and what it sends between devices.

    The text has no line numbers, times or addresses, so it changes when the distribution of the step does. The fixture
    `mapping_snapshot` of `axonym.insight.pytest_plugin` keeps such texts in files.

    Arguments:
        step, *args, mapping, mesh, **kwargs: as in `axonym.insight.explain`.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> print(axn.insight.snapshot(lambda x: x * 2, axn.ones({"batch": 4}), mapping={"batch": "data"}, mesh=mesh))
    on the mesh data=1
    <BLANKLINE>
    arguments: 16 B on each device
      x  float32[batch=4 over data]  16 B
    <BLANKLINE>
    nothing is sent between devices
    """
    by = "partitioner" if jax.default_backend() == "cpu" else "compiled"
    report = explain(step, *args, mapping=mapping, mesh=mesh, by=by, **kwargs)
    with active(mesh):
        leaves = list(_placed(distributed(step, mapping), args, kwargs))
    sizes = [_bytes_on_each(leaf) for leaf in leaves]
    rows = [(leaf.path, _described(leaf), _errors.describe_bytes(n)) for leaf, n in zip(leaves, sizes, strict=True)]
    parts = [f"on the mesh {', '.join(f'{n}={s}' for n, s in report.mesh.items())}" if report.mesh else "on one device"]
    parts.append("\n  ".join([f"arguments: {_errors.describe_bytes(sum(sizes))} on each device", *aligned(rows)]))
    sent = sorted(counted(report.collectives).values(), key=lambda found: (-found[0] * found[1], found[2]))
    lines = [f"{times} x {_errors.describe_bytes(n)}  {text}" for times, n, text in sent]
    parts.append("\n  ".join(["sent by each device:", *lines]) if lines else "nothing is sent between devices")
    return "\n\n".join(parts)


def _placed(step: Any, args: Any, kwargs: Any) -> Iterator[Leaf]:
    """Yield the arrays among the arguments, sharded as the step shards them."""
    if isinstance(step, CompiledFunction):
        args, kwargs = step.placed(args, kwargs)
    names = parameter_names(step, len(args), kwargs)
    return (leaf for leaf in leaves_of(dict(zip(names, args, strict=True)) | kwargs)[0] if leaf.shape is not None)


def _described(leaf: Leaf) -> str:
    array = raw(leaf.value)
    sharding = getattr(array, "sharding", None)
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    spec += (None,) * (array.ndim - len(spec))
    return _errors.describe_sharded(array.dtype, leaf.names, array.shape, map(mesh_axes, spec))


def _bytes_on_each(leaf: Leaf) -> int:
    array = raw(leaf.value)
    sharding = getattr(array, "sharding", None)
    shape = array.shape if sharding is None else sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize
