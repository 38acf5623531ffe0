"""`plan`: find the mesh and the mappings under which a step takes the least time, as far as names tell."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from ..core.errors import counted, describe_bytes
from ..distribution.active_settings import activate
from ..distribution.mesh_axes import NO_MESH, entry_of
from ..names.distributing import DistributedFunction
from ..sharding.leaves import leaves_of
from ._by_names import Account, Layout, check_sizes, memory_of
from ._html import Html
from ._lowered import products
from ._named_events import NamedTrace, NotKnown, Renamed, Sum
from ._named_trace import named_trace
from ._plan_page import plan_page
from ._text import aligned, described_seconds, markdown_table, parsed_bytes, written_number
from .chips import Chip, known_chip
from .explaining import distributed, explain
from .page import Page
from .report import Bounds, Report

Over = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PlannedMapping:
    """A mesh and two mappings, and their cost.

    >>> step = lambda w, x: axn.dot(x, w, axis="embed")
    >>> w, x = axn.ones({"embed": 8, "mlp": 8}), axn.ones({"batch": 8, "embed": 8})
    >>> axn.insight.plan(step, w, x, chips=2).best.mesh
    {'data': 2}
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
    """Its source: `names`, or `shardy` where names are not enough."""
    verified: Report | None = None
    """The partitioner's report, if it was asked for one."""
    raw: bool = False
    """True if the step is a function of raw arrays, made by `axonym.names.distribute`."""

    @property
    def seconds(self) -> float:
        """Return the lower bound on the time of a step: the longest of its bounds.

        >>> step = lambda w, x: axn.dot(x, w, axis="embed")
        >>> w, x = axn.ones({"embed": 8, "mlp": 8}), axn.ones({"batch": 8, "embed": 8})
        >>> axn.insight.plan(step, w, x, chips=2).best.seconds > 0
        True
        """
        return self.bounds.longest

    @property
    def mapping(self) -> Any:
        """Return the argument `mapping` for `explain` and `compare`.

        >>> step = lambda w, x: axn.dot(x, w, axis="embed")
        >>> w, x = axn.ones({"embed": 8, "mlp": 8}), axn.ones({"batch": 8, "embed": 8})
        >>> axn.insight.plan(step, w, x, chips=2).best.mapping
        {'batch': 'data'}
        """
        return (dict(self.storage), dict(self.compute)) if self.storage else dict(self.compute)

    def code(self) -> str:
        """Return the mesh and the mappings as Python.

        >>> step = lambda w, x: axn.dot(x, w, axis="embed")
        >>> w, x = axn.ones({"embed": 8, "mlp": 8}), axn.ones({"batch": 8, "embed": 8})
        >>> print(axn.insight.plan(step, w, x, chips=2).best.code())
        mesh = axn.make_mesh({'data': 2})
        compute = {'batch': 'data'}
        step = axn.named_jit(step, compute, in_placement=compute)
        """
        lines = [f"mesh = axn.make_mesh({dict(self.mesh)!r})", f"compute = {dict(self.compute)!r}"]
        if self.raw:
            lines += [f"storage = {dict(self.storage)!r}"] if self.storage else []
            stored = ", storage" if self.storage else ""
            lines.append(f"step = axn.names.distribute(step, compute{stored}, names=names)")
        elif self.storage:
            lines += [f"storage = {dict(self.storage)!r}", "step = axn.fsdp(step, storage, compute)"]
        else:
            lines.append("step = axn.named_jit(step, compute, in_placement=compute)")
        return "\n".join(lines)

    def _order(self) -> tuple[float, float, int]:
        """Return the sort key of plans: if their bounds are shown alike, their sum decides."""
        total = sum(t for t in (self.bounds.compute, *self.bounds.links.values()) if t is not None)
        return _as_shown(self.seconds), total, len(self.mesh) + len(self.compute) + len(self.storage)


@dataclasses.dataclass(frozen=True)
class MappingPlan(Page):
    """The mappings that `plan` found, the best first. Prints as a table, with the best one as code.

    >>> step = lambda w, x: axn.dot(x, w, axis="embed")
    >>> w, x = axn.ones({"embed": 8, "mlp": 8}), axn.ones({"batch": 8, "embed": 8})
    >>> isinstance(axn.insight.plan(step, w, x, chips=2), axn.insight.MappingPlan)
    True
    """

    step: str
    chips: int
    chip: Chip
    memory: int
    found: tuple[PlannedMapping, ...]
    """The mappings that fit into the memory, by the time they take."""
    too_large: tuple[PlannedMapping, ...]
    """The mappings that do not fit, the smallest first."""
    considered: int
    asked: int
    """The number of these mappings whose cost Shardy computed."""
    left_out: Mapping[str, str]
    """The kinds of mappings that were not considered, each with the reason."""
    cautions: tuple[str, ...] = ()
    """Warnings about the best one, which are printed first."""

    @property
    def best(self) -> PlannedMapping:
        """Return the mapping that takes the least time.

        >>> step = lambda w, x: axn.dot(x, w, axis="embed")
        >>> w, x = axn.ones({"embed": 8, "mlp": 8}), axn.ones({"batch": 8, "embed": 8})
        >>> axn.insight.plan(step, w, x, chips=2).best.compute
        {'batch': 'data'}
        """
        return self.found[0]

    def why(self) -> str:
        """Say why the best mapping comes before the next one, from the bounds of both; nothing if there is no other.

        >>> step = lambda w, x: axn.dot(x, w, axis="embed")
        >>> w, x = axn.ones({"embed": 8, "mlp": 8}), axn.ones({"batch": 8, "embed": 8})
        >>> axn.insight.plan(step, w, x, chips=2).why()
        'The first costs as much as the second.'
        """
        (first, _), *others = self._by_mapping()
        return why_first(first, others[0][0]) if others else ""

    def to_markdown(self) -> str:
        """Return the table in Markdown.

        >>> step = lambda w, x: axn.dot(x, w, axis="embed")
        >>> w, x = axn.ones({"embed": 8, "mlp": 8}), axn.ones({"batch": 8, "embed": 8})
        >>> "| mesh |" in axn.insight.plan(step, w, x, chips=2).to_markdown()
        True
        """
        header, *rows = self._table()
        code = f"```python\n{self.best.code()}\n```"
        parts = [self._title(), *self.cautions, markdown_table(header, rows), self.why(), code]
        return "\n\n".join(filter(None, parts))

    def __str__(self) -> str:
        notes = [f"{what} is not considered: {why}" for what, why in self.left_out.items()]
        if self.best.verified is None:
            notes.append("not compiled: by names and Shardy alone" if self.asked else "not compiled: by names alone")
        notes.append("times and memory are lower bounds: measure the first few")
        parts = [
            "\n".join([self._title(), *(f"caution: {c}" for c in self.cautions)]),
            "\n".join(aligned(self._table())),
            self.why(),
            self.best.code(),
        ]
        return "\n\n".join([*filter(None, parts), "\n".join(f"note: {n}" for n in notes)])

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    def _page(self, source: bool) -> tuple[str, Html]:
        return plan_page(self, self._by_mapping())

    def _headline(self) -> tuple[str, str]:
        return f"{self._title()}.", self.why()

    def _by_mapping(self) -> list[tuple[PlannedMapping, int]]:
        """Return each mapping on its best mesh, and the number of other meshes that it was found for."""
        groups: dict[Any, list[PlannedMapping]] = {}
        for p in self.found:
            groups.setdefault((frozenset(p.compute.items()), frozenset(p.storage.items())), []).append(p)
        return [(first, len(others)) for first, *others in groups.values()]

    def _title(self) -> str:
        large = (
            f", {len(self.too_large)} of which need{'s' * (len(self.too_large) == 1)} more memory"
            if self.too_large
            else ""
        )
        return (
            f"{self.step} on {self.chips} x {self.chip.name} with {describe_bytes(self.memory)} each: "
            f"{counted(self.considered, 'mesh and mapping', 'meshes and mappings')}{large}"
        )

    def _table(self) -> list[list[str]]:
        header = ["mesh", "compute", "and stored by", "at least", "bottleneck", "sent", "memory", "flops", "source",
                  "partitioner"]  # fmt: skip
        rows = []
        for p, others in self._by_mapping()[:8]:
            verified = "-" if p.verified is None else _agreement(p)
            own = {n: over for n, over in p.storage.items() if p.compute.get(n) != over}
            flops = "not known" if p.flops is None else written_number(p.flops)
            mesh = _listed(p.mesh, "=") + (f" (and {counted(others, 'other')})" if others else "")
            rows.append(
                [mesh, _listed(p.compute), _listed(own) or "as used",
                 described_seconds(p.seconds), p.bounds.bottleneck, describe_bytes(p.sent),
                 describe_bytes(p.memory), flops, p.by, verified]
            )  # fmt: skip
        return [header, *rows]


def plan(
    fn: Callable[..., Any],
    model: Any,
    *batch: Any,
    chips: int,
    chip: Chip | str = "v5p",
    memory: int | str | None = None,
    ask: int = 12,
    verify: int = 3,
) -> MappingPlan:
    """Search for the mesh and the mappings under which a training step fits into memory and takes the least time.

    The step is traced once, and each mapping is worked out by name, as `explain` does with `by="names"`: mappings of
    the batch (data parallelism), of the parameters between uses (FSDP), of axes along which devices can compute
    independently (tensor parallelism), and of these together, on all meshes of one or two axes. For axes where names do
    not determine the communication, such as axes of experts, of a sequence, or of layers that run as a pipeline, it
    uses Shardy, like `explain` with `by="shardy"`: only for a few mappings, since each takes as long as lowering the
    step. The remaining mappings are not considered, and the result says so. A step with operations whose flops are not
    known, such as kernels of Pallas, is refused.

    The time of a mapping is the longest of its bounds: to compute, or to send over a mesh axis. Bounds that agree in
    the three digits shown are ordered by their sum. Bytes that Shardy is uncertain about count as sent. Anything that
    runs only for some values does not count: all experts are assumed to get equally many rows.

    Arguments:
        fn: a function of the model and more arguments, with the whole step in it: loss, gradients, update. It does
            not say how it is distributed, and is not run. `axonym.names.distribute` without mappings makes one of a
            function of raw arrays.
        model: its first argument, which determines the axes of the model. May be abstract.
        *batch: its other arguments. Axes that the model lacks are axes of the batch.
        chips: the number of chips.
        chip: the kind of chip: a `Chip`, or the name of one of `CHIPS`.
        memory: the bytes that a device may keep, such as `"80 GiB"`; all that the chip has by default.
        ask: the largest number of mappings to run Shardy on.
        verify: how many of the best to explain by the partitioner too, if this process has enough devices, which a CPU
            can simulate. Its figures order these; if other mappings then come first, as many of them are explained too.

    >>> step = lambda w, x: axn.dot(x, w, axis="embed")
    >>> w, x = axn.ones({"embed": 8, "mlp": 8}), axn.ones({"batch": 8, "embed": 8})
    >>> print(axn.insight.plan(step, w, x, chips=2).best.code())
    mesh = axn.make_mesh({'data': 2})
    compute = {'batch': 'data'}
    step = axn.named_jit(step, compute, in_placement=compute)
    """
    chip, limit = known_chip(chip, "plan"), parsed_bytes(memory) if isinstance(memory, str) else memory
    limit = chip.memory if limit is None else limit
    args = (model, *batch)
    trace, convolved = _counted(fn, args)
    raw = isinstance(fn, DistributedFunction)
    of_model, *of_batch = fn.named(args, {})[0] if isinstance(fn, DistributedFunction) else args
    parameters = [{n for n in leaf.names or () if n != "_"} for leaf in leaves_of(of_model)[0]]
    search = _Search(trace, chip, _names(of_model), _names(of_batch), parameters, convolved)
    found = list(search.run(chips))
    asked = list(itertools.islice(search.ask(chips, fn, args, limit), ask))
    for p in asked:
        search.left_out.pop(search.of_refused(p.compute), None)
    found = [dataclasses.replace(p, raw=raw) for p in (*found, *asked)]
    fitting = sorted((p for p in found if p.memory <= limit), key=PlannedMapping._order)
    too_large = sorted((p for p in found if p.memory > limit), key=lambda p: p.memory)
    if not fitting:
        least = f"; the least is {describe_bytes(too_large[0].memory)} ({too_large[0].mapping})" if too_large else ""
        raise ValueError(
            f"plan: of {counted(len(found), 'mapping')} on {counted(chips, 'device')}, none fits into "
            f"{describe_bytes(limit)}{least}. "
            + "; ".join(f"{what} was not considered: {why}" for what, why in search.left_out.items())
        )
    if verify and jax.default_backend() == "cpu" and jax.device_count() >= chips:
        fitting[:verify] = [_verified(p, fn, args, chip) for p in fitting[:verify]]
        fitting.sort(key=PlannedMapping._order)
        for _ in range(verify):
            if fitting[0].verified is None:  # the mappings before it turned out to take longer
                fitting[0] = _verified(fitting[0], fn, args, chip)
                fitting.sort(key=PlannedMapping._order)
    return MappingPlan(
        trace.name, chips, chip, limit, tuple(fitting), tuple(too_large), len(found), len(asked),
        dict(search.left_out), tuple(_cautions(search, chips, fitting[0])),
    )  # fmt: skip


def _counted(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[NamedTrace, int]:
    """Trace a step by names; return the flops of its convolutions, which names do not count, beside it."""
    trace, convolved = named_trace(fn, args, {}), 0
    if set(trace.uncounted) == {"conv_general_dilated"}:
        trace, convolved = dataclasses.replace(trace, uncounted=()), _flops_of_convolutions(fn, args)
    if trace.uncounted:
        raise ValueError(
            f"plan: how long {trace.name} computes is not known, because the flops of {', '.join(trace.uncounted)} are "
            "not counted. Compare mappings that you choose, with `compare`."
        )
    return trace, convolved


def _cautions(search: _Search, chips: int, first: PlannedMapping) -> Iterator[str]:
    """Yield what makes the first mapping of a plan doubtful."""
    if chips > 1 and not first.compute:
        yield (
            f"the first one shards nothing: each of the {chips} devices computes everything, which takes less time "
            "than the others' communication. Plan with the sizes that you will train with, or use fewer devices."
        )


def _names(tree: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(n for leaf in leaves_of(tree)[0] for n in leaf.names or () if n != "_"))


def _multiplied(trace: NamedTrace, parameters: Sequence[set[str]]) -> set[str]:
    """Return the axes that parameters in products have; all of them if no product is named.

    Storing others sharded, such as the positions of a table that is only added, saves next to nothing.
    """
    terms = [
        {a.name for a in term}
        for e in trace.events
        if isinstance(e, Sum) and e.flops and e.place.operation is not None
        for term in e.place.operation.operands
    ]
    found = {n for term in terms if any(term <= x and len(x - term) <= 1 for x in parameters) for n in term}
    return found if terms else set[str]().union(*parameters)


def _verified(p: PlannedMapping, fn: Callable[..., Any], args: Sequence[Any], chip: Chip) -> PlannedMapping:
    """Explain a planned mapping with the partitioner."""
    report = explain(fn, *args, mapping=p.mapping, mesh=_abstract(p.mesh), by="partitioner", chip=chip)
    assert report.bounds is not None, "there is a chip"
    return dataclasses.replace(p, bounds=report.bounds, verified=report)


# --- searching ---


class _Search:
    """All meshes and mappings of a traced step whose cost can be computed from names."""

    def __init__(
        self,
        trace: NamedTrace,
        chip: Chip,
        of_model: Sequence[str],
        of_batch: Sequence[str],
        parameters: Sequence[set[str]],
        convolved: int = 0,
    ):
        self.trace, self.chip = trace, chip
        self._convolved = convolved
        """The flops of all convolutions. Names do not tell what sharded ones send, so each device computes them all."""
        self._of_batch = of_batch
        self.left_out: dict[str, str] = {}
        """The shardings that are not considered, each with the reason."""
        sizes = {n: size for x in trace.arguments for n, size in x.dims if n is not None}
        alone = [n for n in sizes if self._told({n: "model"}, {})]
        self.refused = sorted((n for n in sizes if n not in alone), key=lambda n: n not in of_batch)
        self.batch = [n for n in of_batch if n not in of_model and n in alone]
        self.tensor = [n for n in alone if n in of_model or n in of_batch]
        data: dict[str, Over] = {self.batch[0]: "data"} if self.batch else {}
        multiplied = _multiplied(trace, parameters)
        self._multiplied = multiplied
        self.stored = [n for n in of_model if n in multiplied and data and self._told(data, {n: "data"})]
        # Pairs of axes that cannot be sharded together; only groups without such a pair are considered.
        apart: set[frozenset[str]] = set()
        for a, b in itertools.combinations(self.tensor, 2):
            if not self._told({a: "model", b: "model"}, {}, note=False):
                apart.add(frozenset((a, b)))
        self.groups = [
            group
            for count in range(len(self.tensor) + 1)
            for group in itertools.combinations(self.tensor, count)
            if not any(frozenset(pair) in apart for pair in itertools.combinations(group, 2))
        ]

    def _told(self, compute: Mapping[str, Over], storage: Mapping[str, Over], note: bool = True) -> bool:
        """Return whether the cost of a mapping can be computed from names, on a mesh whose axes divide everything."""
        try:
            # Whether names suffice does not depend on the sizes of mesh axes, so the smallest will do.
            Account(self.trace, Layout({"data": 2, "model": 2}, compute, storage, self.trace.joined), divides=False)
        except NotKnown as e:
            if note:
                what = f"storing {', '.join(storage)} sharded" if storage else f"sharding {', '.join(compute)}"
                self.left_out.setdefault(what, e.reason)
            return False
        return True

    def run(self, chips: int) -> Iterator[PlannedMapping]:
        """Yield a plan for each mapping that divides the axes."""
        for mesh, compute, storage in self._candidates(chips):
            try:
                account = Account(self.trace, Layout(mesh, compute, storage, self.trace.joined))
            except ValueError:  # it does not divide the axes, or names do not determine its cost
                continue
            yield self._planned(account, mesh, compute, storage)

    def _candidates(self, chips: int) -> Iterator[tuple[dict[str, int], dict[str, Over], dict[str, Over]]]:
        for data, model in ((chips // n, n) for n in range(1, chips + 1) if chips % n == 0):
            mesh = _mesh(data, model) or {"data": 1}
            for batch, group in itertools.product(self.batch or [None], self.groups):
                # A group takes the mesh axis of the model; the batch can take both, if there is no group.
                takes_both = model > 1 and data > 1 and batch and not group
                if batch in group or not (takes_both or bool(group) == (model > 1)):
                    continue
                over: Over = ("data", "model") if model > 1 and not group else "data"
                batches = [batch] if batch and data > 1 else []
                compute: dict[str, Over] = dict.fromkeys(batches, over)
                compute |= dict.fromkeys(group, "model")
                used = self._as_used(group)
                # Two mesh axes that both shard the batch differ from one only if parameters are stored over one.
                if group or model == 1:
                    yield mesh, compute, {}
                for name in self.stored if batches else ():
                    if name not in group:
                        yield mesh, compute, {name: "data"} | used

    def ask(self, chips: int, fn: Callable[..., Any], args: Sequence[Any], limit: int) -> Iterator[PlannedMapping]:
        """Plan with Shardy the mappings whose communication names do not determine, few devices along an axis first."""
        sizes = [n for n in range(2, chips + 1) if chips % n == 0]
        # Devices with different experts also have different rows, if no array has both axes.
        experts = [n for n in self.refused if n in self.trace.exchanged]
        others = [n for n in self.refused if n not in experts]
        tried = [(alike, pair) for alike, names in ((True, experts), (False, others), (False, experts))
                 for pair in itertools.product(sizes, names)]  # fmt: skip
        for alike, (model, name) in tried:
            axes = self._sharded_with(name)
            mesh = _mesh(chips // model, model)
            batch = next((b for b in self.batch if b not in axes), None)
            if len(mesh) > 1 and batch is None:
                continue
            over = list(mesh) if alike else [a for a in mesh if a == "data"]
            entry = entry_of(over)
            compute: dict[str, Over] = {} if batch is None or entry is None else {batch: entry}
            if name in self._of_batch and len(mesh) == 1:  # it is data parallelism
                mesh = {"data": model}
            compute |= dict.fromkeys(axes, "model" if "model" in mesh else "data")
            stored = [n for n in self.stored if n not in axes][:1] if "data" in mesh else []
            storages: list[dict[str, Over]] = [{n: "data", **self._as_used(axes)} for n in stored]
            for storage in (*storages, {}):
                yield from self._asked(mesh, compute, storage, fn, args, limit)

    def _as_used(self, group: Sequence[str]) -> dict[str, Over]:
        """Return the storage sharding of parameters along axes of a group; an axis that they lack is none of theirs."""
        return {n: "model" for n in group if n in self._multiplied}

    def of_refused(self, compute: Mapping[str, Over]) -> str:
        """List the sharded axes whose communication cannot be computed from names."""
        return f"sharding {', '.join(n for n in compute if n in self.refused)}"

    def _sharded_with(self, name: str) -> list[str]:
        """Return all names that an axis has during the step: positions may become key positions.

        Other axes of arguments are mapped by themselves, such as the next state of a recurrent cell.
        """
        found = [name]
        for known in found:
            for event in self.trace.events:
                if isinstance(event, Renamed):
                    pairs = [(a, b) for (a, _), (b, _) in zip(event.before, event.after, strict=True) if a and b]
                    found += [n for n in {m for p in pairs if known in p for m in p} if n not in found]
        given = {n for x in self.trace.arguments for n in x.names}
        return [name, *(n for n in found[1:] if n not in given)]

    def _asked(
        self,
        mesh: dict[str, int],
        compute: dict[str, Over],
        storage: dict[str, Over],
        fn: Callable[..., Any],
        args: Sequence[Any],
        limit: int,
    ) -> Iterator[PlannedMapping]:
        """Plan a mapping with Shardy, if it divides the axes and fits into memory."""
        layout = Layout(mesh, compute, storage, self.trace.joined)
        try:
            check_sizes(layout, self.trace.arguments)
        except ValueError:
            return
        if (memory := _kept(self.trace, layout)) > limit:
            return
        mapping = (storage, compute) if storage else compute
        try:
            report = explain(fn, *args, mapping=mapping, mesh=_abstract(mesh), by="shardy", chip=self.chip)
        except (NotImplementedError, TypeError, ValueError) as e:
            self.left_out[self.of_refused(compute)] = str(e)
            return
        sent, bounds = report.total_sent(), report.bounds
        if sent is None or bounds is None or report.flops is None:
            self.left_out[self.of_refused(compute)] = "; ".join(report.notes)
            return
        slowest = max(bounds.links, key=bounds.links.__getitem__, default=("model",))
        uncertain = report.uncertain / self.chip.link_bandwidth
        links = {**bounds.links, slowest: bounds.links.get(slowest, 0.0) + uncertain}
        bounds = dataclasses.replace(bounds, links=links)
        yield PlannedMapping(mesh, compute, storage, bounds, memory, report.flops, sent, report.uncertain, "shardy")

    def _planned(
        self, account: Account, mesh: dict[str, int], compute: dict[str, Over], storage: dict[str, Over]
    ) -> PlannedMapping:
        flops = None if account.flops is None else account.flops + self._convolved
        bounds = account.bounds(self.chip, None, self._convolved)
        sent = sum(e.total_sent or 0 for e in account.exchanges)
        memory = _kept(self.trace, account.layout)
        return PlannedMapping(mesh, compute, storage, bounds, memory, flops, sent, account.uncertain)


def _mesh(data: int, model: int) -> dict[str, int]:
    """Return the mesh axes with more than one device."""
    return {axis: n for axis, n in (("data", data), ("model", model)) if n > 1}


def _kept(trace: NamedTrace, layout: Layout) -> int:
    """Return the bytes on each device, counting results that become arguments of the next step once.

    Beside what loops keep, a backward pass that recomputes layers has the products of one of them, and the gradients of
    all layers that a loop goes through, since it stacks them.
    """
    memory = memory_of(trace, layout)
    products = [e for e in trace.events if isinstance(e, Sum) and e.flops]
    again: dict[int, int] = {}
    for e in products:
        if e.place.recomputes and e.place.phase == "recomputed":
            again[e.place.within] = again.get(e.place.within, 0) + layout.bytes(e.result)
    stacked = [{*x.names} for x in trace.arguments]
    gradients = sum(
        layout.bytes(e.result, layout.over(e.result.base)) * (e.place.times or 1)
        for e in products
        if again and e.place.phase == "backward" and e.place.times != 1
        and any({*e.result.names} < names and len(names - {*e.result.names}) == 1 for names in stacked)
    )  # fmt: skip
    return max(memory.arguments, memory.results) + memory.temporaries + max(again.values(), default=0) + gradients


def _flops_of_convolutions(fn: Callable[..., Any], args: Sequence[Any]) -> int:
    """Count the flops of all convolutions of a step."""
    with activate(None), jax.sharding.use_abstract_mesh(NO_MESH), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no mesh is active")
        lowered = distributed(fn, None).trace(*args).lower(lowering_platforms=("cpu",))
    return sum(p.flops or 0 for p in products(lowered, {}) if p.convolves)


def _abstract(mesh: Mapping[str, int]) -> AbstractMesh:
    return AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))


# --- writing ---


def _listed(mapping: Mapping[str, Any], sign: str = ":") -> str:
    def one(over: Any) -> str:
        return "+".join(over) if isinstance(over, tuple) else str(over)

    gap = "" if sign == "=" else " "
    return ", ".join(f"{n}{sign}{gap}{one(over)}" for n, over in mapping.items())


def why_first(first: PlannedMapping, second: PlannedMapping) -> str:
    """Say why a mapping comes before another one."""
    (seconds, total, count), (others_seconds, others_total, others_count) = first._order(), second._order()
    least, others = described_seconds(first.seconds), described_seconds(second.seconds)
    if seconds < others_seconds:
        said = f"The first takes at least {least}, the second {others}"
    elif total < others_total:
        sums = f"the first takes {described_seconds(total)}, the second {described_seconds(others_total)}"
        said = f"Both take at least {least}; if nothing overlaps, {sums}"
    else:
        return f"The first costs as much as the second{', and shards less' if count < others_count else ''}."
    own, theirs = dict(first.bounds.named()), dict(second.bounds.named())
    most = max({**own, **theirs}, key=lambda name: theirs.get(name, 0.0) - own.get(name, 0.0))
    times = [described_seconds(t[most]) if most in t else "no time" for t in (own, theirs)]
    return f"{said}: {most} takes {times[0]} instead of {times[1]}."


def _as_shown(seconds: float) -> float:
    """Round a time to the digits that are shown, by which plans are ordered."""
    return float(f"{seconds:.3g}")


def _agreement(p: PlannedMapping) -> str:
    """Compare the partitioner's result with the prediction from names."""
    assert p.verified is not None
    true = p.verified.total_sent()
    if true == p.sent:
        return "agrees"
    return "sends " + ("not known" if true is None else describe_bytes(true))
