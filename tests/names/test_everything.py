"""What takes a step of named arrays also takes a step of raw arrays that `distribute` made."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.insight import contract, explain, plan, snapshot

STORED, COMPUTE = {"mlp": "model", "embed": "data"}, {"batch": "data", "mlp": "model"}


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(8, 48, rngs=rngs), nnx.Linear(48, 12, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


GRAPH, STATE = nnx.split(Mlp(nnx.Rngs(0)), nnx.Param)
NAMES = {"up/kernel": "embed mlp", "down/kernel": "mlp classes", "^x$": "batch embed"}
PARAMETERS = {"up": jnp.full((8, 48), 0.1), "down": jnp.full((48, 12), 0.1)}
X = jnp.ones((16, 8))


def apply_nnx(params: Any, x: jax.Array) -> jax.Array:
    return nnx.merge(GRAPH, params)(x)


def apply_raw(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["up"]) @ params["down"]


def step_of(apply: Any) -> Any:
    def step(params: Any, x: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: (apply(p, x) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    return step


NNX = (step_of(apply_nnx), STATE, NAMES)
RAW = (step_of(apply_raw), PARAMETERS, {key.removesuffix("/kernel"): own for key, own in NAMES.items()})
KINDS = pytest.mark.parametrize(("step", "params", "names"), [NNX, RAW], ids=["nnx", "raw"])


def mesh() -> jax.sharding.Mesh:
    assert jax.device_count() == 8
    return axn.make_mesh({"data": 4, "model": 2})


SUMS = {"sums over batch, which is sharded over data", "sums over mlp, which is sharded over model"}


@KINDS
def test_explain(step: Any, params: Any, names: Any) -> None:
    free = axn.names.distribute(step, names=names)
    for by in ("compiled", "partitioner", "names"):
        report = explain(free, params, X, mapping=COMPUTE, mesh=mesh(), by=by)
        assert {c.reason for c in report.collectives} >= SUMS, report
        # Each device has a fourth of the rows and half of the large axis. Nothing needs the gradient of x.
        assert report.flops == 2 * (16 // 4) * (48 // 2) * (2 * 8 + 3 * 12), report


def test_explain_stored() -> None:
    """The parameters that are stored sharded, and gathered to be used, by names and by the partitioner."""
    free, gathered = axn.names.distribute(RAW[0], names=RAW[2]), "embed is stored sharded over data"
    for by in ("partitioner", "names"):
        report = explain(free, PARAMETERS, X, mapping=(STORED, COMPUTE), mesh=mesh(), by=by)
        assert any(c.kind == "all-gather" and gathered in str(c.reason) for c in report.collectives), report


def test_mappings_of_its_own() -> None:
    own = axn.names.distribute(RAW[0], COMPUTE, names=RAW[2])
    with pytest.raises(ValueError, match="give the function that it compiles, or `distribute` without mappings"):
        explain(own, PARAMETERS, X, mapping=COMPUTE, mesh=mesh())
    for mapping in (None, COMPUTE):
        with pytest.raises(ValueError, match=r"distribute`.* without mappings"):
            explain(own, PARAMETERS, X, mapping=mapping, mesh=mesh(), by="names")


@KINDS
def test_contract(step: Any, params: Any, names: Any) -> None:
    free = axn.names.distribute(step, names=names)
    with pytest.raises(axn.insight.BrokenContract, match="gathers embed: all-gather over"):
        contract(never_gathers=["embed"], mapping=(STORED, COMPUTE), mesh=mesh()).check(free, params, X)
    own = axn.names.distribute(step, COMPUTE, names=names)
    contract(never_gathers=["batch", "mlp"], mesh=mesh()).check(own, params, X)
    with pytest.raises(axn.insight.BrokenContract, match=r"may send 10 B.*sums over batch, which is sharded over data"):
        contract(max_sent={"data": 10}, mesh=mesh()).check(own, params, X)


def test_snapshot() -> None:
    step, params, names = NNX
    free = axn.names.distribute(step, names=names)
    text = snapshot(free, params, X, mapping=(STORED, COMPUTE), mesh=mesh())
    for line in (
        r"params/up/kernel/value    float32[embed=8 over data, mlp=48 over model]  192 B",
        r"params/down/bias/value    float32[classes=12]                            48 B",
        r"x                         float32[batch=16 over data, embed=8]           128 B",
    ):
        assert line in text, text
    own = axn.names.distribute(step, COMPUTE, STORED, names=names)
    assert snapshot(own, params, X, mesh=mesh()) == text


def test_plan() -> None:
    """The plan's best mapping is one of the names, and its code runs."""
    step, params, names = NNX
    found = plan(axn.names.distribute(step, names=names), params, jnp.ones((4096, 8)), chips=8)
    assert found.best.compute.keys() & {"batch", "mlp"}, found
    assert {n for p in found.found for n in p.compute} >= {"batch", "mlp"}, found
    where: Any = {"mapping": found.best.mapping, "mesh": axn.make_mesh(dict(found.best.mesh)), "by": "partitioner"}
    verified = explain(axn.names.distribute(step, names=names), params, jnp.ones((4096, 8)), **where)
    assert verified.total_sent() == pytest.approx(found.best.sent, rel=0.25), found
    scope: dict[str, Any] = {"axn": axn, "step": step, "names": names}
    exec(found.best.code(), scope)
    with axn.set_mesh(scope["mesh"]):
        new, _ = jax.block_until_ready(scope["step"](params, jnp.ones((4096, 8))))
    kernel, mapping = new["up"]["kernel"].get_value(), found.best.storage or found.best.compute
    wanted = NamedSharding(scope["mesh"], P(mapping.get("embed"), mapping.get("mlp")))
    assert kernel.sharding.is_equivalent_to(wanted, 2), (kernel.sharding, found)


@KINDS
def test_shard_invariance(step: Any, params: Any, names: Any) -> None:
    with axn.set_mesh(mesh()):
        found = axn.testing.check_shard_invariance(axn.names.distribute(step, COMPUTE, names=names), params, X)
    assert found.compared


@KINDS
def test_trees(step: Any, params: Any, names: Any, tmp_path: pathlib.Path) -> None:
    """A model is named to lint a mapping, to be placed, and to be saved and restored."""
    own = {key: names[key] for key in list(names)[:2]}
    named = axn.names.name(params, own)
    assert "Did you mean 'mlp'" in str(axn.lint_mapping(named, {"mpl": "model"}, mesh()))
    placed = axn.names.unname(axn.shard(named, STORED, mesh()))
    assert jax.tree.structure(placed) == jax.tree.structure(params)
    kept = axn.names.name(placed, own)
    axn.state.save_checkpoint(tmp_path / "saved", kept)
    template = jax.eval_shape(lambda: named)
    restored = axn.names.unname(axn.state.restore_checkpoint(tmp_path / "saved", template, STORED, mesh=mesh()))
    matrices = 0
    for x, y, right in zip(*map(jax.tree.leaves, (placed, restored, params)), strict=True):
        if x.ndim == 2:
            matrices += 1
            wanted = P("data", "model") if x.shape[0] == 8 else P("model", None)
            assert x.sharding.spec == y.sharding.spec == wanted, (x.sharding, y.sharding)
        assert (y == right).all()
    assert matrices == 2


def test_axes_of_size_one() -> None:
    step = axn.names.distribute(RAW[0], COMPUTE, names=RAW[2])
    with axn.set_mesh(mesh()):
        one, _ = jax.block_until_ready(step(PARAMETERS, X[:1]))
        assert one["up"].sharding.spec == P(None, "model")
        with pytest.warns(UserWarning, match="'batch' of the mapping names no axis .* larger than 1"):
            axn.names.distribute(RAW[0], {"batch": "data"}, names=RAW[2])(PARAMETERS, X[:1])
