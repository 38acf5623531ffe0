"""The context of one load: its options, and the mismatches found so far.

A load walks a tree and may call `from_state_dict` methods of modules, which call back into the library. A context
variable holds the active load, so that all of these calls share options and one error reports every mismatch.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import fnmatch
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import errors
from .naming import with_prefix

# Beyond this many comparisons, the search for similar names would take longer than loading.
_MOST_COMPARISONS = 50_000


@dataclasses.dataclass(frozen=True)
class AllLayers:
    """The entries of a state dict for all layers, which are one entry of another state dict."""

    entries: Mapping[str, Any]
    name: str
    """The key with a star for the number of the layer, for messages: `h.*.weight`."""
    keys: Sequence[str]
    """The key of each layer; some may be missing."""

    def stacked(self) -> Any:
        """Return all entries as one array, with the layers first."""
        if missing := [key for key in self.keys if key not in self.entries]:
            raise ValueError(f"from_state_dict: {self.name!r} lacks {errors.quoted(missing)}, which other layers have.")
        parts = [self.entries[key] for key in self.keys]
        parts = [x if isinstance(x, jax.Array) or not hasattr(x, "shape") else np.asarray(x[...]) for x in parts]
        if len(shapes := {str(np.shape(x)) for x in parts}) > 1:
            raise ValueError(f"from_state_dict: {self.name!r} has different shapes: {', '.join(sorted(shapes))}.")
        return jnp.stack(parts) if any(isinstance(x, jax.Array) for x in parts) else np.stack(parts)


class TrackedStateDict(UserDict[str, Any]):
    """A state dict that records which of its entries were read, also those that a module's method copied."""

    def __init__(self, entries: Mapping[str, Any]):
        self.used: set[str] = set()
        super().__init__()
        self.data = dict(entries)

    def __getitem__(self, key: str) -> Any:
        found = super().__getitem__(key)
        self.used.add(key)
        context = active_load()
        return found.stacked() if isinstance(found, AllLayers) and context is not None and not context.lazy else found

    def unused(self, prefix: str | None) -> list[str]:
        """Return the keys below a prefix that were not read."""
        below = "" if prefix is None else f"{prefix}."
        return [k for k in self.data if k not in self.used and (k == prefix or k.startswith(below))]


@dataclasses.dataclass
class LoadContext:
    """The options of one load of a state dict into a tree, and the mismatches found so far."""

    what: str
    """The operation, for messages."""
    strict: bool
    ignore: Sequence[str]
    source: str = "state dict"
    """The kind of source, for messages."""
    lazy: bool = True
    """Whether a module's method gets lazy arrays. A module that overrides `from_state_dict` without `lazy_loading` may
    compute with its arrays, so it gets JAX arrays."""
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    """A description of the wanted leaf for each key that the state dict lacks."""
    unexpected: list[str] = dataclasses.field(default_factory=list)
    misfits: list[str] = dataclasses.field(default_factory=list)
    """Messages about entries of a wrong shape, dtype or value."""
    keys: list[str] = dataclasses.field(default_factory=list)
    """All keys of the state dict."""

    def track(self, state_dict: Mapping[str, Any]) -> TrackedStateDict:
        """Return a state dict that records which of its entries are read."""
        if isinstance(state_dict, TrackedStateDict):
            return state_dict
        self.keys += state_dict
        return TrackedStateDict(state_dict)

    def add_missing(self, key: str, wanted: str) -> None:
        """Record a key that the tree has and the state dict lacks."""
        if self.strict:
            self.missing[key] = wanted

    def add_unexpected(self, keys: Iterable[str]) -> None:
        """Record keys that the state dict has and the tree lacks."""
        if self.strict:
            self.unexpected += [k for k in keys if not any(fnmatch.fnmatchcase(k, p) for p in self.ignore)]

    def raise_problems(self) -> None:
        """Raise one error that lists every mismatch, if there are any."""
        advice = _advice_on_levels(list(self.missing), self.keys) if self.source == "state dict" else ""
        far_too_many = len(self.missing) * len(self.unexpected) > _MOST_COMPARISONS
        compared = [] if advice or far_too_many else self.missing
        hints = {key: errors.suggestion(key, self.unexpected) for key in compared}
        problems = [f"{key!r} is missing, for {wanted}.{hints.get(key, '')}" for key, wanted in self.missing.items()]
        problems += self.misfits
        problems += [f"{key!r} is in the {self.source}, but not in the tree." for key in self.unexpected]
        if not problems:
            return
        if not advice and (self.missing or self.unexpected):
            advice = (
                "List keys to leave out in `ignore`, as in ignore=['*.inv_freq']; with strict=False, missing leaves "
                "keep their value, and unexpected keys are left out."
            )
        count = "" if len(problems) == 1 else f", {len(problems)} problems"
        first = f"{self.what}: the {self.source} does not fit the tree{count}."
        raise ValueError("\n  ".join([f"{first} {advice}".rstrip(), *problems]))


_CURRENT: contextvars.ContextVar[LoadContext | None] = contextvars.ContextVar("axonym_active_load", default=None)


def active_load() -> LoadContext | None:
    """Return the active load, or None."""
    return _CURRENT.get()


@contextlib.contextmanager
def activate(context: LoadContext, **options: Any) -> Iterator[None]:
    """Make a load the active one, with other options for a subtree."""
    token, before = _CURRENT.set(context), {name: getattr(context, name) for name in options}
    vars(context).update(options)
    try:
        yield
    finally:
        vars(context).update(before)
        _CURRENT.reset(token)


# --- hints for the error message ---


def _advice_on_levels(missing: Sequence[str], keys: Iterable[str]) -> str:
    """Return advice for the most frequent reason why all keys are missing: the tree is one level higher or lower."""
    known = set(keys)
    if not missing or not known:
        return ""
    for key in known:
        if key.endswith(f".{missing[0]}"):
            prefix = key.removesuffix(f".{missing[0]}")
            if all(with_prefix(prefix, k) in known for k in missing):
                return f"All missing keys are there with {prefix + '.'!r} in front: add that to `prefix`."
    first = missing[0].split(".")[0]
    if all(k.startswith(f"{first}.") and k.removeprefix(f"{first}.") in known for k in missing):
        return f"All missing keys are there without {first + '.'!r} in front."
    return ""
