"""What is found while a state dict is matched with a tree, so that one error can tell all of it."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import fnmatch
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .. import _errors
from .naming import with_prefix

# Beyond this many comparisons, looking for near names would take longer than loading.
_MOST_COMPARISONS = 50_000


class Reader(UserDict[str, Any]):
    """A state dict that remembers which of its entries were looked at. What a method of a model copies counts, too."""

    def __init__(self, entries: Mapping[str, Any]):
        self.used: set[str] = set()
        super().__init__()
        self.data = dict(entries)

    def __getitem__(self, key: str) -> Any:
        found = super().__getitem__(key)
        self.used.add(key)
        return found

    def unused(self, prefix: str | None) -> list[str]:
        """The keys below a prefix that nothing looked at."""
        below = "" if prefix is None else f"{prefix}."
        return [k for k in self.data if k not in self.used and (k == prefix or k.startswith(below))]


@dataclasses.dataclass
class Session:
    """One loading of a state dict into a tree."""

    what: str
    strict: bool
    ignore: Sequence[str]
    source: str = "state dict"
    """What is loaded, for messages."""
    lazy: bool = True
    """Whether modules are given lazy arrays in place of their own. A module that overrides `from_state_dict` may want
    to compute with them, so it gets those that it will have."""
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    """What the state dict should have at each key that it has not."""
    unexpected: list[str] = dataclasses.field(default_factory=list)
    misfits: list[str] = dataclasses.field(default_factory=list)
    keys: list[str] = dataclasses.field(default_factory=list)
    """All keys of the state dict."""

    def reads(self, state_dict: Mapping[str, Any]) -> Reader:
        """A state dict that this loading reads."""
        if isinstance(state_dict, Reader):
            return state_dict
        self.keys += state_dict
        return Reader(state_dict)

    def lacks(self, key: str, wanted: str) -> None:
        """The tree has something that the state dict has not."""
        if self.strict:
            self.missing[key] = wanted

    def left_over(self, keys: Iterable[str]) -> None:
        """The state dict has something that the tree has not."""
        if self.strict:
            self.unexpected += [k for k in keys if not any(fnmatch.fnmatchcase(k, p) for p in self.ignore)]

    def check(self) -> None:
        """Raise one error of everything that is wrong."""
        advice = _shifted(list(self.missing), self.keys) if self.source == "state dict" else ""
        hints = {} if advice else _hints(list(self.missing), self.unexpected)
        problems = [f"{key!r} is missing, for {wanted}.{hints.get(key, '')}" for key, wanted in self.missing.items()]
        problems += self.misfits
        problems += [f"{key!r} is in the {self.source}, but not in the tree." for key in self.unexpected]
        if not problems:
            return
        if not advice and (self.missing or self.unexpected):
            advice = (
                "What is not wanted can be named in `ignore`, as in ignore=['*.inv_freq']; with strict=False, what is "
                "missing stays as it is, and what is unexpected is left out."
            )
        count = "" if len(problems) == 1 else f", {len(problems)} problems"
        first = f"{self.what}: the {self.source} does not fit the tree{count}."
        raise ValueError("\n  ".join([f"{first} {advice}".rstrip(), *problems]))


_CURRENT: contextvars.ContextVar[Session | None] = contextvars.ContextVar("axonym_state_dict_session", default=None)


def current_session() -> Session | None:
    """The loading that is under way."""
    return _CURRENT.get()


@contextlib.contextmanager
def under_way(session: Session) -> Iterator[Session]:
    """Make a loading the one that is under way."""
    token = _CURRENT.set(session)
    try:
        yield session
    finally:
        _CURRENT.reset(token)


@contextlib.contextmanager
def with_options(session: Session, **options: Any) -> Iterator[None]:
    """Change options of a loading for a part of the tree."""
    before = {name: getattr(session, name) for name in options}
    vars(session).update(options)
    try:
        yield
    finally:
        vars(session).update(before)


# --- words ---


def _hints(missing: Sequence[str], unexpected: Sequence[str]) -> dict[str, str]:
    if len(missing) * len(unexpected) > _MOST_COMPARISONS:
        return {}
    return {key: _errors.suggestion(key, unexpected) for key in missing}


def _shifted(missing: Sequence[str], keys: Iterable[str]) -> str:
    """Advice for the most frequent reason why everything is missing: that it is one level further up or down."""
    known = set(keys)
    if not missing or not known:
        return ""
    for key in known:
        if key.endswith(f".{missing[0]}"):
            prefix = key.removesuffix(f".{missing[0]}")
            if all(with_prefix(prefix, k) in known for k in missing):
                return f"All that is missing is there with {prefix + '.'!r} in front: put that into `prefix`."
    first = missing[0].split(".")[0]
    if all(k.startswith(f"{first}.") and k.removeprefix(f"{first}.") in known for k in missing):
        return f"All that is missing is there without {first + '.'!r} in front."
    return ""
