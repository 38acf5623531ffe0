"""The active settings: one value that is part of every jit cache key.

An active mapping must never be baked into a compiled function that outlives it. JAX has a place for such things: a
*user context*, whose value is part of the key under which `jax.jit` and all that builds on it keep what they traced and
compiled. So a changed mapping retraces, and one that returns finds what it compiled before.

JAX compares the value by hash and equality on every call. Settings are therefore interned: equal ones are one object.
No settings are `None`, the value every thread starts with.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any

import jax

Entry = str | tuple[str, ...] | None
"""The mesh axis that an axis is sharded over, or several; None if it is replicated."""


class Settings:
    """The mappings and annotations that are active, as one immutable value. Made by `intern_settings`."""

    __slots__ = ("__weakref__", "annotations", "mapping", "storage")

    def __init__(self, mapping: Mapping[str, Entry], storage: Mapping[str, Entry], annotations: Mapping[str, Hashable]):
        self.mapping = MappingProxyType(dict(mapping))
        """The active mapping."""
        self.storage = MappingProxyType(dict(storage))
        """The storage mapping of parameters: see `axonym.fsdp`."""
        self.annotations = MappingProxyType(dict(annotations))
        """The placements of annotations by name: see `axonym.sharding.with_sharding_annotation`."""

    def __repr__(self) -> str:
        rest = f", storage={dict(self.storage)}" if self.storage else ""
        rest += f", annotations={dict(self.annotations)}" if self.annotations else ""
        return f"Settings({dict(self.mapping)}{rest})"


_INTERNED: weakref.WeakValueDictionary[Any, Settings] = weakref.WeakValueDictionary()
_INTERNING = threading.Lock()

# Made once, on import: JAX asks that contexts are not made while it is in use.
ACTIVE = jax.make_user_context(None)


def intern_settings(
    mapping: Mapping[str, Entry] | None = None,
    storage: Mapping[str, Entry] | None = None,
    annotations: Mapping[str, Hashable] | None = None,
) -> Settings | None:
    """Return the same object for equal settings; None if they are empty."""
    given = mapping or {}, storage or {}, annotations or {}
    if not any(given):
        return None
    key = tuple(frozenset(part.items()) for part in given)
    with _INTERNING:
        return _INTERNED.setdefault(key, Settings(*given))


def changed(outer: Settings | None, **parts: Mapping[str, Any]) -> Settings | None:
    """Return settings with some parts replaced."""
    kept = {} if outer is None else {n: getattr(outer, n) for n in ("mapping", "storage", "annotations")}
    return intern_settings(**{**kept, **parts})


def active_settings() -> Settings | None:
    """Return all active settings, or None."""
    return ACTIVE.value


def active_mapping() -> Mapping[str, Entry] | None:
    """Return the active mapping, or None if it has no entries."""
    settings = ACTIVE.value
    return None if settings is None else settings.mapping or None


def activate(settings: Settings | None) -> contextlib.AbstractContextManager[None]:
    """Activate settings in a with-block."""
    return ACTIVE(settings)
