"""Write checkpoints, at once or while training goes on.

Orbax copies the shards to host memory and writes them in its threads. Everything around that is done here, so that
several processes agree where one of them could fail: if one cannot write, Orbax's `AsyncCheckpointer` leaves the others
at a barrier until its timeout of 20 minutes. Without its barriers, its first process creates the folder anew, and
removes what faster processes have already written.
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
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.processes import fail_together
from ..core.tree_spec import is_key
from ..distribution.padded_array import stored
from ..named_array import NamedArray, is_jax_array_like, raw
from ..sharding.leaves import Leaf, child_of, leaves_of
from ..tree import LayerStack
from .file_checksums import as_folder, write_checksums, write_checksums_of_process
from .naming import is_number, require_representable

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
                beside, unfinished = pending._folder.parent, pending._unfinished
                for left in [*beside.iterdir()] if beside.is_dir() else []:
                    if left.name.startswith(f"{pending._folder.name}{UNFINISHED}-"):
                        _remove_tree(left)  # what a process that was killed has left
                (unfinished / "about").mkdir(parents=True)
                (unfinished / "about" / "metadata").write_text(json.dumps(about))
                (unfinished / "arrays").mkdir()  # or each process that writes would wait for it
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
            import tensorstore  # which Orbax uses

            # Added layers and padding are left out in the files, since devices cannot shard the true number evenly.
            base = f"{self._unfinished}/arrays"
            base = base if "://" in base else f"file://{base}"
            for key, shape in self._padded.items():
                store = {"driver": "ocdbt", "base": base, "path": f"{key}/"}
                tensorstore.open({"driver": "zarr", "kvstore": store}).result().resize(exclusive_max=shape).result()
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


# --- the entries, one for each leaf of a tree ---


def key_of(leaf: Leaf) -> str:
    """Return the name of a leaf in a checkpoint."""
    return jax.tree_util.keystr(leaf.keys, simple=True, separator=".") or "array"


def added_layers_of(leaf: Leaf, tree: Any) -> tuple[int, ...]:
    """Return for each axis of an array the number of added layers at its end."""
    shape = leaf.shape or ()
    added, names, stacks = [0] * len(shape), leaf.names or (), 0
    is_named = len(names) == len(shape) and isinstance(leaf.value, NamedArray)
    # Not down to the leaf: it is no stack, and Flax warns if the value of a variable is looked up.
    for node in itertools.accumulate(leaf.keys[:-1], child_of, initial=tree):
        if not isinstance(node, LayerStack):
            continue
        if found := node.added_layers():
            axis, number = found
            position = stacks  # raw arrays have the axes of the stacks around them first, from the outside in
            if is_named:
                position = names.index(axis.name) if axis.name in names else len(shape)
            if shape[position : position + 1] == (axis.size + number,):
                added[position] = number
        stacks += 1
    return tuple(added)


def entry_of(leaf: Leaf, array: Any, added: Sequence[int]) -> dict[str, Any]:
    """Return the entry of an array: everything that is stored about it besides its values."""
    names = leaf.value.names if isinstance(leaf.value, NamedArray) else None
    names = None if leaf.made_from else names  # the names belong to another array
    shape = [size - n for size, n in zip(array.shape, added, strict=True)]
    about = {"axes": names, "shape": shape, "dtype": str(array.dtype)}
    return about | ({"key": str(jax.random.key_impl(stored(array)))} if is_key(array) else {})


def entries_and_arrays(tree: Any) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """Return by keys the entries of leaves, and the arrays as they are written; check that all can be stored."""
    arrays, about = {}, {}
    for leaf in leaves_of(tree)[0]:
        key = key_of(leaf)
        if key in about:
            raise ValueError(
                f"save_checkpoint: two leaves of the tree have the key {key!r}; rename a key of a dictionary."
            )
        array = raw(leaf.value)
        if is_number(array):
            about[key] = {"number": [array.real, array.imag] if isinstance(array, complex) else array}
        elif is_jax_array_like(array):
            if isinstance(stored(array), jax.ShapeDtypeStruct):
                raise TypeError(f"save_checkpoint: {leaf.path} has no values, only a shape and a dtype.")
            if not isinstance(stored(array), jax.Array):
                require_representable(f"save_checkpoint: {leaf.path}", array, array.dtype)
            about[key] = entry_of(leaf, array, added_layers_of(leaf, tree))
            array = stored(array)
            try:  # arrays of NumPy, which may be changed while files are written, are copied
                data = array if isinstance(array, jax.Array) else jnp.array(array)
            except TypeError:
                text = f"save_checkpoint: {leaf.path} has the dtype {array.dtype}, which JAX does not have."
                raise TypeError(text) from None
            data = jax.random.key_data(data) if is_key(data) else data
            if (wider := stored_as(data.dtype)) != data.dtype:
                about[key]["stored"], data = wider.name, data.astype(wider)
            if data.size:  # Orbax refuses empty arrays, and the shape of one says everything about it
                arrays[key] = data
    return about, arrays


def stored_as(dtype: Any) -> np.dtype[Any]:
    """Return the dtype that an array is written with: a wider one, which has all its values, if files lack its own."""
    import tensorstore  # which Orbax uses

    try:
        tensorstore.dtype(dtype.name)
    except (TypeError, ValueError):
        if jnp.issubdtype(dtype, jnp.integer):
            return np.dtype(np.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else np.uint8)
        return np.dtype(np.float16)
    return dtype


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
