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


REPORTED = "mapping of the report"
"""The key that stands for all entries of the mapping that a report by names is for, which its trace does not know."""


def _empty_mapping() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclasses.dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Settings:
    """The active settings, as one immutable value. Made by `intern_settings`."""

    mapping: Mapping[str, Entry] = dataclasses.field(default_factory=_empty_mapping)
    """The active mapping."""
    parameter_mapping: Mapping[str, Entry] = dataclasses.field(default_factory=_empty_mapping)
    """The mapping that parameters are stored by: see `axonym.fsdp`."""
    annotations: Mapping[str, Hashable] = dataclasses.field(default_factory=_empty_mapping)
    """The placements of annotations by name: see `axonym.sharding.with_sharding_annotation`."""
    uneven: str | None = None
    """The treatment of axes that their mesh axes do not divide: see `axonym.axis_mapping`."""
    environment: Any = None
    """The names that stand for mesh axes inside `shard_map`: see `axonym.manual._axis_environment`."""
    kept: Any = None
    """The axes that stay sharded in a pipeline: see `axonym.distribution.kept_shards`."""
    mapped: bool = False
    """True while a function is mapped over an axis on a mesh: see `axonym.transforms._mapped_axis`."""
    marked: bool = False
    """True while a program is traced to follow its names: see `axonym.distribution.axis_marks`."""

    def __repr__(self) -> str:
        rest = f", parameter_mapping={dict(self.parameter_mapping)}" if self.parameter_mapping else ""
        rest += f", annotations={dict(self.annotations)}" if self.annotations else ""
        return f"Settings({dict(self.mapping)}{rest})"


_INTERNED: weakref.WeakValueDictionary[Any, Settings] = weakref.WeakValueDictionary()
_INTERNING = threading.Lock()

# Created when the package is imported, not when a module is first used: the context is part of every jit cache key, so
# a new one makes JAX compile everything again.
ACTIVE = jax.make_user_context(None)

activated = False
"""Whether settings were ever active. If not, an eager operation does not have to ask JAX for them."""


def intern_settings(**parts: Any) -> Settings | None:
    """Return the same object for equal settings; None if they are empty."""
    # An empty mapping is none: another value would make JAX compile everything again.
    parts = {name: MappingProxyType(dict(p)) if isinstance(p, Mapping) else p for name, p in parts.items() if p}
    if not parts:
        return None
    key = frozenset([(name, frozenset(p.items()) if isinstance(p, Mapping) else p) for name, p in parts.items()])
    with _INTERNING:
        found = _INTERNED.get(key)
        if found is None:
            found = _INTERNED[key] = Settings(**parts)
        return found


def changed(outer: Settings | None, **parts: Any) -> Settings | None:
    """Return settings with some parts replaced."""
    kept = {} if outer is None else {f.name: getattr(outer, f.name) for f in dataclasses.fields(outer)}
    if parts.get("uneven") == "replicate" and kept.get("uneven") == "pad":  # which stays: see `axonym.axis_mapping`
        del parts["uneven"]
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


def active_uneven() -> str | None:
    """Return what to do with axes that their mesh axes do not divide: "pad", "replicate", or None for an error."""
    settings = ACTIVE.value
    return None if settings is None else settings.uneven


def pads_uneven() -> bool:
    """Return whether axes may be sharded that their mesh axes do not divide."""
    return active_uneven() == "pad"


def is_mapped() -> bool:
    """Return whether a function is mapped over an axis on a mesh."""
    settings = ACTIVE.value
    return settings is not None and settings.mapped


def activate(settings: Settings | None) -> contextlib.AbstractContextManager[None]:
    """Activate the mappings and annotations of settings in a with-block.

    Such settings can come from other code. The axis environment, the kept shards of a pipeline, and the marks that a
    function is mapped or traced for names depend on the surrounding code, and stay as they are.
    """
    before, here = (
        {name: None if s is None else getattr(s, name) or None for name in _OF_SURROUNDINGS}
        for s in (settings, ACTIVE.value)
    )
    return _settings_block(settings if before == here else changed(settings, **here))


_OF_SURROUNDINGS = ("environment", "kept", "mapped", "marked")


def activate_here(**parts: Any) -> contextlib.AbstractContextManager[None]:
    """Activate single settings, such as an axis environment or that a function is mapped, in a with-block."""
    return _settings_block(changed(ACTIVE.value, **parts))


def _settings_block(settings: Settings | None) -> contextlib.AbstractContextManager[None]:
    global activated
    activated = activated or settings is not None
    return ACTIVE(settings)
