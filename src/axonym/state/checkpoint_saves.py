"""Write checkpoints, at once or while training goes on.

Orbax copies the shards to host memory and writes them in its threads. Everything around that is done here, so that
several processes agree where one of them could fail: Orbax has barriers of its own, at which the others would wait.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import itertools
import json
import os
import threading
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from ..core.processes import fail_together
from ._checkpoint_entries import entries_and_arrays
from .file_checksums import as_folder, write_checksums, write_checksums_of_process

UNFINISHED = ".orbax-checkpoint-tmp"
"""What follows the name of a folder until it is complete, as Orbax calls it, and then a number."""
_NUMBERS = itertools.count()


def save_checkpoint(path: str | os.PathLike[str], tree: Any) -> None:
    """Write a tree to a checkpoint, which is a folder.

    The folder appears once it is complete and is never overwritten, so a run that is killed while saving still has its
    previous checkpoint. Give every checkpoint its own name, such as the step number; see `latest_checkpoint`. With
    several processes, all of them must call this function; if one fails, all of them raise the same error.

    Arguments:
        path: the folder, which must not exist yet.
        tree: any tree, such as a model, the state of an optimizer and the step number. Leaves that are neither arrays
            nor numbers are left out.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     axn.state.save_checkpoint(f"{folder}/100", {"w": axn.ones({"embed": 2}), "step": 100})
    ...     axn.state.restore_checkpoint(f"{folder}/100", {"w": axn.zeros({"embed": 2}), "step": 0})
    {'step': 100, 'w': NamedArray(float32[embed=2], [1. 1.])}
    """
    save_checkpoint_async(path, tree).wait()


def save_checkpoint_async(path: str | os.PathLike[str], tree: Any) -> PendingCheckpoint:
    """Write a tree to a checkpoint while training goes on.

    This returns once the shards are in host memory, which needs room for one copy of them there. The tree may be
    donated or changed afterwards. Threads write the files. See `save_checkpoint` for all else.

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
    require_orbax("save_checkpoint")
    pending = None
    try:
        with fail_together("save_checkpoint") as agree:
            pending = PendingCheckpoint(as_folder(path))
            about, arrays = entries_and_arrays(tree)
            pending._claim()
            agree({"arrays and numbers": "\n".join(f"{key} {entry}" for key, entry in about.items())})
            if jax.process_index() == 0:
                pending._make_folder(about)
            agree()
            pending._begin(about, arrays)
    except BaseException:
        if pending is not None:
            pending._give_up()
        raise
    return pending


class PendingCheckpoint:
    """A checkpoint that threads are writing; `save_checkpoint_async` returns one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pending: axn.state.PendingCheckpoint = axn.state.save_checkpoint_async(f"{folder}/100", {"step": 100})
    ...     pending.wait()
    """

    def __init__(self, folder: Any):
        self._folder, self._writer = folder, _orbax_writer()
        # A name of its own, the same in all processes: writes of an earlier try that failed may still be going on. In
        # cloud storage nothing can be renamed; there, the checksums appear last.
        unfinished = folder.with_name(f"{folder.name}{UNFINISHED}-{next(_NUMBERS)}")
        self._unfinished = folder if "://" in str(folder) else unfinished
        self._thread, self._written = ThreadPoolExecutor(1), Future[None]()
        self._padded: dict[str, list[int]] = {}
        """The true shapes in the files of arrays that have padding or added layers."""
        self._has_arrays = self._has_claimed = False
        self._waiting, self._outcome, self._over = threading.RLock(), None, False

    def is_written(self) -> bool:
        """Return whether this process has written its shards, or failed, so that `wait` takes no time.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pending = axn.state.save_checkpoint_async(f"{folder}/100", {"step": 100})
        ...     pending.wait()
        ...     pending.is_written()
        True
        """
        return self._written.done()

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
            if self._over:
                if self._outcome is not None:
                    raise self._outcome
                return
            try:
                with fail_together("save_checkpoint") as agree:
                    self._written.result()
                    agree()
                    if jax.process_count() > 1 and jax.process_index() == 0:
                        self._complete()
            except BaseException as error:
                if jax.process_count() == 1 and not self._written.done():
                    raise  # an interrupt, after which the thread goes on to complete the checkpoint
                self._outcome = error
                self._give_up()
                raise
            self._close()

    def _claim(self) -> None:
        """Refuse a second write of this checkpoint, which would spoil the first; warn of failures beside it."""
        with _CLAIMING:
            for path, other in [*_PENDING.items()]:
                if os.path.dirname(path) == os.path.dirname(str(self._folder)):
                    other._warn_if_failed()
            if str(self._folder) in _PENDING:
                raise FileExistsError(
                    f"save_checkpoint: {self._folder} is being written already. Give each checkpoint its own name, "
                    "such as the step number, and call `wait` of what `save_checkpoint_async` returned."
                )
            if self._folder.exists():
                raise FileExistsError(
                    f"save_checkpoint: {self._folder} exists already, and checkpoints are never overwritten. Give each "
                    "checkpoint its own name, such as the step number."
                )
            _PENDING[str(self._folder)], self._has_claimed = self, True

    def _make_folder(self, about: Any) -> None:
        beside = self._folder.parent
        for path in [*beside.iterdir()] if beside.is_dir() else []:
            if path.name.startswith(f"{self._folder.name}{UNFINISHED}-"):
                _remove_tree(path)  # what a process that was killed has left
        (self._unfinished / "about").mkdir(parents=True)
        (self._unfinished / "about" / "metadata").write_text(json.dumps(about))
        (self._unfinished / "arrays").mkdir()  # or each process that writes would wait for it

    def _begin(self, about: Mapping[str, Any], arrays: Mapping[str, jax.Array]) -> None:
        """Copy the shards of this process to host memory, and let threads write them."""
        for key, x in arrays.items():
            shape = about[key]["shape"]
            if [*x.shape[: len(shape)]] != shape:
                self._padded[key] = [*shape, *x.shape[len(shape) :]]  # a random key has one more axis in the file
        orbax, commits = require_orbax("save_checkpoint"), []
        if arrays:
            # In a thread, since a notebook has a running loop in its own.
            begun = self._writer.async_save(orbax_path(self._unfinished / "arrays"), args=orbax.args.PyTreeSave(arrays))
            commits = self._thread.submit(asyncio.run, begun).result()
        self._has_arrays = bool(arrays)
        self._written = self._thread.submit(self._write, commits)
        self._thread.shutdown(wait=False)

    def _write(self, commits: Any) -> None:
        try:
            for commit in commits:
                commit.result()
            write_checksums_of_process(self._unfinished, jax.process_index())
            if jax.process_count() == 1:
                self._complete()
        except BaseException as e:
            if jax.process_count() == 1:
                _remove_unfinished(self._unfinished)
            if isinstance(e, ValueError) and "RESOURCE_EXHAUSTED" in str(e):  # what TensorStore says about it is long
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder)) from None
            raise

    def _complete(self) -> None:
        if self._has_arrays:
            self._writer.finalize(orbax_path(self._unfinished / "arrays"))
            _leave_out_padding(self._unfinished, self._padded)
        write_checksums(self._unfinished)
        if self._unfinished != self._folder:
            self._unfinished.rename(self._folder)

    def _give_up(self) -> None:
        """Remove what was written, once no process writes any more."""
        with fail_together("save_checkpoint"):
            self._thread.shutdown()
        if jax.process_index() == 0 and self._has_claimed:
            _remove_unfinished(self._unfinished)
        self._close()

    def _close(self) -> None:
        self._over = True
        if self._has_claimed:
            _PENDING.pop(str(self._folder), None)

    def _warn_if_failed(self) -> None:
        """Warn of a failure that nobody knows of, because nobody has waited."""
        if self._written.done() and (failure := self._written.exception()) is not None:
            text = f"save_checkpoint_async: {self._folder} could not be written: {failure or type(failure).__name__}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            self._outcome = failure  # which `wait` still raises
        if self._written.done() and jax.process_count() == 1:  # several processes wait together
            self._close()


_PENDING: dict[str, PendingCheckpoint] = {}
"""The checkpoints that are being written, or not waited for, by path."""
_CLAIMING = threading.Lock()


@atexit.register
def _warn_at_exit() -> None:
    for pending in [*_PENDING.values()]:
        pending._warn_if_failed()
        if str(pending._folder) in _PENDING:
            text = f"save_checkpoint_async: {pending._folder} is not complete. Call `wait` before the program ends."
            warnings.warn(text, RuntimeWarning, stacklevel=1)


def require_orbax(operation: str) -> Any:
    """Return Orbax's module, which is optional."""
    try:
        import orbax.checkpoint
    except ImportError as e:
        raise ImportError(f"{operation} needs Orbax, which is optional: install axonym[checkpoint].") from e
    return orbax.checkpoint


_SHARED = 2**20
"""The bytes for each device from which the devices share the writing of a replicated array."""


def _orbax_writer() -> Any:
    """Return the Orbax handler that writes arrays, which does not wait for other processes.

    Orbax lets each device write a part of a replicated array, which compiles a program for each shape and part. This
    only pays if several processes share the writing of large arrays.
    """
    orbax = require_orbax("save_checkpoint")
    arrays = orbax.type_handlers.ArrayHandler(
        use_replica_parallel=jax.process_count() > 1, min_slice_bytes_for_replica_parallel=_SHARED
    )
    return orbax.PyTreeCheckpointHandler(
        type_handler_registry=orbax.type_handlers.create_type_handler_registry((jax.Array, arrays)),
        multiprocessing_options=orbax.options.MultiprocessingOptions(
            primary_host=0, active_processes={jax.process_index()}
        ),
    )


def orbax_path(folder: Any) -> Any:
    """Return a path of the kind that Orbax takes."""
    from etils import epath  # installed with Orbax

    return epath.Path(folder)


def _leave_out_padding(folder: Any, padded: Mapping[str, list[int]]) -> None:
    """Leave out added layers and padding: in the files, since devices cannot shard the true number evenly."""
    import tensorstore  # which Orbax uses

    base = f"{folder}/arrays" if "://" in str(folder) else f"file://{folder}/arrays"
    for key, shape in padded.items():
        store = {"driver": "ocdbt", "base": base, "path": f"{key}/"}
        tensorstore.open({"driver": "zarr", "kvstore": store}).result().resize(exclusive_max=shape).result()


def _remove_unfinished(path: Any) -> None:
    """Remove the rest of a checkpoint that could not be written."""
    for _ in range(20):  # TensorStore goes on to write for a moment after one of its writes has failed
        _remove_tree(path)
        time.sleep(0.05)
        if not path.exists():
            return


def _remove_tree(path: Any) -> None:
    with contextlib.suppress(OSError):
        if os.path.islink(path) or not path.is_dir():
            path.unlink()
            return
        for child in list(path.iterdir()):
            _remove_tree(child)
        path.rmdir()
