"""What `named_jit` traces, lowers and compiles ahead of time, where that is not called as the function is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._apart import Form, Separated, joined

TakeApart = Callable[[Any, Any], tuple[list[Any], list[Any], Form]]
"""From positional and keyword arguments to those that are donated, those that are kept, and the rest."""


def staged(stage: Any, take_apart: TakeApart | None, form: Form | None = None) -> Any:
    """One of `jax.stages`, to be called like the function.

    Arguments:
        stage: what JAX made.
        take_apart: what is done to the arguments before each call; None if they go in as they are.
        form: the form in which they went in.
    """
    if take_apart is None and not isinstance(stage.out_info, Separated):
        return stage
    return Staged(stage, take_apart, form)


class Staged:
    """One of `jax.stages`, for a function some of whose arguments are donated, or are no arrays, or whose results are.

    What it does not define itself, it has from the stage of JAX.
    """

    def __init__(self, stage: Any, take_apart: TakeApart | None, form: Form | None):
        self._stage = stage
        self._take_apart = take_apart
        self._form = form

    @property
    def out_info(self) -> Any:
        """What the function gives, with abstract arrays."""
        return joined(self._stage.out_info)

    def lower(self, *args: Any, **kwargs: Any) -> Staged:
        """See `jax.stages.Traced.lower`."""
        return Staged(self._stage.lower(*args, **kwargs), self._take_apart, self._form)

    def compile(self, *args: Any, **kwargs: Any) -> Staged:
        """See `jax.stages.Lowered.compile`."""
        return Staged(self._stage.compile(*args, **kwargs), self._take_apart, self._form)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._take_apart is None:
            return joined(self._stage(*args, **kwargs))
        donated, kept, form = self._take_apart(args, kwargs)
        if form != self._form:
            raise TypeError(
                "named_jit: a compiled program is for arguments of the structure for which it was lowered, and for the "
                "same values of those that are not arrays; these arguments are others."
            )
        return joined(self._stage(donated, kept))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)
