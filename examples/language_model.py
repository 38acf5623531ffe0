"""A small language model of dictionaries and plain arrays, which does not mention devices.

It trains on one device: `python examples/language_model.py`. `language_model_fsdp.py` and
`language_model_tensor_parallel.py` distribute it by rules, without changing it.
"""

import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonym.sharding import with_sharding_annotation

try:
    import optax
except ImportError as e:
    raise ImportError(f"{e}. What this example needs is optional: install axonym[examples].") from e

VOCAB, EMBED, HEADS, MLP, LAYERS = 64, 64, 4, 256, 2
BATCH, LENGTH, STEPS = 16, 32, 60
OPTIMIZER = optax.adam(3e-3)


def init(key: jax.Array) -> dict[str, Any]:
    """Parameters; those of the layers are stacked. Their paths, such as `layers/attn/q`, are what rules go by."""
    keys = iter(jax.random.split(key, 5))

    def weight(*shape: int) -> jax.Array:
        return jax.random.uniform(next(keys), shape, minval=-1, maxval=1) * (3 / shape[-2]) ** 0.5

    layers = {
        "attn": dict(zip("qkvo", weight(4, LAYERS, EMBED, EMBED), strict=True)),
        "mlp": {"up": weight(LAYERS, EMBED, MLP), "down": weight(LAYERS, MLP, EMBED)},
        "norms": {"attn": jnp.ones((LAYERS, EMBED)), "mlp": jnp.ones((LAYERS, EMBED))},
    }
    return {"table": weight(VOCAB, EMBED), "layers": layers, "head": weight(EMBED, VOCAB)}


def logits(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Scores of what follows each token."""

    def layer(x: jax.Array, weights: dict[str, Any]) -> tuple[jax.Array, None]:
        x = x + attention(weights["attn"], normalized(x, weights["norms"]["attn"]))
        h = normalized(x, weights["norms"]["mlp"]) @ weights["mlp"]["up"]
        x = x + jax.nn.gelu(with_sharding_annotation(h, "hidden")) @ weights["mlp"]["down"]
        return with_sharding_annotation(x, "residual"), None

    x = with_sharding_annotation(params["table"][tokens] + positions()[None], "residual")
    x, _ = jax.lax.scan(layer, x, params["layers"])
    return x @ params["head"]


def attention(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Compute causal attention. Only the heads are ever sharded."""
    q, k, v = (
        with_sharding_annotation((x @ weights[name]).reshape(*x.shape[:2], HEADS, EMBED // HEADS), "heads")
        for name in ("q", "k", "v")
    )
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ weights["o"]


def normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale[None, None]


def positions() -> np.ndarray:
    angles = np.arange(LENGTH)[:, None] / 100 ** (np.arange(EMBED // 2)[None] * 2 / EMBED)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def loss(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """The mean surprise at the next token."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, tokens[:, :-1]), tokens[:, 1:]).mean()


def start(key: jax.Array) -> tuple[dict[str, Any], Any]:
    """Parameters, and the state of the optimizer."""
    params = init(key)
    return params, OPTIMIZER.init(params)


def step(params: dict[str, Any], state: Any, tokens: jax.Array) -> tuple[jax.Array, dict[str, Any], Any]:
    """One step of training: the loss, new parameters, and a new state of the optimizer."""
    value, gradients = jax.value_and_grad(loss)(params, tokens)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return value, optax.apply_updates(params, updates), state


def batches() -> Iterator[np.ndarray]:
    """Sequences in which each token is a step ahead of the one before it; the step is the sequence's own."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        first, stride = rng.integers(0, VOCAB, (BATCH, 1)), rng.integers(1, 6, (BATCH, 1))
        yield ((first + stride * np.arange(LENGTH + 1)[None]) % VOCAB).astype(np.int32)


def report(i: int, value: jax.Array) -> None:
    if i % 20 == 0 or i == STEPS - 1:
        print(f"step {i:>3}: loss {float(value):.3f}")


def main() -> None:
    print("compiling for one device", file=sys.stderr)
    params, state = jax.jit(start)(jax.random.key(0))
    train = jax.jit(step)
    for i, tokens in enumerate(batches()):
        value, params, state = train(params, state, tokens)
        report(i, value)


if __name__ == "__main__":
    main()
