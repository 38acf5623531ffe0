"""Distributed checkpoints: other meshes and mappings, other orders of axes, saves that do not finish."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.state import (
    checkpoint_saves,
    latest_checkpoint,
    restore_checkpoint,
    save_checkpoint,
    save_checkpoint_async,
    verify,
)
from tests.helpers import compilations, small_disk
from tests.state.models import assert_same_tree

A, B = axn.make_axes(a=8, b=4)


def state() -> dict[str, Any]:
    """Return the state of a training run: parameters, raw arrays, an optimizer's state, a random key and numbers."""
    model = {"w": axn.arange(axn.Axis("x", 32)).unflatten_axis("x", (A, B)) * 1.0, "raw": jnp.arange(6)}
    optimizer = optax.adam(1e-3).init({"w": model["w"]})
    rest = {"key": jax.random.key(7), "step": 3, "rate": 0.5, "done": False, "z": 1 + 2j, "function": jnp.tanh}
    return {"model": model, "optimizer": optimizer, **rest}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, auto_mesh: Mesh) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "1"
    save_checkpoint(path, axn.shard(state(), {"a": "data", "b": "model"}, auto_mesh))
    return path


def test_onto_another_mesh(saved: Path, mesh: Mesh) -> None:
    other = jax.make_mesh((2, 4), ("data", "model"), axis_types=mesh.axis_types)
    found = restore_checkpoint(saved, eqx.filter_eval_shape(state), {"b": "model"}, mesh=other)
    assert_same_tree({**found, "key": 0}, {**state(), "key": 0})
    assert found["key"] == state()["key"] and found["key"].dtype == state()["key"].dtype
    for x in (found["model"]["w"], found["optimizer"][0].mu["w"]):
        assert x.array.sharding == NamedSharding(other, P(None, "model"))


def test_saving_compiles_nothing(tmp_path: Path, auto_mesh: Mesh) -> None:
    """Devices that hold the same do not each cut out a part to write, which took a program for each shape."""
    x = axn.shard({"w": axn.ones({"a": 24, "b": 5}), "v": axn.ones({"a": 16})}, {"b": None}, auto_mesh)
    with compilations() as found:
        save_checkpoint(tmp_path / "1", x)
    assert not found
    assert_same_tree(restore_checkpoint(tmp_path / "1", x), x)


def test_under_the_mapping_in_force_and_like_the_template(saved: Path, mesh: Mesh) -> None:
    with axn.set_mesh(mesh), axn.axis_mapping({"a": ("data", "model")}):
        found = restore_checkpoint(saved, eqx.filter_eval_shape(state))
    assert found["model"]["w"].array.sharding == NamedSharding(mesh, P(("data", "model"), None))
    again = restore_checkpoint(saved, found)
    assert again["model"]["w"].array.sharding == found["model"]["w"].array.sharding


def test_a_step_can_take_what_was_restored(saved: Path, mesh: Mesh) -> None:
    """What no placement is for, such as counters and keys, lies on the devices of the mesh too."""
    template = eqx.filter_eval_shape(state)
    with jax.set_mesh(mesh):
        restored = [restore_checkpoint(saved, template, {"b": "model"}), restore_checkpoint(saved, template)]
        restored.append(restore_checkpoint(saved, template, NamedSharding(mesh, P())))
        with axn.axis_mapping({"a": "data"}):
            restored.append(restore_checkpoint(saved, template))
    restored.append(restore_checkpoint(saved, template, {"b": "model"}, mesh=mesh))
    for found in restored:
        arrays = [x for x in jax.tree.leaves(found) if isinstance(x, jax.Array)]
        assert all(x.sharding.device_set == set(mesh.devices.flat) for x in arrays)
        assert found["optimizer"][0].count.sharding.is_fully_replicated
        with jax.set_mesh(mesh):
            result = eqx.filter_jit(lambda s: s["model"]["w"] + s["optimizer"][0].count)(found)
        np.testing.assert_array_equal(result.array, np.asarray(state()["model"]["w"].array))
    assert len(restore_checkpoint(saved, template)["key"].devices()) == 1


def test_axes_in_another_order(saved: Path, mesh: Mesh) -> None:
    template = eqx.filter_eval_shape(state)
    template["model"]["w"] = jax.eval_shape(lambda: axn.zeros((B, A), dtype=jnp.bfloat16))
    w = restore_checkpoint(saved, template, {"a": "data", "b": "model"}, mesh=mesh)["model"]["w"]
    assert w.names == ("b", "a") and w.dtype == jnp.bfloat16 and w.array.sharding.spec == P("model", "data")
    np.testing.assert_array_equal(w.array, np.arange(32.0).reshape(8, 4).T)


def test_a_part_of_it(saved: Path) -> None:
    template = {"model": {"w": state()["model"]["w"] * 0}}
    with pytest.raises(ValueError, match=r"'optimizer\.0\.count' is in the checkpoint, but not in the tree"):
        restore_checkpoint(saved, template)
    w = restore_checkpoint(saved, template, strict=False)["model"]["w"]
    np.testing.assert_array_equal(w.array, np.arange(32.0).reshape(8, 4))
    more = {**state(), "new": axn.ones(A)}
    assert restore_checkpoint(saved, more, strict=False)["new"] is more["new"]


def test_empty_arrays(tmp_path: Path, mesh: Mesh) -> None:
    tree = {
        "named": axn.zeros({"layers": 0, "embed": 8}, dtype=jnp.bfloat16),
        "raw": jnp.zeros((4, 0)),
        "keys": jax.random.split(jax.random.key(0), 0),
    }
    axn.state.save_checkpoint(tmp_path / "all", tree)
    axn.state.save_checkpoint(tmp_path / "some", {**tree, "w": axn.ones({"embed": 8})})
    with jax.set_mesh(mesh):
        template = jax.eval_shape(lambda: {**tree, "w": axn.ones({"embed": 8})})
        found = axn.state.restore_checkpoint(tmp_path / "some", template, {"embed": "data"})
        assert found["named"].array.sharding.spec == jax.P(None, "data")
        assert found["w"].array.tolist() == [1.0] * 8
        found = axn.state.restore_checkpoint(tmp_path / "all", tree)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
    assert found["named"].names == ("layers", "embed")


def test_integers_do_not_wrap(tmp_path: Path, mesh: Mesh) -> None:
    save_checkpoint(tmp_path / "1", {"small": axn.full({"a": 8}, 100), "large": axn.full({"a": 8}, 300)})
    template = {"small": axn.zeros({"a": 8}, dtype=jnp.int8), "large": axn.zeros({"a": 8}, dtype=jnp.int16)}
    found = restore_checkpoint(tmp_path / "1", template, {"a": "data"}, mesh=mesh)
    for key, value in {"small": 100, "large": 300}.items():
        assert found[key].dtype == template[key].dtype and found[key].array.tolist() == [value] * 8
        assert found[key].array.sharding == NamedSharding(mesh, P("data"))
    template["large"] = template["small"]
    with pytest.raises(ValueError, match=r"^restore_checkpoint: large has values from 300 to 300, which int8 cannot"):
        restore_checkpoint(tmp_path / "1", template, {"a": "data"}, mesh=mesh)


@pytest.mark.parametrize("name", ["uint2", "uint4", "float8_e4m3"])
def test_dtypes_that_files_lack(name: str, tmp_path: Path, mesh: Mesh) -> None:
    """They are written with a wider dtype, which has all their values, and read with their own, sharded."""
    dtype = jnp.dtype(name)
    wide = np.arange(4.0).repeat(2) if name == "uint2" else np.array([0, 1, 2, 3, 5, 7, 13, 15.0])
    x = axn.named(jnp.asarray(wide, jnp.float32).astype(dtype), "a")
    tree = {"w": axn.shard(x, {"a": "data"}, mesh), "other": axn.ones({"a": 8})}
    save_checkpoint(tmp_path / "1", tree)
    found = restore_checkpoint(tmp_path / "1", jax.eval_shape(lambda: tree), {"a": "data"}, mesh=mesh)
    assert found["w"].dtype == dtype and found["w"].array.sharding.spec == P("data")
    np.testing.assert_array_equal(found["w"].array.astype(jnp.float32), x.array.astype(jnp.float32))
    if name != "float8_e4m3":
        larger = restore_checkpoint(tmp_path / "1", {"w": axn.zeros({"a": 8}, dtype=jnp.int8)}, ignore=["other"])
        assert larger["w"].tolist() == wide.tolist()


def test_integers_that_jax_cannot_hold_are_not_saved(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "1", {"seen": np.array([7])})
    with pytest.raises(ValueError, match=r"^save_checkpoint: seen has values from 3 to 1099511627776, which int32 can"):
        save_checkpoint(tmp_path / "2", {"seen": np.array([3, 2**40])})
    with pytest.raises(ValueError, match=r"^save_checkpoint: seen has .* which uint32 cannot .* 64-bit"):
        save_checkpoint(tmp_path / "2", {"seen": np.uint64(2**63)})
    assert not (tmp_path / "2").exists()


def test_numbers_are_never_rounded(tmp_path: Path) -> None:
    numbers = {"rate": 1.5, "many": 3, "z": 1 + 2j, "steps": 2**60 + 1, "kept": np.float64(2.5), "whole": 2.0}
    save_checkpoint(tmp_path / "1", numbers)
    restored = restore_checkpoint(
        tmp_path / "1", {**dict.fromkeys(numbers, 0), "rate": 0.0, "z": 0j, "kept": np.float64(0)}
    )
    assert restored == numbers and type(restored["whole"]) is int and type(restored["kept"]) is np.float64
    with pytest.raises(ValueError) as e:
        template = {"rate": 0, "many": False, "z": 0.0, "steps": 0.0, "kept": 0, "whole": 0}
        restore_checkpoint(tmp_path / "1", template)
    assert sorted(line.strip() for line in str(e.value).splitlines()[1:]) == [
        "'kept' is 2.5, but in the tree it is a number, int.",
        "'many' is 3, but in the tree it is a number, bool.",
        "'rate' is 1.5, but in the tree it is a number, int.",
        f"'steps' is {2**60 + 1}, but in the tree it is a number, float.",
        "'z' is (1+2j), but in the tree it is a number, float.",
    ]


def test_everything_that_does_not_fit_is_one_error(saved: Path) -> None:
    template = state()
    template["model"] = {"w": axn.zeros((A, B.alias("c"))), "raw": jnp.zeros(6), "more": jnp.zeros(2)}
    template["key"], template["rates"] = jnp.zeros(()), template.pop("rate")
    with pytest.raises(ValueError) as e:
        restore_checkpoint(saved, template)
    assert sorted(line.strip() for line in str(e.value).splitlines()[1:]) == [
        "'key' has dtype key<fry>, but in the tree it is float32[].",
        "'model.more' is missing, for float32[2].",
        "'model.raw' has dtype int32, but in the tree it is float32[6].",
        "'model.w' has axes (a=8, b=4), but in the tree it is float32[a=8, c=4].",
        "'rate' is in the checkpoint, but not in the tree.",
        "'rates' is missing, for a number, float. Did you mean 'rate'?",
    ]
    abstract = {"new": jax.ShapeDtypeStruct((2,), "float32")}
    with pytest.raises(ValueError, match="new is missing, and the tree has only its shape and dtype"):
        restore_checkpoint(saved, abstract, strict=False)


def test_checkpoints_are_not_overwritten(saved: Path) -> None:
    with pytest.raises(FileExistsError, match="exists already"):
        save_checkpoint(saved, {"w": axn.ones(A)})
    with pytest.raises(TypeError, match="w has no values"):
        save_checkpoint(saved.parent / "2", jax.eval_shape(lambda: {"w": axn.ones(A)}))
    with pytest.raises(ValueError, match=r"two leaves of the tree have the key 'a\.b'"):
        save_checkpoint(saved.parent / "2", {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}})
    with pytest.raises(FileNotFoundError, match="is not a complete checkpoint"):
        restore_checkpoint(saved.parent / "2", {})


def test_a_save_that_does_not_finish_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving is interrupted by the rename that would make the checkpoint complete."""
    save_checkpoint(tmp_path / "step-9", {"w": axn.ones(A), "step": 9})

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise OSError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", interrupted)
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(OSError, match="interrupted"):
            save_checkpoint(tmp_path / "step-10", {"w": axn.zeros(A), "step": 10})
    assert os.listdir(tmp_path) == ["step-9"]
    assert latest_checkpoint(tmp_path) == str(tmp_path / "step-9")
    assert restore_checkpoint(tmp_path / "step-9", {"w": axn.zeros(A), "step": 0})["step"] == 9
    save_checkpoint(tmp_path / "step-10", {"step": 10})
    latest = latest_checkpoint(tmp_path)
    assert latest is not None and restore_checkpoint(latest, {"step": 0}) == {"step": 10}
    assert latest_checkpoint(tmp_path / "nothing") is None


def test_a_full_disk(tmp_path: Path) -> None:
    """It leaves nothing; there may be room again for the next checkpoint. Orbax's threads complain in their process."""
    with small_disk(tmp_path / "disk") as mounted:
        script = [sys.executable, "-c", FULL_DISK, tmp_path / "disk", "-1" if mounted else "3000"]
        ended = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


FULL_DISK = """
import resource, sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 8)
import axonym as axn
from axonym.state import latest_checkpoint, save_checkpoint, save_checkpoint_async, verify

folder, largest = Path(sys.argv[1]), int(sys.argv[2])
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
mesh = axn.make_mesh({"data": 8})
axes = {"rows": 64, "columns": 64}
large = {str(i): axn.random.normal(jax.random.key(i), axes) for i in range(24)}
large = axn.shard(large, {"rows": "data"}, mesh)
for save in (save_checkpoint, lambda path, tree: save_checkpoint_async(path, tree).wait()):
    try:
        save(folder / "step-1", large)
        raise AssertionError("saved")
    except OSError as e:
        assert largest == 3000 or "No space left on device" in str(e), e
    except ValueError:
        assert largest == 3000
    assert not any(folder.iterdir()), [*folder.iterdir()]
resource.setrlimit(resource.RLIMIT_FSIZE, before)
save_checkpoint(folder / "step-1", {"x": axn.ones({"a": 8})})
verify(folder / "step-1")
assert latest_checkpoint(folder) == str(folder / "step-1")
print("done")
"""


def test_saving_while_the_arrays_are_donated(tmp_path: Path) -> None:
    mesh = axn.make_mesh({"data": 8})
    x = axn.shard(axn.arange({"rows": 16, "columns": 4}), {"rows": "data"}, mesh)
    tree = {"x": x, "key": jax.random.key(3), "step": 7}
    pending = save_checkpoint_async(tmp_path / "1", tree)
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(x))
    pending.wait()
    assert pending.is_written()
    verify(tmp_path / "1")
    found: Any = restore_checkpoint(tmp_path / "1", tree | {"x": axn.zeros({"rows": 16, "columns": 4}, dtype=int)})
    np.testing.assert_array_equal(found["x"].array, np.arange(64).reshape(16, 4))
    with pytest.raises(FileExistsError, match="exists already"):
        save_checkpoint_async(tmp_path / "1", {"x": 1})


def test_saving_copies_all_that_can_change(tmp_path: Path) -> None:
    """Also arrays that are in pinned host memory already, and NumPy's."""
    mesh = axn.make_mesh({"data": 4, "model": 2})
    rows = jax.NamedSharding(mesh, jax.P("data"))
    tree = {
        "rows": jax.device_put(jnp.arange(2**16), rows),
        "pinned": jax.device_put(jnp.arange(2**16), rows.with_memory_kind("pinned_host")),
        "replicated": jax.device_put(jnp.arange(2**16), jax.NamedSharding(mesh, jax.P())),
        "numpy": np.arange(2**16),
    }
    pending = save_checkpoint_async(tmp_path / "1", tree)
    for x in tree.values():
        x.fill(-1) if isinstance(x, np.ndarray) else x.delete()
    others = [jax.device_put(jnp.full(2**16, -1), rows) for _ in range(8)]  # in memory that may be free now
    pending.wait()
    del others
    for x in restore_checkpoint(tmp_path / "1", dict.fromkeys(tree, np.zeros(2**16, int))).values():
        np.testing.assert_array_equal(x, np.arange(2**16))


def slow_checksums(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let saves wait for an event."""
    go_on, write = threading.Event(), checkpoint_saves.write_checksums

    def slow(folder: Path) -> None:
        assert go_on.wait(60)
        write(folder)

    monkeypatch.setattr(checkpoint_saves, "write_checksums", slow)
    return go_on


def test_an_interrupted_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread goes on, so it completes the checkpoint; until then, nobody else can write to the same path."""
    go_on = slow_checksums(monkeypatch)
    pending = save_checkpoint_async(tmp_path / "1", {"x": 1})
    for save in (save_checkpoint, save_checkpoint_async):
        with pytest.raises(FileExistsError, match="1 is being written already"):
            save(tmp_path / "1", {"x": 2})
    threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    assert not pending.is_written()
    go_on.set()
    pending.wait()
    assert restore_checkpoint(tmp_path / "1", {"x": 0}) == {"x": 1}


def test_a_failure_is_raised_again_and_never_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(folder: Path) -> None:
        raise OSError("the cable is cut")

    (tmp_path / "run1.orbax-checkpoint-tmp").mkdir()  # of another checkpoint, which the name as a pattern would match
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_saves, "write_checksums", fails)
        pending = save_checkpoint_async(tmp_path / "run[1]", {"x": 1})
        for _ in range(2):
            with pytest.raises(OSError, match="the cable is cut"):
                pending.wait()
        failed = save_checkpoint_async(tmp_path / "run[1]", {"x": 1})
        failed._thread.shutdown()
    (tmp_path / "run[1].orbax-checkpoint-tmp-99").mkdir()  # as another process left it that was killed
    with pytest.warns(RuntimeWarning, match=r"run\[1\] could not be written: the cable is cut"):
        save_checkpoint(tmp_path / "run[1]", {"x": 1})
    assert sorted(os.listdir(tmp_path)) == ["run1.orbax-checkpoint-tmp", "run[1]"]
    with pytest.raises(OSError, match="the cable is cut"):
        failed.wait()


def test_without_orbax(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    for call in (save_checkpoint, restore_checkpoint):
        with pytest.raises(ImportError, match=rf"{call.__name__} needs Orbax.*install axonym\[checkpoint\]"):
            call(tmp_path / "1", {})


@pytest.mark.parametrize("values", [np.array(["a"]), np.array([None]), np.array(["2020-01-01"], "datetime64[D]")])
def test_dtypes_that_jax_lacks(values: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^save_checkpoint: b has the dtype .*, which JAX does not have"):
        save_checkpoint(tmp_path / "1", {"a": np.zeros(2), "b": values})
    assert not [*tmp_path.iterdir()]
