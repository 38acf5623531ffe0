"""Save and restore distributed checkpoints with Orbax.

Every process writes its own shards of the arrays and reads the shards it needs. A checkpoint can be restored on another
mesh or under another mapping than it was written with. The checkpoint also stores each array's axis names: restoring
compares them with the template's and transposes arrays whose axes are in another order. It also stores checksums, so
that no damaged value is ever loaded.

Orbax is an optional dependency, `axonym[checkpoint]`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import errno
import functools
import math
import os
import queue
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..core import errors
from ..core.processes import ProcessAgreement, fail_together
from ..distribution.padded_array import padded_array, stored
from ..named_array import NamedArray, describe_array, is_jax_array_like, raw, wrap, wrap_like
from ..ops.rearranging import rearrange
from ..sharding.leaves import Leaf, child_of, is_placed_whole, leaves_of
from ..sharding.mapping import Uneven, uneven_here
from ..sharding.meshes import AnyMesh, current_mesh, with_devices
from ..sharding.placement import Placement, listed
from ..tree import LayerStack
from ._orbax_output import quiet, remove_unfinished, wait_for_threads
from .checksums import as_folder, damage_of, listed_damage, write_checksums, write_checksums_of_process
from .load_context import LoadContext
from .naming import is_number, require_representable, same_kind
from .sharded_reading import has_values, no_value, shardings_of, stored_shape

T = TypeVar("T")

_UNFINISHED = ".orbax-checkpoint-tmp"


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
    with contextlib.ExitStack() as claim:
        with fail_together("save_checkpoint") as agree:
            path, about, arrays = _described(path, tree)
            claim.enter_context(_claimed(path))
            agree({"arrays and numbers": "\n".join(f"{key} {entry}" for key, entry in about.items())})
        with _all_or_nothing(path), fail_together("save_checkpoint") as agree:
            _write(path, about, arrays, agree)


@contextlib.contextmanager
def _all_or_nothing(path: str, is_being_written: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Remove what is left of a checkpoint if it cannot be written, once all processes know that."""
    try:
        with quiet():
            yield
    except BaseException:
        if jax.process_index() == 0 and not is_being_written():
            remove_unfinished(as_folder(path))
        raise


_CLAIMED: set[str] = set()
"""The checkpoints that are being written. A second write to one of them would remove the files of the first."""
_CLAIMING = threading.Lock()


@contextlib.contextmanager
def _claimed(path: str) -> Iterator[None]:
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


def save_checkpoint_async(path: str | os.PathLike[str], tree: Any) -> PendingCheckpoint:
    """Write a tree to a checkpoint while training goes on.

    This returns once it is under way to copy the shards to host memory, which needs room for one copy of them there.
    The tree may be donated or changed afterwards. A thread writes the files. See `save_checkpoint` for all else.

    Call `wait` of the result before the next checkpoint, and before the program ends: only then is it known that the
    checkpoint could be written. Otherwise a failure is a warning, when the next one is saved in the same folder, or at
    the end. With several processes, all of them must call `wait` at the same place, and the
    checkpoint appears when they do.

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
            tree = jax.tree.map(
                lambda x: x.copy() if isinstance(x, np.ndarray) else x, tree
            )  # the caller may change it
            path, about, arrays = _described(path, tree)
            claim.enter_context(_claimed(path))
            agree({"arrays and numbers": "\n".join(f"{key} {entry}" for key, entry in about.items())})
            copies = {key: _copy_in_host_memory(x) for key, x in arrays.items()}
        pending = PendingCheckpoint(path, functools.partial(_write, path, about, copies))
        if jax.process_count() > 1:
            with _all_or_nothing(path, pending._thread.is_alive), fail_together("save_checkpoint") as agree:
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
            with (
                _all_or_nothing(self._path, self._thread.is_alive),
                fail_together("save_checkpoint") as agree,
            ):
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


def _described(path: Any, tree: Any) -> tuple[str, dict[str, Any], dict[str, jax.Array]]:
    """Return the absolute path, what is stored about each leaf, and the arrays, all by keys; check that they can be."""
    _orbax("save_checkpoint")
    path = str(as_folder(path))
    arrays, about = {}, {}
    for leaf in leaves_of(tree)[0]:
        key = _key(leaf)
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
            about[key] = _about(leaf, array, _added_layers(leaf, tree))
            array = stored(array)
            data = jax.random.key_data(array) if _is_key(array) else _as_jax_array(leaf.path, array)
            if (wider := _stored_as(data.dtype)) != data.dtype:
                about[key]["stored"], data = wider.name, data.astype(wider)
            if data.size:  # Orbax refuses empty arrays, and the shape of one says everything about it
                arrays[key] = data
    if as_folder(path).exists():
        raise FileExistsError(
            f"save_checkpoint: {path} exists already, and checkpoints are never overwritten. Give each checkpoint "
            "its own name, such as the step number."
        )
    return path, about, arrays


def _write(path: str, about: Any, arrays: Mapping[str, jax.Array], agree: ProcessAgreement) -> None:
    """Write a checkpoint; with several processes, they agree where one of them could fail."""
    orbax = _orbax("save_checkpoint")
    try:
        if jax.process_count() > 1:
            _save_from_all(orbax, path, about, arrays, agree)
        else:
            _save_alone(orbax, path, about, arrays)
    except Exception as e:
        wait_for_threads()
        if isinstance(e, ValueError) and "RESOURCE_EXHAUSTED" in str(e):  # what TensorStore knows about it is long
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path) from None
        raise


def _save_alone(orbax: Any, path: str, about: Any, arrays: Mapping[str, jax.Array]) -> None:
    handler = orbax.CompositeCheckpointHandler(about=orbax.JsonCheckpointHandler(), arrays=_writer(orbax))
    finalize = handler.finalize

    # After Orbax has merged its files, and before it renames the folder.
    def finalize_with_checksums(folder: Any) -> None:
        finalize(folder)
        _leave_out_padding(folder, about, arrays)
        write_checksums(folder)

    handler.finalize = finalize_with_checksums
    with orbax.Checkpointer(handler) as checkpointer:
        parts = {"arrays": orbax.args.PyTreeSave(arrays)} if arrays else {}
        checkpointer.save(path, args=orbax.args.Composite(about=orbax.args.JsonSave(about), **parts))


_SHARED = 2**20
"""The bytes for each device from which the devices share the writing of a replicated array."""


def _writer(orbax: Any, **options: Any) -> Any:
    """Return the Orbax handler that writes arrays.

    Orbax lets each device write a part of a replicated array, which compiles a program for each shape and part. This
    only pays if several processes share the writing of large arrays.
    """
    arrays = orbax.type_handlers.ArrayHandler(
        use_replica_parallel=jax.process_count() > 1, min_slice_bytes_for_replica_parallel=_SHARED
    )
    registry = orbax.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return orbax.PyTreeCheckpointHandler(type_handler_registry=registry, **options)


def _save_from_all(orbax: Any, path: str, about: Any, arrays: Mapping[str, Any], agree: ProcessAgreement) -> None:
    """Write a checkpoint from several processes, which agree after each step.

    Orbax has its own barriers between these steps, where the others would wait for a process that failed. It omits its
    barriers if only one process is active, so each process claims to be the only one.
    """
    alone = orbax.options.MultiprocessingOptions(primary_host=0, active_processes={jax.process_index()})
    writer = _writer(orbax, multiprocessing_options=alone)

    handler = orbax.CompositeCheckpointHandler(composite_options=orbax.CompositeOptions(multiprocessing_options=alone))
    save_about, finalize_about = handler.save, handler.finalize

    def save(directory: Any, args: Any) -> None:
        if jax.process_index() == 0:
            save_about(directory, args=args)
            if arrays:
                # Otherwise Orbax makes the inner folder while it writes, and the others would wait for it.
                (directory / "arrays" / "array_metadatas").mkdir(parents=True)
        agree()
        if arrays:
            writer.save(directory / "arrays", args=orbax.args.PyTreeSave(arrays))
            write_checksums_of_process(directory, jax.process_index())
        agree()

    def finalize(directory: Any) -> None:
        finalize_about(directory)
        if arrays:
            writer.finalize(directory / "arrays")
        _leave_out_padding(directory, about, arrays)
        write_checksums(directory)

    handler.save, handler.finalize = save, finalize  # Orbax does not know classes derived from its own
    with orbax.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        checkpointer.save(path, args=orbax.args.Composite(about=orbax.args.JsonSave(about)))


def _leave_out_padding(folder: Any, about: Any, arrays: Mapping[str, jax.Array]) -> None:
    """Leave out added layers and padding: in the files, since devices cannot shard the true number evenly."""
    import tensorstore  # which Orbax uses

    base = f"{folder}/arrays" if "://" in str(folder) else f"file://{folder}/arrays"
    for key, x in arrays.items():
        rank = len(about[key]["shape"])  # a random key has one more axis in the file
        if (shape := [*about[key]["shape"], *x.shape[rank:]]) != [*x.shape]:
            store = {"driver": "ocdbt", "base": base, "path": f"{key}/"}
            file = tensorstore.open({"driver": "zarr", "kvstore": store}).result()
            file.resize(exclusive_max=shape).result()


@fail_together("restore_checkpoint")
def restore_checkpoint(
    path: str | os.PathLike[str],
    template: T,
    placement: Placement = None,
    *,
    mesh: AnyMesh | None = None,
    strict: bool = True,
    ignore: Sequence[str] = (),
    verify: bool = True,
    uneven: Uneven = None,
) -> T:
    """Load a tree from a checkpoint.

    Every array gets the axes and the dtype of its counterpart in the template. Its sharding comes from the placement,
    or else from the template's array, whatever mesh the checkpoint was written on. Every device reads only its own
    shard. Arrays without a sharding from either, such as random keys and the counters of an optimizer, are replicated
    over the mesh.

    Arguments:
        path: the folder.
        template: a tree with the structure of the saved one. Its arrays can be abstract.
        placement: the placement of the arrays; by default the active mapping.
        mesh: the mesh; by default the active one.
        strict: whether missing and unexpected keys are errors. If not, leaves that are missing from the checkpoint keep
            their value in the template.
        ignore: patterns of keys that may be in the checkpoint but not in the template, with `*` for anything.
        verify: whether to refuse a checkpoint that differs from what was written, or has lost its checksums.
        uneven: "pad" stores arrays padded whose axes their mesh axes do not divide: see `axonym.axis_mapping`. The
            files have true sizes in any case.

    >>> import tempfile
    >>> mesh = axn.make_mesh({"data": -1})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     axn.state.save_checkpoint(f"{folder}/1", {"w": axn.ones({"embed": 16})})
    ...     template = {"w": jax.eval_shape(lambda: axn.zeros({"embed": 16}))}
    ...     restored = axn.state.restore_checkpoint(f"{folder}/1", template, {"embed": "data"}, mesh=mesh)
    >>> restored["w"].array.sharding.spec
    P('data',)
    """
    orbax = _orbax("restore_checkpoint")
    folder = as_folder(path)
    path = str(folder)
    if not _is_complete(folder):
        raise FileNotFoundError(f"restore_checkpoint: {path} is not a complete checkpoint.")
    if verify and (damage := damage_of(folder, jax.process_index(), jax.process_count())):
        raise ValueError(f"restore_checkpoint: {path} is damaged: {listed_damage(damage)}. {_last_intact(folder)}")
    with quiet(), _reader(orbax) as checkpointer:
        about = _read(checkpointer, path, orbax.args.Composite(about=orbax.args.JsonRestore()))["about"]
        as_stored = _as_stored(template, about, strict, ignore)
        with uneven_here("restore_checkpoint", uneven):
            leaves = shardings_of(as_stored, template, placement, mesh, "restore_checkpoint")
        replicated = _replicated(mesh, [sharding for _, _, sharding in leaves if sharding is not None])
        wanted, with_added = {}, set[str]()
        for leaf, _, sharding in leaves:
            # Orbax knows neither named arrays nor typed keys: it reads raw arrays, and `_restored` puts them together.
            if leaf.shape is not None and "shape" in about.get(_key(leaf), {}):
                array = raw(leaf.value)
                data = jax.eval_shape(jax.random.key_data, array) if _is_key(array) else array
                target = replicated if sharding is None else sharding
                # Orbax would wrap integers that do not fit.
                is_integer = jnp.issubdtype(data.dtype, jnp.integer) and not _is_key(array)
                entry = about[_key(leaf)]
                dtype = entry.get("stored", entry["dtype"] if is_integer else data.dtype)
                dtype = jax.dtypes.canonicalize_dtype(dtype)
                shape = stored_shape(leaf.shape, sharding)
                shape_of_data = (*shape, *data.shape[len(shape) :])
                wanted[_key(leaf)] = jax.ShapeDtypeStruct(shape_of_data, dtype, sharding=target)
                if list(shape) != entry["shape"]:
                    with_added.add(_key(leaf))
        arrays = {key: _empty(x) for key, x in wanted.items() if not math.prod(x.shape)}
        wanted = {key: x for key, x in wanted.items() if key not in arrays}
        if wanted:
            restore_args = orbax.checkpoint_utils.construct_restore_args(wanted)
            for key in with_added:  # Orbax fills them up with zeros
                restore_args[key] = dataclasses.replace(restore_args[key], strict=False)
            restore = orbax.args.PyTreeRestore(wanted, restore_args=restore_args, partial_restore=True)
            arrays |= _read(checkpointer, path, orbax.args.Composite(arrays=restore))["arrays"]
    results = [_restored(leaf, mine, about.get(_key(leaf)), arrays) for leaf, mine, _ in leaves]
    return jax.tree.unflatten(jax.tree.structure(template, is_leaf=is_placed_whole), results)


def _empty(x: jax.ShapeDtypeStruct) -> jax.Array:
    """Return an array without elements."""
    return jax.make_array_from_callback(x.shape, x.sharding, lambda index: np.zeros(x.shape, x.dtype)[index])


def _reader(orbax: Any) -> Any:
    """Return the Orbax reader of checkpoints without its own barriers, which a process that fails would not reach."""
    alone = orbax.options.MultiprocessingOptions(active_processes={jax.process_index()})
    arrays = orbax.type_handlers.ArrayHandler()
    deserialize = arrays.deserialize

    async def deserialize_all(*args: Any, **kwargs: Any) -> Any:
        """Wait for all reads if one fails: TensorStore would print a traceback for each that ends later."""
        before = asyncio.all_tasks()
        try:
            return await deserialize(*args, **kwargs)
        except Exception:
            if left := asyncio.all_tasks() - before:
                await asyncio.wait(left, timeout=60)
            raise

    arrays.deserialize = deserialize_all
    registry = orbax.type_handlers.create_type_handler_registry((jax.Array, arrays))
    handler = orbax.CompositeCheckpointHandler(
        about=orbax.JsonCheckpointHandler(multiprocessing_options=alone),
        arrays=orbax.PyTreeCheckpointHandler(type_handler_registry=registry, multiprocessing_options=alone),
        composite_options=orbax.CompositeOptions(multiprocessing_options=alone),
    )
    return orbax.Checkpointer(handler, multiprocessing_options=alone)


def _read(checkpointer: Any, path: str, what: Any) -> Any:
    try:
        return checkpointer.restore(path, args=what)
    except jax.errors.JaxRuntimeError:  # too little memory
        raise
    except Exception as e:  # Orbax and TensorStore have their own errors, with everything they know about an array
        cause: BaseException = e
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = re.split(r" \[\w+(?:\[\d+\])?='|\n", f"{type(cause).__name__}: {cause}")[0]
        raise ValueError(f"restore_checkpoint: {path} cannot be read: {reason.removesuffix('.')}.") from None


def _last_intact(damaged: Any) -> str:
    """Name the last undamaged checkpoint in the folder of a damaged one."""
    for _, folder in sorted(_complete(damaged.parent), reverse=True):
        if folder != damaged and not damage_of(folder):
            return f"The last checkpoint beside it that is not damaged is {folder}."
    return "No other checkpoint beside it is known to be intact."


def _replicated(mesh: AnyMesh | None, known: list[Any]) -> Any:
    """Return the replicated sharding for arrays that have none, so that a step can use them with the others."""
    mesh = current_mesh() if mesh is None else mesh
    meshes = [*([] if mesh is None else [with_devices(mesh)]), *(sharding.mesh for sharding in known)]
    for one in meshes:
        if isinstance(one, Mesh):
            return NamedSharding(one, PartitionSpec())
    return SingleDeviceSharding(jax.local_devices()[0])


def latest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the path of the checkpoint whose name ends with the highest number, or None if there is none.

    Checkpoints that were not finished do not count, nor does anything else in the folder.

    Arguments:
        folder: the folder with the checkpoints.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (9, 10):
    ...         axn.state.save_checkpoint(f"{folder}/{step}", {"step": step})
    ...     pathlib.Path(axn.state.latest_checkpoint(folder)).name
    '10'
    """
    _orbax("latest_checkpoint")
    found = _complete(as_folder(folder))
    return str(max(found)[1]) if found else None


def _complete(folder: Any) -> list[tuple[int, Any]]:
    """Return the complete checkpoints in a folder whose names end with a number, each with that number."""
    numbered = [(re.search(r"[0-9]+$", child.name), child) for child in folder.iterdir()] if folder.is_dir() else []
    return [(int(number[0]), child) for number, child in numbered if number and _is_complete(child)]


def _is_complete(folder: Any) -> bool:
    return _UNFINISHED not in folder.name and (folder / "about").is_dir()


def _orbax(operation: str) -> Any:
    try:
        import orbax.checkpoint
    except ImportError as e:
        raise ImportError(f"{operation} needs Orbax, which is optional: install axonym[checkpoint].") from e
    return orbax.checkpoint


# --- metadata that is stored with the arrays ---


def _key(leaf: Leaf) -> str:
    return jax.tree_util.keystr(leaf.keys, simple=True, separator=".") or "array"


def _added_layers(leaf: Leaf, tree: Any) -> tuple[int, ...]:
    """Return for each axis of an array the number of added layers at its end."""
    shape = leaf.shape or ()
    added, names, stacks = [0] * len(shape), leaf.names or (), 0
    is_named = len(names) == len(shape) and isinstance(leaf.value, NamedArray)
    node = tree
    # Not down to the leaf: it is no stack, and Flax warns if the value of a variable is looked up.
    for key in (None, *leaf.keys[:-1]):
        node = tree if key is None else child_of(node, key)
        if isinstance(node, LayerStack):
            if found := node.added_layers():
                axis, number = found
                if is_named:
                    position = names.index(axis.name) if axis.name in names else len(shape)
                else:
                    position = stacks  # raw arrays have the axes of the stacks around them first, from the outside in
                if shape[position : position + 1] == (axis.size + number,):
                    added[position] = number
            stacks += 1
    return tuple(added)


def _about(leaf: Leaf, array: Any, added: Sequence[int]) -> dict[str, Any]:
    names = leaf.value.names if isinstance(leaf.value, NamedArray) else None
    names = None if leaf.made_from else names  # the names belong to another array
    shape = [size - n for size, n in zip(array.shape, added, strict=True)]
    about = {"axes": names, "shape": shape, "dtype": str(array.dtype)}
    return about | ({"key": str(jax.random.key_impl(stored(array)))} if _is_key(array) else {})


def _as_jax_array(path: str, x: Any) -> jax.Array:
    try:
        return jnp.asarray(x)
    except TypeError:
        raise TypeError(f"save_checkpoint: {path} has the dtype {x.dtype}, which JAX does not have.") from None


def _stored_as(dtype: Any) -> np.dtype[Any]:
    """Return the dtype that an array is written with: a wider one, which has all its values, if files lack its own."""
    import tensorstore  # which Orbax uses

    try:
        tensorstore.dtype(dtype.name)
    except (TypeError, ValueError):
        if jnp.issubdtype(dtype, jnp.integer):
            return np.dtype(np.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else np.uint8)
        return np.dtype(np.float16)
    return dtype


def _is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


# --- matching a checkpoint with a template ---


def _as_stored(template: Any, about: Mapping[str, Any], strict: bool, ignore: Sequence[str]) -> Any:
    """Return the template with abstract arrays that have their axes in the stored order."""
    context = LoadContext("restore_checkpoint", strict, ignore, source="checkpoint", keys=list(about))
    leaves, structure = leaves_of(template)
    found, problems = [], []
    for leaf in leaves:
        key, x = _key(leaf), leaf.value
        entry = about.get(key)
        found.append(x)  # the template's own value, unless the checkpoint has an array in its place
        if is_number(x):
            if entry is None or "number" not in entry:
                context.add_missing(key, f"a number, {type(x).__name__}")
            elif _number(x, entry) is None:
                context.misfits.append(
                    f"{key!r} is {_stored_number(entry)}, but in the tree it is a number, {type(x).__name__}."
                )
            continue
        if not is_jax_array_like(x):
            continue
        if entry is None or "number" in entry:
            context.add_missing(key, describe_array(x))
            if not has_values(x):
                problems.append(no_value(key))
        elif misfit := _misfit(x, entry, added := _added_layers(leaf, template)):
            context.misfits.append(f"{key!r} {misfit}, but in the tree it is {describe_array(x)}.")
        else:
            found[-1] = _abstract(x, entry, added)
    keys = {_key(leaf) for leaf in leaves}
    context.add_unexpected(key for key in about if key not in keys)
    context.raise_problems()
    if problems:
        raise ValueError(listed("restore_checkpoint", problems, None))
    return jax.tree.unflatten(structure, found)


def _misfit(x: Any, entry: Mapping[str, Any], added: Sequence[int]) -> str | None:
    """Describe how a stored array differs from the template's, or return None."""
    names, shape, dtype = entry["axes"], entry["shape"], entry["dtype"]
    own = [size - n for size, n in zip(raw(x).shape, added, strict=True)]
    if isinstance(x, NamedArray) and names is not None:
        if len(x.names) != len(own) or dict(zip(names, shape, strict=True)) != dict(zip(x.names, own, strict=True)):
            return f"has axes {errors.describe_axes(names, shape)}"
    elif own != shape:
        return f"has shape {tuple(shape)}"
    same = dtype == str(x.dtype) if _is_key(x) or "key" in entry else same_kind(jnp.dtype(dtype), x.dtype)
    return None if same else f"has dtype {dtype}"


def _stored_number(entry: Mapping[str, Any]) -> Any:
    value = entry["number"]
    return complex(*value) if isinstance(value, list) else value


def _number(x: Any, entry: Mapping[str, Any]) -> Any:
    """Convert a stored number to the type of the template's number; None if that type cannot represent it."""
    value = _stored_number(entry)
    try:
        found = type(x)(value)
    except (OverflowError, TypeError, ValueError):
        return None
    return found if found == value or found != found else None  # equal, or NaN


def _abstract(x: Any, entry: Mapping[str, Any], added: Sequence[int]) -> Any:
    """Return an abstract array with the axes in the stored order, and with the layers that are added in the tree."""
    names = entry["axes"] if isinstance(x, NamedArray) else None
    more = added if names is None else [dict(zip(x.names, added, strict=True))[n] for n in names]
    struct = jax.ShapeDtypeStruct(tuple(size + n for size, n in zip(entry["shape"], more, strict=True)), x.dtype)
    return wrap(struct, x.names if names is None else tuple(names)) if isinstance(x, NamedArray) else struct


def _restored(leaf: Leaf, mine: Any, entry: Mapping[str, Any] | None, arrays: Mapping[str, Any]) -> Any:
    """Return a leaf of the restored tree."""
    if entry is None:
        return mine
    if is_number(mine) and "number" in entry:
        return _number(mine, entry)
    if not is_jax_array_like(mine):
        return mine
    array = arrays[_key(leaf)]
    if _is_key(mine):
        array = jax.random.wrap_key_data(array, impl=entry["key"])
    elif array.dtype != (dtype := jax.dtypes.canonicalize_dtype(mine.dtype)):
        require_representable(f"restore_checkpoint: {leaf.path}", array, dtype)
        array = array.astype(dtype)
    assert leaf.shape is not None
    shape = leaf.shape
    if isinstance(mine, NamedArray) and leaf.value.names != mine.names:
        sizes = dict(zip(leaf.value.names, shape, strict=True))
        array, shape = rearrange(wrap(array, leaf.value.names), mine.names).array, tuple(sizes[n] for n in mine.names)
    return wrap_like(array if array.shape == shape else padded_array(array, shape), mine)
