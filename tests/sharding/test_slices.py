"""Meshes over devices of several slices, which the mocked devices here are in."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym.insight import Islands
from axonym.sharding import slices_along
from axonym.sharding.meshes import arranged_devices


@dataclasses.dataclass(frozen=True)
class Gpu:
    id: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"


def gpus(*counts: int) -> list[Any]:
    """Return GPUs of machines with so many each, those of different machines in turn."""
    all_of_them = [(i, at) for i, n in enumerate(counts) for at in range(n)]
    return [Gpu(id, i) for id, (i, _) in enumerate(sorted(all_of_them, key=lambda one: one[::-1]))]


# The sizes, how many devices each slice has, `between`, and the number of slices along each axis.
MESHES: dict[str, tuple[dict[str, int], list[int], Any, dict[str, int]]] = {
    "the first axis that fits": ({"data": 2, "model": 4}, [4, 4], None, {"data": 2}),
    "a part of an axis": ({"data": -1}, [4, 4], None, {"data": 2}),
    "an axis by name": ({"data": 4, "model": 2}, [4, 4], "model", {"model": 2}),
    "a later axis, if the first does not fit": ({"data": 4, "model": 6}, [4] * 6, None, {"model": 6}),
    "two axes that share them": ({"data": 4, "model": 6}, [4] * 6, ("data", "model"), {"data": 2, "model": 3}),
    "in the other order": ({"data": 4, "model": 6}, [4] * 6, ["model", "data"], {"model": 6}),
    "numbers": ({"replica": 6, "model": 4}, [4] * 6, {"replica": 3, "model": 2}, {"replica": 3, "model": 2}),
    "some of the devices": ({"data": 4}, [4, 4], None, {"data": 2}),
    "one slice": ({"data": 2, "model": 2}, [4], ("model",), {}),
    "one slice, numbers": ({"data": 2, "model": 2}, [4], {"model": 4}, {}),
}


@pytest.mark.parametrize(("sizes", "counts", "between", "along"), MESHES.values(), ids=list(MESHES))
def test_slices_lie_along_some_axes(sizes: Any, counts: list[int], between: Any, along: dict[str, int]) -> None:
    """Each slice is a block of the mesh, so all other axes stay within one."""
    mesh = axn.make_mesh(sizes, devices=gpus(*counts), between=between)
    assert slices_along(mesh) == along
    numbers = np.vectorize(lambda d: d.slice_index)(mesh.devices)
    blocks = [along.get(a, 1) for a in mesh.axis_names]
    shape = [k for count, size in zip(blocks, numbers.shape, strict=True) for k in (count, size // count)]
    parts = np.moveaxis(numbers.reshape(shape), range(0, len(shape), 2), range(len(blocks)))
    parts = parts.reshape(int(np.prod(blocks)), -1)
    assert (parts == parts[:, :1]).all() and sorted(parts[:, 0]) == sorted(set(numbers.flat))
    assert len({d.id for d in mesh.devices.flat}) == mesh.size


REFUSED: dict[str, tuple[dict[str, int], list[int], Any, str]] = {
    "no axis fits": (
        {"data": 3, "model": 8},
        [4] * 6,
        None,
        r"6 slices of 4 devices \(a slice is .*\), and no mesh axis of \{'data': 3, 'model': 8\} is a multiple of 6\. "
        r"Name axes that share them, as in between=\('data', 'model'\), or choose other sizes\.",
    ),
    "slices differ": ({"data": 8}, [5, 3], None, r"2 slices of 3 or 5 devices .*: pass `devices`, or start more proc"),
    "no such axis": ({"data": 8}, [4, 4], "model", r"between has model; the mesh axes are data\."),
    "no such axis, on one slice": ({"data": 4}, [4], {"model": 2}, r"between has model; the mesh axes are data\."),
    "it does not divide": (
        {"data": 3, "model": 2},
        [3, 3],
        "data",
        r"which cannot be divided by between='data' along the sizes \{'data': 3, 'model': 2\}\. Name axes that",
    ),
    "wrong numbers": ({"data": 4, "model": 2}, [4, 4], {"data": 4}, r"cannot be divided by between=\{'data': 4\}"),
    "numbers of nothing": ({"data": 4, "model": 2}, [4, 4], {"data": 0}, r"cannot be divided by between=\{'data': 0\}"),
}


@pytest.mark.parametrize(("sizes", "counts", "between", "said"), REFUSED.values(), ids=list(REFUSED))
def test_what_is_refused(sizes: Any, counts: list[int], between: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^make_mesh: .*{said}"):
        axn.make_mesh(sizes, devices=gpus(*counts), between=between)


def test_one_slice_is_as_jax_has_it() -> None:
    mesh = axn.make_mesh({"data": 2, "model": -1}, between="data")
    assert (mesh.devices == jax.make_mesh((2, 4), ("data", "model")).devices).all() and slices_along(mesh) == {}
    assert slices_along(Mesh(gpus(1, 1), ("data",))) == {"data": 2}


def test_plans_say_which_axes_cross() -> None:
    slices, islands = Islands("v5e", 32, 16), Islands("h100", 32)
    assert slices.between({"data": 2, "model": 16}) == ["data"]
    found = [islands.between(placed) for placed in islands.placements({"data": 8, "model": 4})]
    assert found == [["data"], ["model"]]
    grid = arranged_devices({"data": 8, "model": 4}, gpus(8, 8, 8, 8), "data", "plan")
    assert {len({d.slice_index for d in row}) for row in grid} == {1}
    islands = Islands("h100", 128)
    both = islands.between(islands.placements({"data": 8, "model": 16})[0])
    mesh = axn.make_mesh({"data": 8, "model": 16}, devices=gpus(*[8] * 16), between=both)
    assert slices_along(mesh) == {"data": 8, "model": 2}
