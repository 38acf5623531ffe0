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
from ..core.jax_versions import varying_axes
from ..core.parameter_names import parameter_names
from ..core.tree_spec import StaticLeaf, TreeSpec
from ..distribution import active_settings
from ..distribution.active_settings import Entry, active_mapping
from ..distribution.mesh_axes import (
    axes_in,
    axes_of_type,
    check_in_mesh,
    entry_of,
    mapped_axes,
    mesh_axes,
    restricted,
    shard_count,
)
from ..distribution.per_device import run_per_device
from ..named_array import NamedArray, raw, wrap_like
from ..sharding.leaves import Leaf
from ..sharding.mapping import ResourceMapping, axis_mapping
from ..sharding.meshes import AnyMesh, as_seen_here, required_mesh
from ..sharding.placement import LeafPlacement, Placement, Rule, check_entries, is_placement, resolve
from ._axis_environment import (
    ArgumentAxis,
    Axes,
    AxisEnvironment,
    activate,
    active_environment,
    count,
    describe_axes,
    interned,
    of_size_one,
    possible_shardings,
    sharded_here,
)

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
        around = jax.sharding.get_abstract_mesh()
        mesh = required_mesh(self.what, None if self.mesh is None else as_seen_here(self.mesh))
        if not around.empty and (around.shape, around.axis_types) != (mesh.shape, mesh.axis_types):
            raise ValueError(
                f"{self.what}: the mesh passed is {errors.describe_mesh(mesh)}, but the active one is "
                f"{errors.describe_mesh(around)}. Leave it out, or activate that mesh."
            )
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
                found, out_structure = _place_results(
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
                spec = _restricted_to_manual(leaf.spec or PartitionSpec(*(None,) * len(leaf.shape)), manual)
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


# --- the shardings of results ---
#
# They are found by name, from the shardings of the arguments. For each axis of a result, in this order:
#
# 1. an axis that has its size outside is replicated;
# 2. an axis that has the size of its shards in the arguments is sharded as there; one that has the size after gathering
#    over minor mesh axes is sharded over the remaining ones;
# 3. any other axis, which is new or was resized, is sharded as the mapping says.
#
# The type of a result determines whether this can be correct. A result that is device-varying over a mesh axis must be
# sharded over it, because it has no single value; a result that is invariant over it would be copies of one shard.


def _restricted_to_manual(spec: PartitionSpec, manual: Collection[str]) -> PartitionSpec:
    """Return the spec with manual mesh axes only; an unconstrained entry is an error."""
    if PartitionSpec.UNCONSTRAINED in tuple(spec):
        raise ValueError(f"shard_map: {spec} leaves a dimension to the partitioner, but it is manual here.")
    return restricted(spec, manual)


def _place_results(
    result: Any, placement: Placement, environment: AxisEnvironment, manual: Collection[str], what: str
) -> tuple[list[Leaf], Any]:
    """Return the leaves of a result on one device, each with its spec, and the structure of the tree.

    Specs follow from the user's placement, and where it is None, from names and the environment.
    """
    mesh = jax.sharding.get_abstract_mesh()
    mapping = active_mapping()
    with active_settings.activate(None):  # so that a leaf without a placement has no spec
        leaves, structure = resolve(result, placement, mesh, what)
        # Which leaves have a spec by position; a mapping is not one, as it applies to replicated axes, too.
        positional = jax.tree.map(
            lambda p: p if isinstance(p, (PartitionSpec, jax.sharding.Sharding)) else _Unplaced(),
            placement,
            is_leaf=is_placement,
        )
        by_position = [leaf.spec is not None for leaf in resolve(result, positional, mesh, what)[0]]
    placed, problems = [], []
    for leaf, given in zip(leaves, by_position, strict=True):
        if leaf.shape is None:
            placed.append(leaf)
            continue
        spec, found = (leaf.spec, []) if leaf.spec is not None else _by_name(leaf, environment, mapping)
        spec = _restricted_to_manual(spec, manual)
        value = leaf.value
        if not found:
            found = check_entries(leaf, tuple(spec), mesh)
            value, wrong = _made_varying(leaf, spec, environment, manual, given)
            found += wrong
        problems += found
        placed.append(Leaf(leaf.keys, value, leaf.names, leaf.shape, spec))
    if problems:
        listed = problems[0] if len(problems) == 1 else "".join(f"\n  {p}" for p in problems)
        raise ValueError(f"{what}: {listed}")
    return placed, structure


class _Unplaced(Rule):
    def place(self, leaf: Leaf, mesh: AnyMesh | None) -> LeafPlacement:
        return None


def _by_name(leaf: Leaf, environment: AxisEnvironment, mapping: Mapping[str, Entry]) -> tuple[PartitionSpec, list[str]]:
    """Return the spec of a result by the names of its axes."""
    assert leaf.shape is not None
    if leaf.names is None:
        return PartitionSpec(*(None,) * len(leaf.shape)), []
    if len(leaf.names) != len(leaf.shape):
        return PartitionSpec(), [f"{_result_path(leaf)}: {errors.wrong_rank(leaf.names, leaf.shape)}"]
    entries, problems, taken = [], [], set()
    for name, size in zip(leaf.names, leaf.shape, strict=True):
        possible: list[Axes] = []
        for _, now, at_most in possible_shardings(name, size):
            possible.append(now)
            if not environment.checked and 1 < count(now) < count(at_most):
                possible.append(at_most)  # resized, or gathered over some mesh axes: only its type would show which
        ways = list(dict.fromkeys(possible))
        ways = ways if len(ways) < 2 else [w for w in ways if not w or set(w) - of_size_one()]
        if len(ways) > 1:
            listed = " or ".join(f"sharded over {' and '.join(map(repr, w))}" if w else "replicated" for w in ways)
            problems.append(
                f"{_describe_result(leaf)}: by the arguments, axis {name!r} of size {size} could be {listed}. Say "
                "which with `out_specs`."
            )
        axes = ways[0] if ways else mapped_axes(name, mapping)
        # Sizes do not show shardings over mesh axes of size one; if two axes could have them, either is correct.
        axes = tuple(a for a in axes if a not in taken or a not in of_size_one())
        taken.update(axes)
        entries.append(entry_of(axes))
    return PartitionSpec(*entries), problems


def _made_varying(
    leaf: Leaf, spec: PartitionSpec, environment: AxisEnvironment, manual: Collection[str], given: bool
) -> tuple[Any, list[str]]:
    """Make a result device-varying over the mesh axes of its spec, or describe its problem."""
    if not environment.checked:
        return leaf.value, []
    value = raw(leaf.value)
    varies = varying_axes(value) & set(manual)
    used = set(axes_in(spec))
    problems = []
    if lost := sorted(varies - used - of_size_one()):
        problems.append(
            f"{_describe_result(leaf)} varies over {describe_axes(lost)}, but no axis of it is sharded over that, "
            f"so there is no one value to return. Reduce it with `axonym.psum` or `axonym.pmean`, gather it with "
            "`axonym.all_gather(..., invariant=True)`, or say which axis is sharded: by the mapping, or by `out_specs`."
        )
    if not given and (copied := sorted(used - varies - of_size_one())):
        names = [n for n, entry in zip(leaf.names or (), spec, strict=True) if set(mesh_axes(entry)) & set(copied)]
        problems.append(
            f"{_describe_result(leaf)} is the same on all devices of {describe_axes(copied)}, so sharding axis "
            f"{errors.quoted(names)} over that would make copies of one shard. If they are meant, use "
            "`axonym.pvary`; if the axis is replicated, rename it, or say so with a PartitionSpec in `out_specs`."
        )
    alone = sorted((varies - used) & of_size_one())
    if problems or not alone:
        return leaf.value, problems
    # On one device, a program for several devices returns the same as on several.
    value = jax.lax.psum(value, tuple(alone))
    return wrap_like(value, leaf.value), []


def _result_path(leaf: Leaf) -> str:
    return f"result {leaf.path!r}" if leaf.keys else "the result"


def _describe_result(leaf: Leaf) -> str:
    assert leaf.shape is not None
    axes = errors.describe_axes(leaf.names, leaf.shape) if leaf.names is not None else f"of shape {leaf.shape}"
    return f"{_result_path(leaf)} {axes}"
