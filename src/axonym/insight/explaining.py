"""`explain`: report the communication, memory and computation of a step."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from ..core.tree_spec import PROGRAM_ARRAYS
from ..distribution.active_settings import Entry, active_mapping, active_parameter_mapping
from ..distribution.mesh_axes import AnyMesh
from ..names.distributing import DistributedFunction
from ..sharding._compiled_function import BoundCompiledFunction, CompiledFunction
from ..sharding.jit import fsdp, named_jit
from ..sharding.mapping import ResourceMapping, is_resource_mapping, normalize_mapping
from ..sharding.meshes import Between, arranged_devices, current_mesh, set_mesh, slices_along, with_devices
from . import _compiling
from ._arguments import ArgumentNames, arrays_of, step_name
from ._by_names import by_names
from ._figures import Memory
from ._hlo import HloProgram
from ._named_trace import named_trace
from ._of_programs import report_on
from .chips import CHIPS, Chip, known_chip
from .report import Report

TIERS = ("compiled", "partitioner", "names")

Mappings: TypeAlias = ResourceMapping | Sequence[ResourceMapping] | None
"""How to distribute a plain function: a resource mapping, or a parameter mapping and a compute mapping."""

_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Values that the TPU compiler would otherwise request from a machine with TPUs, and wait for; and permission for other
processes to load it, too. None affects compiled programs. It reads them on first use; they stay in the environment."""


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
    between: Between = None,
    chip: Chip | str | None = None,
    compiler_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Report:
    """Report the communication, memory and computation of a step, without running it.

    Arguments:
        fn: a function, or one compiled by `named_jit`, `fsdp`, `axonym.names.distribute` or `jax.jit`. It is not run.
        *args: its arguments, which may be abstract; keywords too. `axonym.shard` places abstract arrays too.
        mapping: how to distribute a plain function: a resource mapping, for `named_jit` with its arguments placed by
            it, or a parameter mapping and a compute mapping, for `fsdp`. `axonym.names.distribute` without mappings of
            its own takes either. For `by="names"`, the active mapping by default.
        mesh: the mesh; by default the active one. A mesh without devices takes this machine's, if there are enough.
        by: how the report is made. `"compiled"` compiles the step to the end. `"partitioner"` stops before code
            generation, which takes most of the time, so memory is not known; collectives and flops are the same. It is
            for CPUs, and for a mesh of any size, whose devices need not exist. `"names"` compiles nothing: it traces
            the step and works out by name what each operation does under the mapping, on a mesh of any size. It takes a
            plain function, or one of `axonym.names.distribute`, that does not say how it is distributed; assumes that
            the mapping shards every array; and raises an error where names do not determine the communication.
        topology: the TPUs to compile for, such as `"v5e:4x4"`, or `"v5e:4x4x2slices"` for two of them, which need not
            exist here. Needs the extra `tpu-plan`.
        between: the mesh axes that cross slices, as in `make_mesh`; by default, what the devices of the mesh say. If no
            topology says how many slices there are, a name stands for as many as the axis has positions.
        chip: the chip for which to give lower bounds on time: a `Chip`, or the name of one of `CHIPS`.
        compiler_options: further options of the compiler, such as those for TPUs that let exchanges
            run beside computing.

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
        mesh = _on_topology(current_mesh() if mesh is None else mesh, topology, between)
        args, kwargs = _moved_to(mesh, (args, kwargs))
    if by == "names":
        if compiler_options:
            raise ValueError("explain: by='names' compiles nothing, so it takes no compiler_options.")
        storage, compute = _mappings_of(fn, mapping)
        around = current_mesh() if mesh is None else mesh
        trace, sizes = named_trace(fn, args, kwargs), dict(around.shape) if around else {}
        report = by_names(trace, sizes, compute, storage, chip, arrays_of(fn, args, kwargs))
        return dataclasses.replace(report, between=_slices_along(around, between))
    with _active_mesh(mesh, repeated=by == "partitioner"):
        args, kwargs = _arrays_on_devices((args, kwargs))
        compiled_step = _distributed_step(fn, mapping)
        platform = jax.default_backend() if topology is None else "tpu"
        if by == "partitioner" and platform != "cpu":
            raise ValueError(
                f"explain: by='partitioner' is for CPUs, and the devices here are {platform!r}: set JAX_PLATFORMS=cpu."
            )
        traced = compiled_step.trace(*args, **kwargs)
        lowered = traced.lower()
        traced, lowered = getattr(traced, "traced", traced), getattr(lowered, "lowered", lowered)  # Flax wraps JAX's
        if by == "compiled":
            compiled = _compiling.compiled(lowered, compiler_options)
            text, memory = compiled.as_text(), _memory(compiled)
        else:
            text, memory = _compiling.partitioned(lowered, compiler_options), None
        program = HloProgram(text, _compiling.device_count(lowered))
        found = _mesh_sizes_of(args, kwargs, program.devices)
        given, here = (args, kwargs), current_mesh()
        if isinstance(compiled_step, CompiledFunction) and not isinstance(compiled_step, DistributedFunction):
            # As the step shards them, and abstract, so that nothing moves.
            given = compiled_step.placed(*jax.tree.map(lambda x: _abstract_array(x, here), given))
        names = ArgumentNames(lowered, fn, *given)
        around = mesh if isinstance(mesh, Mesh) else current_mesh()
        crossing = _slices_along(around and with_devices(around), None if topology else between)
        timed_on = chip if chip and chip.clock else CHIPS.get((topology or "").partition(":")[0])
        report = report_on(
            step_name(fn), program, traced.jaxpr, lowered, names, found, platform, by, memory, compiled_step, chip,
            fn is compiled_step, crossing, timed_on,
        )  # fmt: skip
        return dataclasses.replace(report, between=crossing)


def _slices_along(mesh: AnyMesh | None, between: Between) -> dict[str, int]:
    """Return how many slices lie along mesh axes: as an argument says, or else the devices."""
    if mesh is None or between is None:
        return slices_along(mesh) if isinstance(mesh, Mesh) else {}
    names = [between] if isinstance(between, str) else list(between)
    if unknown := [n for n in names if n not in mesh.shape]:
        raise ValueError(f"explain: between has {', '.join(unknown)}; the mesh axes are {', '.join(mesh.shape)}.")
    return dict(between) if isinstance(between, Mapping) else {n: mesh.shape[n] for n in names}


def _distributed_step(fn: Callable[..., Any], mapping: Mappings) -> Any:
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


def _mappings_of(fn: Callable[..., Any], mapping: Mappings) -> tuple[Mapping[str, Entry], Mapping[str, Entry]]:
    """Return the parameter and the compute mapping by which to distribute a function that does not say how."""
    if mapping is None:
        stored, compute = active_parameter_mapping(), active_mapping()
        mapping = (stored, compute) if stored else compute or None
    if mapping is None:
        raise ValueError(
            "explain: by='names' takes the function that is compiled, or `axonym.names.distribute` of it without "
            "mappings, and its mapping: pass `mapping=`, or activate it by `axonym.axis_mapping`."
        )
    _distributed_step(fn, mapping)  # which raises the error
    storage, compute = ({}, mapping) if is_resource_mapping(mapping) else mapping
    return normalize_mapping(storage, "explain"), normalize_mapping(compute, "explain")


# --- meshes ---


def _on_topology(mesh: AnyMesh | None, topology: str, between: Between) -> Mesh:
    """Return a mesh with the axes of another one and the devices of a TPU topology, placed as `make_mesh` does."""
    if mesh is None:
        raise ValueError(
            f"explain: a mesh is needed for the topology {topology!r}: pass `mesh`, which needs no devices."
        )
    try:
        import libtpu  # noqa: F401  # pyright: ignore[reportMissingImports]  # only to see if it exists
    except ImportError as e:
        raise ImportError(f"{e}. Compiling for TPUs needs their compiler: install axonym[tpu-plan].") from e
    from jax.experimental import topologies

    if jax.default_backend() != "tpu":
        for name, value in _MACHINE.items():
            os.environ.setdefault(name, value)
    name, _, count = re.sub(r"x(\d+)slices$", r" \1", topology).partition(" ")
    several = {"num_slices": int(count)} if count else {}
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **several).devices
    except (RuntimeError, NotImplementedError) as e:
        raise ValueError(f"explain: the TPU compiler cannot be asked for the topology {topology!r}: {e}") from e
    if len(devices) != mesh.size:
        raise ValueError(
            f"explain: the topology {topology!r} has {len(devices)} devices and the mesh {dict(mesh.shape)} has "
            f"{mesh.size}. Make them equal."
        )
    if between is None and isinstance(mesh, Mesh):
        between = slices_along(mesh) or None
    grid = arranged_devices(mesh.shape, devices, between, "explain")
    return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def _abstract_array(x: Any, mesh: AnyMesh | None) -> Any:
    """Replace an array by an abstract one, which keeps its sharding if that is on a mesh with these axes."""
    if not isinstance(x, PROGRAM_ARRAYS) or getattr(x.dtype, "kind", "") in ("S", "U", "O"):  # these are static
        return x
    sharding = getattr(x, "sharding", None)
    if mesh is not None and isinstance(sharding, NamedSharding) and sharding.mesh.shape == mesh.shape:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, sharding.spec))
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _moved_to(mesh: Mesh, tree: Any) -> Any:
    """Replace the arrays of a tree by abstract ones with the same shardings, but on this mesh."""

    def moved(x: Any) -> Any:
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.shape != mesh.shape:
            raise ValueError(
                f"explain: an argument is on the mesh {dict(sharding.mesh.shape)}, and the step is explained on "
                f"{dict(mesh.shape)}. Give the arguments without placements, or on that mesh."
            )
        return _abstract_array(x, mesh) if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) else x

    return jax.tree.map(moved, tree)


@contextlib.contextmanager
def _active_mesh(mesh: AnyMesh | None, repeated: bool = False) -> Iterator[None]:
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
        grid = np.array(devices[: mesh.size]).reshape(mesh.axis_sizes)
        mesh = Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)
    with set_mesh(mesh):
        yield


def _arrays_on_devices(tree: Any) -> Any:
    """Replace arrays on a mesh without devices by arrays on the active mesh."""
    here, abstract = current_mesh(), any(isinstance(mesh, AbstractMesh) for mesh in _meshes_in(tree))
    return _moved_to(here, tree) if abstract and isinstance(here, Mesh) else tree


def _meshes_in(tree: Any) -> list[AnyMesh]:
    """Return the meshes that the arrays of a tree are on."""
    shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves(tree))
    return [s.mesh for s in shardings if isinstance(s, NamedSharding)]


def _mesh_sizes_of(args: Any, kwargs: Any, devices: int) -> dict[str, int] | None:
    """Return the mesh axes of a program and their sizes; None if no known mesh has its devices."""
    known = (m for m in (current_mesh(), *_meshes_in((args, kwargs))) if m is not None and m.size == devices)
    return next((dict(mesh.shape) for mesh in known), {} if devices == 1 else None)


def _memory(compiled: Any) -> Memory | None:
    found = compiled.memory_analysis()
    sizes = "argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes"
    return None if found is None else Memory(*(getattr(found, size) for size in sizes))
