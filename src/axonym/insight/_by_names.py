"""Report the cost of a traced step under a mapping from its names: exchanges, memory and flops."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.source_lines import source
from ..distribution.active_settings import Entry
from . import _scopes
from ._arguments import GivenArray, added_up
from ._branches import NOTE
from ._counted_exchanges import Account
from ._figures import Memory
from ._named_events import NamedTrace, Sum, Use
from ._named_layout import Layout
from ._parameters import kind_of, updated, used_by, with_parameters
from ._text import array_said
from .chips import Chip
from .repeating import repeated_by_names
from .report import Report
from .timeline import HeldArray


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
    layout = Layout(mesh, compute, storage, trace.joined)
    account = Account(trace, layout)
    found, temporaries = tuple(map(account.described, account.exchanges)), _temporaries(trace, layout)
    own = [layout.bytes(x, layout.over(x.base)) for x in trace.arguments]
    results = sum(layout.bytes(x, layout.over(x.base)) for x in trace.results)
    # A lower bound: all arguments and results, and some of the temporaries.
    memory = Memory(sum(own), results, aliased=0, temporaries=sum(x.bytes for x in temporaries))
    kinds = {kind_of([n for n, _ in x.dims], [size for _, size in x.dims]) for x in trace.results}
    names = {n for x in (*trace.arguments, *trace.results) for n, _ in x.dims}
    names |= {n for event in trace.events if hasattr(event, "place") and (op := event.place.operation) for n in op.axes}
    shards = [layout.local(value.dims, layout.over(value.dims)) for value in trace.arguments]
    sizes = {x.path: shard for x, shard in zip(given, shards, strict=True)}
    placed = (x.on_devices(shard, mesh, (compute, storage)) for x, shard in zip(given, shards, strict=True))
    return Report(
        trace.name,
        "any platform",
        dict(mesh),
        "names",
        tuple(with_parameters(found, used_by(_uses(trace, given)), given, sizes, kinds)),
        memory,
        account.flops,
        None if chip is None else account.bounds(chip, memory),
        tuple(_notes(account)),
        account.uncertain,
        arguments=added_up(zip([x.argument for x in given], own, strict=True)),
        placed=tuple(placed),
        repeated=tuple(repeated_by_names(trace, layout)),
        mapping=compute,
        parameter_mapping=storage,
        axes=tuple(sorted(n for n in names if n is not None)),
        least_flops=account.least_flops,
        updated=tuple(x.path for x in updated(given, kinds)),
        temporaries=tuple(temporaries),
        computed=account.computed,
    )


def _uses(trace: NamedTrace, given: Sequence[GivenArray]) -> Iterator[Any]:
    """Yield each operation that uses an argument, or a slice of one, with its lines."""
    known = {value.origin: x for value, x in zip(trace.arguments, given, strict=True)}
    for event in trace.events:
        if isinstance(event, Use):
            origin = event.operand.origin
            while origin not in known and origin in trace.slices:  # in a loop over layers
                origin = trace.slices[origin]
            if origin in known:
                yield event.place.operation, event.place.frames, [known[origin]]


def _notes(account: Account) -> Iterator[str]:
    """Note what names leave open."""
    trace = account.trace
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
    if any(e.branches for e in account.exchanges) or account.flops != account.least_flops:
        yield NOTE


def _temporaries(trace: NamedTrace, layout: Layout) -> list[HeldArray]:
    """Return what loops keep for the backward pass, and the largest product, the largest first.

    At some time, this product exists; the others may use its memory before or after.
    """
    products = ((e.result, e.place) for e in trace.events if isinstance(e, Sum) and e.flops)
    most = max(products, key=lambda pair: layout.bytes(pair[0]), default=None)
    found: dict[HeldArray, int] = {}
    for x, place in (*trace.kept, *([] if most is None else [most])):
        sizes = zip(x.base, layout.local(x.base), strict=True)
        array = array_said(x.short_dtype, [(n, own) for (n, _), own in sizes])
        made = "kept by a loop" if most is None or x is not most[0] else _scopes.said_of(place.operation) or "a product"
        held = HeldArray("temporary", array, 1, layout.bytes(x), place.phase, made, source(place.frames))
        found[held] = found.get(held, 0) + 1
    alike = (dataclasses.replace(x, count=n, bytes=n * x.bytes) for x, n in found.items())
    return sorted(alike, key=lambda x: -x.bytes)
