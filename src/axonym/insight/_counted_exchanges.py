"""Count by names what devices exchange and compute for a traced step under a mapping: `Account`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..core.errors import describe_axes, indivisible
from ..core.source_lines import source
from ..distribution import policy
from ..distribution.active_settings import REPORTED, Entry
from ..distribution.mesh_axes import Axes, mapped_axes
from ..distribution.policy import Mappings, PlacedAxes, Undecided, distinct
from ..names.distributing import PRODUCTS
from ..ops._blocks import pivot_of
from . import _scopes
from ._flops import Computed
from ._named_events import (
    BY_REPORT,
    Dims,
    Exchanged,
    Lies,
    Lookup,
    NamedTrace,
    NotKnown,
    Occurrence,
    Offloaded,
    Open,
    PerDevice,
    Placed,
    Renamed,
    Sum,
    Together,
    Use,
    Value,
    short_dtype,
)  # fmt: skip
from ._text import array_said
from .records import Collective, sent_by


@dataclasses.dataclass(frozen=True)
class LayerStages:
    """The stages of a pipeline, along the mesh axis `stage`."""

    layers: str
    """The axis of the layers."""
    size: int
    """The number of layers."""
    count: int
    microbatches: int


class Layout(Mappings):
    """The mesh axes that each name is sharded over; mesh axes of size one do not count."""

    def __init__(
        self,
        mesh: Mapping[str, int],
        compute: Mapping[str, Entry],
        storage: Mapping[str, Entry],
        joined: Mapping[str, Axes] = MappingProxyType({}),
        stages: LayerStages | None = None,
        around: Layout | None = None,
    ):
        """Arguments:
        around: the layout of the report, in which this one is of a mapping that the step has inside.
        """
        super().__init__(mesh, compute, storage)
        self.joined, self.stages, self._around = joined, stages, around or self
        # A step uses the same few names again and again.
        cached = functools.lru_cache(maxsize=4096)
        self._by = cached(self._of_mapping)
        self.used, self.stored = cached(self._used), cached(self._stored)
        lies = super().is_stored
        self._is_stored = cached(lambda names: lies(n for name in names for n in self._parts(name)))
        self._over = cached(lambda names: [*map(self.stored if self.is_stored(names) else self.used, names)])

    def by(self, mapping: Lies) -> Layout:
        """Return the layout of arrays that lie by a mapping inside of the step."""
        return self._around if mapping == BY_REPORT else self._around._by(mapping)

    def _of_mapping(self, mapping: Lies) -> Layout:
        own = dict(mapping)
        compute = {**self.compute, **own} if REPORTED in own else own
        own = {n: entry for n, entry in compute.items() if n != REPORTED}
        return Layout(self.mesh, own, self.storage, self.joined, self.stages, around=self)

    def over_stages(self) -> Layout:
        """Return where arguments and results lie, whose layers are divided over the stages, if there are any."""
        if self.stages is None:
            return self
        own = {self.stages.layers: "stage"}
        return Layout(self.mesh, {**self.compute, **own}, self.storage and {**self.storage, **own}, self.joined)

    def _used(self, name: str | None) -> Axes:
        return self._large(a for n in self._parts(name) for a in super(Layout, self).used(n))

    def _stored(self, name: str | None) -> Axes:
        return self._large(a for n in self._parts(name) for a in super(Layout, self).stored(n))

    def _parts(self, name: str | None) -> Axes:
        """Return the names of the joined axes that it is sharded by, such as the first of `batch*pos`, or its own."""
        if name is None:
            return ()
        if name in self.compute or name in self.storage:
            return (name,)
        return self.joined.get(name, (name.partition("*")[0],))

    def _large(self, axes: Iterable[str]) -> Axes:
        return tuple(a for a in axes if self.mesh.get(a, 1) > 1)

    def is_stored(self, names: Iterable[str | None]) -> bool:
        """Return whether an array with these axes is a parameter, which is sharded as it is stored."""
        return bool(self.storage) and self._is_stored(tuple(names))

    def over(self, dims: Dims) -> list[Axes]:
        """Return the mesh axes that each axis of an array is sharded over."""
        return self._over(tuple([n for n, _ in dims]))

    def local(self, dims: Dims, over: Sequence[Axes] | None = None) -> tuple[int, ...]:
        """Return the sizes of a shard."""
        over = [self.used(n) for n, _ in dims] if over is None else over
        return tuple(-(-size // self.count(axes)) for (_, size), axes in zip(dims, over, strict=True))

    def bytes(self, x: Value, over: Sequence[Axes] | None = None) -> int:
        """Return the bytes of a shard."""
        return math.prod(self.by(x.by).local(x.base, over)) * x.dtype.itemsize


def check_sizes(layout: Layout, arrays: Iterable[Value]) -> None:
    """Raise an error if a mesh axis is unknown, or does not divide an axis."""
    for mapping in (layout.compute, layout.storage):
        for name in mapping:
            if unknown := [a for a in mapped_axes(name, mapping) if a not in layout.mesh]:
                raise ValueError(
                    f"explain: axis {name!r} is mapped to mesh axis {unknown[0]!r}, but the mesh has "
                    f"{describe_axes(layout.mesh)}."
                )
    for x in arrays:
        for (name, size), axes in zip(x.dims, layout.over(x.dims), strict=True):
            if size % layout.count(axes):
                problem = indivisible(f"axis {name!r}", size, {a: layout.mesh[a] for a in axes})
                raise ValueError(
                    f"explain: {problem} Names tell nothing of axes that are stored padded: count with a rounded size, "
                    "or explain the compiled program."
                )


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


class Account:
    """The collectives and the flops of a step under a mapping."""

    def __init__(self, trace: NamedTrace, layout: Layout, divides: bool = True, all_known: bool = True):
        """Arguments:
        divides: whether mesh axes must divide the axes of arguments.
        all_known: whether to refuse a mapping of which names do not tell all exchanges.
        """
        self.trace, self.layout, self._divides = trace, layout, divides
        self.exchanges: list[CountedExchange] = []
        self.computed = Computed()
        self.computed.flops = None if trace.uncounted else 0
        self.products: list[tuple[Occurrence, Axes, int]] = []
        """Each product, the mesh axes that divide it, and its flops on each device."""
        self.open: dict[str, Occurrence] = {}
        self.uncertain = 0
        self.saved = 0
        """The counted flops that a compiler may save."""
        self._indices: set[tuple[int, Axes]] = set()
        self._gathered: set[tuple[int, int, Any]] = set()
        self._given = {x.origin for x in trace.arguments}
        if divides:
            check_sizes(layout, trace.sized)
        counts: dict[type, Callable[[Any], None]] = {
            Sum: self._sum, Use: self._use, Lookup: self._lookup, Together: self._together, Renamed: self._renamed,
            Exchanged: self._exchanged, Placed: self._change_placement, PerDevice: self._per_device, Open: self._along,
            Offloaded: lambda _: None,
        }  # fmt: skip
        for event in trace.events:
            self.layout = layout.by(event.place.by)
            counts[type(event)](event)
        self.layout = layout
        if self.open and all_known:
            at = ((what, source(place.frames)) for what, place in self.open.items())
            lines = [f"{what}{f' (at {line})' if line else ''}" for what, line in at]
            listed = f"{'; '.join(lines[:4])}{f'; and {len(lines) - 4} more' if lines[4:] else ''}"
            message = f"explain: by='names' cannot know what this mapping exchanges: {listed}"
            raise NotKnown(f"{message}. by='partitioner' shows it.", lines[0])

    def _per_device(self, event: PerDevice) -> None:
        used = {a for n, _ in event.result.dims for a in self.layout.used(n)}
        if idle := tuple(a for a, n in self.layout.mesh.items() if n > 1 and a not in used):
            self._exchange(event.place, "all-reduce", idle, event.result)

    def _along(self, event: Open) -> None:
        stored = self.layout.is_stored(event.names)
        if sharded := sorted(n for n in event.names if self.layout.used(n) or (stored and self.layout.stored(n))):
            self._leave_open(f"{event.what} along {', '.join(sharded)}", event.place)

    def _may_send(self, place: Occurrence, sent: int | None) -> None:
        """Add bytes that a compiler may send, or save, each time."""
        self.uncertain += (place.times or 1) * (sent or 0)

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

    def _change_placement(self, event: Placed) -> None:
        """Count what takes an array from one mapping to another: asked for, or where others lie by that one."""
        layout, place, x = self.layout.by(event.by), event.place, event.value
        if self._divides:
            try:
                check_sizes(layout, [x])
            except ValueError as e:
                line = source(place.frames)
                raise ValueError(f"{e} A mapping inside the step asks for it{f' at {line}' if line else ''}.") from None
        before, after = self.layout.over(x.dims), layout.over(x.dims)
        if before == after:
            return
        what = f"[{', '.join(n or '_' for n, _ in x.dims)}], which lies by another mapping"
        try:
            if layout.storage:
                raise Undecided(f"{what} beside a parameter mapping")
            found = policy.change(before, after)
            if not event.asked and (found is not None or place.phase == "backward"):
                raise Undecided(f"{what} than what it is used with")
        except Undecided as undecided:
            return self._leave_open(str(undecided), place)
        if found is not None:
            self._exchange(place, *found, dataclasses.replace(x, base=x.dims), after)

    def _exchanged(self, event: Exchanged) -> None:
        layout, x, along = self.layout, event.value, event.along
        if event.what == "matrices":
            shared, exchanges = event.details
            over = tuple(a for a in layout.mesh if layout.mesh[a] > 1 and (shared is None or a in shared))
            if layout.used(along) != over:
                self._leave_open(
                    f"a state with the axis {along}, which is not sharded over {', '.join(over)}", event.place
                )
            try:
                for dtype, (kind, axis, sizes, lies) in exchanges(over, layout.stored, layout.mesh):
                    dims = tuple(sizes.items())
                    value = dataclasses.replace(x, dims=dims, base=dims, dtype=dtype)
                    self._exchange(event.place, kind, (axis,), value, [lies.get(n, ()) for n in sizes])
            except ValueError as e:
                self._leave_open(str(e), event.place)
            return
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
        elif event.what == "elements":  # look-ups along the axis need a halo from each side, or all elements
            places, reach = event.details
            if layout.used(places.name) != axes or places.size % count:
                self._leave_open(f"places that are not sharded like {along}", event.place)
            elif reach is None or (widths := reach.widths(count)) is None:
                self._all_elements(event, axes)
            else:
                for width in filter(None, widths):
                    self._sent(event, "collective-permute", axes, (*rest, (None, width)))
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
            used = distinct(a for n, _ in event.axes for a in layout.used(n))
            total = event.flops
            for n, size in event.axes:
                if n in self.trace.matrices:  # devices that have fewer compute with zero matrices
                    total += total // size * (-size % layout.count(layout.used(n)))
            flops = total // layout.count(used) * (place.times or 1)
            self.computed.add(place.phase, flops, place.branches, event.narrow)
            if place.times is None:
                self.computed.flops = None
            self.products.append((place, used, flops))
            self.saved += flops if place.avoidable else 0
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
        lies = None
        for part in sums:
            self._exchange(place, part.kind, part.axes, result, lies)
            self.uncertain += (self.exchanges[-1].sent or 0) * place.kept_inside
            if part.kind == "reduce-scatter":
                lies = final.over
                if self.trace.spliced or "vmap(" in place.scope:
                    # No operation of this library does it, so a compiler may add it up on all devices.
                    self.uncertain += self.exchanges[-1].total_sent or 0
        if event.flops and lies is None:
            self._may_be_apart(place, layout.bytes(result), parts)
        if lies is not None and target is None:
            # A policy has sharded an array that is not stored. No layout is followed through the trace: later
            # operations assume that the sum lies by the mapping, so it is gathered at once.
            for part in sums:
                self._exchange(place, "all-gather", part.axes, result)

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
        self._may_send(place, max(0, apart - together))

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
        # Convolutions gather parameters if `distribute` constrains their results.
        op = place.operation
        gathered = elementwise or (op is not None and (op.rule.gathers or (self.trace.spliced and op.name == "conv")))
        if extra is None or not gathered:
            why = f"{stored} and used{_within(place)} by devices that do not share its mesh axes"
            self.open.setdefault(why, place)
        elif _scopes.around(place.scope, "dispatch") and any(layout.used(n) for n in names):
            self._leave_open(f"{stored}, and sharded where it is used", place)
        else:
            self._gather(event, extra)

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
            self.uncertain += (self.exchanges[-1].sent or 0) * ((place.times or 1) - (origin not in known))

    # --- look-ups ---

    def _lookup(self, event: Lookup) -> None:
        layout, table, result, place = self.layout, event.table, event.result, event.place
        # Otherwise it is a named update, or its gradient.
        looks_up = self.trace.spliced or (place.operation is not None and place.operation.name == "index")
        names = table.names, event.indices.names, event.rows[0]
        columns = policy.exchange_columns(*names, layout) if looks_up else None
        moved = () if columns is None else columns.axes
        over = distinct(a for n in event.indices.names for a in layout.used(n) if a not in moved)
        if moved:
            if not event.backward or self.trace.spliced:
                self._gather_indices(event, moved)
            self._exchange(place, "all-to-all", moved, result)
            used = {*moved, *(a for n in table.names for a in layout.stored(n))}
            if self.trace.spliced and (others := [a for a, n in layout.mesh.items() if n > 1 and a not in used]):
                # The compiler may share a look-up of raw JAX among the devices along other mesh axes.
                sent = sent_by("all-reduce", layout.bytes(table, layout.over(table.base)), layout.count(others)) or 0
                self._may_send(place, layout.bytes(result, [()] * len(result.base)) + sent * event.backward)
        elif layout.is_stored(table.names):
            if event.backward and (not looks_up or layout.gathered(event.rows[0])):
                self._leave_open("an update of a table that is stored sharded", place)
            elif not event.backward and not layout.is_stored(result.names):
                self._leave_open("a table that is stored sharded", place)
        if event.backward:
            if over:
                # The gradient lies like the table, so each device adds up its own shard.
                own = layout.over(table.base)
                self._exchange(place, "all-reduce", over, table, own)
                parts = [tuple(a for a in layout.used(n) if a in over) for n in event.indices.names]
                self._may_be_apart(place, layout.bytes(table, own), [axes for axes in parts if axes])
            return
        if not moved and layout.is_stored(result.names) and (extra := layout.extra(result.names)):
            # The compiler may gather it here, again where it is used, and once more in the backward pass.
            size, count = layout.bytes(result), layout.count(extra)
            self._may_send(place, 3 * (size // count) * (count - 1))
        if of_rows := layout.used(event.rows[0]):  # each device has some of the rows, and zeros for all others
            if not {a for n in event.indices.names for a in layout.used(n)}.isdisjoint(of_rows):
                self._leave_open("indices that are sharded like rows", place)
            self._exchange(place, "all-reduce", of_rows, result)

    def _gather_indices(self, event: Lookup, moved: Axes) -> None:
        """Count the all-gather of indices. Indices of one column are kept from the forward pass."""
        place, indices, layout = event.place, event.indices, self.layout
        over = [tuple(a for a in layout.used(n) if a not in moved) for n, _ in indices.base]
        if place.phase != "backward":
            self._exchange(place, "all-gather", moved, indices, over, of_indices=True)
        elif indices.dims[-1][1] > 1:
            count = layout.count(moved)
            self._may_send(place, sent_by("all-gather", layout.bytes(indices, over) // count, count))

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
            self._may_send(place, sent)
        if of_indices:
            self._indices.add((value.origin, axes))

    def described(self, found: CountedExchange) -> Collective:
        """Describe a collective."""
        place, x, axes = found.place, found.value, found.axes
        layout = self.layout.by(place.by)
        operation = place.operation
        if operation is not None:  # it says where its axes lie
            operands, results = (
                tuple(
                    tuple(dataclasses.replace(a, compute=layout.used(a.name), stored=layout.stored(a.name)) for a in t)
                    for t in own
                )
                for own in (operation.operands, operation.results)
            )
            operation = dataclasses.replace(operation, operands=operands, results=results)
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
            array=array_said(short_dtype(x.dtype), [(n, local[n]) for n in known]),
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
