"""Trace a function of any trees, and find the lines of the user's code that its equations come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, AxisType

from ..core.source_lines import Source, frames_of, source
from ..core.tree_spec import PROGRAM_ARRAYS, TreeSpec, flatten_arrays
from ..distribution.active_settings import activate, activate_here
from ..distribution.axis_marks import is_marking
from ..distribution.mesh_axes import NO_MESH, has_manual
from ._sources import roots_of
from ._values import AxisStep

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced program, and the trees of its arguments and results."""

    jaxpr: ClosedJaxpr
    given: TreeSpec
    """The tree of the positional arguments and those by keyword."""
    returned: TreeSpec
    paths: tuple[str, ...]
    """The path of each array in the arguments."""


def trace(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
    """Trace a function with abstract arguments, without a mapping, and with shardings in no types."""
    given, static = flatten_arrays((args, dict(kwargs)), PROGRAM_ARRAYS, named=False)
    returned: list[TreeSpec] = []

    def flat(*arrays: Any) -> list[Any]:
        args, kwargs = static.unflatten(arrays)
        found, spec = flatten_arrays(fn(*args, **kwargs), PROGRAM_ARRAYS, named=False)
        returned[:] = [spec]
        return found

    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False)) for x in given]
    own_marks = activate_here(marked=not is_marking())  # a report marks the program that it traces itself
    # Constraints by a `PartitionSpec` need the active mesh; its axes are Auto here, so that no type has a sharding.
    active = jax.sharding.get_abstract_mesh()
    types = (AxisType.Auto,) * len(active.axis_names)
    without = active.empty or has_manual(active)
    mesh = NO_MESH if without else AbstractMesh(active.axis_sizes, active.axis_names, axis_types=types)
    with activate(None), own_marks, jax.sharding.use_abstract_mesh(mesh):
        closed = jax.make_jaxpr(flat)(*abstract)
    parameters = {root.keys: root.path for root in roots_of(fn, args, kwargs)}
    leaves = jax.tree_util.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
    paths = [(parameters[keys[:2]], keys[2:]) for keys, leaf in leaves if isinstance(leaf, PROGRAM_ARRAYS)]
    parts = [(path, jax.tree_util.keystr(keys, simple=True, separator="/")) for path, keys in paths]
    return Traced(closed, static, returned[0], tuple("/".join(filter(None, own)) for own in parts))


def source_of(step: AxisStep) -> Source | None:
    """Return the user's line of a step."""
    frames = list(frames_of(step.eqn))
    own = source(frames)
    outer = None if step.outer is None else source_of(step.outer)
    if own is None or outer is None or step.outer is None:
        return own or outer
    called = step.outer.params.get("name")
    if called is None:
        return own
    # JAX traces a function of a library once, for the first of its callers, so its lines may come from another call.
    return own if own.function.rpartition(".")[2] == called else outer
