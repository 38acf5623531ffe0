"""DiLoCo: replicas that train alone for some steps, and then agree: `python examples/diloco.py`.

Each slice of a cluster trains a replica of the model by AdamW, and sends nothing to the others for many steps. Then the
replicas' mean change is the gradient of an outer optimizer, and all start from its result. The replicas are one more
axis, `replica`, which the mapping shards over the slices; the inner step is mapped over it. A contract checks, before
anything runs, that an inner step never sends over `slice`.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import axonym as axn
from axonym import NamedArray, insight, nn

try:
    import optax
except ImportError as e:
    raise ImportError(f"{e}. What this example needs is optional: install axonym[examples].") from e

jax.config.update("jax_num_cpu_devices", 8)  # simulate eight devices; without effect on accelerators

Layers, Embed, Mlp, Batch = axn.make_axes(layers=4, embed=16, mlp=32, batch=16)
COMPUTE = {"replica": "slice", "batch": "data"}
STORAGE = COMPUTE | {"embed": "data"}
ADAM = optax.adamw(3e-3)
NESTEROV = optax.sgd(0.7, momentum=0.8, nesterov=True)


class Block(eqx.Module):
    """A layer that adds to its input."""

    up: nn.Linear
    down: nn.Linear

    @staticmethod
    def init(*, key: jax.Array) -> Block:
        a, b = jax.random.split(key)
        return Block(nn.Linear.init(Embed, Mlp, key=a), nn.Linear.init(Mlp, Embed, key=b))

    def __call__(self, x: NamedArray) -> NamedArray:
        return x + self.down(axn.tanh(self.up(x)))


def make_model(key: jax.Array) -> Any:
    return nn.Stacked.init(Layers, Block)(key=key)


def loss(model: Any, x: NamedArray) -> NamedArray:
    """Return how far the model is from rolling its input along `embed`."""
    return axn.mean((model.fold(x) - x.roll(1, "embed")) ** 2)


def step(model: Any, state: Any, x: NamedArray) -> tuple[Any, Any]:
    """Train one replica for one step."""
    updates, state = ADAM.update(axn.grad(loss)(model, x), state, model)
    return optax.apply_updates(model, updates), state


def replicate(model: Any, replicas: int) -> Any:
    """Return as many replicas of a model; the axis comes first, as in the results of `axn.vmap`."""
    return axn.broadcast_axis(model, axn.Axis("replica", replicas))


def agree(anchor: Any, momentum: Any, models: Any, *, int8: bool = False) -> tuple[Any, Any, Any]:
    """Return the next anchor, by the mean change of the replicas since they started from it, and new replicas."""
    changes = axn.tree.map(lambda a, m: a - m, anchor, models)
    change = axn.mean(axn.tree.map(as_sent, changes) if int8 else changes, "replica")
    updates, momentum = NESTEROV.update(change, momentum, anchor)
    anchor = optax.apply_updates(anchor, updates)
    replicas = jax.tree.leaves(models, is_leaf=axn.is_named_array)[0].axis_size("replica")
    return anchor, momentum, replicate(anchor, replicas)


def as_sent(change: NamedArray) -> NamedArray:
    """Return what replicas know of each other's change if they send 8 bits, and a scale for each layer."""
    scale = axn.max(axn.abs(change), tuple(n for n in change.names if n not in ("replica", "layers"))) / 127 + 1e-30
    sent = axn.round(change / scale).astype(jnp.int8)
    everywhere = STORAGE | {"replica": None}
    return axn.shard(sent, everywhere) * axn.shard(scale, everywhere)


def agree_on(first: Any, anchor: Any, momentum: Any, models: Any, *, count: int = 2) -> tuple[Any, Any, Any]:
    """Agree on some layers from the first one on, and leave the others to later rounds: as much less is sent."""
    before = anchor, momentum, models
    part = axn.tree.map(lambda x: x["layers", axn.ds(first, count)], before)
    return axn.tree.map(lambda x, new: axn.updated_slice(x, {"layers": first}, new), before, agree(*part))


def resized(states: Any, replicas: int) -> Any:
    """Return inner states for another number of replicas, which start from the mean of those before."""

    def resize(x: Any) -> Any:
        if not axn.is_named_array(x):  # Optax's count of steps
            return jnp.broadcast_to(x[0], (replicas, *x.shape[1:]))
        return replicate(x.mean("replica"), replicas)

    return axn.tree.map(resize, states)


inner_step = axn.fsdp(axn.vmap(step, "replica"), STORAGE, COMPUTE)
outer_step = axn.fsdp(agree, STORAGE, COMPUTE)


def texts(key: jax.Array, replicas: int) -> NamedArray:
    """Return a batch for each replica."""
    return axn.random.normal(key, (axn.Axis("replica", replicas), Batch, Embed))


def start(replicas: int) -> tuple[Any, Any, Any, Any]:
    """Return the anchor, the outer momentum, the replicas and their inner states, in their storage sharding."""
    anchor = make_model(jax.random.key(0))
    models = replicate(anchor, replicas)
    return axn.shard((anchor, NESTEROV.init(anchor), models, axn.vmap(ADAM.init, "replica")(models)), STORAGE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="inner steps of a round")
    parser.add_argument("--int8", action="store_true", help="send changes in 8 bits")
    options = parser.parse_args()
    mesh = axn.make_mesh({"slice": 2, "data": -1})
    replicas = mesh.shape["slice"]
    print(f"compiling an inner and an outer step for the mesh {dict(mesh.shape)}", file=sys.stderr)
    outer = axn.fsdp(functools.partial(agree, int8=options.int8), STORAGE, COMPUTE)
    with jax.set_mesh(mesh):
        anchor, momentum, models, states = start(replicas)
        insight.contract(max_sent={"slice": 0}).check(inner_step, models, states, texts(jax.random.key(1), replicas))
        sent = insight.explain(outer, anchor, momentum, models).total_sent("slice") or 0
        print(f"over the slices, an inner step sends nothing, and an outer step {sent / 1024:.1f} KiB")
        for i in range(options.rounds):
            for key in jax.random.split(jax.random.key(i + 1), options.steps):
                x = texts(key, replicas)
                # Simulated devices share threads, which several steps at once could use up.
                models, states = jax.block_until_ready(inner_step(models, states, x))
            anchor, momentum, models = jax.block_until_ready(outer(anchor, momentum, models))
            value = loss(anchor, axn.random.normal(jax.random.key(0), (Batch, Embed)))
            print(f"round {i + 1}: loss {value.item():.3f}")


if __name__ == "__main__":
    main()
