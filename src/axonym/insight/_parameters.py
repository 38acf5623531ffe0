"""Make a report of what was found of a step, with the parameters that its collectives carry, or the gradients of."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ..core.source_lines import Frame, Source, source
from ..distribution.active_settings import Entry
from ..distribution.operation_scope import ScopedOperation
from . import _scopes
from ._arguments import GivenArray
from ._figures import Memory, bounds_on
from ._flops import Computed
from ._text import Said, described_axes
from .chips import Chip
from .records import Collective, carried_axes, without_numbers
from .report import Report

Place = tuple[str | None, Source | None]
"""A named operation and its line, in all passes of a step."""


Kind = frozenset[str] | tuple[int, ...]
"""The names of the axes of an array, or its sizes if it has none."""


def kind_of(names: Iterable[str | None], sizes: Sequence[int]) -> Kind:
    return frozenset(n for n in names if n is not None) or tuple(sizes)


class HeldArgument(NamedTuple):
    """An array in the arguments of a step, as each device holds it."""

    argument: str
    """The parameter."""
    array: GivenArray | None
    """None if it is not known which it is."""
    sizes: Sequence[int]
    bytes: int


Uses = Iterable[tuple[ScopedOperation | None, Sequence[Frame], Iterable[GivenArray | None]]]
"""Operations, their lines, and the arguments that they use."""


def report_of(
    step: str,
    platform: str,
    mesh: Mapping[str, int],
    by: str,
    *,
    chip: Chip | None,
    collectives: Sequence[Collective],
    uses: Uses,
    given: Sequence[GivenArray],
    held: Sequence[HeldArgument],
    kinds: Collection[Kind],
    mappings: tuple[Mapping[str, Entry], Mapping[str, Entry]],
    memory: Memory | None,
    computed: Computed,
    converted: Mapping[str, str] = MappingProxyType({}),
    looked_up: Mapping[Source | None, GivenArray | None] = MappingProxyType({}),
    **more: Any,
) -> Report:
    """Report on a step, from what was read of a program, or worked out by names.

    `kinds` are the kinds of the results: an argument of another kind is no parameter, as no result updates it.
    `converted` has by path the dtype that an argument gets once it is gathered, `looked_up` by line the table of rows.
    """
    sizes = Counter[str]()
    for x in held:
        sizes[x.argument] += x.bytes
    updated = {x: None for x in given if kind_of(x.axes, x.sizes) in kinds}
    shards = {x.path: sizes for _, x, sizes, _ in held if x is not None}
    placed = (x.on_devices(sizes, mesh, mappings) for _, x, sizes, _ in held if x and len(x.sizes) == len(sizes))
    return Report(
        step,
        platform,
        mesh,
        by,
        tuple(_with_parameters(collectives, uses, shards, updated, converted, looked_up)),
        memory,
        computed.flops,
        None if chip is None else bounds_on(chip, collectives, memory, computed.wide),
        arguments=dict(sizes),
        placed=tuple(placed),
        mapping=mappings[0],
        parameter_mapping=mappings[1],
        least_flops=computed.least,
        updated=tuple(x.path for x in updated),
        computed=computed.phases,
        **more,
    )


def _with_parameters(
    collectives: Iterable[Collective],
    operations: Uses,
    shards: Mapping[str, Sequence[int]],
    parameters_of_step: Collection[GivenArray],
    converted: Mapping[str, str],
    looked_up: Mapping[Source | None, GivenArray | None],
) -> Iterator[Collective]:
    """Add to collectives the paths of the parameters that they carry, as far as known."""
    uses: dict[Place, list[GivenArray]] = {}
    by_line: dict[Source | None, list[GivenArray]] = {}
    for operation, frames, arrays in operations:
        known, line = [x for x in arrays if x is not None], source(frames)
        uses.setdefault((_scopes.said_of(operation), line), []).extend(known)
    for (_, line), known in uses.items():
        by_line.setdefault(line, []).extend(known)
    for c in collectives:
        # Scales and biases are in no product, so their axes or sizes tell; the loop over layers has one axis more.
        around = (uses.get((c.operation, c.source), ()), by_line.get(c.source, ()), parameters_of_step)
        # An activation may have the axes of an argument; only parameters are stored sharded.
        any_of = c.stored and c.kind not in ("all-reduce", "reduce-scatter")
        possible = ([x for x in arrays if any_of or x in parameters_of_step] for arrays in around)
        carried = ([x for x in arrays if _is_carried(c, x, shards.get(x.path, x.sizes))] for arrays in possible)
        found, sizes = next(filter(None, carried), []), sorted(_sizes_of(c))
        # Those with the sizes of the collective, or else all.
        own = [x for x in found if "reduce" in c.kind and sorted(shards.get(x.path, ())) == sizes]
        exact = own or [x for x in found if sorted(x.sizes) == sizes] or found
        paths = dict.fromkeys(x.path for x in exact)
        few = tuple(paths) if len(set(map(without_numbers, paths))) <= _AT_MOST else ()
        reason, array, over = c.reason, c.array, described_axes(c.axes)
        if few and "reduce" in c.kind and (reason is None or "held array" in reason):
            reason = f"the gradient of {' or '.join(dict.fromkeys(map(without_numbers, few)))} is summed"
            reason += f" over {over}" if c.axes else ""
        elif few and c.kind == "all-gather" and reason is None:  # the axes that it completes, by sizes
            x = exact[0]
            both = zip(x.axes, x.sizes, shards.get(x.path, x.sizes), strict=True)
            names = [n for n, size, held in both if n is not None and held < size and size in sizes]
            reason = f"{' and '.join(names)} is stored sharded over {over}, and all of it is used" if names else None
        if few and "held array" in array:
            array = Said(re.sub(r"\d+ of held array \d+=", "", array), ((), _sizes_of(c)))
        cause = reason.of if isinstance(reason, Said) else ""
        if c.made is not None:
            also = f"an {c.made} over all axes of the torus: twice the bytes, over all links"
            reason = f"{reason or 'why is not known'}; the compiler for TPUs makes of it {also}"
        dtypes = {converted.get(path) for path in few} if c.kind == "all-gather" else set[str | None]()
        late = dtypes.pop() if len(dtypes) == 1 else None
        table = looked_up.get(c.source) if c.operation is None and c.source is not None else None
        if table is not None and (reason is None or table.path in few):
            reason = f"rows of {without_numbers(table.path)} are looked up without names"
            if c.kind == "all-gather" and table.path in few:
                reason, cause = f"{reason}, for which all of it is gathered", "look-up"
        yield dataclasses.replace(c, array=array, parameters=few, reason=reason, converted=late, cause=cause)


_AT_MOST = 3
"""The largest number of candidates that are listed for one parameter."""


def _is_carried(c: Collective, x: GivenArray, shard: Sequence[int]) -> bool:
    """Return whether a collective may carry an argument, a slice of it along one axis, or its gradient."""
    if c.kind in ("all-reduce", "reduce-scatter") and c.phase != "backward":
        return False
    names = carried_axes(c)
    own = {n for n in x.axes if n is not None}
    if names and own:
        more = own - set(names)
        return own >= set(names) and len(more) <= 1 and not more & set(c.named_axes)
    # A lifted function calls the axes of its own arrays `0 of held array 2`. Loops take slices in code without names.
    whole = not own or (c.kind == "all-gather" and not c.phase)
    return whole and not names and _fit(_sizes_of(c), x.sizes, shard)


def _sizes_of(c: Collective) -> Sequence[int]:
    return c.array.of[1] if isinstance(c.array, Said) else ()


def _fit(sizes: Sequence[int], whole: Sequence[int], shard: Sequence[int]) -> bool:
    """Return whether an array, with axes in any order, may be a shard of another, complete along some axes."""
    own = [n for n in sizes if n > 1]
    if len(shard) != len(whole):  # the data of random keys
        return False
    pairs = [(a, b) for a, b in zip(shard, whole, strict=True) if b > 1]
    pairs = pairs if len(pairs) == len(own) else [(a, b) for a, b in pairs if a > 1]
    orders = itertools.permutations(pairs) if 0 < len(own) == len(pairs) < 7 else ()
    return any(all(n % a == 0 == b % n for n, (a, b) in zip(own, order, strict=True)) for order in orders)
