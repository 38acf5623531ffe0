"""Work out the costs of a traced step under a mapping on many meshes at once: each amount, and the axes that divide it.

Names decide the exchanges of a step whatever the sizes of mesh axes are, so one walk of its events is enough for all
meshes with the same axes. The rest is arithmetic: see `cost_model`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..distribution.decisions import distinct
from ..distribution.mesh_axes import Axes
from . import cost_model
from ._branches import Branches, ways
from ._counted_exchanges import Account, CountedExchange
from ._named_events import NamedTrace, Occurrence, Offloaded, Open, Sum, Value
from ._named_layout import Layout
from .chips import Chip
from .cost_model import Estimate, Multiplication, Part, Sent
from .linked_chips import Amount, Islands
from .report import Report


class Sizes(dict[str, Amount]):
    """For each mesh axis, its size on each of several meshes."""

    def __init__(self, sizes: Mapping[str, Amount]):
        super().__init__(sizes)
        self._counts: dict[Axes, Amount] = {}

    def count(self, axes: Iterable[str]) -> Amount:
        """Return how many devices are along some mesh axes."""
        axes = tuple(axes)
        if axes not in self._counts:
            self._counts[axes] = functools.reduce(lambda a, b: a * b, (self[a] for a in axes), 1.0)
        return self._counts[axes]


class Meshes:
    """The meshes of some axes on chips: their sizes, places, and what exchanges take on each."""

    def __init__(self, axes: Axes, islands: Islands, fixed: Mapping[str, int]):
        """Arguments:
        fixed: the sizes of axes that are not to be chosen.
        """
        found: list[dict[str, int]] = []
        for sizes in _factors(islands.chips, axes, fixed):
            found += islands.placements(dict(zip(axes, sizes, strict=True)) or {"data": 1})
        self.placed = found
        self.sizes = Sizes({a: np.array([mesh[a] for mesh in found], float) for a in axes})
        sizes = [tuple(mesh[a] for a in axes) for mesh in found]
        numbers = {own: i for i, own in enumerate(dict.fromkeys(sizes))}
        self.kinds = [numbers[own] for own in sizes]
        """For each, the number of its sizes: several are one mesh on several places."""
        each = [functools.partial(islands.rate, mesh) for mesh in found]
        self.rates = functools.cache(lambda kind, axes: cost_model.stacked([rates(kind, axes) for rates in each]))
        """Returns what an exchange takes on each mesh."""


def _factors(chips: int, axes: Axes, fixed: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Return the sizes of mesh axes of more than one device each."""
    if not axes:
        return [()]
    first, *rest = axes
    sizes = [fixed[first]] if first in fixed else range(2, chips + 1)
    found = [n for n in sizes if chips % n == 0]
    if not rest:
        return [(n,) for n in found if n == chips]
    return [(n, *more) for n in found for more in _factors(chips // n, tuple(rest), fixed)]


class _Bytes:
    """A sum of bytes, each divided by some mesh axes."""

    def __init__(self) -> None:
        self.parts: dict[Axes, float] = {}

    def add(self, layout: Layout, x: Value, over: Sequence[Axes] | None = None, share: float = 1.0) -> None:
        axes, whole = _divided(layout, x, over)
        self.parts[axes] = self.parts.get(axes, 0.0) + whole * share

    def at(self, sizes: Sizes) -> Amount:
        return sum((whole / sizes.count(axes) for axes, whole in self.parts.items()), start=0.0)


def _divided(layout: Layout, x: Value, over: Sequence[Axes] | None = None) -> tuple[Axes, float]:
    """Return the mesh axes that divide an array, and its bytes."""
    over = [layout.used(n) for n, _ in x.base] if over is None else over
    return distinct(a for axes in over for a in axes), math.prod(n for _, n in x.base) * x.dtype.itemsize


class Evaluated(NamedTuple):
    """The cost of a step on each of several meshes."""

    fits: Any
    """True where the mesh axes divide the axes of the arguments."""
    estimate: Estimate
    bound: Amount
    memory: Amount


@dataclasses.dataclass(frozen=True)
class DividedLayers:
    """The stages of a pipeline."""

    layers: str
    """The axis of the layers."""
    size: int
    """The number of layers."""
    count: int
    microbatches: int

    over = "stage"
    """The mesh axis."""


class PatternAccount:
    """The parts of a step under a mapping, on meshes of any sizes."""

    def __init__(
        self,
        trace: NamedTrace,
        parameters: Sequence[set[str]],
        axes: Axes,
        compute: Mapping[str, Any],
        storage: Mapping[str, Any],
        stages: DividedLayers | None = None,
        exchanges: bool = True,
    ):
        """Arguments:
        parameters: the axes of each array of the model.
        exchanges: whether to work out what it exchanges, which raises `NotKnown` if names do not tell.
        """
        self._trace, self._stages = trace, stages
        sizes = dict.fromkeys(axes, 2)
        self.layout = Layout(sizes, compute, storage, trace.joined)
        """Without stages."""
        self._stored = self.layout
        if stages is not None:
            own = {stages.layers: stages.over}
            self._stored = Layout(sizes, {**compute, **own}, {**storage, **own} if storage else {}, trace.joined)
        self._exchanges = Account(trace, self.layout, divides=False).exchanges if exchanges else []
        self._parameters = {frozenset(names) for names in parameters}
        self._loops = set[int]() if stages is None else {id(e.place.eqns[0]) for e in loops_over(trace, stages.layers)}
        self._known: dict[frozenset[str], bool] = {}

    def evaluate(self, meshes: Meshes, chip: Chip) -> Evaluated:
        """Return what the step takes on each mesh."""
        sizes = meshes.sizes
        fits = np.ones(len(meshes.placed), bool)
        for x in self._trace.sized:
            for (_, size), over in zip(x.dims, self._stored.over(x.dims), strict=True):
                if over:
                    fits &= size % sizes.count(over) == 0
        touched, memory = self.memory(sizes)
        parts = self.parts(sizes, touched)
        bound = cost_model.bound(parts, meshes.rates, chip, touched)
        return Evaluated(fits, cost_model.estimate(parts, meshes.rates, chip), bound, memory)

    def memory(self, sizes: Sizes) -> tuple[Amount, Amount]:
        """Return the bytes of arguments and results, and the bytes that each device keeps at least: see `kept`."""
        scale = 1.0
        if self._stages is not None:
            scale = min(self._stages.count, self._stages.microbatches) / self._stages.microbatches
        return _memory(self._trace, self._stored, self.layout, self._parameters, sizes, scale, self._at_once)

    def _at_once(self, place: Occurrence) -> float:
        """Return the share of a layer's batch that a stage computes at once: schedules may trace it as a whole."""
        stages, turn = self._stages, self._turn(place)
        if stages is None or not turn.layers:
            return 1.0
        return min(1.0, turn.times / stages.size / stages.microbatches)

    def parts(self, sizes: Sizes, touched: Amount) -> list[Part]:
        """Return the parts of the step.

        Arguments:
            touched: the bytes of arguments and results.
        """
        products: dict[_Turns, list[Multiplication]] = {}
        results: dict[_Turns, _Bytes] = {}
        for event in self._trace.events:
            if not isinstance(event, Sum) or not event.flops:
                continue
            place = self._turn(event.place)
            product = self._product(event, sizes)
            products.setdefault(place, []).append(product)
            if not product.core:
                results.setdefault(place, _Bytes()).add(self.layout, event.result)
        sent: dict[_Turns, list[Sent]] = {}
        for e in self._exchanges:
            if e.sent:
                sent.setdefault(self._turn(e.place), []).append(self._sent(e, sizes))
        moved: dict[_Turns, _Bytes] = {}
        for event in self._trace.events:
            if isinstance(event, Offloaded):
                moved.setdefault(self._turn(event.place), _Bytes()).add(self.layout, event.array)
        found = [Part(1.0, touched=touched)]
        for place in dict.fromkeys((*products, *sent, *moved)):
            read = cost_model.TOUCHED * results[place].at(sizes) if place in results else 0.0
            offloaded = moved[place].at(sizes) if place in moved else 0.0
            exchanges = _merged(sent.get(place, ()))
            part = Part(place.times, tuple(products.get(place, ())), exchanges, read, offloaded, place.forward)
            found += self._staged(part) if place.layers else [part]
        return found

    def _turn(self, place: Occurrence) -> _Turns:
        layers = any(id(eqn) in self._loops for eqn in place.eqns)
        return _Turns(place.times or 1, place.phase not in ("backward", "recomputed"), layers)

    def _staged(self, part: Part) -> list[Part]:
        """Divide a loop over layers over stages, of which each waits for others at the beginning and the end."""
        stages = self._stages
        assert stages is not None
        own = dataclasses.replace(part, times=part.times / stages.count)
        waits = dataclasses.replace(own, times=own.times * (stages.count - 1) / stages.microbatches, waits=True)
        return [own, waits]

    def _product(self, event: Sum, sizes: Sizes) -> Multiplication:
        layout = self.layout

        def local(dims: Iterable[tuple[str | None, int]]) -> Amount:
            dims = list(dims)
            return math.prod(n for _, n in dims) / sizes.count(distinct(a for n, _ in dims for a in layout.used(n)))

        operation = event.place.operation
        terms = () if operation is None else operation.operands[:2]
        names = [frozenset(a.name for a in term) for term in terms]
        flops = 2 * local(event.axes)
        around: dict[str, Any] = {"narrow": event.narrow, "branches": event.place.branches}
        if len(names) < 2:
            return Multiplication(flops, 1e9, **around)
        given = dict(event.axes)
        rows, columns, summed = (
            local([(n, given[n]) for n in found if n in given])
            for found in (names[0] - names[1], names[1] - names[0], _summed(event, names))
        )
        core = not any(self._is_parameter(term) for term in names)
        return Multiplication(flops, functools.reduce(np.minimum, (rows, columns, summed)), core, **around)

    def _is_parameter(self, names: frozenset[str]) -> bool:
        """Return whether an array with some axes is a parameter, or a slice of one."""
        if names not in self._known:
            self._known[names] = any(names <= x and len(x - names) <= 1 for x in self._parameters)
        return self._known[names]

    def _sent(self, e: CountedExchange, sizes: Sizes) -> Sent:
        over = None if e.over is None else list(e.over)
        axes, whole = _divided(self.layout, e.value, over)
        size = whole / sizes.count(axes)
        if e.kind == "all-to-all":
            size = size * sizes.count(e.axes)
        parameter = self._is_parameter(frozenset(e.value.names)) and bool(e.value.names)
        gradient = parameter and e.place.phase == "backward"
        gathered = parameter and e.kind == "all-gather"
        return _named_exchange(e.kind, e.axes, size, gradient, gathered, e.place.branches)


class _Turns(NamedTuple):
    """The turn of a loop in a phase: what happens there overlaps."""

    times: int
    forward: bool
    layers: bool
    """True in a loop over layers that stages divide."""


def loops_over(trace: NamedTrace, axis: str | None = None) -> list[Open]:
    """Return the loops that go over an axis, or over any."""
    loops = [e for e in trace.events if isinstance(e, Open) and e.what == "a loop"]
    return [e for e in loops if axis is None or axis in e.names]


def _summed(event: Sum, names: Sequence[frozenset[str]]) -> frozenset[str]:
    """Return the axes that a product sums over, or if it is a gradient, that its forward pass did."""
    operation = event.place.operation
    assert operation is not None
    results = {a.name for term in operation.results for a in term}
    return (names[0] & names[1]) - results


def _named_exchange(kind: str, axes: Axes, size: Amount, gradient: bool, parameter: bool, branches: Branches) -> Sent:
    what = "summing gradients" if gradient else "gathering parameters" if parameter else "exchanging activations"
    return Sent(kind, axes, size, what, ahead=gradient or parameter, branches=branches)


def _merged(sent: Iterable[Sent]) -> tuple[Sent, ...]:
    """Add up exchanges of one kind."""
    found: dict[Any, Sent] = {}
    for x in sent:
        key = x.kind, x.axes, x.what, x.branches
        if (before := found.get(key)) is not None:
            x = dataclasses.replace(x, size=before.size + x.size, count=before.count + x.count)
        found[key] = x
    return tuple(found.values())


def parts_of_report(report: Report, parts: Sequence[Part]) -> list[Part]:
    """Replace the exchanges of parts by the ones in the partitioner's report, and their flops by its sum.

    Stages of a pipeline compute while they wait for others, so the report has these flops, too.
    """
    # Names say how often each product runs, and the report the exact sum of flops, to which products are scaled.
    own = [p for p in parts if not p.waits]
    flops = sum(float(product.flops) * p.times / ways(product.branches) for p in own for product in p.products)
    scale = (report.flops or flops) / flops if flops else 1.0
    found = [
        dataclasses.replace(
            p, products=tuple(dataclasses.replace(x, flops=x.flops * scale) for x in p.products), sent=()
        )
        for p in own
    ]
    for c in report.collectives:
        if not c.axes or not c.sent:
            continue
        size = c.size * c.devices if c.kind in ("reduce-scatter", "all-to-all") else c.size
        parameter = bool(c.parameters)
        gradient = parameter and c.kind in ("all-reduce", "reduce-scatter")
        one = _named_exchange(c.kind, c.axes, size, gradient, parameter or bool(c.stored), c.branches)
        _add(one, c.times or 1, c.phase not in ("backward", "recomputed"), found)
    return [dataclasses.replace(p, sent=_merged(p.sent)) for p in found]


def _add(one: Sent, times: int, forward: bool, parts: list[Part]) -> None:
    """Add an exchange to the part that it overlaps with, or if there is none, as a part of its own.

    A pipeline has loops of its own, and exchanges while stages compute: its exchanges are spread over the turns of the
    loop that computes most.
    """
    alike = [i for i, p in enumerate(parts) if p.forward == forward and p.products]
    if not (like := [i for i in alike if parts[i].times == times][:1]) and times > 1:
        like = [i for i in alike if parts[i].times > 1]
    if not like:
        parts.append(Part(times, sent=(one,), forward=forward))
        return
    i = max(like, key=lambda i: sum(float(x.flops) for x in parts[i].products))
    turns = times / parts[i].times
    one = dataclasses.replace(one, size=one.size * turns, count=one.count * turns)
    parts[i] = dataclasses.replace(parts[i], sent=(*parts[i].sent, one))


# --- memory ---


def kept(trace: NamedTrace, layout: Layout, parameters: Sequence[set[str]]) -> int:
    """Return the bytes that each device keeps at least, on the mesh of a layout."""
    return int(_memory(trace, layout, layout, {frozenset(names) for names in parameters}, Sizes(layout.mesh))[1])


def _memory(
    trace: NamedTrace,
    layout: Layout,
    used: Layout,
    parameters: Collection[frozenset[str]],
    sizes: Sizes,
    in_flight: float = 1.0,
    at_once: Callable[[Occurrence], float] = lambda _: 1.0,
) -> tuple[Amount, Amount]:
    """Return the bytes of arguments and results, and the bytes that each device keeps at least.

    Results that become arguments of the next step count once. Beside what loops keep, a backward pass that recomputes
    layers has the products of one of them, and the gradients of all layers that a loop goes through, since it stacks
    them.

    Arguments:
        used: the layout where arrays are computed.
        in_flight: the share of what loops keep that a device keeps at once.
        at_once: returns the share of a product that a device has at once.
    """
    arguments, results, loops, gradients = (_Bytes() for _ in range(4))
    for x in trace.arguments:
        arguments.add(layout, x, layout.over(x.base))
    for x in trace.results:
        results.add(layout, x, layout.over(x.base))
    for x, _ in trace.kept:
        loops.add(layout, x)
    largest: dict[Axes, float] = {}
    again: dict[int, _Bytes] = {}
    found = [e for e in trace.events if isinstance(e, Sum) and e.flops]
    for e in found:
        (axes, whole), share = _divided(used, e.result), at_once(e.place)
        largest[axes] = max(largest.get(axes, 0.0), whole * share)
        if e.place.recomputes and e.place.phase == "recomputed":
            again.setdefault(e.place.within, _Bytes()).add(used, e.result, share=share)
    stacked = [x for x in trace.arguments if frozenset(x.names) in parameters]
    for e in found:
        if e.place.phase == "backward" and e.place.times != 1 and (layers := _stacked_along(e.result, stacked)):
            all_layers = dataclasses.replace(e.result, base=(*e.result.base, layers))
            gradients.add(used, all_layers, [*used.over(e.result.base), layout.used(layers[0])])
    products = [whole / sizes.count(axes) for axes, whole in largest.items()]
    most = functools.reduce(np.maximum, [*products, *(b.at(sizes) for b in again.values())], 0.0)
    given, made = arguments.at(sizes), results.at(sizes)
    kept = np.maximum(given, made) + loops.at(sizes) * in_flight + most + gradients.at(sizes)
    return given + made, kept


def _stacked_along(x: Value, stacked: Iterable[Value]) -> tuple[str | None, int] | None:
    """Return the axis that one of some arrays has, and that its slices of the axes of an array lack."""
    own = {*x.names}
    return next(
        (d for y in stacked if own < {*y.names} and len(y.base) == len(own) + 1 for d in y.base if d[0] not in own),
        None,
    )
