"""Mark arrays with the names of their axes in a program that is traced to follow its names.

A named array is an array and names, and a rename changes no array, so a traced program does not show which names its
axes have. In a trace that `marking` surrounds, each named operation therefore leaves a mark for each of its operands
and results: an operation without effect that holds the names. A derivative has the marks of the value that it belongs
to, and `jax.vmap` adds an axis without a name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ..axis import Names
from ..core.jax_versions import marking_operation
from .active_settings import ACTIVE, Entry, activate_here, active_mapping
from .axis_rules import names_of_results
from .operation_scope import DerivedName, unmarked

MARK = "named_axes"
"""The name of the primitive of marks; its parameter `names` has a name or None for each axis."""

EXCHANGE = "exchanged"
"""The name of the primitive that shows what devices exchange; its parameter `names` has what `exchanged` got."""

PLACEMENT = "placement"
"""The kind of mark that places an array by a mapping from there on, for which devices may exchange shards."""

ACTIVE_HERE = "active mapping"
"""The kind of mark that names the active mapping, by which new arrays lie; devices exchange nothing for it."""

_mark = marking_operation(MARK, lambda names, at: (*names[:at], None, *names[at:]))
_exchange = marking_operation(EXCHANGE, lambda names, at: names)


def marking() -> contextlib.AbstractContextManager[None]:
    """Let named operations mark their operands and results in a with-block, in which a program is traced."""
    return activate_here(marked=True)


def is_marking() -> bool:
    settings = ACTIVE.value
    return settings is not None and settings.marked


def marked(arrays: Sequence[jax.Array], names: Sequence[Names]) -> list[jax.Array]:
    """Return arrays, each marked with its names, and with the mapping that is active inside of the step, if any."""
    found = [_mark(x, tuple(map(_public_name, own))) if own else x for x, own in zip(arrays, names, strict=True)]
    if not (mapping := active_mapping()):
        return found
    here = _sorted_entries(mapping)
    return [_exchange(x, (ACTIVE_HERE, own, here)) if own else x for x, own in zip(found, names, strict=True)]


def exchanged(x: jax.Array, what: str, axis: str, *details: Any) -> jax.Array:
    """Return an array, marked as what devices exchange if an axis is sharded; the gradient is exchanged alike.

    Arguments:
        what: "halo", "totals" or "shards"; or for look-ups at places along another axis, "elements", and "parts" for
            an operand that devices have alike, of whose gradient each has a part.
        details: for look-ups, the axis of the places, as an `Axis`, and how far they reach, if known: see
            `axonym.ops._blocks`; for "parts", the axes that the operand lacks; for "matrices", the mesh axes that
            share them out (None for all), and a function that yields their exchanges: see `axonym.optim.matrices`.
    """
    return _exchange(x, (what, axis, *details))


def placed(x: jax.Array, names: Names, mapping: Mapping[str, Entry]) -> jax.Array:
    """Return an array, marked with the mapping that shards these axes of it from here on."""
    return _exchange(x, (PLACEMENT, names, _sorted_entries(mapping)))


def _sorted_entries(mapping: Mapping[str, Entry]) -> tuple[tuple[str, Entry], ...]:
    return tuple(sorted(mapping.items(), key=lambda pair: pair[0]))


def _public_name(name: str) -> str | None:
    """Return the name of an axis; None for a private one, which stands for any: see `axonym.ops._operands`."""
    return None if isinstance(name, DerivedName) and name.private else unmarked(name)


def marked_results(found: jax.Array | Sequence[jax.Array], out_names: Names | Sequence[Names]) -> Any:
    """Return the result of an operation, or its results, marked with their names."""
    if not isinstance(found, jax.Array):
        return tuple(marked(found, names_of_results(out_names)))
    return marked([found], names_of_results(out_names))[0]
