"""`plan`: find the mesh and the mappings under which a step takes the least time, as far as names tell."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..core.errors import counted, describe_bytes
from ..core.html import Html, Words, copyable, element, folded, joined, listed, stacked, table
from ..distribution.mesh_axes import Axes
from ._accounts import Meshes
from ._searching import NEAR, PlannedMapping, Ranked, Search, TracedStep
from ._tables import Column, rows_of
from ._text import as_shown, described_seconds, markdown_table, parsed_bytes, written_number
from .chips import Chip, Islands, islands_of
from .cost_model import why_first
from .page import Page

_SHOWN = 12
"""The largest number of candidates in the first table; a folded one has the others."""
_COMPUTING = {"products", "attention", "reading and writing"}
"""The terms of an estimate that are drawn as one."""


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
    """The mappings that fit into memory as far as known, by the time they are estimated to take; at most 64, and those
    of a single axis."""
    too_large: tuple[PlannedMapping, ...]
    """The mappings that do not fit, the smallest first."""
    considered: int
    asked: int
    """The number of these mappings whose cost the partitioner computed."""
    left_out: Mapping[str, str]
    """The kinds of mappings that were not considered, each with the reason."""
    cautions: tuple[str, ...] = ()
    """Warnings about the best one, which are printed first."""
    pruned: int = 0
    """The number of mappings considered that cannot be best: they take longer than the first one is estimated to, even
    by their bounds, or do not fit."""
    not_fitting: int = 0
    """The number of those that do not fit."""

    @property
    def best(self) -> PlannedMapping:
        """Return the mapping that is estimated to take the least time.

        >>> step = lambda w, x: axn.dot(x, w, axis="embed")
        >>> w, x = axn.ones({"embed": 8, "mlp": 8}), axn.ones({"batch": 8, "embed": 8})
        >>> axn.insight.plan(step, w, x, chips=2).best.compute
        {'batch': 'data'}
        """
        return self.found[0]

    def why(self) -> str:
        """Say by which terms of the estimates the first mapping is better than the second; nothing if there is none.

        >>> step = lambda w, x: axn.dot(x, w, axis="embed")
        >>> w, x = axn.ones({"embed": 8, "mlp": 8}), axn.ones({"batch": 8, "embed": 8})
        >>> axn.insight.plan(step, w, x, chips=2).why().startswith("The second ")
        True
        """
        rows = self._by_mapping()
        if len(rows) < 2:
            return ""
        (first, _), (second, _), *_ = rows
        tied = second.estimate.seconds <= _TIED * first.estimate.seconds
        said = "this is a tie, within 2%." if tied else why_first(first.estimate, second.estimate)
        return f"The second ({_what(second)}): {said}"

    def __str__(self) -> str:
        notes = [f"{what} is not considered: {why}" for what, why in self.left_out.items()]
        notes.append("not compiled: by names alone" if self.best.by == "names" else "partitioned, not compiled")
        notes.append(
            f"all {counted(self.considered, 'combination')} of these were considered, of which {self.pruned} cannot "
            "be better, by their bounds"
        )
        notes.append("times are estimates, and `at least` and memory lower bounds: measure the first few")
        columns = self._columns(self._by_mapping(8))
        cautions, code = (f"caution: {c}" for c in self.cautions), textwrap.indent(self.best.code(), "    ")
        parts = [
            self._title(),
            *cautions,
            markdown_table([c.title for c in columns], rows_of(columns)),
            self.why(),
            code,
        ]
        return "\n\n".join([*filter(None, parts), "\n".join(f"- note: {n}" for n in notes)])

    def _page(self) -> tuple[str, Html]:
        mappings = self._by_mapping()
        words = Words(list(dict.fromkeys(a for p in self.found for a in p.mesh)))
        best = self.best
        crumb = [element("b", self.step), f"{self.chips} × {self.chip.name}", f"{describe_bytes(self.memory)} each"]
        considered = f"All {counted(self.considered, 'combination')} of these were considered"
        if self.not_fitting:
            considered += f"; {self.not_fitting} need more than {describe_bytes(self.memory)}"
        most = max(p.estimate.seconds for p, _ in mappings[:_SHOWN])
        least = best.estimate.seconds
        cells = {c.title: c.cells for c in self._columns(mappings)}
        numbers = zip(cells["about"], cells["at least"], cells["memory"], strict=True)
        rows = enumerate(zip(mappings, numbers, strict=True))
        fitting = [_row(i + 1, p, others, written, most, least, words) for i, ((p, others), written) in rows]
        terms = dict.fromkeys(name for p, _ in mappings for name, t in p.estimate.terms.items() if t)
        then = listed(["sending", *(name for name in terms if name not in _COMPUTING and " over " not in name)])
        header = ("", "mesh", "mapping", joined(["computing, then ", then]), "about", "at least", "memory")
        about = f"About {described_seconds(as_shown(best.estimate.seconds))} a step, by "
        first = element(
            "section",
            element("h1", about, words.mesh(best.mesh), "."),
            element("p", words.said(f"{self.why()} {considered}.".strip()), class_="lead"),
            *(element("p", element("b", "Caution: "), words.said(c)) for c in self.cautions),
            copyable("The first as code", best.code()),
            class_="card",
            aria_label="the plan",
        )
        parts = [element("h2", "Candidates"), table("candidates", header, fitting[:_SHOWN])]
        if len(fitting) > _SHOWN:
            more = table("more candidates", header, fitting[_SHOWN:][:60])
            parts.append(folded(f"{len(fitting) - _SHOWN} more", more))
        if self.left_out:
            rows = [(what, words.said(reason)) for what, reason in self.left_out.items()]
            title = f"{counted(len(rows), 'kind')} of mappings {'was' if len(rows) == 1 else 'were'} not considered"
            parts.append(folded(title, table("not considered", ("what", "why"), rows)))
        note = "Times are estimates, and `at least` and memory are lower bounds: measure the first few."
        parts.append(element("p", note, class_="small"))
        crumbs = element("p", joined(crumb, " · "), class_="crumb")
        return f"A plan for {self.step}", joined([crumbs, first, element("section", *parts)])

    def _headline(self) -> tuple[str, str]:
        return f"{self._title()}.", self.why()

    def _by_mapping(self, most: int | None = None) -> list[tuple[PlannedMapping, int]]:
        """Return mappings on their best mesh, and the number of other meshes that each was found for.

        Arguments:
            most: how many to return, beside the ones of a single axis; by default all.
        """
        groups: dict[Any, list[PlannedMapping]] = {}
        for p in self.found:
            key = frozenset(p.compute.items()), frozenset(p.storage.items()), frozenset(p.choices.items())
            groups.setdefault(key, []).append(p)
        found = [(first, len(others)) for first, *others in groups.values()]
        return [
            (p, others)
            for i, (p, others) in enumerate(found)
            if most is None or i < most or (len(p.mesh) == 1 == len(p.compute) and not p.storage and not p.choices)
        ]

    def _title(self) -> str:
        few = self.not_fitting == 1
        large = f", {self.not_fitting} of which need{'s' * few} more memory" if self.not_fitting else ""
        return (
            f"{self.step} on {self.chips} x {self.chip.name} with {describe_bytes(self.memory)} each: "
            f"{counted(self.considered, 'mesh and mapping', 'meshes and mappings')}{large}"
        )

    def _columns(self, mappings: Sequence[tuple[PlannedMapping, int]]) -> list[Column]:
        """Return the table of some mappings, each on its best mesh."""
        found = [p for p, _ in mappings]
        own = [{n: over for n, over in p.storage.items() if p.compute.get(n) != over} for p in found]
        others = [f" (and {counted(n, 'other')})" if n else "" for _, n in mappings]
        columns = [
            Column("mesh", [_listed(p.mesh, "=") + more for p, more in zip(found, others, strict=True)]),
            Column("choices", [_listed(p.choices, "=") for p in found]),
            Column("compute", [_listed(p.compute) for p in found]),
            Column("and stored by", [_listed(stored) or "as used" for stored in own]),
            Column("about", [described_seconds(as_shown(p.estimate.seconds)) for p in found]),
            Column("at least", [described_seconds(p.seconds) for p in found]),
            Column("bottleneck", [p.bounds.bottleneck for p in found]),
            Column("sent", [describe_bytes(p.sent) for p in found]),
            Column("memory", [describe_bytes(p.memory) for p in found]),
            Column("flops", ["not known" if p.flops is None else written_number(p.flops) for p in found]),
            Column("source", [p.by for p in found]),
        ]
        return [c for c in columns if c.title != "choices" or any(p.choices for p in self.found)]


def plan(
    fn: Callable[..., Any],
    model: Any,
    *batch: Any,
    chips: int | str | Islands,
    chip: Chip | str = "v5p",
    memory: int | str | None = None,
    ask: int = 12,
    choices: Mapping[str, Mapping[str, Any] | Sequence[Any]] | None = None,
) -> MappingPlan:
    """Search for the mesh and the mappings under which a training step fits into memory and takes the least time.

    The step is traced once, and each mapping is worked out by name, as `explain` does with `by="names"`: mappings of
    the batch (data parallelism), of the parameters between uses (FSDP), of axes along which devices can compute
    independently (tensor parallelism), and of these together, on all meshes of up to three axes, of which slices or
    islands have the last ones. For axes where names do not determine the communication, such as axes of
    experts, of a sequence, or of layers that run as a pipeline, it uses the partitioner, like `explain` with
    `by="partitioner"`: only for a few mappings, since each takes about twice as long as lowering the step. The
    remaining mappings are not considered, and the result says so. A step with operations whose flops are not known,
    such as kernels of Pallas, is refused.

    Mappings are ordered by an estimate of the time of a step, to the two digits shown: the sum of its products, and of
    that part of its exchanges that computing does not hide, and of what it moves to the memory of the host and back. Of
    the branches of a conditional, the one that takes least counts in bounds; all experts are assumed to get equally
    many rows. The first mapping computes with no axis of the model in shards across slices, such as tensor parallelism
    does, if one that does not is estimated within 10% of the least.

    With `choices`, `fn` is a builder: `fn(**choices)` returns the step, or the step and its arguments. A choice named
    `stages` divides the layers over that many stages of a pipeline, along a mesh axis `stage`, with as many
    microbatches as a choice named `microbatches` or `accumulate` says.

    Arguments:
        fn: a function of the model and more arguments, with the whole step in it: loss, gradients, update. It does
            not say how it is distributed, and is not run. `axonym.names.distribute` without mappings makes one of a
            function of raw arrays.
        model: its first argument, which determines the axes of the model. May be abstract.
        *batch: its other arguments. Axes that the model lacks are axes of the batch.
        chips: the number of chips; or `Islands`, or a name such as `"v5p:8x8x8"`, `"v5e:16x16x2slices"` or
            `"h100:64"`.
        chip: the kind of chip, if `chips` is a number: a `Chip`, or the name of one of `CHIPS`.
        memory: the bytes that a device may keep, such as `"80 GiB"`; all that the chip has by default.
        ask: the largest number of mappings to partition the step for.
        choices: for each argument of the builder, its values, such as numbers or strings, or its values by keys to
            show. All combinations are traced, at most 64.

    >>> step = lambda w, x: axn.dot(x, w, axis="embed")
    >>> w, x = axn.ones({"embed": 8, "mlp": 8}), axn.ones({"batch": 8, "embed": 8})
    >>> print(axn.insight.plan(step, w, x, chips=2).best.code())
    mesh = axn.make_mesh({'data': 2})
    compute = {'batch': 'data'}
    step = axn.named_jit(step, compute, in_placement=compute)
    """
    islands = islands_of(chips, chip)
    limit = parsed_bytes(memory) if isinstance(memory, str) else memory
    planner = _Planner(islands, islands.chip.memory if limit is None else limit)
    planner.add_all(fn, (model, *batch), choices or {})
    planner.ask(ask)
    return planner.result()


_TIED = 1.02
"""The estimates up to this multiple of another one are ties."""

_MOST_TRACED = 64
"""The largest number of combinations of choices."""

_MOST_KEPT = 64
"""The largest number of mappings in a plan, beside the number considered."""


class _Candidate(NamedTuple):
    """A mesh for a pattern of mappings, and its cost."""

    search: Search
    ranked: Ranked
    place: int
    seconds: float
    memory: float
    bound: float


class _Planner:
    """Finds the mappings of a plan."""

    def __init__(self, islands: Islands, limit: int):
        self._islands, self._limit = islands, limit
        self._meshes: dict[Any, Meshes] = {}
        self._searches: dict[Any, Search] = {}
        """The searches, by what was chosen."""
        self._rows: list[_Candidate] = []
        self._left_out: dict[str, str] = {}
        self._asked: list[PlannedMapping] = []

    def add_all(self, fn: Callable[..., Any], args: tuple[Any, ...], choices: Mapping[str, Any]) -> None:
        """Work out all mappings by names, for each combination of choices."""
        if not choices:
            return self._add(Search(TracedStep(fn, args), self._islands))
        values = {n: dict(v) if isinstance(v, Mapping) else {x: x for x in v} for n, v in choices.items()}
        keyed = tuple(n for n, v in choices.items() if isinstance(v, Mapping))
        combinations = list(itertools.product(*values.values()))
        if len(combinations) > _MOST_TRACED:
            raise ValueError(
                f"plan: {len(combinations)} combinations of choices, of which each is traced; at most {_MOST_TRACED} "
                f"can be: {', '.join(f'{n} has {len(v)}' for n, v in values.items())}."
            )
        for keys in combinations:
            chosen = dict(zip(values, keys, strict=True))
            given = {n: values[n][key] for n, key in chosen.items()}
            try:
                built = fn(**given)
                step, arguments = built if isinstance(built, tuple) else (built, args)
                made = TracedStep(step, tuple(arguments), chosen, keyed)
            except Exception as e:  # of the user's code: it refuses a combination
                self._left_out[_listed(chosen, "=")] = f"{type(e).__name__}: {e}".partition("\n")[0]
                continue
            stages = None
            if (of := given.get("stages", 1)) != 1:
                stages = made.stages(of, given.get("microbatches") or given.get("accumulate") or of)
                if stages is None or stages.size % of or self._islands.chips % of:
                    self._left_out[_listed(chosen, "=")] = f"{of} stages do not divide a loop over layers, or the chips"
                    continue
            self._add(Search(made, self._islands, stages, next(iter(self._searches.values()), None)))
        if not self._searches:
            raise ValueError(
                "plan: no combination of choices makes a step: "
                + "; ".join(f"{what}: {why}" for what, why in self._left_out.items())
            )
        return None

    def _add(self, search: Search) -> None:
        self._searches[tuple(search.step.choices.items())] = search
        fixed = {} if search.stages is None else {"stage": search.stages.count}

        def meshes_of(axes: Axes) -> Meshes:
            at = axes, tuple(fixed.items())
            if at not in self._meshes:
                self._meshes[at] = Meshes(axes, self._islands, fixed)
            return self._meshes[at]

        for ranked in search.run(meshes_of):
            costs = (x[ranked.rows].tolist() for x in (ranked.seconds, ranked.memory, ranked.bound))
            self._rows += [_Candidate(search, ranked, *row) for row in zip(ranked.rows.tolist(), *costs, strict=True)]

    def ask(self, most: int) -> None:
        """Ask the partitioner about mappings that names do not tell: of the choices that are best by names."""
        fitting = sorted((r for r in self._rows if r.memory <= self._limit), key=lambda r: r.seconds)
        staged: dict[int, _Candidate] = {}  # names tell only about what happens within a stage
        for row in fitting:
            if row.search.stages is not None:
                staged.setdefault(id(row.ranked), row)
        for row in [*staged.values()][: min(2, most)]:
            found = row.search.found(row.ranked, row.place)
            if (asked := row.search.asked(found.mesh, found.compute, found.storage, self._limit)) is not None:
                self._asked.append(asked)
        search = next((r.search for r in (*fitting, *self._rows)), next(iter(self._searches.values())))
        if search.stages is None:
            asked = search.ask(self._limit, fitting[0].seconds if fitting else math.inf)
            self._asked += itertools.islice(asked, most - len(self._asked))

    def result(self) -> MappingPlan:
        """Return the plan."""
        fit = [r for r in self._rows if r.memory <= self._limit]
        large = [r for r in self._rows if r.memory > self._limit]
        kept = heapq.nsmallest(_MOST_KEPT, fit, key=lambda r: r.seconds)
        known = {id(r) for r in kept}
        kept += [r for r in fit if len(r.ranked.compute) == len(r.ranked.axes) == 1 and id(r) not in known]
        smallest = heapq.nsmallest(_MOST_KEPT, large, key=lambda r: r.memory)
        fitting, too_large = ([r.search.found(r.ranked, r.place) for r in rows] for rows in (kept, smallest))
        asked = {p._what() for p in self._asked}  # of these, names told only a part of the cost
        again = sum(p._what() in asked for p in (*fitting, *too_large))
        fitting, too_large = ([p for p in found if p._what() not in asked] for found in (fitting, too_large))
        fitting = self._ordered((*fitting, *self._asked))
        left_out = dict(self._left_out)
        for search in self._searches.values():
            left_out |= search.left_out
        if not fitting:
            least = f"; the least is {describe_bytes(too_large[0].memory)} ({too_large[0].mapping})" * bool(too_large)
            raise ValueError(
                f"plan: of {counted(len(self._rows), 'mapping')} on {counted(self._islands.chips, 'device')}, none "
                f"fits into {describe_bytes(self._limit)}{least}. "
                + "; ".join(f"{what} was not considered: {why}" for what, why in left_out.items())
            )
        first = fitting[0]
        ruled_out = sum(search.ruled_out for search in self._searches.values())
        pruned = len(large) + ruled_out + sum(r.bound > first.estimate.seconds for r in fit)
        considered = len(self._rows) + len(self._asked) - again + ruled_out
        cautions = list[str]()
        if self._islands.chips > 1 and not first.compute:
            cautions.append(
                f"the first one shards nothing: each of the {self._islands.chips} devices computes everything, which "
                "takes less time than the others' communication. Plan with the sizes that you will train with, or use "
                "fewer devices."
            )
        return MappingPlan(
            self._search(first).trace.name, self._islands.chips, self._islands.chip, self._limit, tuple(fitting),
            tuple(too_large), considered, len(self._asked), left_out, tuple(cautions), pruned, len(large),
        )  # fmt: skip

    def _search(self, p: PlannedMapping) -> Search:
        return self._searches[tuple(p.choices.items())]

    def _ordered(self, found: Iterable[PlannedMapping]) -> list[PlannedMapping]:
        """Order mappings by their estimates; the first shards no axis of the model across slices if it need not."""
        ordered = sorted(found, key=PlannedMapping._order)
        within = (p for p in ordered if p.estimate.seconds <= NEAR * ordered[0].estimate.seconds)
        first = next((p for p in within if not self._search(p).divides_model(p.compute, p.mesh)), None)
        return ordered if first is None else sorted(ordered, key=lambda p: p is not first)


# --- writing ---


def _what(p: PlannedMapping) -> str:
    """Say in a line which mapping it is."""
    return ", ".join(filter(None, (_listed(p.mesh, "="), _listed(p.choices, "="), _listed(p.compute))))


def _listed(mapping: Mapping[str, Any], sign: str = ":") -> str:
    def one(over: Any) -> str:
        return "+".join(over) if isinstance(over, tuple) else str(over)

    gap = "" if sign == "=" else " "
    return ", ".join(f"{n}{sign}{gap}{one(over)}" for n, over in mapping.items())


# --- the page ---


def _row(
    number: int, p: PlannedMapping, others: int, written: Sequence[str], most: float, least: float, words: Words
) -> Sequence[Html | str]:
    stored = {n: over for n, over in p.storage.items() if p.compute.get(n) != over}
    mapping = [words.entries(p.compute)] if any(p.compute.values()) else [joined(["nothing is sharded"])]
    if stored:
        mapping.append(joined([element("span", "stored by ", class_="soft"), words.entries(stored)]))
    mapping += [joined([element("span", f"{name} ", class_="soft"), str(value)]) for name, value in p.choices.items()]
    more = element("small", f" and {counted(others, 'other mesh', 'other meshes')}") if others else None
    numbers = [element("span", text, class_="num") for text in written]
    if number > 1 and p.estimate.seconds <= _TIED * least:
        numbers[0] = joined([numbers[0], element("small", " a tie, within 2%")])
    # The time to compute, and after it the times to send, in the color of the mesh axes, to wait and to offload.
    bars = [("", sum(t for name, t in p.estimate.terms.items() if name in _COMPUTING))]
    for name, t in p.estimate.terms.items():
        if name not in _COMPUTING:
            _, over, axes = name.rpartition(" over ")
            bars.append((words.color(tuple(axes.split(" and "))) if over else "mid", t))
    times, lines = stacked((t / (most or 1), kind) for kind, t in bars if t), joined(mapping, element("br"))
    return str(number), joined([words.mesh(p.mesh), more]), lines, times, *numbers
