"""Find the parameter that a collective carries, or the gradient of: the argument that its operation uses."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..core.source_lines import Source, source
from . import _scopes
from ._arguments import GivenArray
from ._lowered import Product
from ._named_events import NamedTrace, Use
from .collectives import Collective

Place = tuple[str | None, Source | None]
"""A named operation and its line, in all passes of a step."""


def used_by(products: Iterable[Product], found: Callable[[int], GivenArray | None]) -> dict[Place, list[GivenArray]]:
    """Return the arguments that each operation uses; `found` gives the argument with a number."""
    uses: dict[Place, list[GivenArray]] = {}
    for product in products:
        operation = _scopes.operation(product.scope)
        place = None if operation is None else str(operation), source(product.frames)
        arrays = [found(n) for n in product.arguments if n is not None]
        uses.setdefault(place, []).extend(x for x in arrays if x is not None)
    return uses


def used_by_names(trace: NamedTrace, given: Sequence[GivenArray]) -> dict[Place, list[GivenArray]]:
    """Return the arguments that each operation of a traced step uses."""
    known = {value.origin: x for value, x in zip(trace.arguments, given, strict=True)}
    uses: dict[Place, list[GivenArray]] = {}
    for event in trace.events:
        if isinstance(event, Use) and event.operand.origin in known:
            place = event.place
            key = str(place.operation) if place.operation else None, source(place.frames)
            uses.setdefault(key, []).append(known[event.operand.origin])
    return uses


def with_parameters(
    collectives: Iterable[Collective], uses: dict[Place, list[GivenArray]], given: Sequence[GivenArray]
) -> Iterator[Collective]:
    """Add to collectives the paths of the parameters that they carry, as far as known."""
    for c in collectives:
        here = uses.get((c.operation, c.source), ())
        found = [x for x in here if _is_carried(c, x)]
        if not found and c.operation is not None:
            # Scales and biases are in no product, so their axes tell; the loop over layers has one more.
            found = [x for x in given if _is_carried(c, x)]
        paths = tuple(dict.fromkeys(x.path for x in found))
        yield dataclasses.replace(c, parameters=paths if len(set(map(without_numbers, paths))) <= _AT_MOST else ())


_AT_MOST = 3
"""How many parameters are listed where it is not known which one it is."""


def _is_carried(c: Collective, x: GivenArray) -> bool:
    """Return whether a collective may carry an argument, a slice of it along one axis, or its gradient."""
    if c.kind in ("all-reduce", "reduce-scatter") and c.phase != "backward":
        return False
    names = carried_axes(c)
    own = {n for n in x.axes if n is not None}
    if names and own:
        more = own - set(names)
        return own >= set(names) and len(more) <= 1 and not more & set(c.named_axes)
    sizes = re.search(r"\[([\d,]*)\]", c.array)
    elements = math.prod(int(n) for n in sizes[1].split(",") if n) if sizes else 0
    return not own and not names and elements > 1 and math.prod(x.sizes) % elements == 0


def carried_axes(c: Collective) -> tuple[str, ...]:
    """Return the names of the axes of the array that a collective carries, as far as known."""
    found = re.search(r"\[([^\[\]]*)\]$", c.array)
    return tuple(re.findall(r"([^,=]+)(?:=\d+)?(?:, |$)", found[1])) if found and not found[1][:1].isdigit() else ()


def without_numbers(path: str) -> str:
    """Write a path for all layers of a kind: `layers/*/weight`."""
    return re.sub(r"(?<=/)\d+(?=/|$)", "*", path)
