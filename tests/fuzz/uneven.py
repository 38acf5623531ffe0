"""Run every operation on uneven shards: `python -m tests.fuzz --uneven`.

JAX refuses an axis that its mesh axes do not divide, except inside jit on Auto mesh axes, where a slice of a sharded
axis stays sharded. There, XLA partitions some operations wrongly, or ends the process. So this runs each case of the
table of operations, and some of layers and transforms, with their gradients, under every mapping of one axis or two, on
a mesh of one axis and on others of two; some slices are even, but not aligned with the shards.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import axonym as axn
from tests.ops.case import SIZES, Case, Operand
from tests.ops.test_operations import (
    CASES,
    _assert_close,
    _differentiable,
    _draw,
    _eager,
    _gradients,
    _loss,
    _raw,
    _weighted,
)

KEY = jax.random.key(0)
BATCH, POS, EMBED = (axn.Axis(n, SIZES[n]) for n in ("batch", "pos", "embed"))
MLP, EMBED_2, WINDOW = axn.Axis("mlp", 6), axn.Axis("embed 2", 4), axn.Axis("pos", 2)
X, IN_BATCH = Operand(("batch", "pos", "embed")), Operand(("batch", "embed"))
ONE = Operand(("batch",))
INDICES = Operand(("batch", "pos"), "index")
WEIGHT = axn.random.normal(KEY, {"embed": 8, "mlp": 6})
LINEAR = axn.nn.Linear.init(EMBED, MLP, key=KEY)


def _attended(q: axn.NamedArray, k: axn.NamedArray, **options: Any) -> axn.NamedArray:
    k = k.rename({"pos": "key_pos"})
    return axn.nn.attention.dot_product_attention(q, k, k, "key_pos", "embed", **options)


def _layers() -> dict[str, tuple[tuple[Operand, ...], Any]]:
    """Return layers and transforms, whose weights are constants, as operands and a function."""
    return {
        "linear": ((X,), LINEAR),
        "mlp": ((X,), axn.nn.MLP.init(EMBED, MLP, 5, 2, key=KEY)),
        "conv": ((X,), axn.nn.Conv.init("pos", EMBED, MLP, 3, padding=1, key=KEY)),
        "conv strided": ((X,), axn.nn.Conv.init("pos", EMBED, MLP, 2, stride=2, dilation=2, padding=2, key=KEY)),
        "conv of groups": ((X,), axn.nn.Conv.init("pos", EMBED, EMBED_2, 3, padding=1, groups=2, key=KEY)),
        "transposed conv": ((X,), axn.nn.ConvTranspose.init("pos", EMBED, MLP, 3, stride=2, key=KEY)),
        "layer norm": ((X,), axn.nn.LayerNorm.init(EMBED)),
        "group norm": ((X,), axn.nn.GroupNorm.init(EMBED, 2, "pos")),
        "batch norm": ((X,), lambda x: axn.nn.standardize(x, "batch")),
        "embedding": ((INDICES,), axn.nn.Embedding.init(axn.Axis("vocab", 5), EMBED, key=KEY)),
        "max pool": ((X,), lambda x: axn.nn.max_pool(x, WINDOW)),
        "mean pool": ((X,), lambda x: axn.nn.mean_pool(x, WINDOW, 1, "SAME")),
        "attention": ((X, X), _attended),
        "causal attention": (
            (X, X),
            lambda q, k: _attended(q, k, mask=axn.nn.attention.Causal("pos")),
        ),
        "cross entropy": ((X, X), lambda x, y: axn.nn.cross_entropy_loss(x, "embed", axn.nn.softmax(y, "embed"))),
        "scan": ((X,), lambda x: axn.scan(lambda c, x: (c * 0.5 + x, c * x), "pos")(x["pos", 0], x)),
        "scan over the batch": ((X,), lambda x: axn.fold(lambda c, x: axn.sin(c) + x, "batch")(x["batch", 0], x)),
        "map": ((X,), lambda x: axn.map(lambda x: axn.sin(x) * axn.sum(x), "batch")(x)),
        "vmap of products": ((X,), lambda x: axn.vmap(lambda x: axn.dot(x, WEIGHT, axis="embed"), "batch")(x)),
        "vmap of sorts": ((X,), lambda x: axn.vmap(lambda x: axn.sort(x, "embed"), "pos")(x)),
        "vmap of convolutions": ((IN_BATCH, IN_BATCH), axn.vmap(lambda a, v: axn.convolve(a, v, "embed"), "batch")),
        "permutation": ((X,), lambda x: axn.random.permutation(KEY, x, "pos", independent=True)),
        "permutation of one axis": ((ONE,), lambda x: axn.random.permutation(KEY, x, "batch")),
        "look-up of one axis": ((ONE,), lambda x: x["batch", axn.argsort(x, "batch")]),
        "look-up of rows": ((X, ONE), lambda x, by: x["batch", axn.argsort(by, "batch")]),
        "look-up beside": ((IN_BATCH, ONE), lambda x, by: x["embed", axn.argsort(by, "batch").rename({"batch": "b"})]),
        "interp of rows": ((IN_BATCH, ONE), lambda x, at: axn.interp(3 * at, np.arange(8.0), x, axis="embed")),
        "interp of one axis": ((ONE, ONE), lambda x, at: axn.interp(at, axn.named(np.arange(8.0), "batch"), x)),
        "vmap of look-ups": (
            (IN_BATCH, ONE),
            lambda x, by: axn.vmap(lambda i: x["batch", i] * 2.0, "batch")(axn.argsort(by, "batch")),
        ),
        "remat": ((X,), jax.checkpoint(lambda x: axn.nn.softmax(LINEAR(axn.tanh(x)), "mlp"))),
    }


LAYERS = _layers()


def _case(name: str) -> Case:
    # Cases are hashed, which layers are not.
    operands, _ = LAYERS[name]
    grad = operands != (INDICES,)
    return Case(name, operands, lambda *xs: LAYERS[name][1](*xs), lambda *xs: xs, grad=grad)


CASES_OF_LAYERS = [_case(name) for name in LAYERS]
BY_ID = {case.id: case for case in [*CASES, *CASES_OF_LAYERS] if case.jit and case.operands}
MESHES: tuple[dict[str, int], ...] = ({"a": 3}, {"a": 3, "b": 2}, {"a": 4, "b": 2})


@dataclasses.dataclass(frozen=True)
class Uneven:
    """A case of the table, a mesh and a mapping, and how the arrays get there."""

    case: str
    mesh: tuple[tuple[str, int], ...]
    mapping: tuple[tuple[str, tuple[str, ...]], ...]
    how: str = "slices"
    """
    "slices": of larger arrays, which the function cuts out.
    "by hand": the same, but the function that takes the arrays knows neither the mesh nor the mapping.
    "padded": arrays that are stored padded; so are the results, and the gradients beside them.
    "renamed": the same, under names that the mapping lacks.
    "remat": as "renamed", rematerialised.
    """

    def __str__(self) -> str:
        return f"{self.case} on {dict(self.mesh)}, {dict(self.mapping)} {self.how}"


def placements(case: Case) -> Iterator[Uneven]:
    """Yield placements of a case: each axis over the first mesh axis, alone or with another axis over the second."""
    names = list(dict.fromkeys(n for operand in case.operands for n in operand.names))
    for mesh in MESHES:
        for name in names:
            pairs = [{name: ("a",), other: ("b",)} for other in names if other != name]
            both = [{name: ("a", "b")}, *pairs] if "b" in mesh else []
            for mapping in [*both, {name: ("a",)}]:
                for how in ("slices", "padded", "renamed", "remat") if mesh == MESHES[1] else ("slices",):
                    yield Uneven(case.id, tuple(mesh.items()), tuple(mapping.items()), how)


def check_uneven(of: Uneven) -> str | None:
    """Describe how a case fails on uneven shards; return None if it does not, or is refused by name."""
    case = BY_ID[of.case]
    expected = _eager(case)[0], _gradients(case) if case.grad else []
    try:
        found = _of_slices(of) if of.how in ("slices", "by hand") else _of_padded(of)
        loose = dataclasses.replace(case, rtol=max(case.rtol, 1e-3), atol=max(case.atol, 1e-4))
        for what, ours, theirs in zip(("value", "gradient"), found, expected, strict=True):
            _assert_close(loose, ours, theirs, what)
    except Exception as error:
        refused = isinstance(error, ValueError) and "cannot be sharded" in str(error)
        return None if refused else f"{type(error).__name__}: {error}"
    return None


def _of_slices(of: Uneven) -> Any:
    """Return results and gradients of a case on slices of sharded arrays."""
    case, sizes, mapping, rng = BY_ID[of.case], dict(of.mesh), dict(of.mapping), random.Random(str(of))
    starts, ends = {}, {}
    for name, axes in mapping.items():
        parts = math.prod(sizes[a] for a in axes)
        ends[name] = parts - SIZES[name] % parts  # how many elements are missing until the mesh axes divide the size
        starts[name] = rng.choice((0, 1, ends[name]))
    whole = []
    for x, operand in zip(_draw(case), case.operands, strict=True):
        widths = [(starts.get(n, 0), ends.get(n, 0) - starts.get(n, 0)) for n in operand.names]
        whole.append(axn.named(np.pad(x, widths, mode="edge") if widths else x, operand.names))

    def results_and_gradients(whole: list[axn.NamedArray]) -> Any:
        arrays = [
            x[{n: axn.ds(starts[n], SIZES[n]) for n in x.names if n in starts}] if starts.keys() & x.names else x
            for x in whole
        ]
        gradients = jax.grad(_loss(case), _differentiable(case))(*arrays) if case.grad else ()
        return _raw(case.call(*arrays)), _raw(gradients)

    with jax.set_mesh(_mesh(sizes)), axn.axis_mapping(mapping):
        placed = axn.shard(whole)
        found = None if of.how == "by hand" else jax.block_until_ready(jax.jit(results_and_gradients)(placed))
    return jax.block_until_ready(jax.jit(results_and_gradients)(placed)) if found is None else found


def _of_padded(of: Uneven) -> Any:
    """Return results and gradients of a case on arrays that are stored padded; so are the results."""
    case, mapping = BY_ID[of.case], dict(of.mapping)
    stored = {n: n if of.how == "padded" else f"stored {n}" for n in mapping}
    own = {s: n for n, s in stored.items()}
    chosen = _differentiable(case) if case.grad else ()

    def renamed(x: Any, names: dict[str, str]) -> Any:
        return x.rename({n: s for n, s in names.items() if n in x.names}) if isinstance(x, axn.NamedArray) else x

    def results_and_gradients(*arrays: axn.NamedArray) -> Any:
        def loss(*floats: axn.NamedArray) -> Any:
            given = dict(zip(chosen, floats, strict=True))
            results = case.call(*(renamed(given.get(i, x), own) for i, x in enumerate(arrays)))
            return _weighted(_raw(results)), results

        loss = jax.checkpoint(loss) if of.how == "remat" else loss
        floats = [arrays[i] for i in chosen]
        if case.grad:
            gradients, results = jax.grad(loss, tuple(range(len(chosen))), has_aux=True)(*floats)
        else:
            gradients, results = (), loss()[1]
        return jax.tree.map(lambda x: renamed(x, stored), (results, gradients), is_leaf=axn.is_named_array)

    arrays = [
        axn.named(x, [stored.get(n, n) for n in o.names]) for x, o in zip(_draw(case), case.operands, strict=True)
    ]
    with (
        jax.set_mesh(_mesh(dict(of.mesh))),
        axn.axis_mapping({stored[n]: axes for n, axes in mapping.items()}, uneven="pad"),
    ):
        found = jax.block_until_ready(axn.named_jit(results_and_gradients)(*axn.shard(arrays)))
        return tuple(map(_raw, axn.unshard(found)))


def _mesh(sizes: dict[str, int]) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@functools.cache
def all_placements() -> tuple[Uneven, ...]:
    return tuple(of for case in BY_ID.values() for of in placements(case))
