"""The page of a plan: the candidates, and why the first beats the second."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ..core.errors import counted, describe_bytes
from ._html import Html, Words, copyable, element, folded, joined, stacked, table
from ._text import described_seconds

Plan: TypeAlias = Any
"""A plan: its module uses this one, and imports point one way."""

_SHOWN = 12
"""How many candidates are shown at once."""
_KNOWN = {"mesh", "compute", "storage", "by"}
"""The fields of a candidate that are mappings or text, and no choice."""


def plan_page(plan: Plan, mappings: Sequence[tuple[Any, int]]) -> tuple[str, Html]:
    """Return the title and the body of the page of a plan.

    Arguments:
        mappings: each mapping on its best mesh, and the number of its other meshes.
    """
    words = Words(list(dict.fromkeys(a for p in plan.found for a in p.mesh)))
    best = plan.best
    crumb = [element("b", plan.step), f"{plan.chips} × {plan.chip.name}", f"{describe_bytes(plan.memory)} each"]
    considered = f"{counted(plan.considered, 'mesh and mapping', 'meshes and mappings')} considered"
    if plan.too_large:
        considered += f"; {len(plan.too_large)} need more than {describe_bytes(plan.memory)}"
    most = max(sum(t for _, t in _terms(p, words)) for p, _ in mappings[:_SHOWN])
    fitting = [_row(i + 1, p, others, most, words) for i, (p, others) in enumerate(mappings)]
    header = ("", "mesh", "mapping", "compute, then sending", "time", "sending", "memory")
    first = element(
        "section",
        element("h1", _least(best).capitalize(), " a step, by ", words.mesh(best.mesh), "."),
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
    note = "Memory, and times that say “at least”, are lower bounds: measure the first few."
    parts.append(element("p", note, class_="small"))
    crumbs = element("p", joined(crumb, " · "), class_="crumb")
    return f"A plan for {plan.step}", joined([crumbs, first, element("section", *parts)])


def _row(number: int, p: Any, others: int, most: float, words: Words) -> Sequence[Html | str]:
    stored = {n: over for n, over in p.storage.items() if p.compute.get(n) != over}
    mapping = [words.entries(p.compute)] if any(p.compute.values()) else [joined(["nothing is sharded"])]
    if stored:
        mapping.append(joined([element("span", "stored by ", class_="soft"), words.entries(stored)]))
    mapping += [joined([element("span", f"{name} ", class_="soft"), value]) for name, value in _choices(p)]
    sending = described_seconds(sum(p.bounds.links.values())) if p.bounds.links else "nothing"
    lines = joined([joined([element("br") if j else None, line]) for j, line in enumerate(mapping)])
    return (
        str(number),
        joined(
            [
                words.mesh(p.mesh),
                element("small", f" and {counted(others, 'other mesh', 'other meshes')}") if others else None,
            ]
        ),
        lines,
        _times(p, most, words),
        element("span", _least(p), class_="num"),
        element("span", sending, class_="num"),
        element("span", describe_bytes(p.memory), class_="num"),
    )


def _least(p: Any) -> str:
    """Write the time that a candidate is estimated to take, or else its bound."""
    if estimate := getattr(p, "estimate", None):
        return f"about {described_seconds(float(estimate.seconds))}"
    return f"at least {described_seconds(p.seconds)}"


def _choices(p: Any) -> Iterator[tuple[str, str]]:
    """Yield what else was chosen: candidates may have further mappings and texts."""
    for field in dataclasses.fields(p):
        value = None if field.name in _KNOWN else getattr(p, field.name)
        if isinstance(value, Mapping):
            yield from ((str(name), str(chosen)) for name, chosen in value.items())
        elif isinstance(value, str):
            yield field.name, value


def _terms(p: Any, words: Words) -> list[tuple[str, float]]:
    """Return the kinds and the times of the parts of a bar: the terms of an estimate if there is one, or the bounds."""
    if estimate := getattr(p, "estimate", None):
        over = [(name.partition(" over ")[2], float(t)) for name, t in estimate.terms.items()]
        return [(words.color(axes.split(" and ")) if axes else "", t) for axes, t in over]
    return [("", p.bounds.compute or 0.0), *((words.color(a), t) for a, t in p.bounds.links.items())]


def _times(p: Any, most: float, words: Words) -> Html:
    """Draw the time to compute, and after it the times to send."""
    terms = sorted(_terms(p, words), key=lambda pair: pair[0])
    scale = max(most, sum(t for _, t in terms)) or 1
    return stacked((t / scale, kind) for kind, t in terms)
