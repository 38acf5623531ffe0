"""Run every operation on slices of sharded arrays, whose mesh axes do not divide their size.

JAX refuses such arrays everywhere but inside jit on Auto mesh axes, where a slice of a sharded axis stays sharded. XLA
partitions some operations on them wrongly, or ends the process.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import axonym as axn
from tests.ops.case import SIZES, Case
from tests.ops.test_operations import CASES, _weighted

BY_ID = {case.id: case for case in CASES if case.jit}

Mapped = Mapping[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Uneven:
    """One case of the table on slices of sharded arrays."""

    case: str
    mesh: tuple[tuple[str, int], ...]
    mapping: tuple[tuple[str, tuple[str, ...]], ...]
    explicit: bool = False

    def __str__(self) -> str:
        return f"{self.case} on {dict(self.mesh)}, {dict(self.mapping)}{', explicit' if self.explicit else ''}"


MESHES: tuple[dict[str, int], ...] = ({"a": 3}, {"a": 3, "b": 2})


def all_uneven(case: Case, explicit: bool = False) -> Iterator[Uneven]:
    """Yield every placement of a case: each axis over the first mesh axis, with another axis over the second."""
    names = list(dict.fromkeys(n for operand in case.operands for n in operand.names))
    for mesh in MESHES:
        second = [n for n in mesh if n != "a"]
        for name in names:
            others = [n for n in names if n != name] if second else []
            choices = [{name: ("a",)}] if not second else [{name: ("a", "b")}]
            choices += [{name: ("a",), other: ("b",)} for other in others]
            for mapping in choices:
                yield Uneven(case.id, tuple(mesh.items()), tuple(mapping.items()), explicit)


@functools.lru_cache(maxsize=1)
def _expected(case_id: str, starts: tuple[tuple[str, int], ...]) -> Any:
    case = BY_ID[case_id]
    arrays = [axn.named(jnp.asarray(x), o.names) for x, o in zip(_draw(case), case.operands, strict=True)]
    return jax.tree.map(np.asarray, jax.jit(functools.partial(_run, case))(arrays))


def _draw(case: Case) -> list[np.ndarray]:
    rng = np.random.default_rng(zlib.crc32(case.id.encode()))
    return [operand.draw(rng, SIZES) for operand in case.operands]


def _raw(result: Any) -> list[Any]:
    leaves = jax.tree.leaves(result, is_leaf=axn.is_named_array)
    return [x.array if isinstance(x, axn.NamedArray) else x for x in leaves]


def _run(case: Case, arrays: list[axn.NamedArray]) -> Any:
    """Return the results, and the gradients with respect to the operands."""
    with jax.numpy_rank_promotion("allow"):
        results = _raw(case.call(*arrays))
        if not case.grad:
            return results, []
        chosen = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

        def loss(some: list[axn.NamedArray]) -> Any:
            filled = list(arrays)
            for i, x in zip(chosen, some, strict=True):
                filled[i] = x
            return _weighted(_raw(case.call(*filled)))

        return results, [x.array for x in jax.grad(loss)([arrays[i] for i in chosen])]


def check_uneven(of: Uneven) -> str | None:
    """Describe how a case fails on slices of sharded arrays; None if it does not, "refused: ..." if it is refused."""
    case, sizes = BY_ID[of.case], dict(of.mesh)
    mapping = dict(of.mapping)
    expected = _expected(case.id, ())
    count = math.prod(sizes.values())
    devices = np.array(jax.devices()[:count]).reshape(tuple(sizes.values()))
    kind = AxisType.Explicit if of.explicit else AxisType.Auto
    mesh = Mesh(devices, tuple(sizes), axis_types=(kind,) * len(sizes))
    rng = random.Random(str(of))
    starts = {}
    for name, axes in mapping.items():
        parts = math.prod(sizes[a] for a in axes)
        whole = (SIZES[name] // parts + 1) * parts
        starts[name] = (rng.choice((0, whole - SIZES[name], 1)), whole)
    with jax.set_mesh(mesh), axn.axis_mapping(mapping):
        placed = []
        for x, operand in zip(_draw(case), case.operands, strict=True):
            for i, n in enumerate(operand.names):
                if n in starts:
                    start, whole = starts[n]
                    widths = [(start, whole - SIZES[n] - start) if j == i else (0, 0) for j in range(x.ndim)]
                    x = np.pad(x, widths, mode="edge")
            spec = PartitionSpec(*(mapping.get(n) for n in operand.names))
            placed.append(axn.named(jax.device_put(x, NamedSharding(mesh, spec)), operand.names))

        def program(arrays: Any) -> Any:
            cut = []
            for x in arrays:
                for n, (start, _) in starts.items():
                    if n in x.names:
                        x = x[n, start : start + SIZES[n]]
                cut.append(x)
            return _run(case, cut)

        try:
            found = jax.block_until_ready(jax.jit(program)(placed))
        except Exception as error:
            if isinstance(error, ValueError) and "mesh ax" in str(error):
                return f"refused: {str(error).splitlines()[0]}"
            return f"{type(error).__name__}: {str(error)[:300]}"
    for what, xs, ys in zip(("value", "gradient"), found, expected, strict=True):
        for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
            if not x.size:
                continue
            x, y = np.asarray(x), np.asarray(y)
            if x.shape != y.shape or x.dtype != y.dtype:
                return f"{what} {i}: {x.dtype}{x.shape} for {y.dtype}{y.shape}"
            if x.dtype.kind in "fc":
                scale = float(np.max(np.abs(y[np.isfinite(y)]), initial=0.0))
                if not np.allclose(x, y, rtol=1e-3, atol=1e-4 * max(scale, 1), equal_nan=True):
                    return f"{what} {i}: {np.nanmax(np.abs(x - y)):.3g} of {scale:.3g}"
            elif not np.array_equal(x, y):
                return f"{what} {i}: other integers"
    return None
