"""The compiled programs of named contractions and look-ups are those of hand-written code.

Programs are compared by the number of instructions of each kind after optimization; on a mesh, also by collectives and
the shardings of results.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.ops.updating import updated_slice
from tests.helpers import assert_named, spec

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = .*?\s([a-z][a-z0-9-]*)\(", re.MULTILINE)
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def instructions(fn: Callable[..., Any], *arguments: Any) -> dict[str, int]:
    """Count each kind of instruction in the optimized program of a call."""
    return collections.Counter(INSTRUCTION.findall(jax.jit(fn).lower(*arguments).compile().as_text() or ""))


def _array(*names: str, dtype: Any = np.float32, **sizes: int) -> axn.NamedArray:
    known = {"batch": 2, "pos": 8, "key": 8, "heads": 4, "size": 16, "embed": 32, "mlp": 24, "vocab": 50} | sizes
    shape = tuple(known[n] for n in names)
    return axn.named(jnp.asarray(np.random.default_rng(len(names)).normal(size=shape).astype(dtype)), names)


X = _array("batch", "pos", "embed")
Q, K = _array("batch", "pos", "heads", "size"), _array("batch", "key", "heads", "size")
WEIGHTS, V = _array("batch", "heads", "pos", "key"), _array("batch", "key", "heads", "size")
TABLE, LOGITS = _array("vocab", "embed"), _array("batch", "pos", "vocab")
TOKENS = axn.named(jnp.arange(16).reshape(2, 8) % 50, ("batch", "pos"))
POSITION = jnp.int32(3)

PROGRAMS = {
    "projection": (
        (X, _array("embed", "heads", "size")),
        lambda x, w: axn.dot(x, w, axis="embed"),
        lambda x, w: jnp.einsum("bpe,ehs->bphs", x, w),
    ),
    "merging projection": (
        (Q, _array("heads", "size", "embed")),
        lambda x, w: axn.dot(x, w, axis=("heads", "size")),
        lambda x, w: jnp.einsum("bphs,hse->bpe", x, w),
    ),
    "weight first": (
        (_array("mlp", "embed"), X),
        lambda w, x: axn.dot(w, x, axis="embed", out_axes=(..., "mlp")),
        lambda w, x: jnp.einsum("me,bpe->bpm", w, x),
    ),
    "attention scores": (
        (Q, K),
        lambda q, k: axn.dot(q, k, axis="size", out_axes=("batch", "heads", "pos", "key")),
        lambda q, k: jnp.einsum("bphs,bkhs->bhpk", q, k),
    ),
    "attention values": (
        (WEIGHTS, V),
        lambda w, v: axn.einsum("-> batch pos heads size", w, v),
        lambda w, v: jnp.einsum("bkhs,bhpk->bphs", v, w),  # `jnp.einsum` multiplies its operands in reverse
    ),
    "norm": (
        (X, X),
        lambda x, y: axn.dot(x, y, axis="embed"),
        lambda x, y: jnp.einsum("bpe,bpe->bp", x, y),
    ),
    "outer product": (
        (_array("pos"), _array("embed")),
        lambda x, y: axn.dot(x, y, axis=()),
        lambda x, y: x[:, None] * y[None, :],
    ),
    "three operands": (
        (X, _array("embed", "mlp"), _array("mlp")),
        lambda x, w, v: axn.dot(x, w, v, axis=("embed", "mlp")),
        lambda x, w, v: jnp.einsum("bpe,em,m->bp", x, w, v),
    ),
    "mixed dtypes": (
        (X, _array("embed", "mlp", dtype=jnp.bfloat16)),
        lambda x, w: axn.dot(x, w, axis="embed"),
        lambda x, w: jnp.einsum("bpe,em->bpm", x, w),
    ),
    "embedding": ((TABLE, TOKENS), lambda table, tokens: table["vocab", tokens], lambda table, tokens: table[tokens]),
    "picked logits": (
        (LOGITS, TOKENS),
        lambda logits, targets: logits["vocab", targets],
        jax.vmap(jax.vmap(lambda row, target: row[target])),
    ),
    "static slice": ((X,), lambda x: x["pos", 1:5, "batch", 0], lambda x: x[0, 1:5]),
    "traced position": ((X, POSITION), lambda x, i: x["pos", i], lambda x, i: x[:, i]),
    "traced slice": (
        (X, POSITION),
        lambda x, i: x["pos", axn.ds(i, 2)],
        lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, 2, 1),
    ),
    "cache update": (
        (X, _array("batch", "embed", "pos", pos=1), POSITION),
        lambda x, new, i: updated_slice(x, {"pos": i}, new),
        lambda x, new, i: jax.lax.dynamic_update_slice_in_dim(x, jnp.swapaxes(new, 1, 2), i, 1),
    ),
    "update": ((X, POSITION), lambda x, i: x.at["pos", i].set(0.0), lambda x, i: x.at[:, i].set(0.0)),
    "scattered sum": (
        (TABLE, TOKENS, X),
        lambda table, tokens, x: table.at["vocab", tokens].add(x),
        lambda table, tokens, x: table.at[tokens].add(x),
    ),
}


def _raw(arguments: tuple[Any, ...]) -> list[Any]:
    return [x.array if isinstance(x, axn.NamedArray) else x for x in arguments]


def _value(result: Any) -> Any:
    return result.array if isinstance(result, axn.NamedArray) else result


@pytest.mark.parametrize("what", PROGRAMS)
def test_program_is_that_of_the_hand_written_code(what: str) -> None:
    arguments, ours, theirs = PROGRAMS[what]
    np.testing.assert_allclose(_value(ours(*arguments)), theirs(*_raw(arguments)), rtol=1e-4, atol=1e-5)
    assert instructions(ours, *arguments) == instructions(theirs, *_raw(arguments))


@pytest.mark.parametrize("what", ["projection", "attention scores", "attention values", "embedding", "picked logits"])
def test_program_of_the_gradient_too(what: str) -> None:
    arguments, ours, theirs = PROGRAMS[what]
    floats = [i for i, x in enumerate(arguments) if jnp.issubdtype(x.dtype, jnp.floating)]

    def gradient(fn):
        return jax.grad(lambda *xs: jnp.sum(jnp.sin(_value(fn(*xs)))), floats)

    assert instructions(gradient(ours), *arguments) == instructions(gradient(theirs), *_raw(arguments))


def test_nothing_of_the_kernels_is_left_in_a_program() -> None:
    """They are inlined: no call, and no transpose that the layout does not ask for."""
    arguments, ours, _ = PROGRAMS["projection"]
    operations = re.findall(r"stablehlo\.\w+|\bcall\b", jax.jit(ours).lower(*arguments).as_text())
    assert operations == ["stablehlo.dot_general"]


# --- on a mesh ---


def place(mesh: Mesh, x: axn.NamedArray, **mapping: str) -> axn.NamedArray:
    """Return the array, sharded by the mapping."""
    spec = P(*(mapping.get(n) for n in x.names))
    return axn.named(jax.device_put(x.array, NamedSharding(mesh, spec)), x.names)


def spec_of(x: axn.NamedArray) -> dict[str, Any]:
    """Return the mesh axis of each axis name."""
    return dict(zip(x.names, spec(x), strict=True))


def collectives(fn: Callable[..., Any], *arguments: Any) -> set[str]:
    found = instructions(fn, *arguments)
    return {kind for kind in COLLECTIVES if found[kind] or found[f"{kind}-start"]}


@pytest.fixture(params=[AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def mesh(request: pytest.FixtureRequest, explicit_mesh: Mesh, auto_mesh: Mesh) -> Mesh:
    return explicit_mesh if request.param is AxisType.Explicit else auto_mesh


def project(x: axn.NamedArray, w: axn.NamedArray) -> axn.NamedArray:
    return axn.dot(x, w, axis="embed")


def test_a_sum_over_a_split_axis_is_one_all_reduce(mesh: Mesh) -> None:
    x = place(mesh, _array("batch", "embed", batch=8), batch="data", embed="model")
    w = place(mesh, _array("embed", "mlp"), embed="model")
    with jax.set_mesh(mesh):
        result = jax.block_until_ready(jax.jit(project)(x, w))
        assert collectives(project, x, w) == {"all-reduce"}
        assert instructions(project, x, w)["all-reduce"] == 1
    assert spec_of(result) == {"batch": "data", "mlp": None}
    np.testing.assert_allclose(result.array, np.asarray(x.array) @ np.asarray(w.array), rtol=1e-4, atol=1e-5)


def test_a_product_of_matching_splits_moves_nothing(mesh: Mesh) -> None:
    x = place(mesh, _array("batch", "embed", batch=8), batch="data")
    w = place(mesh, _array("embed", "mlp"), mlp="model")
    with jax.set_mesh(mesh):
        result = jax.block_until_ready(jax.jit(project)(x, w))
        assert collectives(project, x, w) == set()
    assert spec_of(result) == {"batch": "data", "mlp": "model"}


def test_a_look_up_in_a_split_table(mesh: Mesh) -> None:
    table = place(mesh, _array("vocab", "embed", vocab=64), vocab="model")
    tokens = place(mesh, axn.named(np.arange(32).reshape(8, 4) * 2 % 64, ("batch", "pos")), batch="data")

    def look_up(table, tokens):
        return table["vocab", tokens]

    with jax.set_mesh(mesh):
        result = jax.block_until_ready(jax.jit(look_up)(table, tokens))
        # Each device looks up rows in its shard of the table; the table itself is not moved.
        assert collectives(look_up, table, tokens) == {"all-reduce"}
        eager = jax.block_until_ready(look_up(table, tokens))
        gradient = jax.jit(jax.grad(lambda t: (look_up(t, tokens) ** 2).sum().scalar()))(table)
    expected = axn.named(jnp.asarray(np.asarray(table.array)[np.asarray(tokens.array)]), ("batch", "pos", "embed"))
    for found in (result, eager):
        assert spec_of(found) == {"batch": "data", "pos": None, "embed": None}
        assert_named(found, expected)
    counts = np.bincount(np.asarray(tokens.array).ravel(), minlength=64)[:, None]
    np.testing.assert_allclose(gradient.array, 2 * counts * np.asarray(table.array), rtol=1e-5)
    if mesh.axis_types[0] is AxisType.Explicit:
        assert spec_of(gradient) == {"vocab": "model", "embed": None}


def test_a_weight_split_over_the_mesh_axis_of_the_batch(mesh: Mesh) -> None:
    """As in fully sharded data parallelism: the batch stays where it is, and the weight's gradient goes home."""
    x = place(mesh, _array("batch", "embed", batch=8), batch="data")
    w = place(mesh, _array("embed", "mlp"), embed="data")

    def loss(w):
        return (project(x, w) ** 2).sum().scalar()

    with jax.set_mesh(mesh):
        result = jax.block_until_ready(jax.jit(project)(x, w))
        eager = jax.block_until_ready(project(x, w))
        gradient = jax.block_until_ready(jax.jit(jax.grad(loss))(w))
        assert "all-gather" in collectives(project, x, w)
    for found in (result, eager):
        assert spec_of(found) == {"batch": "data", "mlp": None}
        np.testing.assert_allclose(found.array, np.asarray(x.array) @ np.asarray(w.array), rtol=1e-4, atol=1e-5)
    expected = 2 * np.asarray(x.array).T @ (np.asarray(x.array) @ np.asarray(w.array))
    np.testing.assert_allclose(gradient.array, expected, rtol=1e-3, atol=1e-3)
    if mesh.axis_types[0] is AxisType.Explicit:
        assert spec_of(gradient) == {"embed": "data", "mlp": None}


def test_three_operands_on_explicit_axes(explicit_mesh: Mesh) -> None:
    x = place(explicit_mesh, _array("batch", "embed", batch=8), batch="data", embed="model")
    w = place(explicit_mesh, _array("embed", "mlp"), embed="model")
    v = place(explicit_mesh, _array("mlp", "pos"), pos="model")
    with jax.set_mesh(explicit_mesh):
        result = jax.jit(lambda *xs: axn.dot(*xs, axis=("embed", "mlp")))(x, w, v)
    assert spec_of(result) == {"batch": "data", "pos": "model"}
    expected = np.asarray(x.array) @ np.asarray(w.array) @ np.asarray(v.array)
    np.testing.assert_allclose(result.array, expected, rtol=1e-3, atol=1e-3)


def test_what_is_open_is_refused_on_explicit_axes(explicit_mesh: Mesh) -> None:
    x, y = _array("batch", batch=8), _array("pos")
    with jax.set_mesh(explicit_mesh):
        with pytest.raises(ValueError, match=r"dot: .*'batch' and .*'pos' .*'data'"):
            axn.dot(place(explicit_mesh, x, batch="data"), place(explicit_mesh, y, pos="data"), axis=())
        with pytest.raises(ValueError, match=r"dot: the operands shard axis 'batch'"):
            axn.dot(place(explicit_mesh, x, batch="data"), place(explicit_mesh, x, batch="model"), axis=())
