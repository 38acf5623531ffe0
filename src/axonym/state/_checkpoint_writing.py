"""Write the files of a checkpoint with Orbax, from one process or from several."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from ..core.processes import ProcessAgreement
from ..core.tree_spec import is_key
from ..distribution.padded_array import stored
from ..named_array import is_jax_array_like, raw
from ..sharding.leaves import leaves_of
from ._checkpoint_entries import added_layers_of, as_jax_array, entry_of, key_of, stored_as
from ._orbax_output import quiet, remove_unfinished, wait_for_threads
from .file_checksums import as_folder, write_checksums, write_checksums_of_process
from .naming import is_number, require_representable


def require_orbax(operation: str) -> Any:
    """Return Orbax's module, which is optional."""
    try:
        import orbax.checkpoint
    except ImportError as e:
        raise ImportError(f"{operation} needs Orbax, which is optional: install axonym[checkpoint].") from e
    return orbax.checkpoint


def described(path: Any, tree: Any) -> tuple[str, dict[str, Any], dict[str, jax.Array]]:
    """Return the absolute path, and by keys the entries of leaves and the arrays; check that all can be stored."""
    require_orbax("save_checkpoint")
    path = str(as_folder(path))
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
            data = jax.random.key_data(array) if is_key(array) else as_jax_array(leaf.path, array)
            if (wider := stored_as(data.dtype)) != data.dtype:
                about[key]["stored"], data = wider.name, data.astype(wider)
            if data.size:  # Orbax refuses empty arrays, and the shape of one says everything about it
                arrays[key] = data
    if as_folder(path).exists():
        raise FileExistsError(
            f"save_checkpoint: {path} exists already, and checkpoints are never overwritten. Give each checkpoint "
            "its own name, such as the step number."
        )
    return path, about, arrays


@contextlib.contextmanager
def all_or_nothing(path: str, is_being_written: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Remove the rest of a checkpoint if it cannot be written, once all processes know that."""
    try:
        with quiet():
            yield
    except BaseException:
        if jax.process_index() == 0 and not is_being_written():
            remove_unfinished(as_folder(path))
        raise


def write(path: str, about: Any, arrays: Mapping[str, jax.Array], agree: ProcessAgreement) -> None:
    """Write a checkpoint; with several processes, they agree where one of them could fail."""
    orbax = require_orbax("save_checkpoint")
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
