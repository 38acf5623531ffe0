"""The page of a plan: the candidates, and why the first beats the second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from ..core.errors import counted, describe_bytes
from ..core.html import Html, Words, copyable, element, folded, joined, listed, stacked, table
from ._text import as_shown, described_seconds

Plan: TypeAlias = Any
"""A plan: its module uses this one, and imports point one way."""

_SHOWN = 12
"""How many candidates are shown at once."""
_COMPUTING = {"products", "attention", "reading and writing"}
"""The terms of an estimate that are drawn as one."""


def plan_page(plan: Plan, mappings: Sequence[tuple[Any, int]]) -> tuple[str, Html]:
    """Return the title and the body of the page of a plan.

    Arguments:
        mappings: each mapping on its best mesh, and the number of its other meshes.
    """
    words = Words(list(dict.fromkeys(a for p in plan.found for a in p.mesh)))
    best = plan.best
    crumb = [element("b", plan.step), f"{plan.chips} × {plan.chip.name}", f"{describe_bytes(plan.memory)} each"]
    considered = f"All {counted(plan.considered, 'combination')} of these were considered"
    if plan.not_fitting:
        considered += f"; {plan.not_fitting} need more than {describe_bytes(plan.memory)}"
    most = max(p.estimate.seconds for p, _ in mappings[:_SHOWN])
    fitting = [_row(i + 1, p, others, most, words) for i, (p, others) in enumerate(mappings)]
    terms = dict.fromkeys(name for p, _ in mappings for name, t in p.estimate.terms.items() if t)
    then = listed(["sending", *(name for name in terms if name not in _COMPUTING and " over " not in name)])
    header = ("", "mesh", "mapping", joined(["computing, then ", then]), "about", "at least", "memory")
    about = f"About {described_seconds(as_shown(best.estimate.seconds))} a step, by "
    first = element(
        "section",
        element("h1", about, words.mesh(best.mesh), "."),
        element("p", words.said(f"{plan.why()} {considered}.".strip()), class_="lead"),
        *(element("p", element("b", "Caution: "), words.said(c)) for c in plan.cautions),
        copyable("The first as code", best.code()),
        class_="card",
        aria_label="the plan",
    )
    parts = [element("h2", "Candidates"), table("candidates", header, fitting[:_SHOWN])]
    if len(fitting) > _SHOWN:
        parts.append(folded(f"{len(fitting) - _SHOWN} more", table("more candidates", header, fitting[_SHOWN:][:60])))
    if plan.left_out:
        rows = [(what, words.said(reason)) for what, reason in plan.left_out.items()]
        title = f"{counted(len(rows), 'kind')} of mappings {'was' if len(rows) == 1 else 'were'} not considered"
        parts.append(folded(title, table("not considered", ("what", "why"), rows)))
    note = "Times are estimates, and `at least` and memory are lower bounds: measure the first few."
    parts.append(element("p", note, class_="small"))
    crumbs = element("p", joined(crumb, " · "), class_="crumb")
    return f"A plan for {plan.step}", joined([crumbs, first, element("section", *parts)])


def _row(number: int, p: Any, others: int, most: float, words: Words) -> Sequence[Html | str]:
    stored = {n: over for n, over in p.storage.items() if p.compute.get(n) != over}
    mapping = [words.entries(p.compute)] if any(p.compute.values()) else [joined(["nothing is sharded"])]
    if stored:
        mapping.append(joined([element("span", "stored by ", class_="soft"), words.entries(stored)]))
    mapping += [joined([element("span", f"{name} ", class_="soft"), str(value)]) for name, value in p.choices.items()]
    more = element("small", f" and {counted(others, 'other mesh', 'other meshes')}") if others else None
    seconds = map(described_seconds, (as_shown(p.estimate.seconds), p.seconds))
    memory = describe_bytes(p.memory if p.peak is None else p.peak)
    numbers = [element("span", text, class_="num") for text in (*seconds, memory)]
    lines = joined(mapping, element("br"))
    return str(number), joined([words.mesh(p.mesh), more]), lines, _times(p, most, words), *numbers


def _times(p: Any, most: float, words: Words) -> Html:
    """Draw the time to compute, and after it the times to send, to wait and to offload."""
    computing = sum(t for name, t in p.estimate.terms.items() if name in _COMPUTING)
    others = [(_kind(name, words), t) for name, t in p.estimate.terms.items() if name not in _COMPUTING]
    return stacked((t / (most or 1), kind) for kind, t in [("", computing), *others] if t)


def _kind(term: str, words: Words) -> str:
    """Return the kind of the bar of a term: the color of the mesh axes that it is over."""
    _, over, axes = term.rpartition(" over ")
    return words.color(tuple(axes.split(" and "))) if over else "mid"
