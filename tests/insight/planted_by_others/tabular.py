"""A residual network for tables, in Equinox alone, trained with dropout."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

ROWS, COLUMNS, WIDTH, HIDDEN, KINDS, DEPTH = 65536, 512, 2048, 8192, 1000, 6


class Block(eqx.Module):
    norm: eqx.nn.RMSNorm
    up: Float[Array, "hidden width"]
    down: Float[Array, "width hidden"]
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.norm = eqx.nn.RMSNorm(WIDTH, use_bias=False)
        self.up = jax.random.normal(first, (HIDDEN, WIDTH)) / WIDTH**0.5
        self.down = jax.random.normal(second, (WIDTH, HIDDEN)) / HIDDEN**0.5
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        h = jax.nn.gelu(self.up.astype(jnp.bfloat16) @ self.norm(x))
        return x + self.dropout(self.down.astype(jnp.bfloat16) @ h, key=key)


class Network(eqx.Module):
    enter: Float[Array, "width columns"]
    blocks: list[Block]
    leave: Float[Array, "kinds width"]

    def __init__(self, key):
        keys = jax.random.split(key, DEPTH + 2)
        self.enter = jax.random.normal(keys[0], (WIDTH, COLUMNS)) / COLUMNS**0.5
        self.blocks = [Block(k) for k in keys[2:]]
        self.leave = jax.random.normal(keys[1], (KINDS, WIDTH)) / WIDTH**0.5

    def __call__(self, row, key):
        x = self.enter.astype(jnp.bfloat16) @ row.astype(jnp.bfloat16)
        for i, block in enumerate(self.blocks):
            x = block(x, None if key is None else jax.random.fold_in(key, i))
        return (self.leave.astype(jnp.bfloat16) @ x).astype(jnp.float32)


optimizer = optax.adamw(1e-3)


def loss(model, rows: Float[Array, "batch columns"], kinds: Int[Array, " batch"], key):
    logits = jax.vmap(lambda row: model(row, key))(rows)
    return optax.softmax_cross_entropy_with_integer_labels(logits, kinds).mean()


def measure(model, rows, kinds):
    """The share of rows that are told right, without dropout."""
    model = eqx.nn.inference_mode(model)
    logits = jax.vmap(lambda row: model(row, None))(rows)
    return (logits.argmax(-1) == kinds).mean()


def train(model, state, rows, kinds, key):
    value, gradients = eqx.filter_value_and_grad(loss)(model, rows, kinds, key)
    updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
    right = measure(model, rows, kinds)
    return {"loss": value, "right": right}, eqx.apply_updates(model, updates), state


MESH = {"data": 8}
NAMES = {"rows": "batch columns", "kinds": "batch", r"norm\.weight|norm/weight": "width"}
MAPPING = {"batch": "data"}


def arguments():
    model = eqx.filter_eval_shape(Network, jax.random.key(0))
    state = eqx.filter_eval_shape(lambda m: optimizer.init(eqx.filter(m, eqx.is_inexact_array)), model)
    rows = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    kinds = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    return model, state, rows, kinds, jax.eval_shape(lambda: jax.random.key(0))
