"""Scans on meshes: real shardings, and errors for changed placements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import axonym as axn
from axonym.transforms.scan import fold, map, scan
from tests.helpers import assert_named, draw, spec
from tests.transforms.scan_cases import LATE, START, WEIGHT, XS, Batch, Case, Embed, Layer, Out, Time, loss_of

PLACED = {"time": "data", "batch": "model"}


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_placements_are_kept_on_explicit_axes(explicit_mesh: Mesh, transform: Callable[..., Any]) -> None:
    """The looped axis is split, too: what comes out is split like what went in."""
    case = Case(LATE)
    raw = START.array, LATE.array, WEIGHT.array
    with jax.set_mesh(explicit_mesh):
        start, xs = axn.shard(START, PLACED), axn.shard(LATE, PLACED)
        final, outputs = jax.block_until_ready(transform(case.ours)(start, xs, WEIGHT))
        gradients = jax.block_until_ready(jax.jit(jax.grad(loss_of(case.ours), argnums=(0, 1)))(start, xs, WEIGHT))
    expected = case.theirs(*raw)
    assert spec(final) == ("model", None) and spec(outputs) == ("data", "model")
    assert_named(final, axn.named(expected[0], (Batch, Embed)), rtol=1e-5, atol=1e-6)
    assert_named(outputs, axn.named(expected[1], (Time, Batch)), rtol=1e-5, atol=1e-6)
    for found, wanted, like in zip(gradients, jax.grad(loss_of(case.theirs), (0, 1))(*raw), (start, xs), strict=True):
        assert_named(found, axn.named(wanted, like.axes), rtol=1e-4, atol=1e-5)
        assert spec(found) == spec(like)


def test_the_partitioner_does_what_it_does_without_names(auto_mesh: Mesh) -> None:
    case = Case(LATE)

    def results(fn: Callable[..., Any], *args: Any) -> list[Any]:
        gradients = jax.jit(jax.grad(loss_of(fn), argnums=(0, 1)))(*args)
        return jax.block_until_ready(jax.tree.leaves((jax.jit(fn)(*args), gradients)))

    with jax.set_mesh(auto_mesh):
        start, xs = axn.shard(START, PLACED), axn.shard(LATE, PLACED)
        found = results(case.ours, start, xs, WEIGHT)
        expected = results(case.theirs, start.array, xs.array, WEIGHT.array)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        assert spec(a) == spec(b)
    assert spec(found[0]) == ("model", None) and spec(found[1])[1] == "model"


@pytest.mark.parametrize("remat", [True, "nested", "offload"])
def test_checkpointing_on_meshes(mesh: Mesh, remat: Any) -> None:
    case = Case(XS, remat=remat)
    raw = jax.grad(loss_of(case.theirs))(START.array, XS.array, WEIGHT.array)
    with jax.set_mesh(mesh):
        start, xs = axn.shard(START, PLACED), axn.shard(XS, PLACED)
        found = jax.block_until_ready(jax.jit(jax.grad(loss_of(case.ours)))(start, xs, WEIGHT))
    assert_named(found, axn.named(raw, START.axes), rtol=1e-4, atol=1e-5)
    assert spec(found) == ("model", None)


def test_raw_arrays_on_explicit_axes(explicit_mesh: Mesh) -> None:
    with jax.set_mesh(explicit_mesh):
        raw = jax.device_put(XS.array, P("data", "model"))
        found = jax.block_until_ready(jax.jit(map(lambda x: x * 2, Time))(raw))
    assert spec(found) == ("data", "model", None)
    np.testing.assert_array_equal(found, 2 * XS.array)


def test_a_new_axis_goes_where_the_mapping_sends_it(explicit_mesh: Mesh) -> None:
    with jax.set_mesh(explicit_mesh), axn.axis_mapping(PLACED):
        start = axn.shard(START)
        _, found = jax.block_until_ready(jax.jit(scan(lambda c: (2 * c, c), Time))(start))
    assert spec(found) == ("data", "model", None)


def test_a_mesh_axis_cannot_be_used_twice(explicit_mesh: Mesh) -> None:
    with jax.set_mesh(explicit_mesh):
        xs, start = axn.shard(XS, {"time": "data"}), axn.shard(START, {"batch": "data"})
        with pytest.raises(ValueError, match=r"axes 'time' and 'batch' of the result would both .*'data'"):
            scan(lambda c, x: (c, c), "time")(start, xs)
        with axn.axis_mapping({"batch": "data"}):
            _, found = jax.block_until_ready(scan(lambda c, x: (c, c), "time")(start, xs))
    assert spec(found) == (None, "data", None)


def test_a_replicated_carry_starts_sharded_as_it_comes_out(explicit_mesh: Mesh) -> None:
    """The everyday carry, made by `zeros`; the program is that of the right start: no more collectives."""
    with jax.set_mesh(explicit_mesh):
        xs = axn.shard(XS, PLACED)

        def summed(start: Any) -> Any:
            return fold(lambda c, x: {"h": c["h"] + x}, "time")({"h": start}, xs)

        found = jax.jit(summed)(START)
        placed = axn.shard(START, {"batch": "model"})
        assert found["h"].array.sharding.spec == summed(placed)["h"].array.sharding.spec == jax.P("model", None)
        assert_named(jax.block_until_ready(found["h"]), START + XS.sum("time"), rtol=1e-5, atol=1e-6)
        programs = [str(jax.jit(summed).lower(x).compile().as_text()) for x in (START, placed)]
        kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
        assert [sum(p.count(f" {kind}(") for kind in kinds) for p in programs] == [0, 0]
        raw: Any = fold(lambda c, x: c + x.array, "time")(START.array, xs)
        assert raw.sharding.spec == jax.P("model", None)
        slopes = jax.jit(jax.grad(lambda s: axn.sum(summed(s)["h"]).scalar()))(START)
        np.testing.assert_array_equal(slopes.array, 1.0)
        kept = fold(lambda c, x: axn.shard(c + x, {"batch": None, "embed": None}), "time")(START, xs)
    assert_named(jax.block_until_ready(kept), START + XS.sum("time"), rtol=1e-5, atol=1e-6)


def test_a_carry_that_is_replicated_again_is_refused_by_leaf(explicit_mesh: Mesh) -> None:
    with jax.set_mesh(explicit_mesh):
        xs, start = axn.shard(XS, PLACED), axn.shard(START, {"batch": "model"})
        with pytest.raises(TypeError, match=r"carry\['h'\] goes in as float32\[batch=4 over model, .* comes out as"):
            fold(lambda c, x: {"h": axn.shard(c["h"] + x, {"batch": None})}, "time")({"h": start}, xs)


def test_inside_shard_map(mesh: Mesh) -> None:
    """The local part is scanned; what differs from device to device is part of a carry's type."""

    def local(x: jax.Array, start: Callable[[], Any], body: Callable[..., Any]) -> jax.Array:
        return fold(body, "time")(start(), axn.named(x, ("time", "batch", "embed"))).array

    def zeros() -> axn.NamedArray:
        return axn.zeros((Batch.resize(1), Embed))

    def varying() -> axn.NamedArray:
        return jax.tree.map(lambda z: jax.lax.pcast(z, ("data",), to="varying"), zeros())

    with jax.set_mesh(mesh):

        def run(start: Callable[[], Any], body: Callable[..., Any] = axn.add) -> Any:
            specs: dict[str, Any] = {"in_specs": P(None, "data"), "out_specs": P("data")}
            x = jax.device_put(XS.array, P(None, "data"))
            return jax.jit(jax.shard_map(lambda x: local(x, start, body), **specs))(x)

        np.testing.assert_allclose(jax.block_until_ready(run(varying)), XS.array.sum(0), rtol=1e-5)
        np.testing.assert_allclose(jax.block_until_ready(run(zeros)), XS.array.sum(0), rtol=1e-5)
        np.testing.assert_array_equal(jax.block_until_ready(run(varying, lambda c, x: zeros() + 1)), 1)


def test_parameters_that_rest_split_are_gathered_in_the_body(mesh: Mesh) -> None:
    """Fully sharded layers, scanned: the stacked gradient lies where the stacked parameters rest."""
    layers, x = draw(Layer, Embed.resize(8), Out.resize(8)), draw(Batch, Embed.resize(8))

    @axn.fsdp({"embed": "data"}, {"batch": "data"})
    def train(layers: axn.NamedArray, x: axn.NamedArray) -> Any:
        def loss(layers: axn.NamedArray) -> Any:
            def body(x: Any, w: Any) -> Any:
                return axn.tanh(axn.dot(x, w, axis="embed")).rename({"out": "embed"})

            return fold(body, Layer, remat=True)(x, layers).sum().array

        return jax.grad(loss)(layers)

    def expected(layers: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x.array, layers)[0].sum()

    with jax.set_mesh(mesh):
        found = jax.block_until_ready(train(layers, x))
    assert spec(found) == (None, "data", None)
    np.testing.assert_allclose(found.array, jax.grad(expected)(layers.array), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("unroll", [1, 3, True])
def test_constants_can_be_outputs(mesh: Mesh, unroll: int | bool) -> None:
    """JAX 0.10 cannot stack them in a partly unrolled loop on Explicit mesh axes."""
    row = np.arange(2.0, dtype=np.float32)
    with jax.set_mesh(mesh):
        xs = axn.shard(axn.arange({"time": 8}, dtype=float), {"time": "data"})
        step: Any = lambda c, x: (c + x, (1.0, axn.named(row, "row")))
        last, (one, rows) = scan(step, "time", unroll=unroll)(0.0, xs)
        ones: Any = map(lambda x: 1.0, "time", unroll=unroll)(xs)
    assert last.item() == 28 and one.tolist() == ones.tolist() == [1.0] * 8
    assert_named(rows, axn.named(np.tile(row, (8, 1)), ("time", "row")))
