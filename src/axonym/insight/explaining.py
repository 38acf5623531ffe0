"""`explain`: report the communication, memory and computation of a step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, NamedSharding

from ..core.source_lines import Frame
from ..distribution.active_settings import Entry, active_mapping, active_parameter_mapping
from ..distribution.mesh_axes import AnyMesh
from ..names.distributing import DistributedFunction
from ..sharding._compiled_function import BoundCompiledFunction, CompiledFunction
from ..sharding.jit import fsdp, named_jit
from ..sharding.leaves import leaves_of
from ..sharding.mapping import ResourceMapping, is_resource_mapping, normalize_mapping
from ..sharding.meshes import current_mesh, set_mesh, with_devices
from . import _compiling, _flops, _scopes, _shardy
from ._arguments import ArgumentNames, GivenArray, arrays_of, step_name
from ._by_names import OF_GROUPS, Layout, by_names
from ._constraints import Constraints
from ._describing import Exchange, Origin, describe, timeline
from ._hlo import COLLECTIVES, HloProgram, HloShape, Instruction, UnknownForm, Visit, along, groups
from ._lowered import products
from ._named_events import NamedTrace
from ._named_trace import named_trace
from ._parameters import used_by, used_by_names, with_parameters
from ._topologies import moved_to, on_topology, with_axes_of
from .chips import Chip, known_chip
from .collectives import Collective
from .repeating import repeated, repeated_by_names
from .report import Memory, Report, bounds_on
from .timeline import MemoryTimeline

WITHOUT_FLOPS = {"AllocateBuffer", "AssumeGatherIndicesInBound", "AsyncCollectiveDone", "AsyncCollectiveStart"}
"""Calls in programs for TPUs that compute nothing."""

TIERS = ("compiled", "partitioner", "shardy", "names")

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
        by: how the report is made. `"compiled"` compiles the step to the end. `"partitioner"`, on CPUs, stops before
            code generation, which takes most of the time, so memory is not known; collectives and flops are the same.
            `"shardy"` runs only the passes that shard the program, on a mesh of any size, whose devices need not exist;
            the report says by how much the bytes sent may be off. `"names"` compiles nothing: it traces the step and
            works out by name what each operation does under the mapping, on a mesh of any size. It takes a plain
            function, or one of `axonym.names.distribute`, that does not say how it is distributed; assumes that the
            mapping shards every array; and raises an error where names do not determine the communication.
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
        return _named(trace, sizes, compute, storage, chip, arrays_of(fn, args, kwargs))
    if by == "shardy":
        with contextlib.nullcontext() if mesh is None else set_mesh(mesh):
            compiled_step = distributed(fn, mapping)
            lowered = compiled_step.trace(*args, **kwargs).lower(lowering_platforms=("cpu",))
            return _sharded(step_name(fn), lowered, ArgumentNames(lowered, fn, args, kwargs), compiled_step, chip)
    with active(mesh):
        compiled_step = distributed(fn, mapping)
        platform = jax.default_backend() if topology is None else "tpu"
        if by == "partitioner" and platform != "cpu":
            raise ValueError(f"explain: by='partitioner' is for CPUs, and the devices here are {platform!r}.")
        lowered = compiled_step.lower(*args, **kwargs)
        if by == "compiled":
            compiled = _compiling.compiled(lowered)
            text, memory = compiled.as_text(), _memory(compiled)
        else:
            text, memory = _compiling.partitioned(lowered), None
        program = HloProgram(text, _compiling.device_count(lowered))
        found = mesh_of(args, kwargs, program.devices)
        names = ArgumentNames(lowered, fn, args, kwargs)
        return _report(step_name(fn), program, lowered, names, found, platform, by, memory, compiled_step, chip)


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


# --- the report ---


@dataclasses.dataclass
class _FlopCount:
    """The flops of a program so far; None if the length of a loop depends on values."""

    counted: int | None = 0
    needed: int | None = 0
    """The same without branches, and without products of rows with matrices of other groups."""
    grouped: int = 0
    """The flops of products of rows with matrices of other groups."""

    def add(self, visit: Visit, each: int, own: int) -> None:
        """Add the flops of an instruction, of which `own` are needed."""
        self.grouped += (each - own) * (visit.times or 1)
        self.counted = None if self.counted is None or visit.times is None else self.counted + each * visit.times
        if not visit.in_branch:
            self.needed = None if self.needed is None or visit.times is None else self.needed + own * visit.times


def _report(
    step: str,
    program: HloProgram,
    lowered: Any,
    names: ArgumentNames,
    mesh: dict[str, int] | None,
    platform: str,
    by: str,
    memory: Memory | None,
    compiled_step: Any,
    chip: Chip | None,
) -> Report:
    constraints, collectives = Constraints(lowered), list[Collective]()
    computed: list[tuple[str, Sequence[Frame], int]] = []
    flops = _FlopCount()
    custom_calls: set[str] = set()
    for visit in program.visits():
        instruction = visit.instruction
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            collectives += describe(_exchange(program, visit, kind, mesh), constraints, mesh or {})
        elif kind in ("dot", "convolution"):
            each = _flops.of_instruction(instruction, [s for _, shapes in program.operands(visit) for s in shapes])
            own = each // _scopes.groups(instruction.scope) if platform == "cpu" else each
            flops.add(visit, each, own)
            if visit.times is not None:
                computed.append((instruction.scope, program.frames(instruction), own * visit.times))
        elif kind == "custom-call":
            custom_calls.add((instruction.attribute("custom_call_target") or "").strip('"'))
    notes = []
    if mesh is None:
        notes.append(
            "neither the active mesh nor the mesh of an argument has this number of devices, so mesh axes are not known"
        )
    if custom_calls := custom_calls - WITHOUT_FLOPS:
        listed = ", ".join(sorted(custom_calls))
        notes.append(f"flops do not include custom calls: {listed}")
    if flops.grouped:
        notes.append(
            f"{flops.grouped:,} of the flops multiply rows by the matrices of other groups; compilers with grouped "
            "products do not compute these, and bounds on time leave them out"
        )
    notes += _notes_on(collectives, flops.counted is None)
    bounds = None if chip is None else bounds_on(chip, collectives, memory, flops.needed)
    # Programs for other platforms use several kinds of memory, and their collectives run beside other work.
    course = _timeline(program, mesh or {}, notes) if platform == "cpu" else None
    shards = [(i.scope, shape) for i in program.parameters() for shape in i.shapes]
    report = Report(
        step, platform, mesh or {}, by, tuple(collectives), memory, flops.counted, bounds, tuple(notes), timeline=course
    )
    return _compared(report, lowered, compiled_step, names, shards, computed)


def _compared(
    report: Report,
    lowered: Any,
    compiled_step: Any,
    names: ArgumentNames,
    shards: Sequence[tuple[str, HloShape]],
    computed: Sequence[tuple[str, Sequence[Frame], int]],
) -> Report:
    """Add to a report what the lowered step tells: the arguments, and the work that devices repeat.

    Arguments:
        shards: the scope of each array in the arguments, and its shard.
        computed: the scope, the lines and the flops of the products of each device.
    """
    mesh, mappings, found = report.mesh, _mappings(compiled_step), products(lowered, report.mesh)
    kept = [names.find(scope) for scope, _ in shards]
    uses = used_by(found, lambda n: kept[n] if n < len(kept) else None)
    of_arguments = {n for x in names.arrays for n in x.axes if n is not None}
    return dataclasses.replace(
        report,
        collectives=tuple(with_parameters(report.collectives, uses, names.arrays, _axes_of(lowered.out_info))),
        arguments=names.added_up((scope, shape.bytes) for scope, shape in shards),
        placed=tuple(names.placed(((scope, shape.sizes) for scope, shape in shards), mesh, mappings)),
        repeated=tuple(repeated(found, computed, mesh)) if mesh else (),
        mapping=mappings[0],
        parameter_mapping=mappings[1],
        axes=tuple(sorted(of_arguments | _scopes.names_in(lowered.as_text(debug_info=True)))),
    )


def _mappings(compiled_step: Any) -> tuple[Mapping[str, Entry], Mapping[str, Entry]]:
    """Return the compute and the parameter mapping that are active in a step."""
    if isinstance(compiled_step, BoundCompiledFunction):
        compiled_step = compiled_step.__func__
    own = compiled_step.active if isinstance(compiled_step, CompiledFunction) else {}
    return own.get("mapping", active_mapping()), own.get("parameter_mapping", active_parameter_mapping())


def _axes_of(results: Any) -> set[frozenset[str | None]]:
    """Return the names of the axes of each array in the results of a step."""
    return {frozenset(n if n != "_" else None for n in leaf.names or (None,)) for leaf in leaves_of(results)[0]}


def _named(
    trace: NamedTrace,
    mesh: Mapping[str, int],
    compute: Mapping[str, Entry],
    storage: Mapping[str, Entry],
    chip: Chip | None,
    given: Sequence[GivenArray],
) -> Report:
    """Report on a traced step by its names."""
    report = by_names(trace, mesh, compute, storage, chip, [x.argument for x in given])
    layout = Layout(mesh, compute, storage, trace.joined)
    placed = (
        x.on_devices(layout.local(value.dims, layout.over(value.dims)), mesh, (compute, storage))
        for x, value in zip(given, trace.arguments, strict=True)
    )
    seen = {n for x in (*trace.arguments, *trace.results) for n, _ in x.dims}
    seen |= {n for event in trace.events if hasattr(event, "place") and (op := event.place.operation) for n in op.axes}
    uses = used_by_names(trace, given)
    results = {frozenset(n for n, _ in x.dims) for x in trace.results}
    return dataclasses.replace(
        report,
        collectives=tuple(with_parameters(report.collectives, uses, given, results)),
        placed=tuple(placed),
        repeated=tuple(repeated_by_names(trace, layout)),
        mapping=compute,
        parameter_mapping=storage,
        axes=tuple(sorted(n for n in seen if n is not None)),
    )


def _timeline(program: HloProgram, mesh: Mapping[str, int], notes: list[str]) -> MemoryTimeline | None:
    try:
        return timeline(program, mesh)
    except UnknownForm as e:
        notes.append(f"the memory over the course of the step is not known: {e}")
        return None


def _sharded(step: str, lowered: Any, names: ArgumentNames, compiled_step: Any, chip: Chip | None) -> Report:
    """Report on a lowered step after the passes of Shardy."""
    program, constraints = _shardy.sharded_program(lowered), Constraints(lowered)
    collectives = [c for found in program.exchanges for c in describe(found, constraints, program.mesh)]
    notes = [
        "by='shardy' reads the program as it is sharded, before the compiler changes it: it may still combine "
        "collectives, merge repeated operations, fold constants, simplify products, or send another dtype"
    ]
    if program.moved:
        notes.append(f"the compiler decides the communication of {', '.join(program.moved)} along sharded axes")
    if program.grouped:
        notes.append(OF_GROUPS)
    if program.uncounted:
        notes.append(f"flops are not known, because {', '.join(program.uncounted)} cannot be counted")
    notes += _notes_on(collectives, program.flops is None and not program.uncounted)
    bounds = None if chip is None else bounds_on(chip, collectives, None, program.needed_flops)
    report = Report(
        step, "any platform", program.mesh, "shardy", tuple(collectives), None, program.flops, bounds, tuple(notes),
        program.uncertain,
    )  # fmt: skip
    return _compared(report, lowered, compiled_step, names, program.arguments, program.products)


def _notes_on(collectives: Sequence[Collective], loops: bool) -> Iterator[str]:
    """Note which numbers depend on values; `loops` says whether flops do."""
    if loops:
        yield "flops are not known, because the length of a loop depends on values"
    if any(c.times is None for c in collectives):
        yield "a loop whose length depends on values: how often its collectives run is not known"
    if any(c.in_branch for c in collectives):
        yield "collectives in a branch run only if it is taken; they are counted as if it always were"
    if any(c.sent is None for c in collectives):
        yield "the bytes that a ragged all-to-all sends depend on values"


def _exchange(program: HloProgram, visit: Visit, kind: str, mesh: dict[str, int] | None) -> Exchange:
    """Read the arrays that a collective carries."""
    instruction = visit.instruction
    found = groups(instruction, program.devices)
    pairs = kind == "collective-permute"
    count = 2 if pairs else max(map(len, found))
    axes, along_all = (None, True) if mesh is None else along(found, mesh, pairs)

    def origin(of: Instruction) -> Origin:
        return Origin(of.scope, functools.partial(program.frames, of))

    carried = [(origin(producer), shape) for producer, shapes in program.operands(visit) for shape in shapes]
    results = _result_shapes(instruction, len(carried))
    pieces = 1
    if kind == "ragged-all-to-all":  # the operand comes with its destination, offsets and sizes
        carried, results = carried[:1], results[:1]
    if kind == "all-to-all" and len(carried) == count > 1:  # the pieces of one array, one for each device
        pieces, carried, results = count, carried[:1], results[:1]
    return Exchange(
        kind=kind,
        axes=axes,
        devices=count,
        along_all=along_all,
        times=visit.times,
        in_branch=visit.in_branch,
        origin=origin(instruction),
        carried=[(producer, operand, result) for (producer, operand), result in zip(carried, results, strict=True)],
        pieces=pieces,
        users=lambda: map(origin, program.users(visit)),
    )


def _result_shapes(instruction: Instruction, carried: int) -> tuple[HloShape, ...]:
    """Return the results of a collective; the start of an asynchronous one lists its operands before them."""
    if not instruction.opcode.endswith("-start") or instruction.opcode == "all-reduce-start":
        return instruction.shapes
    return instruction.shapes[carried : 2 * carried]


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
