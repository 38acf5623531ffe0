"""The active settings: one value that is part of every jit cache key.

An active mapping must never be baked into a compiled function that outlives it. JAX has a place for such state: a *user
context*, whose value is part of the cache key of `jax.jit` and everything built on it. So a changed mapping retraces,
and a mapping that was active before finds its compiled program again.

JAX compares the value by hash and equality on every call. Settings are therefore interned: equal ones are one object.
Without settings, the value is `None`, as when a thread starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any

import jax

Entry = str | tuple[str, ...] | None
"""The mesh axis or axes that an axis is sharded over; None if it is replicated."""


def _empty() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclasses.dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Settings:
    """The active mappings and annotations, as one immutable value. Made by `intern_settings`."""

    mapping: Mapping[str, Entry] = dataclasses.field(default_factory=_empty)
    """The active mapping."""
    parameter_mapping: Mapping[str, Entry] = dataclasses.field(default_factory=_empty)
    """The mapping that parameters are stored by: see `axonym.fsdp`."""
    annotations: Mapping[str, Hashable] = dataclasses.field(default_factory=_empty)
    """The placements of annotations by name: see `axonym.sharding.with_sharding_annotation`."""

    def __repr__(self) -> str:
        rest = f", parameter_mapping={dict(self.parameter_mapping)}" if self.parameter_mapping else ""
        rest += f", annotations={dict(self.annotations)}" if self.annotations else ""
        return f"Settings({dict(self.mapping)}{rest})"


_INTERNED: weakref.WeakValueDictionary[Any, Settings] = weakref.WeakValueDictionary()
_INTERNING = threading.Lock()

# Created when the package is imported, not when a module is first used: each context is part of every jit cache key,
# so a new one makes JAX compile everything again.
ACTIVE = jax.make_user_context(None)
ENVIRONMENT = jax.make_user_context(None)
"""Holds the names that stand for mesh axes inside `shard_map`: see `axonym.manual._axis_environment`."""
MAPPED = jax.make_user_context(False)
"""Whether a function is mapped over an axis on a mesh: see `axonym.transforms._mapped_axis`."""

activated = False
"""Whether settings were ever active. If not, an eager operation does not have to ask JAX for them."""


def intern_settings(**parts: Mapping[str, Any]) -> Settings | None:
    """Return the same object for equal settings; None if they are empty."""
    key = frozenset([(name, frozenset(part.items())) for name, part in parts.items() if part])
    if not key:
        return None
    with _INTERNING:
        found = _INTERNED.get(key)
        if found is None:
            found = Settings(**{name: MappingProxyType(dict(part)) for name, part in parts.items()})
            _INTERNED[key] = found
        return found


def changed(outer: Settings | None, **parts: Mapping[str, Any]) -> Settings | None:
    """Return settings with some parts replaced."""
    kept = {} if outer is None else {f.name: getattr(outer, f.name) for f in dataclasses.fields(outer)}
    return intern_settings(**{**kept, **parts})


def active_settings() -> Settings | None:
    """Return all active settings, or None."""
    return ACTIVE.value


def active_mapping() -> Mapping[str, Entry]:
    """Return the active mapping; an empty one if there is none."""
    settings = ACTIVE.value
    return {} if settings is None else settings.mapping


def active_parameter_mapping() -> Mapping[str, Entry]:
    """Return the active mapping that parameters are stored by; an empty one if there is none."""
    settings = ACTIVE.value
    return {} if settings is None else settings.parameter_mapping


def activate(settings: Settings | None) -> contextlib.AbstractContextManager[None]:
    """Activate settings in a with-block."""
    global activated
    activated = activated or settings is not None
    return ACTIVE(settings)
