"""Activate resource mappings, from logical axes to the mesh axes that they are sharded over.

`axonym.distribution.mesh_axes` looks axes up in the active mapping; `placement` applies mappings to trees.

JAX keeps the active mesh per thread, and this library the active settings. A new thread starts without either. The
tasks of an event loop share a thread, so a mesh or mapping that one task activates is active in the others too, as soon
as that task waits for something inside its with-block. `in_context` takes both along to another thread.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeAlias, TypeGuard, TypeVar

import jax

from ..axis import Axis, name_of
from ..core import errors
from ..distribution import active_settings
from ..distribution.active_settings import REPORTED, Entry, Settings
from ..distribution.mesh_axes import AnyMesh, check_mesh_axes, current_mesh, entry_of

P = ParamSpec("P")
R = TypeVar("R")

ResourceMapping: TypeAlias = Mapping[Any, str | Sequence[str] | None]
"""Maps a logical axis to the mesh axis that it is sharded over, to several, or to None: explicitly replicated."""

PhysicalAxisSpec: TypeAlias = str | Sequence[str]
"""One mesh axis, or several that an axis is sharded over."""


Uneven: TypeAlias = Literal["pad", "replicate"] | None
"""The treatment of axes that their mesh axes do not divide: see `axonym.axis_mapping`. None keeps the active one, by
default an error."""


def check_uneven(what: str, uneven: Any, replicates: bool = True) -> None:
    """Check an argument `uneven`, of a function that may replicate or not."""
    choices = ("pad", "replicate") if replicates else ("pad",)
    if uneven not in (*choices, None):
        raise ValueError(f"{what}: `uneven` is {errors.quoted(choices)} or None, got {uneven!r}.")


def uneven_here(what: str, uneven: Uneven) -> contextlib.AbstractContextManager[Any]:
    """Activate an argument `uneven` in a with-block; None leaves the active setting."""
    check_uneven(what, uneven)
    return active_settings.activate_here(uneven=uneven) if uneven else contextlib.nullcontext()


def normalize_mapping(mapping: Any, what: str = "axis_mapping") -> dict[str, Entry]:
    """Return a resource mapping with plain strings and tuples; anything else in it is an error."""
    if not isinstance(mapping, Mapping):
        raise TypeError(
            f"{what}: expected a resource mapping such as {{'batch': 'data'}}, got {type(mapping).__name__}."
            f"{as_mapping(mapping)}"
        )
    result: dict[str, Entry] = {}
    for axis, entry in mapping.items():
        if not isinstance(axis, (str, Axis)):
            raise TypeError(f"{what}: a key is an axis or its name, got {axis!r}.")
        name = name_of(axis)
        if name in result:
            raise ValueError(f"{what}: axis {name!r} is mapped twice.")
        result[name] = _normalize_entry(entry, name, what)
    return result


def _normalize_entry(entry: Any, name: str, what: str) -> Entry:
    if entry is None:
        return None
    if isinstance(entry, str):
        return str(entry)
    if isinstance(entry, Sequence) and all(isinstance(e, str) for e in entry):
        axes = tuple(str(e) for e in entry)
        if len(set(axes)) != len(axes):
            raise ValueError(f"{what}: axis {name!r} is sharded over one mesh axis twice, {axes}.")
        return entry_of(axes)
    raise TypeError(
        f"{what}: axis {name!r} must map to the name of a mesh axis, to several, or to None; got {entry!r}.{NO_SIZES}"
    )


NO_SIZES = " Sizes belong to the mesh, as in `axonym.make_mesh({'data': 4})`."
"""Advice where a mesh axis was expected."""


def as_mapping(given: Any) -> str:
    """Return how a sequence of pairs of names is written as a mapping, or an empty string."""
    pairs = given if isinstance(given, (list, tuple)) else ()
    if pairs and all(isinstance(p, (list, tuple)) and len(p) == 2 and isinstance(p[0], str) for p in pairs):
        return f" Write `{dict(pairs)}`."
    return ""


def is_resource_mapping(placement: object) -> TypeGuard[ResourceMapping]:
    """Return whether a placement is a resource mapping, rather than a dictionary of placements."""
    return isinstance(placement, Mapping) and all(
        isinstance(k, (str, Axis))
        and (v is None or isinstance(v, str) or (isinstance(v, (tuple, list)) and all(isinstance(e, str) for e in v)))
        for k, v in placement.items()
    )


def axis_mapping(
    mapping: ResourceMapping | None = None,
    *,
    merge: bool = False,
    uneven: Uneven = None,
    **entries: str | Sequence[str] | None,
) -> ActiveSettings:
    """Activate a resource mapping, in a with-block or as a decorator.

    The active mapping is part of jit's cache key: a function is compiled again for another mapping, but not when an
    earlier mapping is active again. A new thread starts without a mapping, as it starts without JAX's mesh.

    Arguments:
        mapping: from axes to mesh axes. None for an axis means replicated. An empty mapping is the same as none.
        merge: whether to keep the entries of the mapping around it for axes that this one lacks, and its `uneven`.
        uneven: what to do with axes that their mesh axes do not divide; by default they are an error. "pad" shards
            them, too, over Auto mesh axes: inside compiled functions they have their true size, and outside their
            arrays are stored padded, and nothing computes with them. "replicate" replicates them inside compiled
            functions, with a warning; outside, they stay an error. Under an active "pad", "pad" stays active.
        **entries: more entries, by keyword.

    >>> with axn.axis_mapping({"batch": "data"}):
    ...     with axn.axis_mapping(merge=True, embed="model"):
    ...         axn.current_mapping()
    {'batch': 'data', 'embed': 'model'}
    """
    new = normalize_mapping({} if mapping is None else mapping) | normalize_mapping(entries)
    check_uneven("axis_mapping", uneven)
    mesh = current_mesh() if new else None
    if mesh is not None:
        check_direction("axis_mapping", new, mesh)

    def settings(outer: Settings | None) -> Settings | None:
        # The storage of parameters does not change with the mapping that is active while they are used.
        if outer is None or not merge:
            ended = active_settings.changed(outer, uneven=None)
            return active_settings.changed(ended, mapping=new, uneven=uneven)
        around = outer.mapping or ({REPORTED: None} if outer.marked else {})
        merged = {**around, **new}
        return active_settings.changed(outer, mapping=merged, uneven=uneven or outer.uneven)

    return ActiveSettings("axis_mapping", settings)


class _Entered(threading.local):
    """The with-blocks this thread is in, innermost last, each with the object and the task that entered it."""

    def __init__(self):
        self.blocks: list[tuple[object, contextlib.AbstractContextManager[Any], Any]] = []


_ENTERED = _Entered()


def _current_task() -> Any:
    asyncio = sys.modules.get("asyncio")
    try:
        return None if asyncio is None else asyncio.current_task()
    except RuntimeError:  # no loop
        return None


def leave_block(of: object, what: str, *raised: Any) -> None:
    """Leave the innermost with-block of an object; raise an error if blocks of several tasks were not nested."""
    blocks, task = _ENTERED.blocks, _current_task()
    theirs = [i for i, (its, _, _) in enumerate(blocks) if its is of]
    mine = [i for i in theirs if blocks[i][2] is task]
    start = max(mine or theirs, default=len(blocks))
    inside = blocks[start:]
    if inside and all(entered_in is task for _, _, entered_in in inside):
        del blocks[start]
        inside[0][1].__exit__(*raised)
        return
    # Leaving a block restores the settings before it, so the blocks that other tasks entered since are left too. If
    # this block is missing, another task has left it this way.
    del blocks[start:]
    for _, block, _ in reversed(inside):
        with contextlib.suppress(ValueError):  # context variables of another task, which end with it
            block.__exit__(None, None, None)
    if not any(raised):
        raise RuntimeError(
            f"{what}: this with-block contains an `await`, and another task entered or left one meanwhile. The tasks "
            "of an event loop share a thread, so each ran under the settings of the other. Wait outside of it, or "
            "for a thread that runs what is in it: `asyncio.to_thread(axn.in_context(fn))`."
        )


class ActiveSettings:
    """Active settings as a with-block or a decorator: the result of `axis_mapping` and similar functions."""

    def __init__(self, what: str, settings: Callable[[Settings | None], Settings | None]):
        self._what = what
        self._settings = settings

    def _active(self) -> contextlib.AbstractContextManager[None]:
        return active_settings.activate(self._settings(active_settings.active_settings()))

    def __enter__(self) -> None:
        block = self._active()
        block.__enter__()  # other threads may enter one too, and this one again
        _ENTERED.blocks.append((self, block, _current_task()))

    def __exit__(self, *raised: Any) -> None:
        leave_block(self, self._what, *raised)

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
            raise TypeError(
                f"{self._what}: {errors.called(fn)} runs between other code, which would see the "
                f"settings too. Use `with {self._what}(...):` inside of it, around what they are meant for."
            )

        @functools.wraps(fn)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._active():
                return fn(*args, **kwargs)

        return wrapper


def check_direction(what: str, mapping: Mapping[str, Entry], mesh: AnyMesh) -> None:
    """Raise if an active mapping goes from mesh axes to axes: it would silently apply to nothing."""
    if not mesh.shape.keys().isdisjoint(mapping) and errors.wrong_way_round(mapping, mesh.axis_names):
        check_mesh_axes(what, mapping, mesh)


def current_mapping() -> dict[str, Entry] | None:
    """Return the active resource mapping, or None.

    >>> with axn.axis_mapping({"batch": ["replica", "data"]}):
    ...     axn.current_mapping()
    {'batch': ('replica', 'data')}
    """
    return dict(active_settings.active_mapping()) or None


# --- threads and tasks ---


def in_context(fn: Callable[P, R]) -> Callable[P, R]:
    """Make a function that runs under the mesh and the mapping that are active now, wherever it is called.

    Use it for functions that other threads run. They also take along Python's context variables. Other settings that
    JAX keeps per thread are not taken along, such as `jax.default_matmul_precision` and the mesh of a `with mesh:`,
    which is deprecated.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> mesh = axn.make_mesh({"data": -1})
    >>> with ThreadPoolExecutor() as pool, axn.set_mesh(mesh), axn.axis_mapping({"batch": "data"}):
    ...     x = pool.submit(axn.in_context(axn.shard), axn.ones({"batch": 16})).result()
    >>> x.array.sharding.spec
    P('data',)
    """
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(
            f"in_context: {errors.called(fn)} runs between other code, which would see the mesh and the mapping too. "
            "Wrap the functions that it calls instead."
        )
    try:
        taken = _ContextSnapshot()
    except ValueError:
        raise ValueError(
            "in_context: the mesh cannot be carried out of jit. Call it outside of traced functions."
        ) from None
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
