"""Distribute a Flax NNX transformer without changing it: `python examples/names_nnx.py`.

The model and its training step are positional code for one device. `axonym.names.distribute` names the axes of every
value in the step from the names of a few parameters, and runs it under a mapping: parameters are stored sharded, and
each device computes on its own examples and heads. Without an accelerator, there are eight simulated devices.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp

import axonym as axn

print("importing Flax, and creating the model", file=sys.stderr)

try:
    import optax
    from flax import nnx
except ImportError as e:
    raise ImportError(f"{e}. What this example needs is optional: install axonym[examples] and flax.") from e

# Without an accelerator there are eight simulated devices; where there is one, this changes nothing.
jax.config.update("jax_num_cpu_devices", 8)

VOCAB, POS, EMBED, MLP, HEADS = 64, 16, 32, 96, 4


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(EMBED, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, EMBED, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(EMBED, rngs=rngs)
        self.up = nnx.Linear(EMBED, MLP, rngs=rngs)
        self.down = nnx.Linear(MLP, EMBED, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.position = nnx.Embed(POS, EMBED, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1])[None])
        for block in self.blocks:
            x = block(x, nnx.make_causal_mask(tokens))
        return self.embed.attend(self.norm(x))


graph, params = nnx.split(Transformer(nnx.Rngs(0)), nnx.Param)
optimizer = optax.adamw(3e-3)


def step(params: Any, state: Any, tokens: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        logits = nnx.merge(graph, params)(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


# From here on, names. The other parameters and the state of the optimizer get theirs from the program.
names = {
    "params/embed/embedding": "vocab embed",
    "query/kernel|value/kernel": "embed heads head_dim",
    "up/kernel": "embed mlp",
    "position": "pos embed",
    "tokens": "batch pos",
}
compute = {"batch": "data", "heads": "model", "mlp": "model"}
stored = {"embed": "data", "heads": "model", "mlp": "model"}


def main() -> None:
    print("compiling a step of training", file=sys.stderr)
    distributed = axn.names.distribute(step, compute, stored, names=names)
    tokens = (jnp.arange(POS)[None] + 7 * jnp.arange(16)[:, None]) % VOCAB
    trained: Any = params
    state = optimizer.init(params)
    with axn.set_mesh(axn.make_mesh({"data": -1, "model": min(2, jax.device_count())})):
        for i in range(30):
            trained, state, loss = jax.block_until_ready(distributed(trained, state, tokens))
            if i % 10 == 9:
                print(f"step {i + 1}: loss {loss:.2f}")
        kernel = trained["blocks"][0]["up"]["kernel"]
        print(f"up/kernel of shape {kernel.shape} is sharded by {kernel.get_value().sharding.spec}")


if __name__ == "__main__":
    main()
