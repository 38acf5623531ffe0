"""Report on a compiled program: count what it sends and computes, and describe it with what the lowered step tells."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from ..core.source_lines import Frame, source
from ..distribution.active_settings import Entry, active_mapping, active_parameter_mapping
from ..sharding._compiled_function import BoundCompiledFunction, CompiledFunction
from ..sharding.leaves import leaves_of
from . import _flops, _scopes
from ._arguments import ArgumentNames, GivenArray
from ._branches import NOTE, Branches, least, mean
from ._constraints import Constraints
from ._describing import Exchange, Origin, describe, timeline
from ._figures import Memory, bounds_on
from ._hlo import COLLECTIVES, HloProgram, HloShape, Instruction, UnknownForm, Visit
from ._hlo_devices import along, groups
from ._lowered import Product, read_step
from ._parameters import Kind, kind_of, updated, used_by, with_parameters
from .chips import Chip
from .collectives import Collective
from .repeating import repeated
from .report import Report
from .timeline import MemoryTimeline

WITHOUT_FLOPS = {"AllocateBuffer", "AssumeGatherIndicesInBound", "AsyncCollectiveDone", "AsyncCollectiveStart"}
"""Calls in programs for TPUs that compute nothing."""


class _Count:
    """The products of a program, and their flops so far."""

    def __init__(self, program: HloProgram, platform: str):
        self._program, self._platform = program, platform
        self.products: list[tuple[str, Sequence[Frame], int, Branches]] = []
        """The scope, the lines, the flops and the branches of each product that runs a known number of times."""
        self.flops: int | None = 0
        """The flops, with the mean of the branches of conditionals; None if the length of a loop depends on values."""
        self.grouped = 0
        """The flops of products of rows with matrices of other groups."""
        self.computed: dict[str, int] = {}
        """The flops in each phase, of products that run a known number of times."""
        self._needed: list[tuple[Branches, str, int]] = []

    @property
    def least_flops(self) -> int | None:
        """Return the flops without the branches that take more, and without products of rows with other groups."""
        return None if self.flops is None else least(self._needed)["flops"]

    @property
    def wide_flops(self) -> int | None:
        """Return the least flops without products of 8 bits, of which chips multiply more in a second."""
        return None if self.flops is None else least(self._needed)["wide"]

    def add(self, visit: Visit) -> None:
        """Add the flops of a product or convolution."""
        instruction, operands = visit.instruction, self._program.operands(visit)
        given = [s for _, shapes in operands for s in shapes]
        each = _flops.of_instruction(instruction, given)
        own = each // _scopes.groups(instruction.scope) if self._platform == "cpu" else each
        self.grouped += (each - own) * (visit.times or 1)
        if visit.times is None:
            self.flops = None
            return
        self.products.append((instruction.scope, self._program.frames(instruction), own * visit.times, visit.branches))
        kinds = ("flops",) if all(s.bits <= 8 for s in given) else ("flops", "wide")
        self._needed += [(visit.branches, kind, own * visit.times) for kind in kinds]
        done, phase = mean(each * visit.times, visit.branches), _scopes.phase(instruction.scope)
        self.flops = None if self.flops is None else self.flops + done
        self.computed[phase] = self.computed.get(phase, 0) + done


def report_on(
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
    donates: bool,
    between: Mapping[str, int],
) -> Report:
    """Report on a compiled program; `donates` says whether the step says itself which arguments it donates."""
    collectives, count, custom_calls = _visited(program, Constraints(lowered), mesh, platform, between)
    notes = [*_notes(collectives, count, custom_calls, mesh)]
    # Programs for other platforms use several kinds of memory, and their collectives run beside other work.
    course = _timeline(program, mesh or {}, notes) if platform == "cpu" else None
    shards = [(i.scope, shape) for i in program.parameters() for shape in i.shapes]
    mappings, found = _mappings(compiled_step), read_step(lowered, mesh or {})
    kept = [names.find(scope) for scope, _ in shards]
    operands = ([kept[n] for n in p.arguments if n is not None and n < len(kept)] for p in found.products)
    uses = used_by((_scopes.operation(p.scope), p.frames, xs) for p, xs in zip(found.products, operands, strict=True))
    late = {x.path: found.converted[i] for i, x in enumerate(kept) if x is not None and i in found.converted}
    sizes = {x.path: shape.sizes for x, (_, shape) in zip(kept, shards, strict=True) if x is not None}
    kinds = _kinds_of(lowered.out_info)
    carried = with_parameters(collectives, uses, names.arrays, sizes, kinds)
    return Report(
        step,
        platform,
        mesh or {},
        by,
        tuple(_converted(c, late) for c in carried),
        memory,
        count.flops,
        None if chip is None else bounds_on(chip, collectives, memory, count.wide_flops),
        tuple(notes),
        timeline=course,
        arguments=names.added_up((scope, shape.bytes) for scope, shape in shards),
        placed=tuple(names.placed(((scope, shape.sizes) for scope, shape in shards), mesh or {}, mappings)),
        repeated=tuple(repeated(found.products, count.products, mesh)) if mesh else (),
        mapping=mappings[0],
        parameter_mapping=mappings[1],
        placed_by_rule=getattr(_function_of(compiled_step), "placed_by_rule", False),
        axes=_names_in(lowered, names.arrays),
        least_flops=count.least_flops,
        updated=tuple(x.path for x in updated(names.arrays, kinds)),
        undonated=_undonated(kept, program.donated, lowered.out_info) if donates else None,
        devices=program.devices if mesh is None else None,
        computed=count.computed,
        **_widened(found.products),
    )


def _visited(
    program: HloProgram,
    constraints: Constraints,
    mesh: dict[str, int] | None,
    platform: str,
    between: Mapping[str, int],
) -> tuple[list[Collective], _Count, set[str]]:
    """Go through a program; return its collectives, its products, and the custom calls that may compute."""
    collectives, count, custom_calls = list[Collective](), _Count(program, platform), set[str]()
    for visit in program.visits():
        instruction = visit.instruction
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            collectives += describe(_exchange(program, visit, kind, mesh, between), constraints, mesh or {})
        elif kind == "send":
            collectives += describe(_exchange_of_slices(program, visit, between), constraints, mesh or {})
        elif kind in ("dot", "convolution"):
            count.add(visit)
        elif kind == "custom-call":
            custom_calls.add((instruction.attribute("custom_call_target") or "").strip('"'))
    return collectives, count, custom_calls - WITHOUT_FLOPS


def _names_in(lowered: Any, given: Sequence[GivenArray]) -> tuple[str, ...]:
    """Return the names of all axes of a step."""
    of_arguments = {n for x in given for n in x.axes if n is not None}
    return tuple(sorted(of_arguments | _scopes.names_in(lowered.as_text(debug_info=True))))


def _converted(c: Collective, late: Mapping[str, str]) -> Collective:
    """Add to a gather of parameters the dtype to which a step converts them after that."""
    dtypes = {late.get(path) for path in c.parameters} if c.kind == "all-gather" else set[str | None]()
    return dataclasses.replace(c, converted=dtypes.pop()) if len(dtypes) == 1 else c


def _undonated(kept: Sequence[GivenArray | None], donated: Collection[int], results: Any) -> tuple[str, ...]:
    """Return the paths of arguments that are not donated, for which there are results of the same sizes and dtype."""
    free = Counter[Any]((tuple(x.shape), x.dtype.itemsize) for x in jax.tree.leaves(results) if hasattr(x, "dtype"))
    keys = [None if x is None else (x.sizes, x.itemsize) for x in kept]
    free.subtract(keys[n] for n in donated if n < len(keys))
    found = []
    for n, (x, key) in enumerate(zip(kept, keys, strict=True)):
        if x is not None and key is not None and n not in donated and free[key] > 0:
            free[key] -= 1
            found.append(x.path)
    return tuple(found)


def _notes(
    collectives: Sequence[Collective], count: _Count, custom_calls: set[str], mesh: Mapping[str, int] | None
) -> Iterator[str]:
    """Note the unknowns, and which numbers depend on values."""
    if mesh is None:
        yield (
            "neither the active mesh nor the mesh of an argument has this number of devices, so mesh axes are not known"
        )
    if custom_calls:
        yield f"flops do not include custom calls: {', '.join(sorted(custom_calls))}"
    if count.grouped:
        yield (
            f"{count.grouped:,} of the flops multiply rows by the matrices of other groups; compilers with grouped "
            "products do not compute these, and bounds on time leave them out"
        )
    if count.flops is None:
        yield "flops are not known, because the length of a loop depends on values"
    if any(c.times is None for c in collectives):
        yield "a loop whose length depends on values: how often its collectives run is not known"
    if any(c.branches for c in collectives):
        yield NOTE
    if any(c.sent is None for c in collectives):
        yield "the bytes that a ragged all-to-all sends depend on values"


def _mappings(compiled_step: Any) -> tuple[Mapping[str, Entry], Mapping[str, Entry]]:
    """Return the compute and the parameter mapping that are active in a step."""
    compiled_step = _function_of(compiled_step)
    own = compiled_step.active if isinstance(compiled_step, CompiledFunction) else {}
    return own.get("mapping", active_mapping()), own.get("parameter_mapping", active_parameter_mapping())


def _function_of(compiled_step: Any) -> Any:
    return compiled_step.__func__ if isinstance(compiled_step, BoundCompiledFunction) else compiled_step


def _widened(products: Sequence[Product]) -> dict[str, Any]:
    """Return the share of the flops in products that are computed in a larger dtype than an operand came in."""
    found = [p for p in products if p.widened and p.flops]
    total = sum(p.flops or 0 for p in products)
    if not found or not total:
        return {}
    (first, *_), (before, after) = found, found[0].widened or ("", "")
    operation, line = _scopes.operation(first.scope), source(first.frames)
    said = f"{operation or 'a product without names'}{f', at {line}' if line else ''}"
    share = sum(p.flops or 0 for p in found) / total
    return {"widened": share, "widened_at": f"{before} to {after}, first in {said}"}


def _kinds_of(results: Any) -> set[Kind]:
    """Return the kind of each array in the results of a step."""
    leaves = leaves_of(results)[0]
    return {kind_of([n for n in x.names or () if n != "_"], x.shape or ()) for x in leaves}


def _timeline(program: HloProgram, mesh: Mapping[str, int], notes: list[str]) -> MemoryTimeline | None:
    try:
        return timeline(program, mesh)
    except UnknownForm as e:
        notes.append(f"the memory over the course of the step is not known: {e}")
        return None


def _exchange_of_slices(program: HloProgram, visit: Visit, between: Mapping[str, int]) -> Exchange:
    """Read what a slice sends to others, each device to those at its place in other slices."""
    found = re.search(r'_transfer_type="([A-Z_]*)"', visit.instruction.attributes)
    kind = "" if found is None else found[1].lower().replace("_", "-")
    if kind not in COLLECTIVES:
        raise UnknownForm(f"slices exchange data in the way {kind!r}")
    received = program.received(visit)
    origin = functools.partial(_origin, program)
    return Exchange(
        kind=kind,
        axes=tuple(between),
        devices=math.prod(between.values()),
        slices=math.prod(between.values()),
        along_all=False,
        times=visit.times,
        branches=visit.branches,
        origin=origin(visit.instruction),
        carried=[(origin(program.operands(visit)[0][0]), visit.instruction.shapes[0], received.instruction.shapes[0])],
        pieces=1,
        users=lambda: map(origin, program.users(received)),
    )


def _origin(program: HloProgram, of: Instruction) -> Origin:
    return Origin(of.scope, functools.partial(program.frames, of))


def _exchange(
    program: HloProgram, visit: Visit, kind: str, mesh: dict[str, int] | None, between: Mapping[str, int]
) -> Exchange:
    """Read the arrays that a collective carries."""
    instruction = visit.instruction
    found = groups(instruction, program.devices_of_text)
    pairs = kind == "collective-permute"
    count = 2 if pairs else max(map(len, found))
    of_a_slice = program.devices_of_text < program.devices
    within = {a: n // between.get(a, 1) for a, n in (mesh or {}).items()} if of_a_slice else mesh
    axes, along_all = (None, True) if mesh is None or within is None else along(found, within, pairs)
    along_all = along_all and not (of_a_slice and axes is not None and any(a in between for a in axes))
    origin = functools.partial(_origin, program)
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
        slices=1 if of_a_slice else None,
        along_all=along_all,
        times=visit.times,
        branches=visit.branches,
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
