"""Describe the collectives and the memory of a program: each array by named axes, the reason, and the user's line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..core.source_lines import Frame, source
from . import _scopes
from ._constraints import Constraint, Constraints
from ._flops import Branches
from ._hlo import HloProgram, HloShape, Instruction
from ._lifetimes import Buffer, Lifetimes
from ._schedule import seconds_waited
from ._text import Said, array_said
from .chips import Chip
from .records import Collective, HeldArray, MemoryTimeline, sent_by, together


class Origin(NamedTuple):
    """The scope and the lines of Python from which a part of a program comes."""

    scope: str
    frames: Callable[[], tuple[Frame, ...]]
    """Returns the lines, the innermost first."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A collective, as read from a program."""

    kind: str
    axes: tuple[str, ...] | None
    """The mesh axes along which the devices of a group differ; None if the mesh is not known."""
    devices: int
    """The number of devices in a group."""
    slices: int | None
    """The number of slices that have devices of a group, if the program says it."""
    along_all: bool
    """False if a group has only some of the devices along these mesh axes."""
    times: int | None
    branches: Branches
    origin: Origin
    carried: Sequence[tuple[Origin, HloShape, HloShape]]
    """For each array that it carries: the producer of the operand, and the operand and the result on each device."""
    pieces: int
    """The number of pieces into which its array is cut."""
    users: Callable[[], Iterator[Origin]]
    """Yields the direct and indirect users of the result, direct ones first."""
    made: str | None = None
    """The kind that the compiler makes of it, if another one."""
    beside: int | None = None
    """The cycles of computing beside it, if the program says it."""
    links: int = 0
    """The number of links that it uses, if the program says it."""
    chip: Chip | None = None
    """The chip at whose rates to estimate its time."""

    def waits(self, sent: int | None) -> float | None:
        """Return about how many seconds a device waits for some of its bytes; None across slices, at rates unknown."""
        if self.chip is None or not self.links or self.beside is None or sent is None:
            return None
        return seconds_waited(sent, self.beside, self.links, self.chip)


def describe(exchange: Exchange, constraints: Constraints, mesh: Mapping[str, int]) -> Iterator[Collective]:
    """Describe a collective, once for each array that it carries."""
    kind, pieces, axes = exchange.kind, exchange.pieces, exchange.axes or ()
    # XLA combines collectives: one that carries several arrays has the scope of only one of them.
    own = len(exchange.carried) == 1 and _scopes.operation(exchange.origin.scope) is not None
    for i, (producer, operand, result) in enumerate(exchange.carried):
        origin = exchange.origin if own else producer
        operation, phase = _scopes.operation(origin.scope), _scopes.phase(origin.scope or exchange.origin.scope)
        shape = result if kind in ("all-gather", "all-to-all") else operand
        # The dimensions that the collective makes longer, and their new sizes.
        longer = {at: b for at, (a, b) in enumerate(zip(operand.sizes, result.sizes, strict=False)) if a < b}
        array, gathered, moved, stored = None, (), (), ()
        if operation is not None:
            array = _scopes.array(operation, kind, phase, shape.sizes, mesh, dict.fromkeys(longer, axes))
            if not own and array is None:  # the origin of the producer says nothing about this array
                operation = None
        if array is not None:
            stored = tuple(a.name for a in _scopes.stored_over([array.term], axes))
            if kind == "all-gather":
                gathered = tuple(a.name for a, at in array.places or () if operand.sizes[at] != result.sizes[at])
        # What makes it necessary is its operation, a placement, or a user of the result: the compiler writes the scope
        # of the producer of an array, even if another operation causes the gather.
        reason, cause = None, origin
        if operation is not None and axes:
            moved = _scopes.moved(operation, axes) if kind == "all-to-all" else ()
            after: Iterable[Constraint] = ()
            if gathered and not stored:
                after = (c for c in constraints.after(origin.scope) if c.gathers(longer, axes, mesh))
            elif moved and moved[0] in (names := [a.name for a in operation.results[0]]):
                after = (c for c in constraints.after(origin.scope) if c.moves(names.index(moved[0]), axes))
            along = gathered or moved
            if (constraint := next(iter(after), None)) is not None:
                cause, reason = constraint, _scopes.reason_of_placement(gathered, moved, axes)
            elif along and not stored and _passes_on(operation, origin.scope, along, constraints):
                # The first user that does not compute the shards along these axes independently.
                user = next(
                    (
                        u
                        for u in exchange.users()
                        if u.scope and not _passes_on(_scopes.operation(u.scope), u.scope, along, constraints)
                    ),
                    None,
                )
                by = operation if user is None else _scopes.operation(user.scope)
                cause, reason = user or origin, _scopes.reason_of_use(operation, by, gathered, moved)
            else:
                reason = _scopes.reason(operation, kind, axes, phase, gathered)
        frames = cause.frames if isinstance(cause, Constraint) else cause.frames()
        pipeline = _scopes.around(exchange.origin.scope or origin.scope, "pipeline")
        if reason is None and pipeline is not None and axes:
            reason = _scopes.reason_in_pipeline(pipeline, kind, axes)
        said = _described(shape, array)
        given = operand if exchange.made is None else max(operand, result, key=lambda shape: shape.bytes)
        sent = sent_by(exchange.made or kind, pieces * given.bytes, exchange.devices)
        yield Collective(
            kind=kind,
            axes=exchange.axes,
            devices=exchange.devices,
            slices=exchange.slices,
            along_all=exchange.along_all,
            times=exchange.times,
            branches=exchange.branches,
            array=Said(f"{pieces} x {said}", said.of) if pieces > 1 else said,
            place=(i, len(exchange.carried)),
            size=pieces * result.bytes,
            sent=sent,
            phase=phase,
            operation=_scopes.said_of(operation),
            named_axes=() if operation is None else operation.axes,
            gathered=gathered,
            moved=moved,
            stored=stored,
            of_indices=operation is not None and array is not None and operation.looks_up(array.term),
            reason=reason,
            source=source(frames) or source(exchange.origin.frames()),
            scope=origin.scope or exchange.origin.scope,
            made=exchange.made,
            beside=exchange.beside,
            waits=exchange.waits(sent),
        )


def timeline(program: HloProgram, mesh: Mapping[str, int]) -> MemoryTimeline:
    """Describe the memory in the course of a program."""
    found = Lifetimes(program)
    moments = found.moments()
    phases = tuple(_scopes.phase(m.instruction.scope) for m in moments)
    held = tuple(m.held for m in moments)
    at_peak = found.held_at(held.index(max(held)))
    backward = {m.at for m, phase in zip(moments, phases, strict=True) if phase in ("backward", "recomputed")}
    # The compiler runs some instructions of the forward pass late, and some of the backward pass early, so there is no
    # single moment at which one ends and the other begins: kept arrays are counted when they take most.
    kept: list[tuple[int, int, HeldArray]] = []
    for buffer in found.buffers:
        until = max(backward & set(buffer.uses), default=0)
        if until and not buffer.argument and not buffer.result:
            described = _held(program, buffer, mesh)
            if described.phase == "forward":
                kept.append((buffer.first, until, described))
    at_once = ([x for first, last, x in kept if first <= moment <= last] for moment, _, _ in kept)
    most = max(at_once, key=lambda arrays: sum(h.bytes for h in arrays), default=[])
    return MemoryTimeline(held, phases, together(_held(program, b, mesh) for b in at_peak), together(most))


def _held(program: HloProgram, buffer: Buffer, mesh: Mapping[str, int]) -> HeldArray:
    """Describe an array by the first instruction that writes it and has a named operation.

    An array that stacks values from the iterations of a loop, for the backward pass say, is described by these values.
    """
    written: list[tuple[Instruction | None, HloShape]] = [(i, buffer.shape) for i in buffer.makers]
    if len(buffer.makers) > 1:
        turn = HloShape(buffer.shape.dtype, buffer.shape.sizes[1:])
        written += [(program.updates_with(i), turn) for i in buffer.makers if buffer.shape.sizes]
    written += [(program.origin(i), buffer.shape) for i in buffer.makers]
    named = ((i, shape) for i, shape in written if i and _scopes.operation(i.scope) is not None)
    scoped = ((i, buffer.shape) for i in buffer.makers if i.scope)
    maker, shape = next(named, None) or next(scoped, (buffer.makers[0], buffer.shape))
    operation, phase = _scopes.operation(maker.scope), _scopes.phase(maker.scope)
    array = None
    if operation is not None:  # it is a result, or the gradient of an operand, like the arrays that are all-reduced
        array = _scopes.array(operation, "all-reduce", phase, shape.sizes, mesh, {})
        if array is None:
            array = _scopes.array_in_other_shape(operation, phase, math.prod(shape.sizes), mesh)
    times = f"{buffer.shape.sizes[0]} x " if shape is not buffer.shape else ""
    return HeldArray(
        kind="argument" if buffer.argument else "result" if buffer.result else "temporary",
        array=times + _described(shape, array),
        count=1,
        bytes=buffer.shape.bytes,
        phase=phase,
        operation=_scopes.said_of(operation) or maker.scope.rpartition("/")[2].rstrip(")") or maker.opcode,
        source=source(program.frames(maker)),
    )


def _passes_on(
    operation: _scopes.ScopedOperation | None, scope: str, axes: Sequence[str], constraints: Constraints
) -> bool:
    """Return whether an operation is no reason for gathering axes, or for moving shards along them.

    A constraint is none if it does not replicate them, and the ones that do were found before.
    """
    if operation is None:
        return False
    placed = operation.name == "shard" and bool(constraints.after(scope))
    return placed or _scopes.keeps(operation, axes, _scopes.phase(scope))


def _described(shape: HloShape, array: _scopes.Array | None) -> Said:
    if array is None:
        return Said(str(shape), ((), shape.sizes))
    if array.places is None:
        names = tuple(a.name for a in array.term)
        return Said(f"{shape} of [{', '.join(names)}]", (names, ()))
    return array_said(shape.dtype, [(a.name, shape.sizes[place]) for a, place in array.places])
