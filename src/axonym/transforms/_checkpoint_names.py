"""Check that the names in a checkpoint policy are given to arrays.

JAX ignores a name that it does not meet, and so a misspelt one: nothing is saved, and nothing is said.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from .. import _errors

_GIVEN: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("names given to arrays", default=None)


def record(name: str) -> None:
    """Record that a name was given to an array."""
    given = _GIVEN.get()
    if given is not None:
        given.add(name)


@contextlib.contextmanager
def recorded() -> Iterator[set[str]]:
    """Collect the names given to arrays in a with-block, as far as it is traced anew."""
    given, outer = set[str](), _GIVEN.get()
    token = _GIVEN.set(given)
    try:
        yield given
    finally:
        _GIVEN.reset(token)
        if outer is not None:
            outer |= given


def warn_of_unknown(
    label: str, wanted: Sequence[str], recorded: set[str], body: Callable[..., Any], *args: Any
) -> None:
    """Warn of names of a policy that a body gives to no array.

    A policy can serve several bodies, each of which has some of its names. So a name that is not met is passed over if
    another one of the policy is, unless it is close to one that the policy does not have.

    Arguments:
        label: what has the policy.
        wanted: the names in the policy.
        recorded: names that are known to be given; if they are all that are wanted, the body is not looked into.
        body: the body.
        *args: what it is called with.
    """
    if recorded.issuperset(wanted):
        return
    found = recorded | set(_names_in(jax.make_jaxpr(body)(*args).jaxpr))
    unknown = [n for n in wanted if n not in found]
    left = sorted(found.difference(wanted))
    hints = "".join(dict.fromkeys(_errors.suggestion(n, left) for n in unknown))
    if unknown and (hints or len(unknown) == len(wanted)):
        listed, named = ", ".join(map(repr, unknown)), ", ".join(map(repr, sorted(found)))
        _errors.warn(
            f"{label}: the checkpoint policy speaks of {listed}, but the body gives no array such a name. "
            + (f"It names {named}.{hints}" if found else "`axonym.tree_checkpoint_name` gives names to arrays.")
        )


def _names_in(jaxpr: Any) -> Iterator[str]:
    """Return the names given to arrays in a traced program, and in those that it calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            yield equation.params["name"]
        for value in jax.tree.leaves(list(equation.params.values())):
            program = getattr(value, "jaxpr", value)
            if hasattr(program, "eqns"):
                yield from _names_in(program)
