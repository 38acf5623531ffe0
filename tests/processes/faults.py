"""Checks for the case that one of several processes cannot do its part of a file operation."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.sharding import fail_together
from axonym.state import (
    load_state_dict,
    restore_checkpoint,
    save_checkpoint,
    save_checkpoint_async,
    save_state_dict,
    to_numpy_state_dict,
    to_torch_compatible_state_dict,
    verify,
)


def spread(n: int = 3) -> dict[str, Any]:
    """Return arrays of which every process has a shard."""
    mesh = axn.make_mesh({"data": -1})
    size = mesh.size * 2
    arrays = {f"w{i}": axn.named(np.arange(size * 4.0).reshape(size, 4) + 100 * i, ("x", "y")) for i in range(n)}
    return axn.shard(arrays, {"x": "data"}, mesh)


def raw(n: int = 3) -> dict[str, jax.Array]:
    return {key: x.array for key, x in spread(n).items()}


def gathers_are_right() -> None:
    """Check that the next gather is paired correctly in every process."""
    found = axn.to_host(spread(1))["w0"].array
    np.testing.assert_array_equal(found, np.arange(found.size, dtype=np.float32).reshape(found.shape))


@contextmanager
def full_disk(at: int, after: int = 0) -> Iterator[None]:
    """Make synchronizing a file fail in one process, as on a full disk."""

    def fsync(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if jax.process_index() != at:
        yield
    else:
        with mock.patch.object(os, "fsync", fsync):
            yield


def raises_everywhere(kind: type[Exception], at: int, action: Callable[[], Any]) -> str:
    """Check that all processes raise the same error, which names the failed one; later collectives are paired right."""
    with pytest.raises(kind) as caught:
        action()
    text = str(caught.value)
    assert f"failed in process {at} of {jax.process_count()}: " in text, text
    with fail_together("compare") as agree:
        agree({"texts": text})
    gathers_are_right()
    return text


def check_state_dict_into_a_missing_folder(folder: Path) -> None:
    text = raises_everywhere(
        FileNotFoundError, 0, lambda: save_state_dict(raw(), folder / "missing" / "model.safetensors")
    )
    assert "save_state_dict failed" in text and "missing" in text


def check_state_dict_on_a_full_disk(folder: Path) -> None:
    path = folder / "model.safetensors"
    with full_disk(0):
        raises_everywhere(OSError, 0, lambda: save_state_dict(raw(), path))
    assert not any(folder.iterdir())
    save_state_dict(raw(), path)
    for key, x in to_numpy_state_dict(raw()).items():
        np.testing.assert_array_equal(load_state_dict(path)[key], x)


def check_state_dict_with_a_bad_entry_in_each_process(folder: Path) -> None:
    for at in range(jax.process_count()):
        bad = {"other": object()} if jax.process_index() == at else {}
        text = raises_everywhere(TypeError, at, lambda bad=bad: save_state_dict(raw() | bad, folder / "a.safetensors"))
        assert "'other' is a object" in text
        gone = jnp.ones(2)
        if jax.process_index() == at:
            gone.delete()
        raises_everywhere(
            RuntimeError, at, lambda gone=gone: save_state_dict(raw() | {"gone": gone}, folder / "a.safetensors")
        )
    assert not any(folder.iterdir())


def check_state_dicts_that_differ(folder: Path) -> None:
    """A process that lacks an array is not waited for in its gather."""
    mine = raw()  # in all processes: placing an array is also collective
    if jax.process_index() == 0:
        del mine["w2"]
    with pytest.raises(ValueError, match=r"arrays must be the same in every process, but differ") as caught:
        save_state_dict(mine, folder / "a.safetensors")
    assert "process 0: none" in str(caught.value) and ": 'w2' float32" in str(caught.value)
    gathers_are_right()
    with pytest.raises(ValueError, match="arrays on several hosts must be the same in every process"):
        axn.to_host(mine)
    gathers_are_right()


def check_gathers_of_deleted_arrays(folder: Path) -> None:
    for gather in (axn.to_host, to_numpy_state_dict, to_torch_compatible_state_dict):
        for at in range(jax.process_count()):
            tree = spread()
            if jax.process_index() == at:
                tree["w1"].array.delete()
            raises_everywhere(RuntimeError, at, lambda gather=gather, tree=tree: gather(tree))


def check_checkpoint_that_one_process_cannot_write(folder: Path) -> None:
    """The first process makes the folder; each writes its shards; the first one completes it."""
    from orbax.checkpoint import PyTreeCheckpointHandler

    def broken(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    steps = [(PyTreeCheckpointHandler, "async_save", at) for at in range(jax.process_count())]
    steps += [(PyTreeCheckpointHandler, "finalize", 0), (os, "mkdir", 0)]
    for i, (owner, name, at) in enumerate(steps):
        with mock.patch.object(owner, name, broken) if jax.process_index() == at else mock.MagicMock():
            raises_everywhere(OSError, at, lambda i=i: save_checkpoint(folder / str(i), spread()))
        assert not (folder / str(i)).exists()
    save_checkpoint(folder / "last", spread() | {"step": 3})
    found: dict[str, Any] = restore_checkpoint(folder / "last", spread() | {"step": 0})
    assert found["step"] == 3
    for key, x in axn.to_host({k: v for k, v in found.items() if k != "step"}).items():
        np.testing.assert_array_equal(x.array, axn.to_host(spread())[key].array)


def check_that_orbax_leaves_the_others_at_a_barrier(folder: Path) -> None:
    """If this fails, `AsyncCheckpointer` tells all processes of a failure, and may replace what is made around it."""
    from orbax.checkpoint import AsyncCheckpointer, PyTreeCheckpointHandler, args
    from orbax.checkpoint.options import AsyncOptions

    tree, last = raw(), jax.process_count() - 1
    handler, options = PyTreeCheckpointHandler(), AsyncOptions(timeout_secs=2)
    if jax.process_index() == last:
        handler.async_save = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with (
        pytest.raises(OSError if jax.process_index() == last else TimeoutError),
        AsyncCheckpointer(handler, async_options=options) as checkpointer,
    ):
        checkpointer.save(folder / "1", args=args.PyTreeSave(tree))
    gathers_are_right()


def check_checkpoint_with_a_bad_tree_in_each_process(folder: Path) -> None:
    for at in range(jax.process_count()):
        bad = {"other": jax.ShapeDtypeStruct((2,), "float32")} if jax.process_index() == at else {}
        raises_everywhere(TypeError, at, lambda bad=bad: save_checkpoint(folder / "1", spread() | bad))
    step = {"step": jax.process_index()}
    with pytest.raises(
        ValueError, match=r"arrays and numbers must be the same .*\n *process 0: step .*0.*\n *process 1"
    ):
        save_checkpoint(folder / "1", spread() | step)
    assert not any(folder.iterdir())


def check_checkpoint_that_one_process_does_not_see(folder: Path) -> None:
    save_checkpoint(folder / "1", spread())
    for at in range(jax.process_count()):
        path = folder / ("elsewhere" if jax.process_index() == at else "1")
        text = raises_everywhere(FileNotFoundError, at, lambda path=path: restore_checkpoint(path, spread()))
        assert "elsewhere is not a complete checkpoint" in text
        template = spread() | ({"more": jnp.ones(2)} if jax.process_index() == at else {})
        text = raises_everywhere(Exception, at, lambda template=template: restore_checkpoint(folder / "1", template))
        assert "'more'" in text


def check_damaged_checkpoint(folder: Path) -> None:
    """Each process writes the checksums of its files, and compares some of them; all raise the error."""
    save_checkpoint(folder / "1", spread())
    assert [path.name for path in (folder / "1").glob("checksums*")] == ["checksums.json"]
    verify(folder / "1")
    for process in range(jax.process_count()):
        file = max((folder / "1" / "arrays" / f"ocdbt.process_{process}" / "d").iterdir())
        content = file.read_bytes()
        with fail_together("wait for all to have read"):
            pass
        if jax.process_index() == 0:
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with fail_together("wait for the damage"):
            pass
        with pytest.raises(ValueError, match=rf"arrays/ocdbt\.process_{process}/d/{file.name} differs from what was"):
            restore_checkpoint(folder / "1", spread())
        if jax.process_index() == 0:
            file.write_bytes(content)
    with fail_together("wait for the repair"):
        pass
    restore_checkpoint(folder / "1", spread())


def check_interrupt_in_a_write(folder: Path) -> None:
    """Ctrl-C ends one process; the others are told."""

    def interrupted(file: int) -> None:
        raise KeyboardInterrupt

    with mock.patch.object(os, "fsync", interrupted):
        if jax.process_index() == 0:
            with pytest.raises(KeyboardInterrupt):
                save_state_dict(raw(), folder / "a.safetensors")
        else:
            with pytest.raises(RuntimeError, match=r"failed in process 0 of .*: it was interrupted"):
                save_state_dict(raw(), folder / "a.safetensors")
    gathers_are_right()


def check_asynchronous_saves(folder: Path) -> None:
    """Each process writes its shards, and all end if one is interrupted in `wait`."""
    mesh, values = axn.make_mesh({"data": 4, "model": 2}), np.arange(2**20, dtype=np.int32)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in (("all", P()), ("model", P("model")))}
    tree = {
        name: jax.make_array_from_callback(values.shape, sharding, values.__getitem__)
        for name, sharding in shardings.items()
    }
    pending = save_checkpoint_async(folder / "1", tree)
    interrupted = save_checkpoint_async(folder / "2", tree)
    for x in tree.values():
        x.delete()
    pending.wait()
    template: dict[str, Any] = {name: jax.ShapeDtypeStruct(values.shape, np.int32) for name in tree}
    for x in restore_checkpoint(folder / "1", template).values():
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, values[shard.index])

    def interrupt() -> None:
        raise KeyboardInterrupt

    if jax.process_index() == 0:
        interrupted._written = mock.Mock(result=interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt if jax.process_index() == 0 else RuntimeError):
            interrupted.wait()
    gathers_are_right()
    assert os.listdir(folder) == ["1"]


def check_programs_without_text(folder: Path) -> None:
    program = jax.jit(lambda x: x + 1).lower(1)
    with mock.patch.object(type(program), "as_text", side_effect=ZeroDivisionError("no text")) as text:
        if jax.process_index() != 1:
            text.side_effect = lambda: "a program"
        with (
            pytest.raises(ZeroDivisionError, match=r"compare failed in process 1 .*no text"),
            fail_together("compare") as agree,
        ):
            agree({"program": program})
    gathers_are_right()


def check_several_failures_at_once(folder: Path) -> None:
    with pytest.raises(ValueError) as caught, fail_together("read"):
        raise ValueError(f"row {jax.process_index()}")
    assert str(caught.value).startswith("read failed in\n  process 0 of ") and "row 1" in str(caught.value)
    with pytest.raises(KeyError, match=r"^'everywhere'$"), fail_together("read"):
        raise KeyError("everywhere")
    with pytest.raises(LookupError, match="'here'"), fail_together("read"):
        if jax.process_index() == 1:
            raise KeyError("here")
    with jax.set_mesh(axn.make_mesh({"data": -1}, explicit=True)), pytest.raises(OSError) as problem:
        with fail_together("read"):
            if jax.process_index() == 1:
                raise PermissionError(errno.EACCES, "Permission denied", "x")
    assert type(problem.value) is PermissionError and problem.value.errno == errno.EACCES
    gathers_are_right()
