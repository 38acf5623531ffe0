"""Models of every kind learn the same under rules as on one device, and rules place their parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.scalax.sharding import FSDPShardingRule, MeshShardingHelper, TreePathShardingRule, with_sharding_annotation

STEPS = 3
In, Hidden, Out, Batch = axn.make_axes(features=8, hidden=16, targets=8, batch=16)
OPTIMIZER = optax.sgd(0.2, momentum=0.9)


@dataclasses.dataclass
class Model:
    """A two-layer network, written with some library or none. The names of its weights are the same in all."""

    parameters: Any
    predict: Callable[[Any, Any], Any]

    def loss(self, parameters: Any, x: Any, y: Any) -> jax.Array:
        error = self.predict(parameters, x) - y
        return axn.mean(error**2).scalar() if isinstance(error, axn.NamedArray) else jnp.mean(error**2)

    def step(self, parameters: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(self.loss)(parameters, x, y)
        updates, state = OPTIMIZER.update(gradients, state, parameters)
        return loss, optax.apply_updates(parameters, updates), state

    @property
    def named(self) -> bool:
        return axn.is_named_array(jax.tree.leaves(self.parameters, is_leaf=axn.is_named_array)[0])

    def data(self, i: int) -> tuple[Any, Any]:
        x = np.random.default_rng(i).normal(size=(Batch.size, In.size)).astype(np.float32)
        return (axn.named(x, (Batch, In)), axn.named(np.sin(x), (Batch, Out))) if self.named else (x, np.sin(x))

    def losses(self, step: Callable[..., Any]) -> tuple[list[float], Any, Any]:
        found, parameters, state = [], self.parameters, OPTIMIZER.init(self.parameters)
        for i in range(STEPS):
            loss, parameters, state = jax.block_until_ready(step(parameters, state, *self.data(i)))
            found.append(float(loss))
        return found, parameters, state


def dictionary() -> Model:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)
    parameters = {
        "up": {"weight": draw(In.size, Hidden.size), "bias": draw(Hidden.size)},
        "down": {"weight": draw(Hidden.size, Out.size)},
    }

    def predict(p, x):
        h = with_sharding_annotation(x @ p["up"]["weight"], "hidden")
        return jnp.tanh(h + p["up"]["bias"][None, :]) @ p["down"]["weight"]

    return Model(parameters, predict)


def named() -> Model:
    p = dictionary().parameters
    parameters = {
        "up": {"weight": axn.named(p["up"]["weight"], (In, Hidden)), "bias": axn.named(p["up"]["bias"], Hidden)},
        "down": {"weight": axn.named(p["down"]["weight"], (Hidden, Out))},
    }

    def predict(p, x):
        h = with_sharding_annotation(axn.dot(x, p["up"]["weight"], axis=In), "hidden")
        return axn.dot(axn.tanh(h + p["up"]["bias"]), p["down"]["weight"], axis=Hidden)

    return Model(parameters, predict)


def equinox() -> Model:
    class Network(eqx.Module):
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    k1, k2 = jax.random.split(jax.random.key(0))
    return Model(
        Network(eqx.nn.Linear(In.size, Hidden.size, key=k1), eqx.nn.Linear(Hidden.size, Out.size, key=k2)),
        lambda model, x: jax.vmap(model)(x),
    )


def flax() -> Model:
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(In.size, Hidden.size, rngs=rngs)
            self.down = nnx.Linear(Hidden.size, Out.size, rngs=rngs)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    definition, parameters = nnx.split(Network(nnx.Rngs(0)))
    return Model(parameters, lambda p, x: nnx.merge(definition, p)(x))


MODELS = {m.__name__: m for m in (dictionary, named, equinox, flax)}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[float]]:
    """Train each model on one device."""
    return {name: (model := make()).losses(jax.jit(model.step))[0] for name, make in MODELS.items()}


@dataclasses.dataclass
class Strategy:
    batch: Any
    rest: Any
    """The storage sharding of the parameters."""
    up: P
    """The spec of the weight whose axes are the features and the hidden units."""
    part: tuple[int, int]
    """The shape of a shard of that weight."""


def by_path(up: P, bias: P, down: P) -> TreePathShardingRule:
    return TreePathShardingRule(
        ("up/(weight|kernel)", up), ("up/bias", bias), ("down/(weight|kernel)", down), strict=False
    )


STRATEGIES = {
    "data": Strategy(P(("data", "model")), P(), P(None, None), (8, 16)),
    "fsdp": Strategy(P("data"), FSDPShardingRule("data", min_fsdp_size=64), P(None, "data"), (8, 4)),
    "tensor": Strategy(P(None), by_path(P(None, "model"), P("model"), P("model", None)), P(None, "model"), (8, 8)),
    "mixed": Strategy(
        P("data"), by_path(P("data", "model"), P("model"), P("model", "data")), P("data", "model"), (2, 8)
    ),
}


def transposed(strategy: Strategy) -> Strategy:
    """Return the strategy for weights that are stored with the outputs first."""
    rest = strategy.rest
    if isinstance(rest, TreePathShardingRule):
        up, bias, down = (spec for _, spec in rest.rules if isinstance(spec, P))
        rest = by_path(P(*reversed(up)), bias, P(*reversed(down)))
    rows, columns = strategy.part
    return Strategy(strategy.batch, rest, P(*reversed(strategy.up)), (columns, rows))


CASES = [
    *(("dictionary", strategy, False) for strategy in STRATEGIES),
    *(("named", strategy, True) for strategy in STRATEGIES),
    *(("named", strategy, False) for strategy in ("fsdp", "mixed")),
    *((model, "mixed", False) for model in ("equinox", "flax")),
    *((model, "fsdp", True) for model in ("dictionary", "equinox", "flax")),
]


@pytest.mark.parametrize(
    ("model", "strategy", "explicit"), CASES, ids=[f"{m}-{s}-{'explicit' if e else 'auto'}" for m, s, e in CASES]
)
def test_training(model: str, strategy: str, explicit: bool, expected: dict[str, list[float]]) -> None:
    trained = MODELS[model]()
    how = transposed(STRATEGIES[strategy]) if model == "equinox" else STRATEGIES[strategy]
    helper = MeshShardingHelper([4, 2], ["data", "model"], explicit=explicit)
    hidden = "model" if "model" in how.up else None
    step = helper.sjit(
        trained.step,
        in_shardings=(how.rest, how.rest, how.batch, how.batch),
        out_shardings=(P(), how.rest, how.rest),
        # On Explicit mesh axes, weights without names are gathered by hand before use.
        args_sharding_constraint=(P(), None, None, None) if explicit and not trained.named else None,
        annotation_shardings={"hidden": P(how.batch[0], hidden)},
    )
    # The mapping decides the sharding of operations on named arrays if operands disagree.
    with axn.axis_mapping({"batch": how.batch[0], "hidden": hidden}):
        losses, parameters, state = trained.losses(step)
    np.testing.assert_allclose(losses, expected[model], rtol=2e-4)
    for tree in (parameters, state[0].trace):
        up = weight(tree)
        assert up.sharding.is_equivalent_to(NamedSharding(helper.mesh, how.up), 2), up.sharding
        assert {s.data.shape for s in up.addressable_shards} == {how.part}


def weight(tree: Any) -> jax.Array:
    """Return the weight of the first layer of any model."""
    found = [x for path, x in jax.tree.leaves_with_path(tree) if "up" in str(path[0]) and x.ndim == 2]
    assert len(found) == 1
    return found[0]
