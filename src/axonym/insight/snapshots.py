"""`snapshot`: describe how a step is distributed, in a short text that is kept with the tests and compared."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from jax.sharding import NamedSharding

from ..core import errors
from ..core.parameter_names import parameter_names
from ..distribution.mesh_axes import AnyMesh, mesh_axes, padded
from ..distribution.padded_array import stored
from ..named_array import raw
from ..names.distributing import DistributedFunction
from ..sharding._compiled_function import CompiledFunction
from ..sharding.leaves import Leaf, leaves_of
from ..sharding.placement import present_sharding
from ._text import aligned, described_mesh, parsed_bytes
from .comparing import counted
from .explaining import Mappings, active, distributed, explain, quickest_exact


def snapshot(
    fn: Callable[..., Any], /, *args: Any, mapping: Mappings = None, mesh: AnyMesh | None = None, **kwargs: Any
) -> str:
    """Describe how a step's arguments are sharded, and what it sends between devices, in a text for tests.

    The text has no line numbers, times or addresses, so it changes when the distribution of the step does. The fixture
    `mapping_snapshot` of `axonym.insight.pytest_plugin` keeps such texts in files.

    Arguments:
        fn, *args, mapping, mesh, **kwargs: as in `axonym.insight.explain`.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> print(axn.insight.snapshot(lambda x: x * 2, axn.ones({"batch": 4}), mapping={"batch": "data"}, mesh=mesh))
    on the mesh data=1
    <BLANKLINE>
    arguments: 16 B on each device
      x  float32[batch=4 over data]  16 B
    <BLANKLINE>
    nothing is sent between devices
    """
    report = explain(fn, *args, mapping=mapping, mesh=mesh, by=quickest_exact(), **kwargs)
    with active(mesh):
        leaves = list(_placed(distributed(fn, mapping), args, kwargs))
    sizes = [_bytes_on_each(leaf) for leaf in leaves]
    rows = [(leaf.path, _described(leaf), errors.describe_bytes(n)) for leaf, n in zip(leaves, sizes, strict=True)]
    parts = [f"on {described_mesh(report.mesh, report.devices)}"]
    parts.append("\n  ".join([f"arguments: {errors.describe_bytes(sum(sizes))} on each device", *aligned(rows)]))
    sent = {what + (why and f": {why}"): found for (what, why), found in counted(report.collectives).items()}
    ordered = sorted(sent.items(), key=lambda pair: (-math.prod(pair[1]), pair[0]))
    lines = [f"{times} x {errors.describe_bytes(n)}  {text}" for text, (times, n) in ordered]
    parts.append("\n  ".join(["sent by each device:", *lines]) if lines else "nothing is sent between devices")
    return "\n\n".join(parts)


def differences(before: str, after: str) -> list[str]:
    """Describe in words how the distribution in one snapshot differs from the distribution in another."""
    found: list[str] = []
    old, new = _arguments(before), _arguments(after)
    changed: dict[str, list[str]] = {}
    bytes_more: collections.Counter[str] = collections.Counter()
    for path in old.keys() & new.keys():
        (axes, size), (new_axes, new_size) = old[path], new[path]
        for axis in axes.keys() & new_axes.keys():
            if axes[axis] != new_axes[axis]:
                what = _said(axis, axes[axis], new_axes[axis])
                changed.setdefault(what, []).append(path)
                bytes_more[what] += new_size - size
    for what, paths in sorted(changed.items()):
        more = bytes_more[what]
        cost = f": {'+' if more > 0 else ''}{errors.describe_bytes(more)} on each device" if more else ""
        found.append(f"{what} in {', '.join(sorted(paths))}{cost}")
    found += [f"argument {path} is new" for path in sorted(new.keys() - old.keys())]
    found += [f"argument {path} is gone" for path in sorted(old.keys() - new.keys())]
    sent = _exchanges(after)
    sent.subtract(_exchanges(before))
    found += [f"{times:+} {kind}{'s' * (abs(times) > 1)}" for kind, times in sorted(sent.items()) if times]
    return found


def _arguments(text: str) -> dict[str, tuple[dict[str, str], int]]:
    """Return, for each argument in a snapshot, the mesh axes of its axes, and its bytes on each device."""
    found: dict[str, tuple[dict[str, str], int]] = {}
    for path, axes, size in re.findall(r"^  (\S+) +\w+\[(.*)\]  +([\d.]+ \w+)$", text, re.MULTILINE):
        parts = re.findall(r"(?:([^\s,=]+)=)?\d+(?: over ([^,]+))?(?:, |$)", axes)
        found[path] = {name or f"axis {i}": over for i, (name, over) in enumerate(parts)}, parsed_bytes(size)
    return found


def _said(axis: str, before: str, after: str) -> str:
    if not after:
        return f"{axis} is no longer sharded over {before}"
    return f"{axis} is sharded over {after}" + (f" instead of {before}" if before else " now")


def _exchanges(text: str) -> collections.Counter[str]:
    """Return how often each kind of collective runs over each mesh axis."""
    found: collections.Counter[str] = collections.Counter()
    for times, kind in re.findall(r"^  (\d+) x .*?  (\S+ over [^,]+), ", text, re.MULTILINE):
        found[kind] += int(times)
    return found


def _placed(fn: Any, args: Any, kwargs: Any) -> Iterator[Leaf]:
    """Yield the arrays among the arguments, sharded as the step shards them."""
    if isinstance(fn, DistributedFunction):
        args, kwargs = fn.named(args, kwargs)
    elif isinstance(fn, CompiledFunction):
        args, kwargs = fn.placed(args, kwargs)
    names = parameter_names(fn, len(args), kwargs)
    return (leaf for leaf in leaves_of(dict(zip(names, args, strict=True)) | kwargs)[0] if leaf.shape is not None)


def _described(leaf: Leaf) -> str:
    array, sharding = raw(leaf.value), present_sharding(leaf.value)
    spec = padded(sharding.spec if isinstance(sharding, NamedSharding) else (), array.ndim)
    return errors.describe_sharded(array.dtype, leaf.names, array.shape, map(mesh_axes, spec))


def _bytes_on_each(leaf: Leaf) -> int:
    array, sharding = stored(raw(leaf.value)), present_sharding(leaf.value)
    shape = array.shape if sharding is None else sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize
