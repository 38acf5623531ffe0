"""`shard_map`: run a function per device, on shards of arguments that are sharded by name.

This is `jax.shard_map`, and the program is the same. Names add this: arguments and results are sharded by the mapping,
not by position; named arrays have their local sizes inside; collectives take logical axes (see
`axonym.manual.collectives`); and errors come before JAX's own, and name the axes of the model.

JAX takes the partition specs of results before it runs the body, and the names of results are known only afterwards.
But JAX reads them only after the body has run. So it gets a list that the body fills, and the body is traced once.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax
from jax.core import Tracer
from jax.sharding import AxisType, PartitionSpec

from ..core import errors
from ..core.parameter_names import parameter_names
from ..core.tree_spec import StaticLeaf, TreeSpec
from ..distribution import active_settings
from ..distribution.mesh_axes import axes_in, axes_of_type, check_in_mesh, mesh_axes, shard_count
from ..distribution.per_device import run_per_device
from ..named_array import NamedArray
from ..sharding.leaves import Leaf
from ..sharding.mapping import ResourceMapping, axis_mapping
from ..sharding.meshes import AnyMesh, as_seen_here, required_mesh
from ..sharding.placement import Placement, is_placement, resolve
from ._axis_environment import (
    ArgumentAxis,
    AxisEnvironment,
    activate,
    active_environment,
    describe_axes,
    interned,
    possible_shardings,
    sharded_here,
)
from ._out_placement import place_results, restricted_to_manual

P = ParamSpec("P")
R = TypeVar("R")


class ShardMapOptions(TypedDict, total=False):
    """The arguments of `shard_map` besides the function."""

    mesh: AnyMesh | None
    mapping: ResourceMapping | None
    in_specs: Placement
    out_specs: Placement
    axis_names: str | Iterable[str] | None
    check_vma: bool


@overload
def shard_map(fn: Callable[P, R], **options: Unpack[ShardMapOptions]) -> Callable[P, R]: ...
@overload
def shard_map(fn: None = None, **options: Unpack[ShardMapOptions]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def shard_map(
    fn: Callable[..., Any] | None = None,
    *,
    mesh: AnyMesh | None = None,
    mapping: ResourceMapping | None = None,
    in_specs: Placement = None,
    out_specs: Placement = None,
    axis_names: str | Iterable[str] | None = None,
    check_vma: bool = True,
) -> Any:
    """Run a function per device, on the shards of its arguments, with manual mesh axes.

    Arguments are sharded by name. Inside, a named array has the sizes of its shard. Each axis of a result is sharded
    as in the arguments, or by the mapping if they lack it. A gathered axis is replicated. Leaves that are not arrays
    are passed through.

    Mesh and mapping are looked up at each call. The mapping is active inside as well, so that collectives can take
    logical axes.

    Arguments:
        fn: the function for one device. Without it, `shard_map` is a decorator.
        mesh: the mesh; by default the active one.
        mapping: the mapping; by default the active one.
        in_specs: the placement of the arguments, if not the mapping: a placement for all of them, a tuple with one for
            each positional argument, or a dictionary by parameter. Raw arrays need a `PartitionSpec` to be sharded.
        out_specs: the placement of the results, if not by their names: a placement, or a tree prefix of them.
        axis_names: the mesh axes that are manual; all by default. The others are left to the partitioner.
        check_vma: whether JAX keeps track of which values are device-varying, and checks the results.

    >>> @axn.shard_map(mesh=axn.make_mesh({"data": -1}), mapping={"batch": "data"})
    ... def total(x):
    ...     return axn.psum(axn.sum(x, "batch"), "batch")
    >>> total(axn.ones({"batch": 16, "embed": 2}))
    NamedArray(float32[embed=2], [16. 16.])
    """
    manual = frozenset([axis_names] if isinstance(axis_names, str) else axis_names or ())

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(fn):
            raise TypeError(f"shard_map: expected a function, got {type(fn).__name__}.")
        name = getattr(fn, "__qualname__", type(fn).__name__).rpartition("<locals>.")[2]
        call = _Call(fn, name, f"shard_map of {name!r}", mesh, in_specs, out_specs, manual, check_vma)

        @functools.wraps(fn)
        def mapped(*args: Any, **kwargs: Any) -> Any:
            if mapping is None:
                return call(args, kwargs)
            with axis_mapping(mapping):
                return call(args, kwargs)

        return mapped

    return decorate if fn is None else decorate(fn)


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of a `shard_map`, while its mapping is active."""

    fn: Callable[..., Any]
    name: str
    what: str
    mesh: AnyMesh | None
    in_specs: Placement
    out_specs: Placement
    axis_names: frozenset[str]
    check_vma: bool

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mesh = self._mesh_here()
        manual = self._manual_axes(mesh)
        labels = [*parameter_names(self.fn, len(args), kwargs), *kwargs]
        arguments = dict(zip(labels, (*args, *kwargs.values()), strict=True))
        leaves, structure = self._resolve(arguments, labels[: len(args)], mesh, manual)
        environment = _environment_of(leaves, mesh, self.check_vma)
        arrays, spec = _flattened_leaves(leaves, structure)
        # The body fills both; JAX reads the specs afterwards.
        out_specs: list[PartitionSpec] = []
        results: list[TreeSpec] = []

        def body(*shards):
            given = spec.unflatten(shards)
            positional = [given[label] for label in labels[: len(args)]]
            with activate(environment):
                try:
                    result = self.fn(*positional, **{name: given[name] for name in kwargs})
                except (TypeError, ValueError) as error:
                    _explain_varying(error, self.what)
                    raise
                found, out_structure = place_results(
                    result, self.out_specs, environment, manual, f"{self.what}, results"
                )
            outputs, out_spec = _flattened_leaves(found, out_structure)
            results[:] = [out_spec]
            out_specs[:] = [leaf.spec for leaf in found if leaf.spec is not None]
            return outputs

        body.__name__ = body.__qualname__ = self.name
        in_specs = [leaf.spec for leaf in leaves if leaf.spec is not None]
        outputs = run_per_device(body, arrays, in_specs, out_specs, mesh, axis_names=manual, check_vma=self.check_vma)
        return results[0].unflatten(outputs)

    def _mesh_here(self) -> AnyMesh:
        around = jax.sharding.get_abstract_mesh()
        mesh = required_mesh(self.what, None if self.mesh is None else as_seen_here(self.mesh))
        if not around.empty and (around.shape, around.axis_types) != (mesh.shape, mesh.axis_types):
            raise ValueError(
                f"{self.what}: the mesh passed is {errors.describe_mesh(mesh)}, but the active one is "
                f"{errors.describe_mesh(around)}. Leave it out, or activate that mesh."
            )
        return mesh

    def _manual_axes(self, mesh: AnyMesh) -> frozenset[str]:
        check_in_mesh(f"{self.what}, `axis_names`", self.axis_names, mesh)
        already = set(axes_of_type(mesh, AxisType.Manual))
        if taken := sorted(self.axis_names & already):
            raise ValueError(
                f"{self.what}: mesh axis {errors.quoted(taken)} of `axis_names` is manual already, by "
                "the surrounding shard_map."
            )
        manual = self.axis_names or frozenset(mesh.axis_names) - already
        if not manual:
            raise ValueError(
                f"{self.what}: the surrounding shard_map makes all mesh axes manual already. Pass the surrounding one "
                "only its own mesh axes, as `axis_names`."
            )
        return manual

    def _resolve(
        self, arguments: dict[str, Any], positional: Sequence[str], mesh: AnyMesh, manual: frozenset[str]
    ) -> tuple[list[Leaf], Any]:
        """Resolve the placements: return the leaves of the arguments, each array with its spec."""
        what = f"{self.what}, arguments"
        leaves, structure = resolve(arguments, self._placement(arguments, positional), mesh, what)
        if self.in_specs is None and not active_settings.active_mapping() and any(leaf.names for leaf in leaves):
            raise ValueError(
                f"{self.what}: nothing says how the arguments are sharded: no mapping is active. Pass `mapping` or "
                "`in_specs`, or use axonym.axis_mapping."
            )
        found = []
        for leaf in leaves:
            if leaf.mesh is not None and leaf.mesh.shape != mesh.shape:
                raise ValueError(f"{what}: {leaf.path} is placed on another mesh, {leaf.mesh}.")
            if leaf.shape is not None:
                if leaf.spec is None:
                    _check_not_sharded(leaf, manual, what)
                spec = restricted_to_manual(leaf.spec or PartitionSpec(*(None,) * len(leaf.shape)), manual)
                leaf = dataclasses.replace(leaf, spec=spec)
            found.append(leaf)
        return found, structure

    def _placement(self, arguments: Mapping[str, Any], positional: Sequence[str]) -> Placement:
        """Return `in_specs` as a placement of all arguments by label."""
        if is_placement(self.in_specs):
            return self.in_specs
        if isinstance(self.in_specs, Mapping):
            if unknown := [name for name in self.in_specs if name not in arguments]:
                listed = errors.quoted(unknown)
                hints = errors.suggestions(unknown, arguments)
                raise ValueError(f"{self.what}: `in_specs` has {listed}, which is not an argument of the call.{hints}")
            return {label: self.in_specs.get(label) for label in arguments}
        if not isinstance(self.in_specs, Sequence):
            raise TypeError(
                f"{self.what}: `in_specs` is a placement, or a tuple or dictionary with one for each argument, got "
                f"{self.in_specs!r}."
            )
        if len(self.in_specs) != len(positional):
            raise ValueError(
                f"{self.what}: `in_specs` has {errors.counted(len(self.in_specs), 'entry', 'entries')} for "
                f"{errors.counted(len(positional), 'positional argument')}, {', '.join(positional)}."
            )
        return dict.fromkeys(arguments) | dict(zip(positional, self.in_specs, strict=True))


# --- leaves and arrays ---


def _flattened_leaves(leaves: Sequence[Leaf], structure: Any) -> tuple[list[Any], TreeSpec]:
    """Return the raw arrays of the leaves that have a spec, and the rest of their tree."""
    arrays, slots = [], []
    for leaf in leaves:
        named = isinstance(leaf.value, NamedArray)
        if leaf.spec is not None:
            arrays.append(leaf.value.array if named else leaf.value)
        slots.append(StaticLeaf(leaf.value) if leaf.spec is None else leaf.value.names if named else None)
    return arrays, TreeSpec(structure, slots)


def _environment_of(leaves: Sequence[Leaf], mesh: AnyMesh, checked: bool) -> AxisEnvironment:
    """Return the environment of the arguments and of a surrounding `shard_map`, whose shards are sharded further."""
    around = active_environment()
    found: set[ArgumentAxis] = set()
    for leaf in leaves:
        if leaf.spec is not None:
            for name, size, entry in zip(leaf.names or (), leaf.shape or (), leaf.spec, strict=False):
                axes = mesh_axes(entry)
                local = size // shard_count(mesh, axes)
                # Inside another `shard_map`, the size is already the size of a shard: outer mesh axes come first.
                of_shards = [
                    ArgumentAxis(name, f.size, local, f.now + axes) for f in possible_shardings(name, size) if f.now
                ]
                found.update(of_shards or [ArgumentAxis(name, size, local, axes)])
    names = {axis.name for axis in found}
    return interned(frozenset(found.union(a for a in around.argument_axes if a.name not in names)), checked)


def _check_not_sharded(leaf: Leaf, manual: Collection[str], what: str) -> None:
    """Check that a raw array without a spec, which counts as replicated, is not sharded."""
    if isinstance(leaf.value, NamedArray):
        return
    spec = jax.typeof(leaf.value).sharding.spec
    # On Auto mesh axes the type does not show the sharding, but a concrete array does.
    if isinstance(leaf.value, jax.Array) and not isinstance(leaf.value, Tracer):
        spec = getattr(leaf.value.sharding, "spec", spec)
    if any(a in manual for a in axes_in(spec)):
        raise ValueError(
            f"{what}: {leaf.path} {leaf.shape} is a raw array sharded by {spec}. Pass `in_specs`: {spec} to keep it "
            "sharded, or PartitionSpec() to replicate it."
        )


# --- messages ---


def _explain_varying(error: Exception, what: str) -> None:
    """Explain JAX's error about device-varying values by name."""
    text = str(error)
    if "varying" not in text or getattr(error, "__notes__", None):
        return
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    if any(".pallas." in module for module in modules):
        error.add_note(
            f"{what}: JAX cannot follow which values differ between devices through a Pallas kernel. Call it in a "
            "function with `axonym.shard_map(f, check_vma=False)`."
        )
        return
    concerned = [a for a in jax.sharding.get_abstract_mesh().manual_axes if re.search(rf"\b{re.escape(a)}\b", text)]
    if concerned:
        words = {next((n for n, axes in sharded_here().items() if a in axes), a) for a in concerned}
        listed = " or ".join(f"`axonym.pvary(x, {w!r})`" for w in sorted(words))
        error.add_note(
            f"{what}: this error is about {describe_axes(concerned)}. To make a value device-varying that is the same "
            f"on all devices, such as a carry that starts from zeros, use {listed}."
        )
