"""Count by names what devices exchange and compute for a traced step under a mapping: `Account`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.source_lines import source
from ..distribution import policy
from ..distribution.decisions import PlacedAxes, Undecided, distinct
from ..distribution.mesh_axes import Axes
from ..names.distributing import PRODUCTS
from ..ops._blockwise import pivot_of
from ..ops._kernels import GATHERING
from . import _scopes
from ._branches import Branches, least, mean
from ._figures import Bounds, Memory, bounds_on
from ._named_events import (
    Dims,
    Exchanged,
    Lookup,
    NamedTrace,
    NotKnown,
    Occurrence,
    Open,
    PerDevice,
    Renamed,
    Sum,
    Together,
    Use,
    Value,
)
from ._named_layout import Layout, check_sizes
from ._text import array_said
from .chips import Chip
from .collectives import Collective, sent_by


@dataclasses.dataclass(frozen=True)
class CountedExchange:
    """A collective, before it is described."""

    place: Occurrence
    kind: str
    axes: Axes
    value: Value
    over: tuple[Axes, ...] | None
    """The mesh axes that the array is sharded over; None if the compute mapping gives them."""
    of_indices: bool
    size: int
    """The bytes of the array on each device."""
    sent: int | None

    @property
    def total_sent(self) -> int | None:
        times = self.place.times
        return None if self.sent is None or times is None else self.sent * times

    @property
    def branches(self) -> Branches:
        return self.place.branches


class Account:
    """The collectives and the flops of a step under a mapping."""

    def __init__(self, trace: NamedTrace, layout: Layout, divides: bool = True):
        """Arguments:
        divides: whether mesh axes must divide the axes of arguments.
        """
        self.trace, self.layout = trace, layout
        self.exchanges: list[CountedExchange] = []
        self.flops: int | None = None if trace.uncounted else 0
        self.computed: dict[str, int] = {}
        """The flops in each phase."""
        self._counted: list[tuple[Branches, str, int]] = []
        """The flops of each product; also as `wide`, unless it is of 8 bits."""
        self.open: dict[str, Occurrence] = {}
        self.uncertain = 0
        self.saved = 0
        """The counted flops that a compiler may save."""
        self._indices: set[tuple[int, Axes]] = set()
        self._gathered: set[tuple[int, int, Any]] = set()
        self._given = {x.origin for x in trace.arguments}
        if divides:
            check_sizes(layout, trace)
        for event in trace.events:
            self._add(event)
        if self.open:
            raise _refusal(self.open)

    @property
    def least_flops(self) -> int | None:
        """Return the flops if each conditional takes the branch with the fewest."""
        return None if self.flops is None else least(self._counted)["flops"]

    def bounds(self, chip: Chip, memory: Memory | None) -> Bounds:
        """Return lower bounds on time."""
        flops = None if self.flops is None else least(self._counted)["wide"]
        return bounds_on(chip, self.exchanges, memory, flops)

    def _add(self, event: object) -> None:
        if isinstance(event, Sum):
            self._sum(event)
        elif isinstance(event, Use):
            self._use(event)
        elif isinstance(event, Lookup):
            (self._updated if event.backward else self._looked_up)(event)
        elif isinstance(event, Together):
            self._together(event)
        elif isinstance(event, Renamed):
            self._renamed(event)
        elif isinstance(event, Exchanged):
            self._exchanged(event)
        elif isinstance(event, PerDevice):
            used = {a for n, _ in event.result.dims for a in self.layout.used(n)}
            if idle := tuple(a for a, n in self.layout.mesh.items() if n > 1 and a not in used):
                self._exchange(event.place, "all-reduce", idle, event.result)
        elif isinstance(event, Open):
            stored = self.layout.is_stored(event.names)
            if sharded := sorted(n for n in event.names if self.layout.used(n) or (stored and self.layout.stored(n))):
                self._leave_open(f"{event.what} along {', '.join(sharded)}", event.place)

    def _leave_open(self, what: str, place: Occurrence) -> None:
        """Record that names do not tell what an operation exchanges."""
        self.open.setdefault(f"{what}{_within(place)}", place)

    def _renamed(self, event: Renamed) -> None:
        over = (self.layout.over(dims) for dims in (event.before, event.after))
        for (before, _), (after, _), a, b in zip(event.before, event.after, *over, strict=True):
            if before is not None and after not in (before, None) and (a != b or (event.whole and a)):
                # If the operation works along the axis, it needs all of it, even if both names are sharded alike.
                sharded = "otherwise" if a != b else f"over {', '.join(a)}, too"
                self._leave_open(f"{before} becomes {after}, which is sharded {sharded}", event.place)

    def _exchanged(self, event: Exchanged) -> None:
        layout, x, along = self.layout, event.value, event.along
        if event.what == "parts":
            lacking = distinct(a for n in event.details for a in layout.used(n))
            if lacking and event.place.phase == "backward":
                self._sent(event, "all-reduce", lacking, x.dims)
            return
        if not (axes := layout.used(along)):
            return
        count, rest = layout.count(axes), tuple(d for d in x.dims if d[0] != along)
        ordered = all(at == tuple(a for a in layout.mesh if a in at) for at in map(layout.used, x.names) if at)
        if event.what in ("shards", "elements") and not ordered:
            return self._leave_open(f"{along}, over mesh axes in another order than the mesh has", event.place)
        if event.what == "shards":
            self._traded(event, axes, count)
        elif event.what == "elements":
            self._found_along(event, axes, count)
        elif event.what == "totals":
            self._sent(event, "all-gather", axes, (*rest, (None, count)))
        else:
            # Each shard of another axis may have a halo already, which the trace shows only once.
            whole = {n: size for given in self.trace.arguments for n, size in given.base}
            others = [layout.count(layout.used(n)) - 1 for n, _ in rest]
            wider = ((n, m + (m - whole.get(n or "", m)) * k) for (n, m), k in zip(rest, others, strict=True))
            width = math.prod(size for n, size in x.dims if n == along)
            self._sent(event, "collective-permute", axes, (*wider, (None, width)))

    def _sent(self, event: Exchanged, kind: str, axes: Axes, dims: Dims) -> None:
        self._exchange(event.place, kind, axes, dataclasses.replace(event.value, dims=dims, base=dims))

    def _all_elements(self, event: Exchanged, axes: Axes) -> None:
        """Count that each device gets all elements along an axis; their gradients are added up."""
        over = [() if n == event.along else self.layout.used(n) for n, _ in event.value.dims]
        kind = "reduce-scatter" if event.place.phase == "backward" else "all-gather"
        self._exchange(event.place, kind, axes, event.value, over)

    def _traded(self, event: Exchanged, axes: Axes, count: int) -> None:
        """Count an all-to-all: each device gets all of an axis, and a shard of another one."""
        layout, place, dims = self.layout, event.place, event.value.dims
        known = () if place.operation is None else place.operation.operands[0]
        local = {a.name: (a.size or 1) // layout.count(layout.used(a.name)) for a in known if a.name != event.along}
        pivot = pivot_of(local, count)
        if pivot in event.value.names:
            padded = -(-local[pivot] // count) * count
            self._sent(event, "all-to-all", axes, (*(d for d in dims if d[0] != pivot), (None, padded)))
        elif pivot is not None and place.phase != "backward":
            self._all_elements(event, axes)
        else:
            why = "no axis to trade for it" if pivot is None else f"an operand without {pivot}"
            self._leave_open(f"{event.along}, with {why}", place)

    def _found_along(self, event: Exchanged, axes: Axes, count: int) -> None:
        """Count what look-ups along an axis need: a halo from each side, or all elements."""
        places, reach = event.details
        if self.layout.used(places.name) != axes or places.size % count:
            self._leave_open(f"places that are not sharded like {event.along}", event.place)
        elif reach is None or (widths := reach.widths(count)) is None:
            self._all_elements(event, axes)
        else:
            rest = [d for d in event.value.dims if d[0] != event.along]
            for width in filter(None, widths):
                self._sent(event, "collective-permute", axes, (*rest, (None, width)))

    def _together(self, event: Together) -> None:
        # A parameter lies as it is stored, so its axes share a mesh axis if their storage shardings do.
        at = self.layout.stored if self.layout.is_stored(event.names) else self.layout.used
        seen: dict[str, str] = {}
        for name in event.names:
            for axis in at(name):
                if axis in seen:
                    self._leave_open(f"{seen[axis]} and {name} are both sharded over {axis}", event.place)
                seen[axis] = name

    # --- sums ---

    def _sum(self, event: Sum) -> None:
        layout, place, result = self.layout, event.place, event.result
        if event.flops:
            self._count_flops(event)
        # A parameter is summed where it is stored, as for its norm; in a product it lies as it is used.
        whole = layout.is_stored(n for n, _ in event.axes) and not event.flops
        at = layout.stored if whole else layout.used
        parts = [axes for axes in (at(n) for n, _ in event.summed) if axes]
        if not parts:
            return
        sizes = [size for _, size in result.base]
        try:
            target = self._must_lie(event)
            lying = _placed(result.base, layout.used)
            if event.flops and place.phase != "backward":
                final, sums = policy.add_up(parts, lying, sizes, layout)
            else:
                final, sums = policy.sums_of_jax(parts, lying, target, bool(event.flops))
        except Undecided as undecided:
            self._leave_open(str(undecided), place)
            return
        lies = self._add_up(place, result, sums, final)
        if event.flops and lies is None:
            self._may_be_apart(place, layout.bytes(result), parts)
        if lies is not None and target is None:
            # A policy has sharded an array that is not stored. No layout is followed through the trace: later
            # operations assume that the sum lies by the mapping, so it is gathered at once.
            for part in sums:
                self._exchange(place, "all-gather", part.axes, result)

    def _add_up(self, place: Occurrence, result: Value, sums: Sequence[policy.PartialSum], final: PlacedAxes) -> Any:
        """Count the collectives of a sum; return over what its axes are sharded if one is a reduce-scatter."""
        lies = None
        for part in sums:
            self._exchange(place, part.kind, part.axes, result, lies)
            self.uncertain += (self.exchanges[-1].sent or 0) * place.kept_inside
            if part.kind == "reduce-scatter" and (self.trace.spliced or "vmap(" in place.scope):
                # No operation of this library does it, so a compiler may add it up on all devices.
                self.uncertain += self.exchanges[-1].total_sent or 0
            lies = final.over if part.kind == "reduce-scatter" else lies
        return lies

    def _count_flops(self, event: Sum) -> None:
        used = distinct(a for n, _ in event.axes for a in self.layout.used(n))
        times = event.place.times
        each = event.flops // self.layout.count(used)
        mean_flops = mean(each * (times or 1), event.place.branches)
        self.flops = None if times is None or self.flops is None else self.flops + mean_flops
        self.computed[event.place.phase] = self.computed.get(event.place.phase, 0) + mean_flops
        kinds = ("flops",) if event.narrow else ("flops", "wide")
        self._counted += [(event.place.branches, kind, each * (times or 1)) for kind in kinds]
        self.saved += each * (times or 1) if event.place.avoidable else 0

    def _must_lie(self, event: Sum) -> PlacedAxes | None:
        """Return where the sum must lie in the end if it is the gradient of a parameter: as that is stored."""
        layout, names = self.layout, event.result.names
        if not layout.is_stored(names) or not layout.extra(names):
            return None
        if event.place.phase == "backward":
            return _placed(event.result.base, layout.stored)
        if event.flops:  # a weight made of others, as in low-rank adapters: the compiler chooses where it lies
            raise Undecided(f"a sum with the axes of a parameter, [{', '.join(names)}], which is no gradient")
        return None

    def _may_be_apart(self, place: Occurrence, size: int, parts: Sequence[Axes]) -> None:
        """Add the bytes sent if the compiler reduces the axes of an array one after another."""
        together = sent_by("all-reduce", size, self.layout.count(distinct(a for axes in parts for a in axes))) or 0
        apart = sum(sent_by("all-reduce", size, self.layout.count(axes)) or 0 for axes in parts)
        self.uncertain += (place.times or 1) * max(0, apart - together)

    # --- parameters ---

    def _use(self, event: Use) -> None:
        layout, place, names = self.layout, event.place, event.operand.names
        if event.intermediate and not self.trace.spliced:
            return
        over = {a for n in event.others for a in layout.used(n)}
        extra = policy.gathered_over(names, over, layout)
        elementwise = self.trace.spliced and not _is_product(place)
        if extra == () or (elementwise and over.isdisjoint(layout.extra(names))):
            return  # it is used as it is stored
        stored = f"[{', '.join(names)}], which is stored sharded"
        if extra is None or not (elementwise or self._gathers(place.operation)):
            why = f"{stored} and used{_within(place)} by devices that do not share its mesh axes"
            self.open.setdefault(why, place)
        elif _scopes.dispatch(place.scope) and any(layout.used(n) for n in names):
            self._leave_open(f"{stored}, and sharded where it is used", place)
        else:
            self._gather(event, extra)

    def _gathers(self, operation: _scopes.ScopedOperation | None) -> bool:
        """Return whether an operation gathers parameters; convolutions do whose results `distribute` constrains."""
        return operation is not None and (
            operation.name in GATHERING or (self.trace.spliced and operation.name == "conv")
        )

    def _gather(self, event: Use, extra: Axes) -> None:
        """Count the all-gather of a parameter, unless it was gathered before for the same use."""
        place, dims, origin = event.place, event.operand.dims, event.operand.origin
        known = {key[1] for key in self._gathered}
        phase = place.phase
        if self.trace.spliced:
            # The compiler gathers each array that it multiplies once, and what it broadcasts anew for each operation.
            apart = not _is_product(place) and not event.others.issubset(n for n, _ in dims)
            key = place.within, origin, place if apart else dims
        else:
            if phase == "backward" and not place.recomputes and (origin in known or origin not in self._given):
                return  # the forward pass keeps the gathered parameters
            key = place.within, origin, str(place.operation)
            # The forward pass gathers it even if only the gradient needs it.
            phase = "forward" if phase == "backward" else phase
        if key in self._gathered:
            return  # equal gathers in one body are computed once
        self._gathered.add(key)
        phase = "recomputed" if place.recomputes and phase else phase
        self._exchange(dataclasses.replace(place, counted_as=phase), "all-gather", extra, event.operand)
        if origin in self._given:
            # The compiler may gather an array only once that is gathered several times, and outside of a loop if
            # the loop does not change it.
            sent, times = self.exchanges[-1].sent or 0, place.times or 1
            self.uncertain += sent * (times if origin in known else times - 1)

    # --- look-ups ---

    def _columns_move(self, event: Lookup) -> Axes:
        """Return the mesh axes over which columns of a table are exchanged for rows."""
        names = event.table.names, event.indices.names, event.rows[0]
        found = policy.exchange_columns(*names, self.layout) if self._is_look_up(event.place) else None
        return () if found is None else found.axes

    def _looked_up(self, event: Lookup) -> None:
        layout, place = self.layout, event.place
        of_rows = layout.used(event.rows[0])
        if moved := self._columns_move(event):
            self._gather_indices(event, moved)
            self._exchange(place, "all-to-all", moved, event.result)
            self._may_share(event, moved)
        elif layout.is_stored(event.table.names) and not layout.is_stored(event.result.names):
            self._leave_open("a table that is stored sharded", place)
        elif over := layout.extra(event.result.names) if layout.is_stored(event.result.names) else ():
            # The compiler may gather it here, again where it is used, and once more in the backward pass.
            size, count = layout.bytes(event.result), layout.count(over)
            self.uncertain += (place.times or 1) * 3 * (size // count) * (count - 1)
        # Each device has some of the rows, and zeros for all others.
        if of_rows:
            if set(of_rows) & {a for n in event.indices.names for a in layout.used(n)}:
                self._leave_open("indices that are sharded like rows", place)
            self._exchange(place, "all-reduce", of_rows, event.result)

    def _updated(self, event: Lookup) -> None:
        layout, place = self.layout, event.place
        over = distinct(a for n in event.indices.names for a in layout.used(n))
        if moved := self._columns_move(event):
            if self.trace.spliced:
                self._gather_indices(event, moved)
            self._exchange(place, "all-to-all", moved, event.result)
            self._may_share(event, moved)
            over = tuple(a for a in over if a not in moved)
        elif layout.is_stored(event.table.names) and (not self._is_look_up(place) or layout.gathered(event.rows[0])):
            self._leave_open("an update of a table that is stored sharded", place)
        if over:
            # The gradient lies like the table, so each device adds up its own shard.
            own = layout.over(event.table.base)
            self._exchange(place, "all-reduce", over, event.table, own)
            parts = [tuple(a for a in layout.used(n) if a in over) for n in event.indices.names]
            self._may_be_apart(place, layout.bytes(event.table, own), [axes for axes in parts if axes])

    def _is_look_up(self, place: Occurrence) -> bool:
        """Return whether an operation is a look-up or its gradient, rather than a named update or its gradient."""
        return self.trace.spliced or (place.operation is not None and place.operation.name == "index")

    def _gather_indices(self, event: Lookup, moved: Axes) -> None:
        """Count the all-gather of indices. Indices of one column are kept from the forward pass."""
        place, indices, layout = event.place, event.indices, self.layout
        over = [tuple(a for a in layout.used(n) if a not in moved) for n, _ in indices.base]
        if place.phase != "backward":
            self._exchange(place, "all-gather", moved, indices, over, of_indices=True)
        elif indices.dims[-1][1] > 1:
            count = layout.count(moved)
            sent = sent_by("all-gather", layout.bytes(indices, over) // count, count) or 0
            self.uncertain += sent * (place.times or 1)

    def _may_share(self, event: Lookup, moved: Axes) -> None:
        """Add the bytes sent if the compiler shares a look-up of raw JAX among the devices along other mesh axes."""
        layout, table = self.layout, event.table
        used = {*moved, *(a for n in table.names for a in layout.stored(n))}
        if self.trace.spliced and (others := [a for a, n in layout.mesh.items() if n > 1 and a not in used]):
            sent = layout.bytes(event.result, [()] * len(event.result.base))
            if event.backward:
                sent += sent_by("all-reduce", layout.bytes(table, layout.over(table.base)), layout.count(others)) or 0
            self.uncertain += sent * (event.place.times or 1)

    # --- collectives ---

    def _exchange(
        self,
        place: Occurrence,
        kind: str,
        axes: Axes,
        value: Value,
        over: Sequence[Axes] | None = None,
        of_indices: bool = False,
    ) -> None:
        """Record a collective; `over` is the sharding after a gather, or before other collectives."""
        # A device has only its part before a gather, and `over` is the sharding after it.
        layout, count = self.layout, self.layout.count(axes)
        size = layout.bytes(value, over)
        sent = sent_by(kind, size // count if kind == "all-gather" else size, count)
        axes = tuple(a for a in layout.mesh if a in axes)
        own = None if over is None else tuple(over)
        self.exchanges.append(CountedExchange(place, kind, axes, value, own, of_indices, size, sent))
        known = of_indices and (value.origin, axes) in self._indices
        if place.avoidable or known:
            self.uncertain += (sent or 0) * (place.times or 1)
        if of_indices:
            self._indices.add((value.origin, axes))

    def described(self, found: CountedExchange) -> Collective:
        """Describe a collective."""
        layout, place, x, axes = self.layout, found.place, found.value, found.axes
        operation = place.operation and _located(place.operation, layout)
        local = {n: s for (n, _), s in zip(x.base, layout.local(x.base, found.over), strict=True) if n is not None}
        terms = () if operation is None else (*operation.operands, *operation.results)
        # In the order of the matching operand or result: transposes are part of products.
        known = next((t for t in ([a.name for a in term] for term in terms) if set(t) == set(local)), local)
        names = tuple(n for n in x.names if set(axes) & {*layout.stored(n), *layout.used(n)})
        gathered = names if found.kind == "all-gather" else ()
        reason = operation and _scopes.reason(operation, found.kind, axes, place.phase, gathered)
        count = layout.count(axes)
        return Collective(
            kind=found.kind,
            axes=axes,
            devices=count,
            along_all=True,
            times=place.times,
            branches=place.branches,
            array=array_said(x.short_dtype, [(n, local[n]) for n in known]),
            place=(0, 1),
            size=found.size // count if found.kind == "reduce-scatter" else found.size,
            sent=found.sent,
            phase=place.phase,
            operation=_scopes.said_of(operation),
            named_axes=() if operation is None else operation.axes,
            gathered=gathered,
            moved=(),
            stored=names if found.kind == "all-gather" and not found.of_indices else (),
            of_indices=found.of_indices,
            reason=reason,
            source=source(place.frames),
            scope=place.scope,
        )


def _refusal(found: Mapping[str, Occurrence]) -> NotKnown:
    lines = []
    for what, place in list(found.items())[:4]:
        line = source(place.frames)
        lines.append(f"{what}{f' (at {line})' if line else ''}")
    more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
    listed = "; ".join(lines)
    message = f"explain: by='names' cannot know what this mapping exchanges: {listed}{more}. by='partitioner' shows it."
    return NotKnown(message, lines[0])


def _located(operation: _scopes.ScopedOperation, layout: Layout) -> _scopes.ScopedOperation:
    """Add to an operation the mesh axes that a mapping shards its axes over."""

    def term(axes: _scopes.Term) -> _scopes.Term:
        return tuple(dataclasses.replace(a, compute=layout.used(a.name), stored=layout.stored(a.name)) for a in axes)

    operands, results = (tuple(map(term, terms)) for terms in (operation.operands, operation.results))
    return dataclasses.replace(operation, operands=operands, results=results)


def _within(place: Occurrence) -> str:
    if place.operation is None:
        return "" if place.frames else " where it is returned"
    return f" in {place.operation}"


def _placed(dims: Dims, at: Callable[[str | None], Axes]) -> PlacedAxes:
    """Return where an array lies. Two axes with one name count as nameless, as in products of derivatives."""
    names = [n for n, _ in dims]
    return PlacedAxes([n if names.count(n) == 1 else None for n in names], [*map(at, names)])


def _is_product(place: Occurrence) -> bool:
    return place.eqns[0].primitive.name in PRODUCTS
