"""Write checkpoints while training goes on."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from ..core.processes import ProcessAgreement, fail_together
from ._checkpoint_writing import all_or_nothing, described, write
from ._orbax_output import quiet


def save_checkpoint_async(path: str | os.PathLike[str], tree: Any) -> PendingCheckpoint:
    """Write a tree to a checkpoint while training goes on.

    This returns once it is under way to copy the shards to host memory, which needs room for one copy of them there.
    The tree may be donated or changed afterwards. A thread writes the files. See `save_checkpoint` for all else.

    Call `wait` of the result before the next checkpoint, and before the program ends: only then is it known that the
    checkpoint could be written. Otherwise a failure is a warning, when the next one is saved in the same folder, or at
    the end. With several processes, all of them must call `wait` at the same place, and the checkpoint appears when
    they do.

    Arguments:
        path: the folder, which must not exist yet.
        tree: any tree. Leaves that are neither arrays nor numbers are left out.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pending = axn.state.save_checkpoint_async(f"{folder}/100", {"w": axn.ones({"embed": 2})})
    ...     # Here, training goes on.
    ...     pending.wait()
    ...     axn.state.restore_checkpoint(f"{folder}/100", {"w": axn.zeros({"embed": 2})})
    {'w': NamedArray(float32[embed=2], [1. 1.])}
    """
    with contextlib.ExitStack() as claim:
        with fail_together("save_checkpoint") as agree:
            tree = jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, tree)  # it may be changed
            path, about, arrays = described(path, tree)
            claim.enter_context(claimed(path))
            agree({"arrays and numbers": "\n".join(f"{key} {entry}" for key, entry in about.items())})
            copies = {key: _copy_in_host_memory(x) for key, x in arrays.items()}
        pending = PendingCheckpoint(path, functools.partial(write, path, about, copies))
        if jax.process_count() > 1:
            with all_or_nothing(path, pending._thread.is_alive), fail_together("save_checkpoint") as agree:
                pending._agree_once(agree)  # that there is a folder to write to
        pending._claim = claim.pop_all()
        _NOT_WAITED_FOR.add(pending)
    return pending


def _copy_in_host_memory(x: jax.Array) -> jax.Array:
    """Copy the shards of an array to host memory; of replicated ones, one in each process."""
    try:
        there = x.sharding.with_memory_kind("pinned_host")
    except ValueError as e:
        raise ValueError(
            "save_checkpoint_async: these devices have no pinned host memory. Use `save_checkpoint`, which writes "
            "before it returns."
        ) from e
    kept = _without_local_replicas(x.sharding)
    if kept is None:
        return jax.device_put(x, there, may_alias=False)  # the array may be there already
    shards = [
        jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind="pinned_host"), may_alias=False)
        for shard in x.addressable_shards
        if shard.device in kept.device_set
    ]
    return jax.make_array_from_single_device_arrays(x.shape, kept, shards)


def _without_local_replicas(sharding: Any) -> NamedSharding | None:
    """Return a sharding with fewer devices that has all shards in the same processes, if there is one."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    mesh, spec = sharding.mesh, sharding.spec
    sharded = {a for entry in spec for a in (entry if isinstance(entry, tuple) else (entry,))} | spec.unreduced
    devices = mesh.devices
    for i, axis in enumerate(mesh.axis_names):
        if axis not in sharded:
            processes = np.vectorize(lambda device: device.process_index)(devices)
            slices = np.moveaxis(processes, i, 0).reshape(devices.shape[i], -1)
            first_of_each = np.unique(slices, axis=0, return_index=True)[1]
            devices = np.take(devices, np.sort(first_of_each), axis=i)
    if devices.size == mesh.size:
        return None
    return NamedSharding(Mesh(devices, mesh.axis_names, mesh.axis_types), spec, memory_kind="pinned_host")


class PendingCheckpoint:
    """A checkpoint that a thread is writing; `save_checkpoint_async` returns one.

    The thread cannot agree with other processes by itself: JAX pairs collectives by their order in each process. It
    asks, and the thread that calls `wait` exchanges that with the other processes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pending: axn.state.PendingCheckpoint = axn.state.save_checkpoint_async(f"{folder}/100", {"step": 100})
    ...     pending.wait()
    """

    def __init__(self, path: str, write: Callable[[ProcessAgreement], None]):
        self._path = path
        self._asks: queue.SimpleQueue[Mapping[str, Any] | BaseException | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._written, self._over = threading.Event(), False
        self._failure: BaseException | None = None
        """Why the thread has failed."""
        self._outcome: BaseException | None = None
        """What `wait` has raised."""
        self._claim, self._waiting = contextlib.ExitStack(), threading.RLock()
        self._thread = threading.Thread(target=self._run, args=(write,), daemon=True)
        self._thread.start()

    def is_written(self) -> bool:
        """Return whether this process has written its shards, or failed, so that `wait` takes no time.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pending = axn.state.save_checkpoint_async(f"{folder}/100", {"step": 100})
        ...     pending.wait()
        ...     pending.is_written()
        True
        """
        return self._written.is_set()

    def wait(self) -> None:
        """Wait until the checkpoint is complete; raise an error if it could not be written.

        With several processes, all of them must call this method, and they all raise the error.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pending = axn.state.save_checkpoint_async(f"{folder}/100", {"step": 100})
        ...     pending.wait()
        ...     axn.state.verify(f"{folder}/100")
        """
        with self._waiting:
            if not self._over:
                self._wait()
                return
        if self._outcome is not None:
            raise self._outcome

    def _wait(self) -> None:
        try:
            with all_or_nothing(self._path, self._thread.is_alive), fail_together("save_checkpoint") as agree:
                while self._agree_once(agree):
                    pass
        except BaseException as error:
            # An interrupt waits for the thread, which may complete the checkpoint, unless it is interrupted again.
            self._outcome = error if jax.process_count() > 1 else self._failure
            self._close(over=jax.process_count() > 1 or not self._thread.is_alive())
            raise
        self._close(over=True)

    def _close(self, over: bool) -> None:
        self._over = over
        if over:
            _NOT_WAITED_FOR.discard(self)
            self._claim.close()

    def _run(self, write: Callable[[ProcessAgreement], None]) -> None:
        try:
            with quiet():
                write(self._agree if jax.process_count() > 1 else lambda same=None: None)
        except BaseException as error:
            self._failure = error
        self._written.set()
        self._asks.put(self._failure)

    def _agree(self, same: Mapping[str, Any] | None = None) -> None:
        self._written.set()
        self._asks.put(same or {})
        if (error := self._answers.get()) is not None:
            raise error

    def _agree_once(self, agree: ProcessAgreement) -> bool:
        """Do what the thread asks for next; return False if it has ended."""
        try:
            asked = self._asks.get()
            if isinstance(asked, BaseException):
                raise asked
            if asked is None:
                return False
            agree(asked)
        except BaseException as error:
            self._answers.put(error)
            self._thread.join()  # or it would go on in a folder that is removed
            raise
        self._written.clear()
        self._answers.put(None)
        return True


_NOT_WAITED_FOR: set[PendingCheckpoint] = set()


def _warn_of_failures(folder: str) -> None:
    """Warn of checkpoints in a folder that could not be written, which nobody knows because nobody has waited."""
    for pending in list(_NOT_WAITED_FOR):
        if os.path.dirname(pending._path) == folder and not pending._thread.is_alive():
            if pending._failure is not None:
                reason = str(pending._failure) or type(pending._failure).__name__
                warnings.warn(
                    f"save_checkpoint_async: {pending._path} could not be written: {reason}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            if jax.process_count() == 1:  # with several, all of them wait together
                with contextlib.suppress(BaseException):
                    pending.wait()


@atexit.register
def _warn_at_exit() -> None:
    for pending in list(_NOT_WAITED_FOR):
        if pending._thread.is_alive():
            warnings.warn(
                f"save_checkpoint_async: {pending._path} is not complete. Call `wait` before the program ends.",
                RuntimeWarning,
                stacklevel=1,
            )
        else:
            _warn_of_failures(os.path.dirname(pending._path))


_CLAIMED: set[str] = set()
"""The checkpoints that are being written. A second write to one of them would remove the files of the first."""
_CLAIMING = threading.Lock()


@contextlib.contextmanager
def claimed(path: str) -> Iterator[None]:
    """Refuse other writes to a checkpoint in a with-block; warn of earlier ones beside it that failed."""
    _warn_of_failures(os.path.dirname(path))
    with _CLAIMING:
        if path in _CLAIMED:
            raise FileExistsError(
                f"save_checkpoint: {path} is being written already. Give each checkpoint its own name, such as the "
                "step number, and call `wait` of what `save_checkpoint_async` returned."
            )
        _CLAIMED.add(path)
    try:
        yield
    finally:
        _CLAIMED.discard(path)
