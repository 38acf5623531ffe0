"""Report on a compiled program: count what it sends and computes, and describe it with what its trace tells."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from ..core.errors import counted
from ..core.source_lines import Frame, Source, source
from ..distribution.active_settings import active_mapping, active_parameter_mapping
from ..distribution.operation_scope import operations_in
from ..sharding._compiled_function import BoundCompiledFunction, CompiledFunction
from ..sharding.leaves import leaves_of
from . import _flops, _scopes
from ._arguments import ArgumentNames, GivenArray, only_axes
from ._constraints import Constraints
from ._describing import Exchange, Origin, describe, timeline
from ._figures import Memory
from ._flops import NOTE, Branches, Computed, mean
from ._hlo import COLLECTIVES, HloProgram, HloShape, Instruction, UnknownForm, Visit
from ._hlo_devices import along, groups
from ._parameters import HeldArgument, kind_of, report_of
from ._products import Product, cast_gradients, converted_arguments, products_of
from ._schedule import SILENT, Schedule, called_target, links_used
from ._step_faults import faults_of
from ._traced_step import Replicating, StepProgram, origin, replicating
from .chips import Chip
from .records import AvoidableWork, Collective, RepeatedWork
from .report import Report


def report_on(
    step: str,
    program: HloProgram,
    traced: Any,
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
    timed_on: Chip | None,
) -> Report:
    """Report on a compiled program.

    Arguments:
        traced: the program that JAX traced.
        donates: whether the step says itself which arguments it donates.
        timed_on: the chip of the topology that the program is compiled for, for the times of its schedule.
    """
    compiled_step = compiled_step.__func__ if isinstance(compiled_step, BoundCompiledFunction) else compiled_step
    own = compiled_step.active if isinstance(compiled_step, CompiledFunction) else {}
    schedule = Schedule(program) if platform == "tpu" else None
    traced_step = StepProgram(traced)
    visited = _Visited(program, Constraints(traced_step), mesh, platform, between, schedule, timed_on)
    notes = [*_notes(visited, mesh)]
    if schedule and schedule.unknown:
        left_out = ", ".join(counted(n, what) for what, n in schedule.unknown.items())
        notes.append(f"the time of the schedule leaves out {left_out} (of loops, all but one turn)")
    course = None
    if platform == "cpu":  # others use several kinds of memory, and their collectives run beside other work
        try:
            course = timeline(program, mesh or {})
        except UnknownForm as e:
            notes.append(f"the memory over the course of the step is not known: {e}")
    arrays = [(i.scope, names.find(i.scope), shape) for i in program.parameters() for shape in i.shapes]
    kept = [x for _, x, _ in arrays]
    results = leaves_of(lowered.out_info)[0]
    known = [names.find(scope or "") for scope in traced.jaxpr.debug_info.arg_names]
    products = [*products_of(traced_step, mesh or {})]
    uses = [
        (op, [known[y.argument] for x in op.operands[:2] if (y := origin(x)).argument is not None])
        for op in traced_step.operations
        if op.flops or op.name == "gather"
    ]
    shards = {x.path: math.prod(x.sizes) // max(1, math.prod(shape.sizes)) for _, x, shape in arrays if x is not None}
    faults = faults_of(traced_step, [x and x.path for x in known], [x.path for x in results], shards, mesh or {})
    operations = {found for op in traced_step.operations for found in operations_in(op.scope)}
    notes += _scopes.choices_in(operations)
    return report_of(
        step,
        platform,
        mesh or {},
        by,
        chip=chip,
        collectives=[*_placed_by(visited.collectives, [*replicating(traced_step)])],
        uses=[(_scopes.operation(op.scope), op.frames, xs) for op, xs in uses],
        looked_up={op.source: xs[0] for op, xs in uses if op.name == "gather" and xs},
        given=names.arrays,
        held=[HeldArgument(names.argument(scope), x, shape.sizes, shape.bytes) for scope, x, shape in arrays],
        kinds={kind_of([n for n in x.names or () if n != "_"], x.shape or ()) for x in results},
        mappings=(
            dict(own.get("mapping", active_mapping())),
            dict(own.get("parameter_mapping", active_parameter_mapping())),
        ),
        memory=memory,
        computed=visited.computed,
        converted={x.path: dtype for n, dtype in converted_arguments(traced_step).items() if (x := known[n])},
        notes=tuple(notes),
        timeline=course,
        repeated=tuple(repeated(products, visited.products, mesh)) if mesh else (),
        placed_by_rule=getattr(compiled_step, "placed_by_rule", False),
        idle=max((op.idle or 0.0 for op in operations), default=0.0),
        axes=tuple(sorted(_scopes.names_in(operations) | {n for x in names.arrays for n in x.axes if n is not None})),
        undonated=_undonated(kept, program.donated, lowered.out_info) if donates else None,
        devices=program.devices if mesh is None else None,
        computing=schedule.cycles / timed_on.clock if schedule and timed_on else None,
        avoidable=(*_one_hot(products), *_again(products, visited.products), *faults),
        narrow=any(op.flops and op.operands[0].dtype.itemsize <= 2 for op in traced_step.operations),
        cast=next(cast_gradients(traced_step), None),
    )


_LEAST = 1.5
"""The least number of computations of a product that counts as repeated: convolutions repeat a little at edges."""


def _key(scope: str, frames: Sequence[Frame]) -> tuple[str | None, str, Source | None]:
    return _scopes.said_of(_scopes.operation(scope)), _scopes.phase(scope), source(frames)


def repeated(
    step: Sequence[Product], computed: Iterable[tuple[str, Sequence[Frame], int, Branches]], mesh: Mapping[str, int]
) -> Iterator[RepeatedWork]:
    """Compare the products of a step with the ones that each device computes, in the order of the step.

    Arguments:
        computed: the scope, the lines, the flops and the branches of products of each device.
    """
    own, taken, merged, devices = Counter[Any](), Counter[Any](), Counter[Any](), math.prod(mesh.values())
    for scope, frames, flops, branches in computed:
        key = _key(scope, frames)
        own[key] += flops
        taken[key] += mean(flops, branches)
        merged[key] += flops if scope.endswith("/transpose") else 0
    needed: dict[tuple[str | None, str, Source | None], list[Product]] = {}
    for product in step:
        needed.setdefault(_key(product.scope, product.frames), []).append(product)
    sums = {
        k: 0 if any(p.flops is None for p in found) else sum(p.flops or 0 for p in found) for k, found in needed.items()
    }
    for key, products in needed.items():
        flops, done = sums[key], own[key] * devices
        if flops and done >= _LEAST * flops:
            # XLA gives a product that it merges with a transpose the line of that, so another line may lack it.
            lacking = sum(max(0, sums[k] - own[k] * devices) for k in needed if k[1] == key[1])
            if merged[key] and lacking >= merged[key] * devices > done - _LEAST * flops:
                continue
            copies, operation = round(done / flops), _scopes.operation(products[0].scope)
            # They repeat it along the mesh axes that shard none of its axes, or else along the only possible ones.
            idle = tuple(a for a, n in mesh.items() if n > 1 and operation and a not in operation.over)
            told = operation is not None and math.prod(mesh[a] for a in idle) == copies
            yield RepeatedWork(*key, taken[key], copies, idle if told else only_axes(mesh, copies))


def _placed_by(collectives: Iterable[Collective], placements: Sequence[Replicating]) -> Iterator[Collective]:
    """Give transfers the line of the placement that makes them necessary, where the compiler says one beside it."""
    for c in collectives:
        over = {*(c.axes or ())}
        by = next((p for p in placements if c.source in p.beside and _gathers(p, c.gathered, over)), None)
        if by is None or c.stored or getattr(c.reason, "of", None) == "placement":
            yield c
        else:
            reason = _scopes.reason_of_placement(c.gathered, (), c.axes or ())
            yield dataclasses.replace(c, source=by.placement.source, reason=reason)


def _gathers(placement: Replicating, names: Collection[str], over: Collection[str]) -> bool:
    """Return whether a placement replicates axes over mesh axes."""
    lost = {a for n in names for a in placement.axes.get(n, ())}
    return bool(names) and {*names} <= {*placement.axes} and lost.issuperset(over)


class _Visited:
    """A program that was gone through: its collectives, its products, and the custom calls that may compute."""

    def __init__(
        self,
        program: HloProgram,
        constraints: Constraints,
        mesh: dict[str, int] | None,
        platform: str,
        between: Mapping[str, int],
        schedule: Schedule | None,
        timed_on: Chip | None,
    ):
        self.collectives: list[Collective] = []
        self.custom_calls: set[str] = set()
        self.computed = Computed()
        self.products: list[tuple[str, Sequence[Frame], int, Branches]] = []
        """The scope, the lines, the flops and the branches of each product that runs a known number of times."""
        self.grouped = 0
        """The flops of products of rows with matrices of other groups."""
        for visit in program.visits():
            instruction = visit.instruction
            kind = instruction.opcode.removesuffix("-start")
            if kind in COLLECTIVES or kind == "send":
                found = _exchange(program, visit, mesh, between, schedule, timed_on)
                if kind == "send" or found.axes != ():  # in a ring, devices may permute what they keep
                    self.collectives += describe(found, constraints, mesh or {})
            elif kind in ("dot", "convolution"):
                given = [s for _, shapes in program.operands(visit) for s in shapes]
                each = _flops_of(instruction, given)
                own = each // _scopes.groups(instruction.scope) if platform == "cpu" else each
                self.grouped += (each - own) * (visit.times or 1)
                if visit.times is None:
                    self.computed.flops = None
                    continue
                phase, narrow = _scopes.phase(instruction.scope), all(s.bits <= 8 for s in given)
                done, needed = each * visit.times, own * visit.times
                self.products.append((instruction.scope, program.frames(instruction), needed, visit.branches))
                self.computed.add(phase, done, visit.branches, narrow, needed)
            elif instruction.opcode == "custom-call":
                self.custom_calls.add(called_target(instruction))
        self.custom_calls.difference_update(SILENT)


def _flops_of(instruction: Instruction, operands: Sequence[HloShape]) -> int:
    """Return the flops of a product or convolution in a compiled program."""
    result, (left, right) = instruction.shapes[0], operands[:2]
    if instruction.opcode == "dot":
        summed = re.findall(r"\d+", instruction.attribute("lhs_contracting_dims") or "")
        return _flops.of_product(result.sizes, [left.sizes[int(i)] for i in summed])
    # Compilers for TPUs write products as convolutions.
    labels, window = instruction.attribute("dim_labels") or "", instruction.window()
    windows = ([n for n, *_ in window.get(name, ())] for name in ("stride", "pad", "lhs_dilate", "rhs_dilate"))
    return _flops.of_convolution(labels, [left.sizes, right.sizes, result.sizes], *windows)


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


def _notes(found: _Visited, mesh: Mapping[str, int] | None) -> Iterator[str]:
    """Note the unknowns, and which numbers depend on values."""
    if mesh is None:
        yield (
            "neither the active mesh nor the mesh of an argument has this number of devices, so mesh axes are not known"
        )
    if found.custom_calls:
        yield f"flops do not include custom calls: {', '.join(sorted(found.custom_calls))}"
    if found.grouped:
        yield (
            f"{found.grouped:,} of the flops multiply rows by the matrices of other groups; compilers with grouped "
            "products do not compute these, and bounds on time leave them out"
        )
    if found.computed.flops is None:
        yield "flops are not known, because the length of a loop depends on values"
    if any(c.times is None for c in found.collectives):
        yield "a loop whose length depends on values: how often its collectives run is not known"
    if any(c.branches for c in found.collectives):
        yield NOTE
    if any(c.sent is None for c in found.collectives):
        yield "the bytes that a ragged all-to-all sends depend on values"


_SLACK = 4
"""The factor by which rows must grow to count as mostly empty: two choices, with twice the even share."""


def _one_hot(products: Sequence[Product]) -> Iterator[AvoidableWork]:
    """Find products with one-hot arrays that look rows of arguments up, or make rows of which most are empty."""
    total = sum(p.flops or 0 for p in products)
    look_ups, made = dict[Source | None, Product](), set[frozenset[str]]()
    for p in products:
        operation = _scopes.operation(p.scope)
        if p.one_hot is None or not p.flops:
            continue
        before, after, looks_up = p.one_hot
        if looks_up and any(n is not None for n in p.arguments):
            look_ups.setdefault(source(p.frames), p)
        elif operation is not None and len(operation.operands) == 2 and after > _SLACK * before:
            first, second, result = (
                {a.name: a.size or 0 for a in t} for t in (*operation.operands, operation.results[0])
            )
            own = ({n: a[n] for n in a if n in result and n not in b} for a, b in ((first, second), (second, first)))
            names = next((frozenset(sizes) for sizes in own if math.prod(sizes.values()) == after), None)
            if names and names not in made:
                made.add(names)
                of_rows = [x for x in products if (op := _scopes.operation(x.scope)) and names <= {*op.axes}]
                share = sum(x.flops or 0 for x in of_rows) / total * (1 - before / after)
                yield AvoidableWork("empty", _scopes.said_of(operation), source(p.frames), share, (before, after))
    for line, first in look_ups.items():
        share = sum(p.flops or 0 for p in products if p.one_hot and source(p.frames) == line) / total
        yield AvoidableWork("one-hot", _scopes.said_of(_scopes.operation(first.scope)), line, share)


def _again(step: Sequence[Product], computed: Iterable[tuple[str, Sequence[Frame], int, Branches]]) -> Iterator[Any]:
    """Find a forward pass that is computed a second time, without a backward pass.

    Its products have the operations and the innermost lines of others, but not the lines that call these.
    """
    used: dict[Any, list[tuple[bool, tuple[Frame, ...], tuple[int | None, ...]]]] = {}
    for p in step:
        used.setdefault(_key(p.scope, p.frames)[::2], []).append((*_call(p.scope, p.frames), p.arguments))

    def arguments(key: Any, call: tuple[bool, tuple[Frame, ...]]) -> set[int | None]:
        """Return the arguments that a product of the step uses; programs may have more of the outermost lines."""
        found: set[int | None] = set()
        for trained, lines, own in used.get(key, ()):
            if trained == call[0] and all(a == b for a, b in zip(lines[::-1], call[1][::-1], strict=False)):
                found.update(own)
        return found - {None}

    passes: dict[Any, dict[Any, int]] = {}
    backward, total = set[Any](), 0
    for scope, frames, flops, branches in computed:
        key, call = _key(scope, frames)[::2], _call(scope, frames)
        total += (own := mean(flops, branches))
        if _scopes.phase(scope) == "backward":
            backward.add((key[1], call))  # in code without names, its products have operations of their own
        elif _scopes.phase(scope) in ("forward", "") and key[0] is not None:
            passes.setdefault(key, {})[call] = passes.get(key, {}).get(call, 0) + own
    found: dict[Any, list[tuple[Any, int]]] = {}
    for key, calls in passes.items():
        trained = [call for call in calls if (key[1], call) in backward]
        for call, own in calls.items():
            known, others = {n for t in trained for n in arguments(key, t)}, arguments(key, call)
            if trained and (key[1], call) not in backward and (known & others or not others):
                apart = next((f for a, f in itertools.zip_longest(trained[0][1], call[1]) if a != f and f), None)
                found.setdefault(apart, []).append((key[0], own))
    for frame, works in found.items():
        line = None if frame is None else Source(frame.file, frame.line, frame.function)
        yield AvoidableWork("again", works[0][0], line, sum(own for _, own in works) / total)


def _call(scope: str, frames: Sequence[Frame]) -> tuple[bool, tuple[Frame, ...]]:
    """Return whether a product belongs to a differentiated function, and the lines around it, the outermost first."""
    mine = (f for f in reversed(frames) if source([f]) is not None)
    return _scopes.phase(scope) != "", tuple(dict.fromkeys(mine))  # calls repeat the lines around them


def _exchange(
    program: HloProgram,
    visit: Visit,
    mesh: dict[str, int] | None,
    between: Mapping[str, int],
    schedule: Schedule | None = None,
    chip: Chip | None = None,
) -> Exchange:
    """Read the arrays that a collective carries, and what the schedule of a program for TPUs says of it."""

    def origin(of: Instruction) -> Origin:
        return Origin(of.scope, functools.partial(program.frames, of))

    instruction, operands, end = visit.instruction, program.operands(visit), visit
    kind, opcode = instruction.opcode.removesuffix("-start"), instruction.opcode
    carried = [(origin(producer), shape) for producer, shapes in operands for shape in shapes]
    results, made, pieces = instruction.shapes, None, 1
    axes: tuple[str, ...] | None
    slices: int | None
    if kind == "send":  # of a slice, each device sends to those at its place in other slices
        found = re.search(r'_transfer_type="([A-Z_]*)"', instruction.attributes)
        kind = "" if found is None else found[1].lower().replace("_", "-")
        if kind not in COLLECTIVES:
            raise UnknownForm(f"slices exchange data in the way {kind!r}")
        end = program.received(visit)
        carried, results = [(origin(operands[0][0]), results[0])], end.instruction.shapes[:1]
        axes, along_all, count, slices = tuple(between), False, math.prod(between.values()), math.prod(between.values())
    else:
        listed = groups(instruction, program.devices_of_text)
        pairs = kind == "collective-permute"
        count = 2 if pairs else max(map(len, listed))
        of_a_slice = program.devices_of_text < program.devices
        within = {a: n // between.get(a, 1) for a, n in (mesh or {}).items()} if of_a_slice else mesh
        axes, along_all = (None, True) if mesh is None or within is None else along(listed, within, pairs)
        along_all = along_all and not (of_a_slice and axes is not None and any(a in between for a in axes))
        slices = 1 if of_a_slice else None
        if opcode.endswith("-start") and kind != "all-reduce":  # it lists its operands before them
            results = results[len(carried) : 2 * len(carried)]
        if kind == "ragged-all-to-all":  # the operand comes with its destination, offsets and sizes
            carried, results = carried[:1], results[:1]
        if kind == "all-to-all" and len(carried) == count > 1:  # the pieces of one array, one for each device
            pieces, carried, results = count, carried[:1], results[:1]
        if schedule is not None and kind == "all-reduce" and len(carried) == 1:
            if (asked := program.asked_for(visit, count)) is not None:
                (kind, producer, part), made, (whole,) = asked, kind, results
                operand, result = (part, whole) if kind == "all-gather" else (whole, part)
                carried, results = [(origin(producer), operand)], (result,)
    return Exchange(
        kind=kind,
        axes=axes,
        devices=count,
        slices=slices,
        along_all=along_all,
        times=visit.times,
        branches=visit.branches,
        origin=origin(instruction),
        carried=[(producer, operand, result) for (producer, operand), result in zip(carried, results, strict=True)],
        pieces=pieces,
        users=lambda: map(origin, program.users(end)),
        made=made,
        beside=None if schedule is None else schedule.beside.get(instruction.name),
        links=0 if schedule is None or opcode == "send" else links_used(instruction),
        chip=chip,
    )
