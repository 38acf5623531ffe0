"""Train a mixture of experts, sharded over devices: `python examples/mixture_of_experts.py`.

Tokens form a few clusters, and each cluster has its own linear function. The task is to learn all of them. A router
sends each token to the experts that it scores highest, so that experts can specialize. A dense layer with the same work
for each token has to serve all clusters at once, and learns more slowly.

The same model is trained under two mappings. In the first, each device has its own tokens and all experts. In the
second, devices also have their own experts, and exchange tokens. The losses are the same. Without an accelerator, there
are eight simulated devices.
"""

from __future__ import annotations

import argparse
from typing import Any

import equinox as eqx
import jax
import numpy as np

import axonym as axn
from axonym import nn

try:
    import optax
except ImportError as e:
    raise ImportError(f"{e}. What this example needs is optional: install axonym[examples].") from e

# Without an accelerator there are eight simulated devices; where there is one, this changes nothing.
jax.config.update("jax_num_cpu_devices", 8)

Tokens, Embed, Mlp, Experts, Cluster = axn.make_axes(tokens=512, embed=16, mlp=32, experts=8, cluster=8)
CHOICES = 2
"""How many experts each token goes to."""
BALANCE = 0.01
"""How much an uneven load counts."""

MAPPINGS: dict[str, dict[str, Any]] = {
    "tokens": {"tokens": ("data", "expert")},
    "experts": {"tokens": "data", "experts": "expert"},
}


class Mixture(eqx.Module):
    """A layer of which each token uses a few experts, those that a router scores highest."""

    router: nn.Linear
    up: nn.MoELinear
    down: nn.MoELinear

    @staticmethod
    def init(*, key: jax.Array) -> Mixture:
        router, up, down = jax.random.split(key, 3)
        return Mixture(
            router=nn.Linear.init(Embed, Experts, use_bias=False, key=router),
            up=nn.MoELinear.init(Experts, Embed, Mlp, use_bias=False, key=up),
            down=nn.MoELinear.init(Experts, Mlp, Embed, use_bias=False, key=down),
        )

    def __call__(self, x: axn.NamedArray) -> tuple[axn.NamedArray, axn.NamedArray, axn.NamedArray]:
        """The output, the tokens that each expert got, and a penalty for an uneven load."""
        scores = nn.softmax(self.router(x), Experts)
        weights, chosen = axn.top_k(scores, Experts, CHOICES, "choice")
        weights = weights / weights.sum("choice")

        def of_experts(layers: Any, rows: axn.NamedArray, load: axn.NamedArray) -> axn.NamedArray:
            up, down = layers
            return down(nn.relu(up(rows, load)), load)

        # Each token goes to the experts that were chosen for it, whatever devices these are on.
        outputs = nn.dispatch(of_experts, (self.up, self.down), x, chosen, Experts)
        mixed = axn.dot(outputs, weights, axis="choice")

        load = axn.bincount(chosen.flatten_axes(("tokens", "choice"), "rows"), Experts)
        penalty = nn.load_balancing_loss(scores, chosen, Experts)
        return mixed, load, penalty


class Dense(eqx.Module):
    """A layer that does as much work for each token, with weights that are the same for all."""

    layers: nn.MLP

    @staticmethod
    def init(*, key: jax.Array) -> Dense:
        return Dense(nn.MLP.init(Embed, Embed, width=Mlp.resize(CHOICES * Mlp.size), depth=1, key=key))

    def __call__(self, x: axn.NamedArray) -> tuple[axn.NamedArray, None, axn.NamedArray]:
        return self.layers(x), None, axn.zeros(())


class Task:
    """Clusters of tokens, each with a linear function of its own."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self.centers = 2 * rng.normal(size=(Cluster.size, Embed.size))
        self.functions = rng.normal(size=(Cluster.size, Embed.size, Embed.size)) / Embed.size**0.5

    def batch(self, seed: int) -> tuple[axn.NamedArray, axn.NamedArray]:
        """Tokens, and what the functions of their clusters make of them."""
        rng = np.random.default_rng(seed)
        cluster = rng.integers(Cluster.size, size=Tokens.size)
        x = self.centers[cluster] + rng.normal(size=(Tokens.size, Embed.size))
        y = np.einsum("ti,tio->to", x, self.functions[cluster])
        return axn.named(x.astype(np.float32), (Tokens, Embed)), axn.named(y.astype(np.float32), (Tokens, Embed))


def train(model: Any, steps: int, every: int) -> list[float]:
    """Train a model under the active mapping, and print how it goes. Returns the loss of each step."""
    optimizer = optax.adam(3e-3)

    @axn.named_jit
    def step(model: Any, state: Any, x: axn.NamedArray, y: axn.NamedArray) -> tuple[Any, Any, Any, Any]:
        def loss(model: Any) -> tuple[jax.Array, Any]:
            predicted, load, penalty = model(x)
            error = axn.mean((predicted - y) ** 2)
            return (error + BALANCE * penalty).scalar(), (error, load)

        (_, (error, load)), gradients = jax.value_and_grad(loss, has_aux=True)(model)
        updates, state = optimizer.update(gradients, state, model)
        return error, load, optax.apply_updates(model, updates), state

    # The model and what the optimizer keeps of it go where the mapping says, and each step leaves them there.
    model, state = axn.shard((model, optimizer.init(model)))
    task, losses = Task(seed=0), []
    for i in range(steps):
        x, y = axn.shard(task.batch(seed=i + 1))
        error, load, model, state = jax.block_until_ready(step(model, state, x, y))
        losses.append(error.item())
        if i % every == 0 or i == steps - 1:
            loads = "" if load is None else f"  tokens of each expert {' '.join(f'{n:>3}' for n in load.tolist())}"
            print(f"  step {i:>4}: loss {losses[-1]:.4f}{loads}")
    if isinstance(model, Mixture):
        weight = model.up.weight
        print(f"  of {weight}, each device has {weight.array.addressable_shards[0].data.shape}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a mixture of experts, distributed by a mapping.")
    parser.add_argument("--mappings", nargs="+", choices=MAPPINGS, default=list(MAPPINGS), help="by default all")
    parser.add_argument("--steps", type=int, default=400, help="steps of training (default: 400)")
    parser.add_argument("--every", type=int, default=100, help="how often to print the loss (default: 100)")
    args = parser.parse_args()

    mesh = axn.make_mesh({"data": -1, "expert": 4 if jax.device_count() % 4 == 0 else 1})
    print(f"mesh {dict(mesh.shape)}\n\na dense layer, for comparison")
    key = jax.random.key(0)
    mixture = Mixture.init(key=key)
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPINGS["tokens"]):
        train(Dense.init(key=key), args.steps, args.every)
    losses = []
    for name in args.mappings:
        print(f"\n{Experts.size} experts, {CHOICES} for each token, mapping {MAPPINGS[name]}")
        with jax.set_mesh(mesh), axn.axis_mapping(MAPPINGS[name]):
            losses.append(train(mixture, args.steps, args.every))

    # The same weights and tokens have the same loss. Later, the order of sums may make a difference to the last digits.
    for other in losses[1:]:
        np.testing.assert_allclose(other[0], losses[0][0], rtol=1e-4)
        print(f"\nthe losses of the two mappings differ by at most {np.abs(np.subtract(other, losses[0])).max():.1g}")


if __name__ == "__main__":
    main()
