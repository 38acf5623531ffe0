"""Search the meshes and mappings of a step: all whose cost names tell, and a few by the partitioner."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType

from ..core.source_lines import source
from ..distribution.mesh_axes import Axes, entry_of, mesh_axes
from ..names.distributing import DistributedFunction
from ..sharding.leaves import leaves_of
from . import cost_model
from ._accounts import Meshes, device_count, kept_memory, loops_over, parts_of_report, parts_of_trace
from ._counted_exchanges import Account, LayerStages, Layout, check_sizes
from ._named_events import NamedTrace, NotKnown, Placed, Renamed, Sum
from ._named_trace import named_trace
from ._text import as_shown
from .chips import Islands
from .cost_model import Bounds, Estimate
from .explaining import explain
from .report import Report

Over = str | tuple[str, ...]

NEAR = 1.1
"""The factor by which a mapping that divides no axis of the model across slices may take longer than others, and still
comes before them: networks differ by more."""


@dataclasses.dataclass(frozen=True)
class PlannedMapping:
    """A mesh and two mappings, and their cost.

    >>> axn.insight.plan(lambda x: x * 2, axn.ones({"batch": 8}), chips=2).best.mesh
    {'model': 2}
    """

    mesh: Mapping[str, int]
    compute: Mapping[str, Over]
    storage: Mapping[str, Over]
    """The parameter mapping, for `axonym.fsdp`; empty if parameters are stored as they are used."""
    bounds: Bounds
    memory: int
    """The bytes that each device keeps at least."""
    flops: int | None
    sent: int
    """The bytes that each device sends."""
    uncertain: int
    by: str = "names"
    """Its source: `names`, or `partitioner` where names are not enough."""
    raw: bool = False
    """True if the step is a function of raw arrays, made by `axonym.names.distribute`."""
    estimate: Estimate = dataclasses.field(default_factory=lambda: Estimate({}))
    """The time of a step, estimated, in terms: by this, mappings are ordered."""
    choices: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The values chosen for the arguments of the step's builder, or their keys, if these were given."""
    keyed: tuple[str, ...] = ()
    """The arguments of the builder whose values have keys."""
    topology: Islands | None = None
    """The chips that the estimate is for; the last axes of the mesh are within islands."""

    @property
    def seconds(self) -> float:
        """Return the lower bound on the time of a step, by which plans prune: the longest of its bounds.

        >>> axn.insight.plan(lambda x: x * 2, axn.ones({"batch": 8}), chips=2).best.seconds > 0
        True
        """
        return self.bounds.longest

    @property
    def mapping(self) -> Any:
        """Return the argument `mapping` for `explain` and `compare`.

        >>> axn.insight.plan(lambda x: x * 2, axn.ones({"batch": 8}), chips=2).best.mapping
        {'batch': 'model'}
        """
        return (dict(self.storage), dict(self.compute)) if self.storage else dict(self.compute)

    @property
    def between(self) -> str | list[str] | None:
        """Return the mesh axes that cross slices or islands, as `make_mesh` takes them.

        >>> print(axn.insight.plan(lambda x: x * 2, axn.ones({"batch": 8}), chips=2).best.between)
        None
        """
        axes = [] if self.topology is None else self.topology.between(self.mesh)
        return axes if len(axes) > 1 else axes[0] if axes else None

    def code(self) -> str:
        """Return the mesh and the mappings as Python.

        >>> print(axn.insight.plan(lambda x: x * 2, axn.ones({"batch": 8}), chips=2).best.code())
        mesh = axn.make_mesh({'model': 2})
        compute = {'batch': 'model'}
        step = axn.named_jit(step, compute, in_placement=compute)
        """
        across = "" if self.between is None else f", between={self.between!r}"
        lines = [f"mesh = axn.make_mesh({dict(self.mesh)!r}{across})", f"compute = {dict(self.compute)!r}"]
        if self.choices:
            value = {n: f"choices[{n!r}][{x!r}]" if n in self.keyed else repr(x) for n, x in self.choices.items()}
            lines.append(f"step = build({', '.join(f'{n}={x}' for n, x in value.items())})")
        if self.storage:
            lines.append(f"storage = {dict(self.storage)!r}")
        if self.raw:
            lines.append(f"step = axn.names.distribute(step, compute{', storage' * bool(self.storage)}, names=names)")
        elif self.storage:
            lines.append("step = axn.fsdp(step, storage, compute)")
        else:
            lines.append("step = axn.named_jit(step, compute, in_placement=compute)")
        return "\n".join(lines)

    def _what(self) -> tuple[str, str, str]:
        """Return the mesh, the mapping and the choices in words, by which it is told from other mappings."""
        return str(self.mesh), str(self.mapping), str(self.choices)

    def _order(self) -> tuple[float, float, int]:
        """Return the sort key of plans: if their estimates are shown alike, their bounds decide."""
        complexity = len(self.mesh) + len(self.compute) + len(self.storage)
        return as_shown(self.estimate.seconds), as_shown(self.seconds), complexity


@dataclasses.dataclass(frozen=True)
class Ranked:
    """A pattern on its meshes, with what each costs."""

    axes: Axes
    compute: dict[str, Over]
    storage: dict[str, Over]
    meshes: Meshes
    rows: np.ndarray
    """The best place of each mesh that divides the axes."""
    seconds: np.ndarray
    bound: np.ndarray
    memory: np.ndarray
    estimate: Estimate


class TracedStep:
    """A step to plan, traced once."""

    def __init__(
        self, fn: Callable[..., Any], args: Sequence[Any], choices: Mapping[str, Any] | None = None, keyed: Axes = ()
    ):
        self.fn, self.args, self.choices, self.keyed = fn, args, choices or {}, keyed
        trace = named_trace(fn, args, {})
        if trace.uncounted:
            raise ValueError(
                f"plan: how long {trace.name} computes is not known, because the flops of "
                f"{', '.join(trace.uncounted)} are not counted. Compare mappings that you choose, with `compare`."
            )
        for event in trace.events:
            if isinstance(event, Placed) and (own := {n: over for n, over in event.by if over is not None}):
                line = source(event.place.frames)
                raise ValueError(
                    f"plan: {trace.name} has a mapping inside, {own}{f' (at {line})' if line else ''}, over mesh axes "
                    "that a plan chooses. Place arrays by the active mapping, as in `axonym.shard(x)`, or compare "
                    "mappings that you choose, with `compare`."
                )
        self.raw = isinstance(fn, DistributedFunction)
        of_model, *of_batch = fn.named(args, {})[0] if isinstance(fn, DistributedFunction) else args
        self.of_model, self.of_batch = names_of(of_model), names_of(of_batch)
        parameters = (frozenset(leaf.names or ()) - {"_"} for leaf in leaves_of(of_model)[0])
        self.trace = dataclasses.replace(trace, parameters=frozenset(parameters))

    def stages(self, count: int, microbatches: int) -> LayerStages | None:
        """Return the stages over which the layers can be divided: the axis of the model that a loop goes over."""
        loops = [n for e in loops_over(self.trace) for n in sorted(e.names)]
        layers = next((n for n in loops if n in self.of_model), None)
        if layers is None:
            return None
        size = next(size for x in self.trace.arguments for n, size in x.dims if n == layers)
        return LayerStages(layers, size, count, microbatches)


class Search:
    """All meshes and mappings of a traced step whose cost can be computed from names."""

    def __init__(
        self,
        step: TracedStep,
        islands: Islands,
        stages: LayerStages | None = None,
        like: Search | None = None,
    ):
        """Arguments:
        like: the search of the same step by other choices, which considers the same mappings if it has the same axes.
        """
        self.step, self.trace, self.islands, self.stages = step, step.trace, islands, stages
        self.chip, self.chips = islands.chip, islands.chips
        of_model, of_batch = step.of_model, step.of_batch
        self.ruled_out = 0
        """The number of mappings that the partitioner did not get, since the exchanges known by name take too long."""
        self.left_out: dict[str, str] = {}
        """The shardings that are not considered, each with the reason."""
        self._sizes = {n: size for x in self.trace.arguments for n, size in x.dims if n is not None}
        if like is not None and like._sizes.keys() == self._sizes.keys():
            self.refused, self.batch, self.tensor = like.refused, like.batch, like.tensor
            self._multiplied, self.stored, self.groups = like._multiplied, like.stored, like.groups
            return
        alone = [n for n in self._sizes if self._told({n: "model"}, {})]
        self.refused = sorted((n for n in self._sizes if n not in alone), key=lambda n: n not in of_batch)
        self.batch = [n for n in of_batch if n not in of_model and n in alone]
        self.tensor = [n for n in alone if n in of_model or n in of_batch]
        data: dict[str, Over] = {self.batch[0]: "data"} if self.batch else {}
        self._multiplied = _multiplied(self.trace)
        self.stored = [n for n in of_model if n in self._multiplied and data and self._told(data, {n: "data"})]
        # Pairs of axes that cannot be sharded together; only groups without such a pair are considered.
        pairs = itertools.combinations(self.tensor, 2)
        apart = {pair for pair in pairs if not self._told(dict.fromkeys(pair, "model"), {}, note=False)}
        self.groups = [
            group
            for count in range(len(self.tensor) + 1)
            for group in itertools.combinations(self.tensor, count)
            if apart.isdisjoint(itertools.combinations(group, 2))
        ]

    def _told(self, compute: Mapping[str, Over], storage: Mapping[str, Over], note: bool = True) -> bool:
        """Return whether the cost of a mapping can be computed from names, on a mesh whose axes divide everything."""
        try:
            # Whether names suffice does not depend on the sizes of mesh axes, so the smallest will do.
            Account(self.trace, self._layout({"data": 2, "model": 2}, compute, storage), divides=False)
        except NotKnown as e:
            if note:
                what = f"storing {', '.join(storage)} sharded" if storage else f"sharding {', '.join(compute)}"
                self.left_out.setdefault(what, e.reason)
            return False
        return True

    # --- by names ---

    def run(self, meshes_of: Callable[[Axes], Meshes]) -> Iterator[Ranked]:
        """Yield the cost of each pattern on all meshes that divide its axes."""
        patterns = {str(pattern): pattern for pattern in self._patterns()}
        for axes, compute, storage in patterns.values():
            axes = ("stage", *axes) if self.stages else axes
            meshes = meshes_of(axes)
            if not meshes.placed:
                continue
            layout = self._layout(dict.fromkeys(axes, 2), compute, storage)
            try:
                exchanges = Account(self.trace, layout, divides=False).exchanges
            except NotKnown:
                continue
            touched, memory = kept_memory(self.trace, layout, meshes.sizes)
            parts = parts_of_trace(self.trace, layout, exchanges, meshes.sizes, touched)
            bound = cost_model.bound(parts, meshes.rates, self.chip, touched)
            estimate = cost_model.estimate(parts, meshes.rates, self.chip)
            seconds, bound, memory = (np.broadcast_to(x, len(meshes.placed)) for x in (estimate.seconds, bound, memory))
            # The best place of each mesh.
            fits, stored = np.ones(len(meshes.placed), bool), layout.over_stages()
            for (_, size), over in (d for x in self.trace.sized for d in zip(x.dims, stored.over(x.dims), strict=True)):
                fits &= size % device_count(meshes.sizes, over) == 0
            handicap = [NEAR if self.divides_model(compute, placed) else 1.0 for placed in meshes.placed]
            order = [i for i in np.argsort(seconds * handicap, kind="stable") if fits[i]]
            best = list({meshes.kinds[i]: i for i in reversed(order)}.values())
            yield Ranked(axes, compute, storage, meshes, np.array(best, int), seconds, bound, memory, estimate)

    def divides_model(self, compute: Mapping[str, Over], mesh: Mapping[str, int]) -> bool:
        """Return whether slices divide an axis of the model that is computed with, other than by stages."""
        crossing = {*self.islands.between(mesh)} - {"stage"}
        return any(n in self.step.of_model and crossing & {*mesh_axes(over)} for n, over in compute.items())

    def _layout(self, mesh: Mapping[str, int], compute: Mapping[str, Over], storage: Mapping[str, Over]) -> Layout:
        return Layout(mesh, {**compute, **self.trace.over_matrices(mesh)}, storage, self.trace.joined, self.stages)

    def _patterns(self) -> Iterator[tuple[Axes, dict[str, Over], dict[str, Over]]]:
        """Yield mesh axes and mappings: of the batch, of groups of axes, and of stored parameters."""
        if self.chips == (self.stages.count if self.stages else 1):
            yield (), {}, {}
        for batch, group in itertools.product(self.batch or [None], self.groups):
            if batch in group:
                continue
            used = self._as_used(group)
            by_group: dict[str, Over] = dict.fromkeys(group, "model")
            if group:
                yield ("model",), by_group, {}
            if batch is None:
                yield (("data", "model") if group else ("data",)), by_group, {}
                continue
            over: Over = "data" if group else ("data", "model")
            stored: list[dict[str, Over]] = [{n: "data", **used} for n in self.stored if n not in group]
            alone: dict[str, Over] = {batch: "data"}
            for storage in () if group else ({}, *stored):
                yield ("data",), alone, storage
            # Two mesh axes that both shard the batch differ from one only if parameters are stored over one.
            compute: dict[str, Over] = {batch: over, **by_group}
            replicas: dict[str, Over] = {batch: ("replica", "data"), **by_group}
            for storage in ({}, *stored) if group else stored:
                yield ("data", "model"), compute, storage
            for storage in stored if group else ():
                yield ("replica", "data", "model"), replicas, storage
            if len(group) > 1:  # the smallest axis of the group may be sharded over fewer devices than the others
                least = min(group, key=lambda n: self._sizes[n])
                wide: dict[str, Over] = {n: "model" if n == least else ("model", "inner") for n in group}
                kept = {n: over for n, over in wide.items() if n in self._multiplied}
                for storage in ({}, *({n: "data", **kept} for n in self.stored if n not in group)):
                    yield ("data", "model", "inner"), {batch: "data", **wide}, storage

    def found(self, ranked: Ranked, row: int) -> PlannedMapping:
        """Return the exact costs of a mesh."""
        placed = ranked.meshes.placed[row]
        mesh = {a: n for a, n in placed.items() if n > 1} or {"data": 1}
        layout = self._layout(mesh, ranked.compute, ranked.storage)
        account = Account(self.trace, layout)
        compute = self._with_stages(ranked.compute)
        storage = self._with_stages(ranked.storage) if ranked.storage else {}
        flops = account.computed.flops
        sent = sum(e.total_sent or 0 for e in account.exchanges)
        if self.stages is not None:
            # Layers are divided over the stages; the few things beside them are not.
            flops, sent = flops and flops // self.stages.count, sent // self.stages.count
        touched, memory = kept_memory(self.trace, layout, mesh)
        parts = parts_of_trace(self.trace, layout, account.exchanges, mesh, touched)
        bounds = cost_model.bounds(parts, functools.partial(self.islands.rate, placed), self.chip, touched)
        return PlannedMapping(
            mesh, compute, storage, bounds, int(memory), flops, sent, account.uncertain, raw=self.step.raw,
            estimate=ranked.estimate.at(row), topology=self.islands, choices=self.step.choices, keyed=self.step.keyed,
        )  # fmt: skip

    def _with_stages(self, mapping: Mapping[str, Over]) -> dict[str, Over]:
        return {**mapping, **({self.stages.layers: "stage"} if self.stages else {})}

    # --- by reports ---

    def estimated(self, found: PlannedMapping, report: Report) -> PlannedMapping:
        """Return the costs of a mapping on its best place, with the exchanges of a report."""
        layers = None if self.stages is None else self.stages.layers
        compute, storage = ({n: over for n, over in m.items() if n != layers} for m in (found.compute, found.storage))
        layout = self._layout(found.mesh, compute, storage)
        touched, _ = kept_memory(self.trace, layout, found.mesh)
        parts = parts_of_report(report, parts_of_trace(self.trace, layout, (), found.mesh, touched))
        estimate, placed = self._on_best_place(parts, found.mesh, compute)
        bounds = cost_model.bounds(parts, functools.partial(self.islands.rate, placed), self.chip, touched)
        if report.bounds is not None:
            bounds = dataclasses.replace(bounds, compute=report.bounds.compute)
        return dataclasses.replace(found, mesh=placed, bounds=bounds, estimate=estimate)

    def _on_best_place(
        self, parts: Sequence[cost_model.Part], mesh: Mapping[str, int], compute: Mapping[str, Over]
    ) -> tuple[Estimate, dict[str, int]]:
        def preferred(one: tuple[Estimate, dict[str, int]]) -> float:
            return float(one[0].seconds) * (NEAR if self.divides_model(compute, one[1]) else 1.0)

        each = [
            (cost_model.estimate(parts, functools.partial(self.islands.rate, placed), self.chip), placed)
            for placed in self.islands.placements(mesh)
        ]
        estimate, placed = min(each, key=preferred)
        return estimate.at(0), placed

    def ask(self, limit: int, least: float) -> Iterator[PlannedMapping]:
        """Plan by the partitioner mappings whose cost names do not determine, few devices along an axis first."""
        sizes = [n for n in range(2, self.chips + 1) if self.chips % n == 0]
        # Devices with different experts also have different rows, if no array has both axes.
        experts = [n for n in self.refused if n in self.trace.exchanged]
        others = [n for n in self.refused if n not in experts]
        for alike, names in ((True, experts), (False, others), (False, experts)):
            for size, name in itertools.product(sizes, names):
                for mesh, compute, storage in self._over(size, name, alike):
                    if (found := self.asked(mesh, compute, storage, limit, least)) is not None:
                        yield found

    def _over(
        self, size: int, name: str, alike: bool
    ) -> Iterator[tuple[dict[str, int], dict[str, Over], dict[str, Over]]]:
        """Yield mappings of an axis over some devices, and of the batch over the others, or if alike over all."""
        axes = [name]  # all names that the axis has during the step: positions may become key positions
        for known in axes:
            for event in self.trace.events:
                if isinstance(event, Renamed):
                    pairs = [(a, b) for (a, _), (b, _) in zip(event.before, event.after, strict=True) if a and b]
                    new = {m for p in pairs if known in p for m in p}
                    axes += [n for n in new if n not in axes and not n.endswith("'")]  # a part of an axis
        # Other axes of arguments are mapped by themselves, such as the next state of a recurrent cell.
        given = {n for x in self.trace.arguments for n in x.names}
        axes = [name, *(n for n in axes[1:] if n not in given)]
        mesh = {axis: n for axis, n in (("data", self.chips // size), ("model", size)) if n > 1}
        batch = next((b for b in self.batch if b not in axes), None)
        if len(mesh) > 1 and batch is None:
            return
        entry = entry_of([a for a in mesh if alike or a == "data"])
        compute: dict[str, Over] = {} if batch is None or entry is None else {batch: entry}
        if name in self.step.of_batch and len(mesh) == 1:  # it is data parallelism
            mesh = {"data": size}
        compute |= dict.fromkeys(axes, "model" if "model" in mesh else "data")
        for n in [n for n in self.stored if n not in axes][:1] if "data" in mesh else ():
            yield mesh, compute, {n: "data", **self._as_used(axes)}
        yield mesh, compute, {}

    def _as_used(self, group: Sequence[str]) -> dict[str, Over]:
        """Return the storage sharding of parameters along axes of a group; an axis that they lack is none of theirs."""
        return {n: "model" for n in group if n in self._multiplied}

    def asked(
        self, mesh: Mapping[str, int], compute: Mapping[str, Over], storage: Mapping[str, Over], limit: int,
        least: float = math.inf,
    ) -> PlannedMapping | None:  # fmt: skip
        """Plan a mapping by the partitioner, if it divides the axes and fits into memory.

        Arguments:
            least: the mapping is left out if the exchanges known by name take this many seconds or more.
        """
        layout, sharded = self._layout(mesh, compute, storage), [n for n in compute if n in self.refused]
        what = f"sharding {', '.join(sharded)}"
        try:
            check_sizes(layout, self.trace.sized)
        except ValueError:
            return None
        touched, memory = kept_memory(self.trace, layout, mesh)
        if memory > limit:
            return None
        exchanges = Account(self.trace, layout, divides=False, all_known=False).exchanges
        parts = parts_of_trace(self.trace, layout, exchanges, mesh, touched)
        if self._on_best_place(parts, mesh, compute)[0].seconds > least:
            self.ruled_out += 1
            self.left_out.pop(what, None)
            return None
        found = PlannedMapping(
            mesh, compute, storage, Bounds(self.chip.name, None, None, {}), int(memory), None, 0, 0, "partitioner",
            raw=self.step.raw, topology=self.islands, choices=self.step.choices, keyed=self.step.keyed,
        )  # fmt: skip
        try:
            report = self.explained(found, "partitioner")
        except (TypeError, ValueError) as e:
            self.left_out[what] = str(e)
            return None
        sent, bounds = report.total_sent(), report.bounds
        if sent is None or bounds is None or report.flops is None:
            self.left_out[what] = "; ".join(report.notes)
            return None
        self.left_out.pop(what, None)
        return self.estimated(dataclasses.replace(found, bounds=bounds, flops=report.flops, sent=sent), report)

    def explained(self, p: PlannedMapping, by: Any) -> Report:
        """Explain a mapping, on a mesh that needs no devices."""
        mesh = AbstractMesh(tuple(p.mesh.values()), tuple(p.mesh), axis_types=(AxisType.Auto,) * len(p.mesh))
        return explain(self.step.fn, *self.step.args, mapping=p.mapping, mesh=mesh, by=by, chip=self.chip)


def names_of(tree: Any) -> tuple[str, ...]:
    """Return the names of the axes of all arrays in a tree."""
    return tuple(dict.fromkeys(n for leaf in leaves_of(tree)[0] for n in leaf.names or () if n != "_"))


def _multiplied(trace: NamedTrace) -> set[str]:
    """Return the axes that parameters in products have; all of them if no product is named.

    Storing others sharded, such as the positions of a table that is only added, saves next to nothing.
    """
    terms = [
        {a.name for a in term}
        for e in trace.events
        if isinstance(e, Sum) and e.flops and e.place.operation is not None
        for term in e.place.operation.operands
    ]
    found = {n for term in terms if any(term <= x and len(x - term) <= 1 for x in trace.parameters) for n in term}
    return found if terms else set[str]().union(*trace.parameters)
