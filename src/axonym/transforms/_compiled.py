"""Finding again what was compiled for a user's function.

JAX knows a traced loop by the function object that is its body. A transform that wraps the user's function in a new one
on every call would trace and, outside of jit, compile every time. So the wrapped function is kept with the user's, for
as long as that lives, and handed out again when everything else that is static is equal too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

Functions: TypeAlias = tuple[Callable[..., Any], ...]

_LIMIT = 256
"""How much is kept for one function; then the oldest goes. Only a static leaf that keeps changing gets there."""

_KNOWN: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def compiled(build: Callable[[Callable[[], Functions], Any], Any], functions: Functions, plan: Any) -> Any:
    """What `build` made of these functions before, or makes of them now.

    Arguments:
        build: makes a compiled function out of a getter of the user's functions, which must not be kept alive, and a
            plan.
        functions: the user's functions.
        plan: everything static that the result depends on. Where it has no hash, nothing is kept.
    """
    # Callables that define equality are not kept: an equal one may live longer than the one that was kept.
    if not all(type(f).__eq__ is object.__eq__ for f in functions):
        return build(lambda: functions, plan)
    try:
        references = tuple(map(weakref.ref, functions))
        key = build, references[1:], plan
        known = _KNOWN.setdefault(functions[0], {})
        found = known.get(key)
    except TypeError:
        return build(lambda: functions, plan)
    if found is None:
        if len(known) >= _LIMIT:
            known.pop(next(iter(known)), None)
        found = known[key] = build(lambda: tuple(_alive(r) for r in references), plan)
    return found


def _alive(reference: weakref.ref[Any]) -> Any:
    function = reference()
    assert function is not None, "the caller holds the functions while they are called"
    return function
