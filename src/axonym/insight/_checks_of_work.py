"""Check a step for compute, and for arrays that it holds, which the step could leave out."""

from __future__ import annotations

from ..core.errors import counted, describe_bytes
from ._checks_of_transfers import lost_axes
from ._figures import Figures
from ._text import short_operation
from .records import MUCH
from .suspicions import Found, Suspicion, at_line, percentage

_WORDS = {
    "one-hot": (
        "{share} of the compute looks rows up by products with one-hot arrays: first {operation}{at}",
        "the rows by their numbers, as in table[axis, numbers].",
    ),
    "empty": (
        "{share} of the compute is of rows that are empty, if each row goes to one expert: {operation}{at} makes "
        "{sizes[1]:,} rows of {sizes[0]:,}",
        "fewer slots for each expert, or axonym.nn.dispatch, which makes no empty rows.",
    ),
    "again": (
        "{share} of the compute is a forward pass that runs a second time, called{at}, first in {operation}",
        "use what the differentiated function computes, by has_aux=True, or run it in few steps only.",
    ),
    "padding": (
        "{share} of the compute is of padding: {of} grows from {sizes[0]:,} to {sizes[1]:,}{at}",
        "a smaller multiple, or several short sequences in one.",
    ),
    "turns": (
        "{share} of the compute is the same in each turn of a loop{at}: it has {values} in {sizes[1]:,} turns",
        "compute it before the loop.",
    ),
    "cache": (
        "{share} of the compute is for all {sizes[1]:,} of {of} in each turn of a loop{at}, which changes one",
        "a cache of keys and values, such as axonym.nn.attention.KVCache, and only the new position in each turn.",
    ),
    "replicated": (
        "{sizes[1]} devices each compute and hold all of {of}, since a placement{at} replicates it",
        "leave the placement out, or add the axis to it.",
    ),
    "gathered": (
        "{bytes} of gradients are gathered by a placement{at}, of parameters that are stored sharded",
        "leave the placement out: norms, clips and updates need no complete gradients.",
    ),
    "joined": (
        "{sizes[1]} arrays are joined to a vector of {bytes}{at}, which no mapping shards",
        "a tree of arrays, or of sums over each: they keep their names and shards.",
    ),
    "frozen": (
        "{share} of the compute is for gradients{at} of parameters that the step leaves as they are: {of}",
        "differentiate with respect to the other parameters only, and keep no state of these.",
    ),
    "unused": (
        "{share} of the compute{at} is for all {sizes[1]:,} of {of}, of which {operation} picks {sizes[0]:,}",
        "pick them before these products.",
    ),
    "equal": (
        "{share} of the compute is of rows that are all equal, since {of} is added by a broadcast{at}",
        "broadcast after the products, or leave it to names.",
    ),
    "experts": (
        "{share} of the compute{at} is for all {sizes[1]:,} of {of}, of which each row takes {sizes[0]:,}",
        "axonym.nn.dispatch, which sends rows only to those that they take.",
    ),
    "apart": (
        "{share} of the compute{at} is in a loop, but does not depend on what it carries",
        "compute it for all turns at once, before the loop.",
    ),
    "checkpointed": (
        "{share} of the compute is computed again twice: gradient checkpointing{at} lies in or around another",
        "checkpoint in one place, such as nn.Stacked, unless memory needs both.",
    ),
    "repeated": (
        "{bytes} of an array{at}, repeated {sizes[1]:,} times, are read by products with few rows",
        "an axis for the repetition in the other operand, as grouped queries have, and the array as it is.",
    ),
    "stacked": (
        "A loop stacks {bytes} of arrays made{at}, of which only sums are used",
        "add them up in what the loop carries.",
    ),
    "sum of products": (
        "A sum of elementwise products{at} makes {sizes[1]:,} numbers of {sizes[0]:,}: it is a product of matrices",
        "axonym.dot of both, along the axis of the sum.",
    ),
    "wide": (
        "{of}{at}: {share} of the flops of the forward pass come after it in the larger dtype",
        "convert the wider operand there to the smaller dtype, or convert the result.",
    ),
}
"""For each kind of avoidable work, the words of a report and the advice."""


def check_work(report: Figures) -> Found:
    told = {lost.source for lost in lost_axes(report) if lost.cause == "placement"}
    for work in report.avoidable:
        if work.share >= MUCH and not (work.why == "replicated" and work.source in told):
            cause, advice = _WORDS[work.why]
            said = cause.format(
                share=percentage(work.share),
                operation=short_operation(work.operation or "a product without names"),
                at=at_line(work.source),
                sizes=work.sizes,
                values=counted(work.sizes[0], "value"),
                of=work.of,
                bytes=describe_bytes(work.sizes[0]),
            )
            yield Suspicion("fix" if work.why == "replicated" else "look", f"{said}.", advice=advice)
    if report.flops and report.by != "names" and not report.avoidable:
        yield "no product has one-hot arrays or many empty rows, or runs in a second forward pass"
