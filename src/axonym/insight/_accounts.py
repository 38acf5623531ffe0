"""Work out the costs of a traced step under a mapping on many meshes at once: each amount, and the axes that divide it.

Names decide the exchanges of a step whatever the sizes of mesh axes are, so one walk of its events is enough for all
meshes with the same axes. The rest is arithmetic: see `cost_model`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..distribution.mesh_axes import Axes
from ..distribution.policy import distinct
from . import cost_model
from ._counted_exchanges import CountedExchange, Layout
from ._flops import Branches, ways
from ._named_events import NamedTrace, Occurrence, Offloaded, Open, Sum, Value
from .chips import Amount, Islands
from .cost_model import Multiplication, Part, Sent
from .report import Report

Sizes = Mapping[str, Amount]
"""For each mesh axis, its size, or its sizes on each of several meshes."""


class Meshes:
    """The meshes of some axes on chips: their sizes, places, and what exchanges take on each."""

    def __init__(self, axes: Axes, islands: Islands, fixed: Mapping[str, int]):
        """Arguments:
        fixed: the sizes of axes that are not to be chosen.
        """
        shapes = (dict(zip(axes, sizes, strict=True)) for sizes in _factors(islands.chips, axes, fixed))
        self.placed = found = [placed for shape in shapes for placed in islands.placements(shape or {"data": 1})]
        self.sizes: Sizes = {a: np.array([mesh[a] for mesh in found], float) for a in axes}
        self.kinds = [tuple(mesh[a] for a in axes) for mesh in found]
        """The sizes of each: several are one mesh on several places."""
        self.rates = functools.cache(
            lambda kind, axes: cost_model.stacked([islands.rate(mesh, kind, axes) for mesh in found])
        )
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


def device_count(sizes: Sizes, axes: Iterable[str]) -> Amount:
    """Return how many devices are along some mesh axes."""
    return math.prod((sizes[a] for a in axes), start=1.0)


def _divided(layout: Layout, x: Value, over: Sequence[Axes] | None = None) -> tuple[Axes, float]:
    """Return the mesh axes that divide an array, and its bytes."""
    over = [layout.by(x.by).used(n) for n, _ in x.base] if over is None else over
    return distinct(a for axes in over for a in axes), math.prod(n for _, n in x.base) * x.dtype.itemsize


class _Bytes(defaultdict[Axes, float]):
    """A sum of bytes, by the mesh axes that divide them."""

    def __init__(self, arrays: Iterable[tuple[Axes, float]] = ()):
        super().__init__(float)
        for axes, whole in arrays:
            self[axes] += whole

    def at(self, sizes: Sizes) -> Amount:
        return sum((whole / device_count(sizes, axes) for axes, whole in self.items()), start=0.0)


def loops_over(trace: NamedTrace, axis: str | None = None) -> list[Open]:
    """Return the loops that go over an axis, or over any."""
    loops = [e for e in trace.events if isinstance(e, Open) and e.what == "a loop"]
    return [e for e in loops if axis is None or axis in e.names]


class _Turn(NamedTuple):
    """The turn of a loop in a phase: what happens there overlaps."""

    times: int
    forward: bool
    layers: bool
    """True in a loop over layers that stages divide."""


def _turn_of(trace: NamedTrace, layout: Layout) -> Callable[[Occurrence], _Turn]:
    """Return what finds the turn of a loop in which an operation runs."""
    loops = {id(e.place.eqns[0]) for e in loops_over(trace, layout.stages.layers)} if layout.stages else set[int]()

    def turn_of(place: Occurrence) -> _Turn:
        layers = bool(loops) and any(id(eqn) in loops for eqn in place.eqns)
        return _Turn(place.times or 1, place.phase not in ("backward", "recomputed"), layers)

    return turn_of


def parts_of_trace(
    trace: NamedTrace, layout: Layout, exchanges: Iterable[CountedExchange], sizes: Sizes, touched: Amount
) -> list[Part]:
    """Return the parts of a step.

    Arguments:
        exchanges: what it sends, as `Account` counts it.
        touched: the bytes of arguments and results.
    """
    turn_of, stages = _turn_of(trace, layout), layout.stages
    is_parameter = functools.cache(lambda names: any(names <= x and len(x - names) <= 1 for x in trace.parameters))

    def sent(e: CountedExchange) -> Sent:
        axes, whole = _divided(layout, e.value, e.over)
        size = whole / device_count(sizes, axes)
        if e.kind == "all-to-all":
            size = size * device_count(sizes, e.axes)
        parameter = is_parameter(frozenset(e.value.names)) and bool(e.value.names)
        gradient = parameter and e.place.phase == "backward"
        return _named_exchange(e.kind, e.axes, size, gradient, parameter and e.kind == "all-gather", e.place.branches)

    found: dict[_Turn, tuple[list[Multiplication], _Bytes, list[Sent], _Bytes]] = defaultdict(
        lambda: ([], _Bytes(), [], _Bytes())
    )
    """The products, their results, exchanges, and what goes to the host, in each turn."""
    for event in trace.events:
        if isinstance(event, Sum) and event.flops:
            products, results, *_ = found[turn_of(event.place)]
            products.append(_multiplication_of(event, layout, sizes, is_parameter))
            if not products[-1].core:
                axes, whole = _divided(layout, event.result)
                results[axes] += whole
        elif isinstance(event, Offloaded):
            axes, whole = _divided(layout, event.array)
            found[turn_of(event.place)][3][axes] += whole
    for e in exchanges:
        if e.sent:
            found[turn_of(e.place)][2].append(sent(e))
    parts = [Part(1.0, touched=touched)]
    for turn, (products, results, exchanged, moved) in found.items():
        read = cost_model.TOUCHED * results.at(sizes)
        part = Part(turn.times, tuple(products), _merged(exchanged), read, moved.at(sizes), turn.forward)
        if stages is not None and turn.layers:
            # The layers are divided over stages, of which each waits for others at the beginning and the end.
            part = dataclasses.replace(part, times=part.times / stages.count)
            waiting = part.times * (stages.count - 1) / stages.microbatches
            parts += [part, dataclasses.replace(part, times=waiting, waits=True)]
        else:
            parts.append(part)
    return parts


def _multiplication_of(event: Sum, layout: Layout, sizes: Sizes, is_parameter: Any) -> Multiplication:
    layout = layout.by(event.place.by)

    def local(dims: Iterable[tuple[str | None, int]]) -> Amount:
        dims = list(dims)
        return math.prod(n for _, n in dims) / device_count(sizes, distinct(a for n, _ in dims for a in layout.used(n)))

    operation = event.place.operation
    flops = 2 * local(event.axes)
    around: dict[str, Any] = {"narrow": event.narrow, "branches": event.place.branches}
    if operation is None or len(operation.operands) < 2:
        return Multiplication(flops, 1e9, **around)
    first, second = (frozenset(a.name for a in term) for term in operation.operands[:2])
    # A gradient counts as its forward pass.
    summed = (first & second) - {a.name for term in operation.results for a in term}
    given = dict(event.axes)
    least = (local([(n, given[n]) for n in names if n in given]) for names in (first - second, second - first, summed))
    return Multiplication(
        flops, functools.reduce(np.minimum, least), not (is_parameter(first) or is_parameter(second)), **around
    )


def _named_exchange(kind: str, axes: Axes, size: Amount, gradient: bool, parameter: bool, branches: Branches) -> Sent:
    what = "summing gradients" if gradient else "gathering parameters" if parameter else "exchanging activations"
    return Sent(kind, axes, size, what, ahead=gradient or parameter, branches=branches)


_COMBINED = 30 * 2**20
"""The bytes up to which XLA combines sums of gradients: its default for CPUs and GPUs."""


def _merged(sent: Iterable[Sent]) -> tuple[Sent, ...]:
    """Add up exchanges of one kind; sums of gradients are launched together."""
    found: dict[Any, Sent] = {}
    for x in sent:
        key = x.kind, x.axes, x.what, x.branches
        if (before := found.get(key)) is not None:
            x = dataclasses.replace(x, size=before.size + x.size, count=before.count + x.count)
        found[key] = x
    return tuple(
        dataclasses.replace(x, count=np.minimum(x.count, np.ceil(x.size / _COMBINED)))
        if x.what == "summing gradients"
        else x
        for x in found.values()
    )


def parts_of_report(report: Report, parts: Sequence[Part]) -> list[Part]:
    """Replace the exchanges of parts by the ones in the partitioner's report, and their flops by its sum.

    Stages of a pipeline compute while they wait for others, so the report has these flops, too.
    """
    # Names say how often each product runs, and the report the exact sum of flops, to which products are scaled.
    own = [p for p in parts if not p.waits]
    flops = sum(float(product.flops) * p.times / ways(product.branches) for p in own for product in p.products)
    scale = (report.flops or flops) / flops if flops else 1.0
    scaled = (tuple(dataclasses.replace(x, flops=x.flops * scale) for x in p.products) for p in own)
    found = [dataclasses.replace(p, products=products, sent=()) for p, products in zip(own, scaled, strict=True)]
    for c in report.collectives:
        if not c.axes or not c.sent:
            continue
        size = c.size * c.devices if c.kind in ("reduce-scatter", "all-to-all") else c.size
        parameter = bool(c.parameters)
        gradient = parameter and c.kind in ("all-reduce", "reduce-scatter")
        one = _named_exchange(c.kind, c.axes, size, gradient, parameter or bool(c.stored), c.branches)
        times, forward = c.times or 1, c.phase not in ("backward", "recomputed")
        # It is in the part that it overlaps with. A pipeline has loops of its own, and exchanges while stages compute:
        # its exchanges are spread over the turns of the loop that computes most.
        alike = [i for i, p in enumerate(found) if p.forward == forward and p.products]
        if not (like := [i for i in alike if found[i].times == times][:1]) and times > 1:
            like = [i for i in alike if found[i].times > 1]
        if not like:
            found.append(Part(times, sent=(one,), forward=forward))
            continue
        i = max(like, key=lambda i: sum(float(x.flops) for x in found[i].products))
        turns = times / found[i].times
        one = dataclasses.replace(one, size=one.size * turns, count=one.count * turns)
        found[i] = dataclasses.replace(found[i], sent=(*found[i].sent, one))
    return [dataclasses.replace(p, sent=_merged(p.sent)) for p in found]


def kept_memory(trace: NamedTrace, layout: Layout, sizes: Sizes) -> tuple[Amount, Amount]:
    """Return the bytes of arguments and results, and the bytes that each device keeps at least.

    Results that become arguments of the next step count once. Beside what loops keep, a backward pass that recomputes
    layers has the products of one of them, and the gradients of all layers that a loop goes through, since it stacks
    them.
    """
    stored, stages, turn_of = layout.over_stages(), layout.stages, _turn_of(trace, layout)

    def at_once(place: Occurrence) -> float:
        """Return the share of a layer's batch that a stage computes at once: schedules may trace it as a whole."""
        turn = turn_of(place)
        return min(1.0, turn.times / stages.size / stages.microbatches) if stages and turn.layers else 1.0

    given, made = (
        _Bytes(_divided(stored, x, stored.over(x.base)) for x in arrays).at(sizes)
        for arrays in (trace.arguments, trace.results)
    )
    in_flight = min(stages.count, stages.microbatches) / stages.microbatches if stages else 1.0
    loops = _Bytes(_divided(stored, x) for x, _ in trace.kept).at(sizes) * in_flight
    largest: dict[Axes, float] = {}
    again: dict[int, _Bytes] = defaultdict(_Bytes)
    gradients: list[tuple[Axes, float]] = []
    stacked = [(frozenset(x.names), x.base) for x in trace.arguments if frozenset(x.names) in trace.parameters]
    for e in trace.events:
        if not isinstance(e, Sum) or not e.flops:
            continue
        (axes, whole), share, x = _divided(layout, e.result), at_once(e.place), e.result
        largest[axes] = max(largest.get(axes, 0.0), whole * share)
        if e.place.recomputes and e.place.phase == "recomputed":
            again[e.place.within][axes] += whole * share
        if e.place.phase == "backward" and e.place.times != 1:
            own = frozenset(x.names)
            whole_of = (base for names, base in stacked if own < names and len(base) == len(own) + 1)
            layers = next((d for base in whole_of for d in base if d[0] not in own), None)
            if layers is not None:
                all_layers = dataclasses.replace(x, base=(*x.base, layers))
                gradients.append(_divided(layout, all_layers, [*layout.over(x.base), stored.used(layers[0])]))
    products = (_Bytes([one]) for one in largest.items())
    most = functools.reduce(np.maximum, (b.at(sizes) for b in (*products, *again.values())), 0.0)
    return given + made, np.maximum(given, made) + loops + most + _Bytes(gradients).at(sizes)
