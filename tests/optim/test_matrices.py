from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import axonym as axn
from tests.helpers import spec
from tests.optim.models import gradients, model

STORAGE = {"embed": "data", "mlp": "model"}
COLLECTIVES = "all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"


def matrices(layers: int = 8, blocks: Any = axn.nn.Stacked) -> Any:
    """Return the layers alone: all their weights are exchanged, and their biases and norms are not."""
    return model(layers, blocks).blocks


def compiled_update(tx: Any, params: Any, storage: Mapping[str, Any]) -> tuple[Any, Any]:
    """Compile the update of sharded parameters, and return the program and the updates."""
    params, grads = axn.shard((params, gradients(params)), storage)
    state = axn.shard(tx.init(params), storage)

    def update(grads: Any, state: Any, params: Any) -> Any:
        return axn.shard(tx.update(grads, state, params), storage)

    program = jax.jit(update).lower(grads, state, params).compile()
    return program, jax.block_until_ready(program(grads, state, params)[0])


def sent(program: Any) -> dict[str, int]:
    """Return the bytes of the results of collectives of a program on each device, without single numbers."""
    found: dict[str, int] = {}
    for line in program.as_text().splitlines():
        if match := re.search(rf"= (.*?) ({'|'.join(COLLECTIVES)})\(", line):
            shapes = [[int(n) for n in dims.split(",") if n] for dims in re.findall(r"f32\[([\d,]*)\]", match[1])]
            size = sum(4 * int(np.prod(shape)) for shape in shapes)
            if size > 64:
                found[match[2]] = found.get(match[2], 0) + size
    return found


def assert_same(updates: Any, expected: Any, tolerance: float = 2e-5) -> None:
    for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(abs(b).max()))


@pytest.mark.parametrize(
    ("layers", "blocks", "bound"),
    [(8, axn.nn.Stacked, 1.0), (6, axn.nn.Stacked, 4 / 3), (8, axn.nn.BlockSeq, 1.0)],
)
def test_matrices_are_exchanged_whole(mesh: Mesh, layers: int, blocks: Any, bound: float) -> None:
    """Each weight goes there and back once for each mesh axis; six layers are padded to eight."""
    params = matrices(layers, blocks)
    grads = gradients(params)
    alone = axn.optim.muon(2e-2, weight_decay=0.1)
    expected, _ = alone.update(grads, alone.init(params), params)
    with axn.set_mesh(mesh):
        tx = axn.optim.muon(2e-2, weight_decay=0.1, over=("data", "model"), storage=STORAGE)
        program, updates = compiled_update(tx, params, STORAGE)
    assert_same(updates, expected)
    weights = [r for r in axn.optim.roles(params) if not r.no_matrix]
    size = {r.path: 4 * math.prod(r.sizes.values()) for r in weights}
    query = sum(n for path, n in size.items() if "query" in path)
    found = sent(program)
    # Each device gets an eighth of a weight at each mesh axis and way. The query has no axis over "model": its matrices
    # are there already, and come back by a gather.
    assert found["all-to-all"] == pytest.approx(bound * (4 * (sum(size.values()) - query) + 2 * query) / 8)
    assert found["all-gather"] == pytest.approx(bound * query / 4)
    assert found.keys() == {"all-to-all", "all-gather"}


def test_left_to_the_partitioner_weights_are_gathered(auto_mesh: Mesh) -> None:
    """The exchange is what avoids it."""
    with axn.set_mesh(auto_mesh):
        program, _ = compiled_update(axn.optim.muon(2e-2), matrices(), STORAGE)
    assert sent(program)["all-gather"] > 10 * sum(x.nbytes for x in jax.tree.leaves(matrices())) / 8


def test_experts_stay_sharded(mesh: Mesh) -> None:
    params = model().experts
    alone = axn.optim.muon(2e-2)
    expected, _ = alone.update(gradients(params), alone.init(params), params)
    storage = {"experts": "data", "mlp": "model"}
    with axn.set_mesh(mesh):
        tx = axn.optim.muon(2e-2, over=("data", "model"), storage=storage)
        program, updates = compiled_update(tx, params, storage)
    assert_same(updates, expected)
    # One matrix for each expert: there is nothing to share out over "model", and zero matrices fill it up.
    assert set(sent(program)) == {"all-to-all"}


def test_one_matrix_for_each_head(mesh: Mesh) -> None:
    params = matrices()
    alone = axn.optim.muon(2e-2, batch="heads")
    expected, _ = alone.update(gradients(params), alone.init(params), params)
    storage = {"embed": "data", "heads": "model"}
    with axn.set_mesh(mesh):
        tx = axn.optim.muon(2e-2, batch="heads", over=None, storage=storage)
        _, updates = compiled_update(tx, params, storage)
    assert_same(updates, expected)


def test_an_axis_that_devices_do_not_divide(auto_mesh: Mesh) -> None:
    """It is stored padded, and matrices are exchanged without the padding."""
    of_layers = axn.nn.Stacked.init(axn.Axis("layers", 6), axn.nn.Linear)
    params: Any = of_layers(axn.Axis("embed", 10), axn.Axis("mlp", 16), key=jax.random.key(0))
    alone, tx = axn.optim.muon(2e-2), axn.optim.muon(2e-2, over=None)
    expected: Any = alone.update(gradients(params), alone.init(params), params)[0]
    with axn.set_mesh(auto_mesh):
        run = axn.fsdp(tx.update, {"embed": "data"}, {}, uneven="pad")
        updates: Any = jax.block_until_ready(run(gradients(params), tx.init(params), params))[0]
    weight = updates.stacked.weight
    assert spec(weight) == (None, None, "data")
    assert_same(axn.to_host(weight).array, expected.stacked.weight.array)


def test_a_contract_forbids_to_gather_a_weight(mesh: Mesh) -> None:
    """Devices may send as much as it takes to exchange all weights, there and back: one of four shards stays."""
    params, storage = matrices(), {"embed": "data"}
    given = jax.eval_shape(lambda: (gradients(params), axn.optim.muon(2e-2).init(params), params))
    weights = 4 * sum(math.prod(r.sizes.values()) for r in axn.optim.roles(params) if not r.no_matrix)
    contract = axn.insight.contract(max_sent={"data": 2 * weights // 4 * 3 // 4}, mapping=storage, mesh=mesh)
    contract.check(axn.optim.muon(2e-2, over="data").update, *given)
    with pytest.raises(axn.insight.BrokenContract, match="data"):
        contract.check(axn.optim.muon(2e-2).update, *given)


def test_in_a_step_of_fsdp(mesh: Mesh) -> None:
    """Parameters are stored by the active mappings, so no `storage` is needed; gradients are summed over two calls."""
    params = matrices()
    x = axn.random.normal(jax.random.key(1), {"batch": 8, "embed": 8})

    def make_step(tx: Any) -> Any:
        def loss(params: Any) -> Any:
            out = axn.scan(lambda y, layer: (layer.down(layer.up(y)), None), "layers")(x, params.stacked)[0]
            return (out * out).mean()

        def step(params: Any, state: Any) -> Any:
            updates, state = tx.update(axn.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        return step

    alone = optax.MultiSteps(axn.optim.muon(2e-2), 2)
    expected, state = params, alone.init(params)
    for _ in range(2):
        expected, state = jax.jit(make_step(alone))(expected, state)
    tx = optax.MultiSteps(axn.optim.muon(2e-2, over="data"), 2)
    with axn.set_mesh(mesh):
        run = axn.fsdp(make_step(tx), {"embed": "data"}, {"batch": "data"})
        stored = axn.shard(params, {"embed": "data"})
        state = axn.shard(tx.init(stored), {"embed": "data"})
        for _ in range(2):
            stored, state = jax.block_until_ready(run(stored, state))
        assert "data" in str(stored.stacked.up.weight.array.sharding.spec)
    assert_same(stored, expected)


def test_resumes_from_a_checkpoint_on_another_mesh(auto_mesh: Mesh, tmp_path: Path) -> None:
    params = matrices(3)
    grads = gradients(params)
    tx = axn.optim.muon(2e-2, over=("data", "model"), storage=STORAGE)
    with axn.set_mesh(auto_mesh):
        placed = axn.shard((params, grads), STORAGE)
        _, state = jax.jit(tx.update)(placed[1], axn.shard(tx.init(placed[0]), STORAGE), placed[0])
        straight = jax.jit(tx.update)(placed[1], state, placed[0])[0]
        axn.state.save_checkpoint(tmp_path / "kept", state)
    with axn.set_mesh(axn.make_mesh({"data": 2, "model": 2}, devices=jax.devices()[:4])):
        params, grads = axn.shard((params, grads), STORAGE)
        state = axn.state.restore_checkpoint(tmp_path / "kept", jax.eval_shape(tx.init, params), STORAGE)
        assert_same(jax.jit(tx.update)(grads, state, params)[0], jax.tree.map(np.asarray, straight))


def test_shampoo_shares_out_its_statistics(mesh: Mesh) -> None:
    params = matrices()
    alone = axn.optim.shampoo(2e-2)
    grads = gradients(params)
    expected, _ = alone.update(grads, alone.init(params), params)
    with axn.set_mesh(mesh):
        tx = axn.optim.shampoo(2e-2, over="data", storage={"embed": "data"})
        params, grads = axn.shard((params, grads), {"embed": "data"})
        updates, state = jax.block_until_ready(jax.jit(tx.update)(grads, jax.jit(tx.init)(params), params))
    statistics = [x for x in jax.tree.leaves(state) if getattr(x, "ndim", 0) == 3 and x.shape[-1] == x.shape[-2]]
    assert len(statistics) == 6 and all(x.sharding.spec[0] == "data" for x in statistics)
    for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-3 * float(abs(b).max()))


@pytest.mark.parametrize(
    ("over", "active", "message"),
    [("data", False, "no mesh is active"), ("dat", True, "Did you mean 'data'?")],
)
def test_refused(auto_mesh: Mesh, over: str, active: bool, message: str) -> None:
    params = matrices()
    tx = axn.optim.muon(2e-2, over=over, storage=STORAGE)
    with axn.set_mesh(auto_mesh if active else jax.sharding.AbstractMesh((), ())), pytest.raises(ValueError) as raised:
        tx.update(params, tx.init(params), params)
    assert message in str(raised.value)


def test_what_is_no_matrix_is_refused() -> None:
    layer: Any = axn.nn.Linear.init(axn.Axis("a", 2), axn.Axis("b", 3), key=jax.random.key(0))
    tx = axn.optim.on_matrices(lambda x: x)
    with pytest.raises(ValueError, match="bias is no matrix"):
        tx.update(layer, tx.init(layer))


def test_the_function_sees_rows_and_columns() -> None:
    seen = []

    def double(x: axn.NamedArray) -> axn.NamedArray:
        seen.append(x.shape)
        return 2 * x

    tx = axn.optim.on_matrices(double, batch="heads")
    weight: Any = {"w": axn.ones({"layers": 3, "mlp": 4, "rows": 5})}
    tx = axn.optim.on_matrices(double, matrix={"w": ("mlp", "rows")})
    updates: Any = tx.update(weight, tx.init(weight))[0]
    assert seen == [{"matrix": 3, "rows": 4, "columns": 5}]
    assert updates["w"].names == ("layers", "mlp", "rows") and jnp.all(updates["w"].array == 2)


@pytest.mark.parametrize("make", [axn.optim.muon, axn.optim.shampoo])
def test_without_over_on_explicit_axes(make: Any) -> None:
    """Rows and columns are gathered, and updates lie as they are stored."""
    params = matrices()
    grads, alone = gradients(params), make(2e-2)
    expected, _ = alone.update(grads, alone.init(params), params)
    with jax.set_mesh(axn.make_mesh({"data": 4, "model": 2}, explicit=True)), axn.axis_mapping(STORAGE):
        tx, (placed, grads) = make(2e-2), axn.shard((params, grads))
        found, _ = jax.block_until_ready(jax.jit(tx.update)(grads, jax.jit(tx.init)(placed), placed))
    assert_same(found, expected, 1e-3)  # roots of statistics round more
    for x, like in zip(*map(axn.tree.leaves, (found, placed)), strict=True):
        assert x.array.sharding.spec == like.array.sharding.spec


def reports(params: Any, mapping: Any, mesh: Any, *by: str, **options: Any) -> list[axn.insight.Report]:
    """Explain an update by Muon, of parameters that are stored and used alike."""
    chosen: Any = {"over": None, **options}
    tx = axn.optim.muon(2e-2, **chosen)
    given = jax.eval_shape(lambda: (gradients(params), tx.init(params), params))
    return [axn.insight.explain(tx.update, *given, mapping=mapping, mesh=mesh, by=way) for way in by]


@pytest.mark.parametrize(
    ("params", "storage"),
    [
        pytest.param(matrices(), STORAGE, id="stacked"),
        pytest.param(matrices(6), STORAGE, id="padded"),
        pytest.param(matrices(8, axn.nn.BlockSeq), STORAGE, id="apart"),
        pytest.param(matrices(), {"embed": ("data", "model")}, id="two mesh axes of one axis"),
        pytest.param(matrices(), {}, id="replicated"),
        pytest.param(model().experts, {"experts": "data", "mlp": "model"}, id="experts"),
    ],
)
def test_reports_by_names_know_the_exchange(params: Any, storage: Any) -> None:
    by_names, true = reports(params, storage, axn.make_mesh({"data": 4, "model": 2}), "names", "partitioner")

    def exchanges(report: axn.insight.Report) -> dict[Any, int]:
        found: dict[Any, int] = {}
        for c in report.chosen(phase="optimizer"):
            found[c.kind, c.axes] = found.get((c.kind, c.axes), 0) + (c.total_sent or 0)
        return found

    assert exchanges(by_names) == exchanges(true) and exchanges(true)
    assert (by_names.flops, by_names.total_sent()) == (true.flops, true.total_sent()) and by_names.uncertain == 0


@pytest.mark.parametrize("over", [{"data": 512}, {"data": 64, "model": 8}])
def test_on_512_devices(over: dict[str, int]) -> None:
    """Each weight of 512 layers goes there and back for each mesh axis, an eighth of a layer on each device."""
    Embed, Mlp = axn.make_axes(embed=512, mlp=1024)
    of_layers = axn.nn.Stacked.init(axn.Axis("layers", 512), axn.nn.Linear)
    params = jax.eval_shape(lambda: of_layers(Embed, Mlp, key=jax.random.key(0), use_bias=False))
    mesh = jax.sharding.AbstractMesh(tuple(over.values()), tuple(over))
    (report,) = reports(params, {n: axis for n, axis in STORAGE.items() if axis in over}, mesh, "names")
    size = 4 * Embed.size * Mlp.size  # one layer, as each device has 1 / 512 of all
    assert report.total_sent() == sum(2 * size * (n - 1) // n for n in over.values())
    assert {c.kind for c in report.collectives} == {"all-to-all"}
    assert report.flops == 5 * 2 * Embed.size**2 * (2 * Mlp.size + Embed.size)  # five steps, of a layer on each device


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        (matrices(), {"over": "data"}, "stored sharded along mlp over model, which `over` leaves out"),
        (matrices(), {"storage": {"embed": "data"}}, "`storage` of mlp other than the mapping's"),
        ({"w": axn.ones({"rows": 8, "mlp": 8})}, {"matrix": {"w": ("rows", "mlp")}}, "a parameter with an axis 'rows'"),
    ],
)
def test_what_names_do_not_tell(params: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        reports(params, STORAGE, axn.make_mesh({"data": 4, "model": 2}), "names", **options)


def test_a_plan_knows_the_exchange() -> None:
    Embed, Mlp = axn.make_axes(embed=1024, mlp=4096)
    of_layers = axn.nn.Stacked.init(axn.Axis("layers", 16), axn.nn.Linear)
    params = jax.eval_shape(lambda: of_layers(Embed, Mlp, key=jax.random.key(0), use_bias=False))
    tx = axn.optim.muon(2e-2, over=None)

    def step(params: Any, state: Any, x: axn.NamedArray) -> Any:
        def loss(params: Any) -> Any:
            add = lambda y, layer: (y + layer(y).sum("mlp"), None)
            return (axn.scan(add, "layers")(x, params.stacked)[0] ** 2).mean()

        updates, state = tx.update(axn.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    x = jax.eval_shape(lambda: axn.zeros({"batch": 2**16, "embed": 1024}))
    plan = axn.insight.plan(step, params, jax.eval_shape(tx.init, params), x, chips=8, chip="v5e")
    where: Any = {"mapping": plan.best.mapping, "mesh": axn.make_mesh(dict(plan.best.mesh)), "by": "partitioner"}
    best = axn.insight.explain(step, params, jax.eval_shape(tx.init, params), x, **where)
    assert plan.best.sent == best.total_sent()
    assert [c for c in best.chosen(phase="optimizer") if (c.total_sent or 0) > 100]
