"""`in_context`: take the active mesh and mapping along into threads and tasks.

JAX keeps the active mesh per thread, and this library the active settings. A new thread starts without either. The
tasks of an event loop share a thread, so a mesh or mapping that one task activates is active in the others too, as soon
as that task waits for something inside its with-block.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Generator, Iterator
from typing import Any, ParamSpec, TypeVar

import jax

from ..core import errors
from ..distribution import active_settings
from .mapping import own_blocks

P = ParamSpec("P")
R = TypeVar("R")


def in_context(fn: Callable[P, R]) -> Callable[P, R]:
    """Make a function that runs under the mesh and the mapping that are active now, wherever it is called.

    Use it for functions that other threads run, and for coroutine functions that become tasks. A task keeps its mesh
    and mapping, including ones it activates itself, while other tasks run. A function also takes along Python's
    context variables; a task always gets them from the code that creates it. Other settings that JAX keeps per thread
    are not taken along, such as `jax.default_matmul_precision` and the mesh of a `with mesh:`, which is deprecated.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> mesh = axn.make_mesh({"data": -1})
    >>> with ThreadPoolExecutor() as pool, axn.set_mesh(mesh), axn.axis_mapping({"batch": "data"}):
    ...     x = pool.submit(axn.in_context(axn.shard), axn.ones({"batch": 16})).result()
    >>> x.array.sharding.spec
    P('data',)
    """
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(
            f"in_context: {errors.called(fn)} is a generator. Wrap the function or task that consumes it instead."
        )
    try:
        taken = _ContextSnapshot()
    except ValueError:
        raise ValueError(
            "in_context: the mesh cannot be carried out of jit. Call it outside of traced functions."
        ) from None
    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def task(*args: P.args, **kwargs: P.kwargs) -> Any:
            return await _CoroutineInContext(fn(*args, **kwargs), taken)

        return task  # pyright: ignore[reportReturnType]

    variables = contextvars.copy_context()

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        def call() -> R:
            with taken.active():
                return fn(*args, **kwargs)

        return variables.copy().run(call)  # a copy, since threads cannot share one

    return run


class _ContextSnapshot:
    """The mesh and the settings that were active when this was created."""

    def __init__(self) -> None:
        self.settings = active_settings.active_settings()
        self.mesh = jax.sharding.get_mesh()  # has no axes if none is active
        abstract = jax.sharding.get_abstract_mesh()
        self.abstract = None if abstract == self.mesh.abstract_mesh else abstract

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Activate this mesh and these settings in a with-block, and restore the previous ones afterwards."""
        with (
            jax.set_mesh(self.mesh),
            contextlib.nullcontext() if self.abstract is None else jax.sharding.use_abstract_mesh(self.abstract),
            active_settings.activate(self.settings),
        ):
            yield


class _CoroutineInContext:
    """A coroutine that runs in its own context between waits."""

    def __init__(self, coroutine: Any, taken: _ContextSnapshot):
        self._coroutine, self._taken = coroutine, taken
        self._blocks: list[Any] = []

    def __await__(self) -> Generator[Any, Any, Any]:
        resume: Callable[[], Any] = functools.partial(self._coroutine.send, None)
        try:
            while True:
                with self._taken.active(), own_blocks(self._blocks):
                    try:
                        waited_for = resume()
                    except StopIteration as end:
                        return end.value
                    self._taken = _ContextSnapshot()  # with the settings that the coroutine has activated meanwhile
                try:
                    resume = functools.partial(self._coroutine.send, (yield waited_for))
                except BaseException as error:  # for example, because the task is cancelled
                    resume = functools.partial(self._coroutine.throw, error)
        finally:
            self._coroutine.close()
