"""Report the cost of a traced step under a mapping from its names: exchanges, memory and flops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.source_lines import source
from ..distribution.active_settings import Entry
from . import _scopes
from ._arguments import GivenArray
from ._counted_exchanges import Account, Layout
from ._figures import Memory
from ._flops import NOTE, mean
from ._named_events import NamedTrace, Sum, Use, short_dtype
from ._parameters import HeldArgument, kind_of, report_of
from ._text import array_said
from .chips import Chip
from .records import HeldArray, RepeatedWork, together
from .report import Report


def by_names(
    trace: NamedTrace,
    mesh: Mapping[str, int],
    compute: Mapping[str, Entry],
    storage: Mapping[str, Entry],
    chip: Chip | None,
    given: Sequence[GivenArray],
) -> Report:
    """Report the cost of a traced step under a compute and a parameter mapping.

    Arguments:
        chip: the chip for which to compute lower bounds on time.
        given: the arrays in the arguments of the step.
    """
    layout = Layout(mesh, {**compute, **trace.over_matrices(mesh)}, storage, trace.joined)
    account = Account(trace, layout)
    temporaries = together(_temporary_arrays(trace, layout))
    held, results = (
        [(layout.local(x.dims, layout.over(x.dims)), layout.bytes(x, layout.over(x.base))) for x in arrays]
        for arrays in (trace.arguments, trace.results)
    )
    # The operations that use an argument, or a slice of one.
    known, uses = {value.origin: x for value, x in zip(trace.arguments, given, strict=True)}, list[Any]()
    for event in trace.events:
        if isinstance(event, Use):
            origin = event.operand.origin
            while origin not in known and origin in trace.slices:  # in a loop over layers
                origin = trace.slices[origin]
            if origin in known:
                uses.append((event.place.operation, event.place.frames, [known[origin]]))
    # Products that the mapping makes devices repeat, in the order of the step.
    repeated: dict[Any, int] = {}
    for place, used, flops in account.products:
        idle = tuple(a for a, n in mesh.items() if n > 1 and a not in used)
        key = _scopes.said_of(place.operation), place.phase, source(place.frames), idle
        repeated[key] = repeated.get(key, 0) + mean(flops, place.branches)
    # A lower bound: all arguments and results, and some of the temporaries.
    own, made, more = sum(n for _, n in held), sum(n for _, n in results), sum(x.bytes for x in temporaries)
    names = {n for x in (*trace.arguments, *trace.results) for n, _ in x.dims}
    names |= {n for event in trace.events if hasattr(event, "place") and (op := event.place.operation) for n in op.axes}
    return report_of(
        trace.name,
        "any platform",
        dict(mesh),
        "names",
        chip=chip,
        collectives=[account.described(x) for x in account.exchanges],
        uses=uses,
        given=given,
        held=[HeldArgument(x.argument, x, *found) for x, found in zip(given, held, strict=True)],
        kinds={kind_of([n for n, _ in x.dims], [size for _, size in x.dims]) for x in trace.results},
        mappings=(compute, storage),
        memory=Memory(own, made, aliased=0, temporaries=more),
        computed=account.computed,
        notes=tuple(_notes(account)),
        uncertain=account.uncertain,
        repeated=tuple(
            RepeatedWork(operation, phase, line, flops, layout.count(idle), idle)
            for (operation, phase, line, idle), flops in repeated.items()
            if idle
        ),
        axes=tuple(sorted(n for n in names if n is not None)),
        temporaries=temporaries,
    )


def _notes(account: Account) -> Iterator[str]:
    """Note what names leave open."""
    trace, computed = account.trace, account.computed
    yield (
        "by='names' assumes that the mappings shard every array, and counts each exchange separately: a compiler may "
        "combine some, leave some out, or send another dtype"
    )
    yield "only some temporaries are counted: arrays that loops keep for the backward pass, and the largest product"
    if trace.unnamed:
        have = "product has" if trace.unnamed == 1 else "products have"
        yield f"{trace.unnamed} {have} axes without names, which are taken to be replicated"
    if trace.uncounted:
        yield f"flops are not known, because the flops of {', '.join(trace.uncounted)} are not counted"
    if trace.grouped:
        yield (
            "flops of grouped products, such as experts', count each row with the matrix of its group: this is the "
            "most, since rows in no group take none"
        )
    if account.saved:
        yield f"a compiler may save up to {account.saved:,} of the flops, of constants and of repeated operations"
    if any(len(e.axes) > 1 and e.kind == "all-gather" for e in account.exchanges):
        yield "an array gathered over several mesh axes may be gathered over one after the other, at the same bytes"
    if any(e.place.branches for e in account.exchanges) or computed.flops != computed.least:
        yield NOTE


def _temporary_arrays(trace: NamedTrace, layout: Layout) -> Iterator[HeldArray]:
    """Yield what loops keep for the backward pass, and the largest product.

    At some time, this product exists; the others may use its memory before or after.
    """
    products = ((e.result, e.place) for e in trace.events if isinstance(e, Sum) and e.flops)
    most = max(products, key=lambda pair: layout.bytes(pair[0]), default=None)
    for x, place in (*trace.kept, *([] if most is None else [most])):
        local = layout.by(x.by).local(x.base)
        array = array_said(short_dtype(x.dtype), [(n, own) for (n, _), own in zip(x.base, local, strict=True)])
        made = "kept by a loop" if most is None or x is not most[0] else _scopes.said_of(place.operation) or "a product"
        yield HeldArray("temporary", array, 1, layout.bytes(x), place.phase, made, source(place.frames))
