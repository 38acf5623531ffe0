"""`explain`: report the communication, memory and computation of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from ..distribution.active_settings import Entry
from ..distribution.mesh_axes import AnyMesh
from ..names.distributing import DistributedFunction
from ..sharding._compiled_function import BoundCompiledFunction, CompiledFunction
from ..sharding.jit import fsdp, named_jit
from ..sharding.mapping import ResourceMapping, is_resource_mapping, normalize_mapping
from ..sharding.meshes import current_mesh, set_mesh, with_devices
from . import _compiling
from ._arguments import ArgumentNames, arrays_of, step_name
from ._by_names import by_names
from ._figures import Memory
from ._hlo import HloProgram
from ._named_trace import named_trace
from ._of_programs import report_on
from ._topologies import moved_to, on_topology, with_axes_of
from .chips import Chip, known_chip
from .report import Report

TIERS = ("compiled", "partitioner", "names")

Mappings: TypeAlias = ResourceMapping | Sequence[ResourceMapping] | None
"""How to distribute a plain function: a resource mapping, or a parameter mapping and a compute mapping."""


def quickest_exact() -> str:
    """Return the quickest way here to make a report whose collectives are exact."""
    return "partitioner" if jax.default_backend() == "cpu" else "compiled"


def explain(
    fn: Callable[..., Any],
    /,
    *args: Any,
    mapping: Mappings = None,
    mesh: AnyMesh | None = None,
    by: str = "compiled",
    topology: str | None = None,
    chip: Chip | str | None = None,
    **kwargs: Any,
) -> Report:
    """Report the communication, memory and computation of a step, without running it.

    Arguments:
        fn: a function, or one compiled by `named_jit`, `fsdp`, `axonym.names.distribute` or `jax.jit`. It is not run.
        *args: its arguments, which may be abstract; keywords too. `axonym.shard` places abstract arrays too.
        mapping: how to distribute a plain function: a resource mapping, for `named_jit` with its arguments placed by
            it, or a parameter mapping and a compute mapping, for `fsdp`. `axonym.names.distribute` without mappings of
            its own takes either.
        mesh: the mesh; by default the active one. A mesh without devices takes this machine's, if there are enough.
        by: how the report is made. `"compiled"` compiles the step to the end. `"partitioner"` stops before code
            generation, which takes most of the time, so memory is not known; collectives and flops are the same. It is
            for CPUs, and for a mesh of any size, whose devices need not exist. `"names"` compiles nothing: it traces
            the step and works out by name what each operation does under the mapping, on a mesh of any size. It takes a
            plain function, or one of `axonym.names.distribute`, that does not say how it is distributed; assumes that
            the mapping shards every array; and raises an error where names do not determine the communication.
        topology: the TPUs to compile for, such as `"v5e:4x4"`, which need not exist here. Needs the extra `tpu-plan`.
        chip: the chip for which to give lower bounds on time: a `Chip`, or the name of one of `CHIPS`.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), mesh=mesh)
    >>> report.collectives, report.flops, report.memory.arguments
    ((), 0, 16)
    """
    if by not in TIERS:
        raise ValueError(f"explain: `by` is one of {', '.join(map(repr, TIERS))}, got {by!r}.")
    chip = None if chip is None else known_chip(chip)
    if type(fn).__module__.partition(".")[0] == "equinox":
        # `eqx.filter_jit` takes no abstract arguments, and `named_jit` does the same otherwise.
        fn = getattr(fn, "__wrapped__", fn)
    if topology is not None:
        if by != "compiled":
            raise ValueError(f"explain: by={by!r} is not for a topology; TPUs are compiled for with by='compiled'.")
        mesh = on_topology(current_mesh() if mesh is None else mesh, topology)
        args, kwargs = moved_to(mesh, (args, kwargs))
    if by == "names":
        storage, compute = mappings_of(fn, mapping)
        around = current_mesh() if mesh is None else mesh
        trace, sizes = named_trace(fn, args, kwargs), dict(around.shape) if around else {}
        return by_names(trace, sizes, compute, storage, chip, arrays_of(fn, args, kwargs))
    with active(mesh, repeated=by == "partitioner"):
        args, kwargs = on_devices((args, kwargs))
        compiled_step = distributed(fn, mapping)
        platform = jax.default_backend() if topology is None else "tpu"
        if by == "partitioner" and platform != "cpu":
            raise ValueError(
                f"explain: by='partitioner' is for CPUs, and the devices here are {platform!r}: set JAX_PLATFORMS=cpu."
            )
        lowered = compiled_step.lower(*args, **kwargs)
        lowered = getattr(lowered, "lowered", lowered)  # Flax wraps JAX's
        if by == "compiled":
            compiled = _compiling.compiled(lowered)
            text, memory = compiled.as_text(), _memory(compiled)
        else:
            text, memory = _compiling.partitioned(lowered), None
        program = HloProgram(text, _compiling.device_count(lowered))
        found = mesh_of(args, kwargs, program.devices)
        names = ArgumentNames(lowered, fn, args, kwargs)
        return report_on(
            step_name(fn),
            program,
            lowered,
            names,
            found,
            platform,
            by,
            memory,
            compiled_step,
            chip,
            fn is compiled_step,
        )


def distributed(fn: Callable[..., Any], mapping: Mappings) -> Any:
    """Return a step compiled under a mapping, or as it is if it is compiled already."""
    if mapping is None:
        return fn if hasattr(fn, "lower") else named_jit(fn)
    under = fn.under if isinstance(fn, DistributedFunction) else None
    if under is None and isinstance(fn, (CompiledFunction, BoundCompiledFunction)):
        raise ValueError(
            "explain: the step is compiled with mappings of its own; give the function that it compiles"
            + (", or `distribute` without mappings." if isinstance(fn, DistributedFunction) else ".")
        )
    if is_resource_mapping(mapping):
        return named_jit(fn, mapping, in_placement=mapping) if under is None else under(mapping, None)
    if isinstance(mapping, Sequence) and len(mapping) == 2 and all(map(is_resource_mapping, mapping)):
        return fsdp(fn, *mapping) if under is None else under(mapping[1], mapping[0])
    raise TypeError(
        "explain: a mapping is a resource mapping, or a pair of a parameter and a compute mapping, got "
        f"{type(mapping).__name__}."
    )


def mappings_of(fn: Callable[..., Any], mapping: Mappings) -> tuple[Mapping[str, Entry], Mapping[str, Entry]]:
    """Return the parameter and the compute mapping by which to distribute a function that does not say how."""
    if mapping is None:
        raise ValueError(
            "explain: by='names' takes the function that is compiled, and its mapping as `mapping=`. Of "
            "`axonym.names.distribute`, it takes a function without mappings."
        )
    distributed(fn, mapping)  # which raises the error
    storage, compute = ({}, mapping) if is_resource_mapping(mapping) else mapping
    return normalize_mapping(storage, "explain"), normalize_mapping(compute, "explain")


# --- meshes ---


@contextlib.contextmanager
def active(mesh: AnyMesh | None, repeated: bool = False) -> Iterator[None]:
    """Make the mesh active, with devices of this machine if it has none.

    If there are too few, that is an error, unless `repeated` allows to compile for one device in place of all.
    """
    if mesh is None:
        around = current_mesh()
        mesh = None if around is None else with_devices(around)
        if not isinstance(mesh, AbstractMesh):
            yield
            return
    if isinstance(mesh, AbstractMesh):
        devices = jax.devices()
        if mesh.size > len(devices):
            devices = devices[:1] * mesh.size if repeated else devices
        if mesh.size > len(devices):
            raise ValueError(
                f"explain: the mesh has {mesh.size} devices and this process {len(devices)}. On a CPU, any number can "
                f"be simulated: jax.config.update('jax_num_cpu_devices', {mesh.size}) before JAX is first used."
            )
        mesh = with_axes_of(mesh, devices[: mesh.size])
    with set_mesh(mesh):
        yield


def on_devices(tree: Any) -> Any:
    """Replace arrays on a mesh without devices by arrays on the active mesh."""
    meshes = [s.mesh for x in jax.tree.leaves(tree) if isinstance(s := getattr(x, "sharding", None), NamedSharding)]
    here = current_mesh()
    return moved_to(here, tree) if any(isinstance(m, AbstractMesh) for m in meshes) and isinstance(here, Mesh) else tree


def mesh_of(args: Any, kwargs: Any, devices: int) -> dict[str, int] | None:
    """Return the mesh axes of a program and their sizes; None if no known mesh has its devices."""
    active = current_mesh()
    meshes = [] if active is None else [active]
    for leaf in jax.tree.leaves((args, kwargs)):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            meshes.append(sharding.mesh)
    for mesh in meshes:
        if mesh.size == devices:
            return dict(mesh.shape)
    return {} if devices == 1 else None


def _memory(compiled: Any) -> Memory | None:
    found = compiled.memory_analysis()
    if found is None:
        return None
    return Memory(
        arguments=found.argument_size_in_bytes,
        results=found.output_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
    )
