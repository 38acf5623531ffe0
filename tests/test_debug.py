"""The functions of `axonym.debug`."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import axonym as axn
from axonym import debug
from axonym.sharding.shard import shard

X = axn.zeros({"batch": 8, "embed": 4})

GRID = """\
x: float32[batch=8, embed=4], 16 B of 128 B on each of 8 CPU devices
  batch=8 over data=4, 2 on each
  embed=4 over model=2, 2 on each
    batch ↓ embed → 0:2   2:4
                    ┌─────┬─────┐
                0:2 │  0  │  1  │
                    ├─────┼─────┤
                2:4 │  2  │  3  │
                    ├─────┼─────┤
                4:6 │  4  │  5  │
                    ├─────┼─────┤
                6:8 │  6  │  7  │
                    └─────┴─────┘
"""


# --- shardings ---


@pytest.mark.parametrize("mesh_name", ["auto_mesh", "explicit_mesh"])
def test_a_grid(mesh_name: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    mesh: Mesh = request.getfixturevalue(mesh_name)
    with jax.set_mesh(mesh):
        x = shard(X, {"batch": "data", "embed": "model"})
    debug.visualize_shardings({"x": x, "n": 3})
    assert capsys.readouterr().out == GRID

    @jax.jit
    def inside(x: axn.NamedArray) -> axn.NamedArray:
        assert debug.describe_shardings({"x": x}) == "x: float32[batch=8, embed=4], 128 B being traced"
        debug.visualize_shardings({"x": x * 2})
        return x

    with jax.set_mesh(mesh):
        jax.block_until_ready(inside(x))
    assert capsys.readouterr().out == GRID, "in a jitted function, when it is compiled"


def test_the_picture_tells_where_the_parts_are(auto_mesh: Mesh) -> None:
    """Against what JAX says of each part."""
    x = shard(X, {"batch": "model", "embed": "data"}, auto_mesh)
    text = debug.describe_shardings(x)
    rows = [line.split("│") for line in text.splitlines() if "│" in line]
    found = {(i, j): int(cell) for i, row in enumerate(rows) for j, cell in enumerate(row[1:-1])}
    for part in x.array.addressable_shards:
        place = tuple((s.start or 0) // size for s, size in zip(part.index, part.data.shape, strict=True))
        assert found[place] == part.device.id
    assert [row[0].strip() for row in rows] == ["0:4", "4:8"]


def test_one_axis_and_copies(auto_mesh: Mesh) -> None:
    x = shard(axn.zeros({"embed": 4, "mlp": 3}), {"embed": "model"}, auto_mesh)
    assert debug.describe_shardings(x) == (
        "the array: float32[embed=4, mlp=3], 24 B of 48 B on each of 8 CPU devices\n"
        "  embed=4 over model=2, 2 on each\n"
        "    embed → 0:2       2:4\n"
        "            ┌─────────┬─────────┐\n"
        "            │ 0,2,4,6 │ 1,3,5,7 │\n"
        "            └─────────┴─────────┘"
    )
    both = shard(axn.zeros({"embed": 16}), {"embed": ("data", "model")}, auto_mesh)
    assert "embed=16 over data=4, model=2, 2 on each" in debug.describe_shardings(both)


def test_more_axes_than_a_picture_has() -> None:
    mesh = axn.make_mesh({"a": 2, "b": 2, "c": 2})
    x = shard(axn.zeros({"a": 2, "b": 4, "c": 6}), {"a": "a", "b": "b", "c": "c"}, mesh)
    assert debug.describe_shardings(x).splitlines()[1:] == [
        "  a=2 over a=2, 1 on each",
        "  b=4 over b=2, 2 on each",
        "  c=6 over c=2, 3 on each",
    ]


class Table(eqx.Module):
    weight: jax.Array = axn.field(axis_names=("vocab", "embed"))


def test_a_tree_of_all_kinds(auto_mesh: Mesh) -> None:
    placed = shard({"table": Table(jnp.zeros((4, 6))), "x": X, "y": X}, {"batch": "data"}, auto_mesh)
    key = axn.named(jax.random.split(jax.random.key(0), 4), "layers")
    tree = placed | {"host": np.zeros(3, np.float32), "abstract": jax.ShapeDtypeStruct((2,), "int8"), "key": key}
    assert debug.describe_shardings(tree).splitlines() == [
        "abstract: int8[2], 2 B not placed",
        "host: float32[3], 12 B on the host",
        "key: key<fry>[layers=4], 32 B on CPU 0",
        "table/weight: float32[vocab=4, embed=6], 96 B on each of 8 CPU devices",
        "x: float32[batch=8, embed=4], 32 B of 128 B on each of 8 CPU devices",
        "  batch=8 over data=4, 2 on each",
        "    batch → 0:2   2:4   4:6   6:8",
        "            ┌─────┬─────┬─────┬─────┐",
        "            │ 0-1 │ 2-3 │ 4-5 │ 6-7 │",
        "            └─────┴─────┴─────┴─────┘",
        "y: float32[batch=8, embed=4], 32 B of 128 B on each of 8 CPU devices",
        "  batch=8 over data=4, 2 on each",
        "6 arrays, 398 B; at most 192 B on CPU 0",
    ]
    assert debug.describe_shardings([placed["x"], placed["y"]]).endswith(
        "2 arrays, 256 B; 64 B on each of 8 CPU devices"
    )


def test_shardings_without_a_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    devices = jax.devices()
    x = jax.device_put(X, devices[3])
    assert debug.describe_shardings(x) == "the array: float32[batch=8, embed=4], 128 B on CPU 3"
    halves: Any = SimpleNamespace(
        device_set=set(devices[:2]),
        memory_kind="pinned_host",
        devices_indices_map=lambda shape: {
            d: (slice(4 * i, 4 * i + 4), slice(None)) for i, d in enumerate(devices[:2])
        },
    )
    debug.visualize_named_sharding(X.axes, halves)
    assert capsys.readouterr().out.splitlines()[:2] == [
        "(batch=8, embed=4) on 2 CPU devices, in pinned host memory",
        "  batch=8 in 2 shards, 4 on each",
    ]


def test_nothing_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    debug.visualize_shardings({"n": 3})
    assert capsys.readouterr().out == ""
    assert debug.describe_shardings({"n": 3}) == "no arrays"


def test_visualize_named_sharding(explicit_mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    debug.visualize_named_sharding(X.axes, NamedSharding(explicit_mesh, PartitionSpec("data", "model")))
    lines = GRID.splitlines()
    assert capsys.readouterr().out.splitlines() == ["(batch=8, embed=4) on 8 CPU devices", *lines[1:]]


@pytest.mark.parametrize("spec", [("data", "model"), ("model",), (("model", "data"),), ()])
def test_abstract_meshes_are_drawn_alike(spec: Any, mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    """Their devices are numbered by their positions in the mesh."""
    on, planned = (NamedSharding(m, PartitionSpec(*spec)) for m in (mesh, mesh.abstract_mesh))
    x = axn.named(jax.device_put(X.array, on), X.axes)
    y = axn.named(jax.ShapeDtypeStruct(X.array.shape, X.dtype, sharding=planned), X.axes)
    expected = debug.describe_shardings({"x": x, "y": x}).replace("CPU devices", "devices")
    assert debug.describe_shardings({"x": y, "y": y}) == expected
    debug.visualize_shardings(y)
    debug.visualize_named_sharding(X.axes, planned)
    debug.visualize_named_sharding(X.axes, on)
    _, once, again = re.split(r"^[^ \n].*\n", capsys.readouterr().out, flags=re.M)[1:]
    assert once == again


def test_abstract_meshes_of_uneven_shards_and_one_device(auto_mesh: Mesh) -> None:
    uneven = NamedSharding(auto_mesh.abstract_mesh, PartitionSpec("data"))
    lines = debug.describe_shardings(jax.ShapeDtypeStruct((6,), "float32", sharding=uneven)).splitlines()
    assert lines[1] == "  axis 0=6 over data=4, 2 or 0 on each" and lines[2].split()[-4:] == [
        "0:2",
        "2:4",
        "4:6",
        "6:6",
    ]
    one = NamedSharding(AbstractMesh((1,), ("data",)), PartitionSpec())
    assert debug.describe_shardings(jax.ShapeDtypeStruct((6,), "float32", sharding=one)).endswith(" 24 B on device 0")


def test_a_picture_that_is_too_big_is_left_out() -> None:
    mesh = axn.make_mesh({"data": 8})
    x = shard(axn.zeros({"batch": 8 * 10**6}), {"batch": "data"}, mesh)
    assert debug.describe_shardings({"x": x}).splitlines() == [
        "x: float32[batch=8000000], 3.8 MiB of 30.5 MiB on each of 8 CPU devices",
        "  batch=8000000 over data=8, 1000000 on each",
    ]


def test_describe_array() -> None:
    assert debug.describe_array(X) == "float32[batch=8, embed=4]"
    assert debug.describe_array(jnp.zeros((2, 3), int)) == "int32[2, 3]"


# --- what is wrong with a module ---


class Pair(eqx.Module):
    first: Any
    second: Any
    static: Any = eqx.field(static=True, default=None)


def test_a_module_without_problems() -> None:
    debug.diagnose_common_issues(Pair(X, X * 1, static=("relu", X.axes)))
    debug.diagnose_common_issues(Pair(jnp.ones(2), [Pair(jnp.ones(2), None)]))


def test_all_problems_are_listed() -> None:
    raw, table = jnp.ones(2), np.ones(3)
    torn = jax.tree.map(lambda x: x[0], axn.zeros({"a": 2, "b": 3}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Equinox warns about some static arrays itself
        model = {
            "a": Pair(X, [axn.named(X.array, X.names), raw], static={"t": table}),
            "b": (Pair(raw, torn, static=X),),
        }
    with pytest.raises(debug.ModuleProblems) as raised:
        debug.diagnose_common_issues(model)
    assert str(raised.value).splitlines() == [
        "This module has problems:",
        "  one array, float32[batch=8, embed=4], at ['a'].first and at ['a'].second[0]",
        "  one array, float32[2], at ['a'].second[1] and at ['b'][0].first",
        "  an array in the static field ['a'].static",
        "  an array in the static field ['b'][0].static",
        "  names that do not fit the array, float32[a, b] over shape (3,), at ['b'][0].second",
    ]
    assert raised.value.reused_arrays[1] == ("float32[2]", ["['a'].second[1]", "['b'][0].first"])


def test_identity_map() -> None:
    x, y = jnp.ones(2), jnp.ones(2)
    found: debug.IdentityMap[jax.Array, int] = debug.IdentityMap([(x, 1)])
    found[y] = 2
    found[x] = 3
    assert (found[x], found[y], len(found)) == (3, 2, 2)
    assert [k is v for k, v in zip(found, (x, y), strict=True)] == [True, True]
    del found[x]
    assert x not in found and y in found
    with pytest.raises(KeyError):
        found[x]
    assert repr(debug.IdentityMap([("k", 1)])) == "IdentityMap([('k', 1)])"
