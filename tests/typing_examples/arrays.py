"""Types that checkers see for arrays: operators, reductions, methods, layers."""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from collections.abc import Sequence
from typing import Any, assert_type

import equinox as eqx
import jax
import jax.numpy as jnp

import axonym as axn
from axonym import Axis, NamedArray

Batch, Embed = axn.make_axes(batch=2, embed=3)
x = axn.ones((Batch, Embed))
number = jnp.ones(())

# --- what an array holds ---

assert_type(x, NamedArray)
assert_type(x.array, jax.Array)
assert_type(x.axes, tuple[Axis, ...])
assert_type(x.names, tuple[str, ...])
assert_type(x.shape, dict[str, int])
assert_type(x.resolve_axis("batch"), Axis)
assert_type(x.axis_size("batch"), int)

# --- operators ---

assert_type(x + x, NamedArray)
assert_type(x - 1, NamedArray)
assert_type(2.0 * x, NamedArray)
assert_type(number * x, NamedArray)
assert_type(x / number, NamedArray)
assert_type(x**2, NamedArray)
assert_type(1 // x, NamedArray)
assert_type(x % 2, NamedArray)
assert_type(divmod(x, 2), tuple[NamedArray, NamedArray])
assert_type(x < 0, NamedArray)
assert_type(x == x, NamedArray)
assert_type((x > 0) & (x < 2), NamedArray)
assert_type(~(x > 0), NamedArray)
assert_type(-x, NamedArray)
assert_type(abs(x), NamedArray)

# --- functions and methods ---

assert_type(axn.add(x, 1), NamedArray)
assert_type(axn.exp(x), NamedArray)
assert_type(axn.round(x, 2), NamedArray)
assert_type(axn.sum(x, Embed), NamedArray)
assert_type(axn.var(x, "embed", ddof=1), NamedArray)
assert_type(axn.argmax(x, Embed), NamedArray)
assert_type(axn.cumsum(x, Embed), NamedArray)
assert_type(axn.dot(x, x, axis=Embed), NamedArray)
assert_type(axn.where(x > 0, x, 0.0), NamedArray)
assert_type(axn.concatenate([x, x], "batch"), NamedArray)
assert_type(x.sum(Embed), NamedArray)
assert_type(x.mean(), NamedArray)
assert_type(x.argmax("embed"), NamedArray)
assert_type(x.std(Embed, where=x > 0), NamedArray)
assert_type(x.rename({"batch": "row"}), NamedArray)
assert_type(x.rearrange("batch embed -> embed batch"), NamedArray)
assert_type(x.astype(jnp.bfloat16), NamedArray)
assert_type(x.real, NamedArray)
assert_type(x.sum().item(), int | float | Any)
assert_type(axn.linalg.svd(x, (Batch, Embed), "k"), tuple[NamedArray, NamedArray, NamedArray])
assert_type(axn.linalg.svdvals(x, (Batch, Embed), "k"), NamedArray)

# --- parts ---

assert_type(x["batch", 0], NamedArray)
assert_type(x[{"batch": slice(0, 1), "embed": 2}], NamedArray)
assert_type(x.at["batch", 0].set(1.0), NamedArray)
assert_type(x.at["batch", 0].get(), NamedArray)
assert_type(x.at[{"batch": 0}].add(x["batch", 0]), NamedArray)
assert_type(x.at["batch", 0].multiply(2), NamedArray)
assert_type((x["batch", 0] * 2).array, jax.Array)
assert_type((-x).mean(Embed).array + 1, jax.Array)
assert_type(x.take("batch", axn.arange(Batch)), NamedArray)

# --- layers ---


class Block(eqx.Module):
    norm: axn.nn.LayerNorm
    mlp: axn.nn.MLP

    def __call__(self, x: NamedArray, *, key: jax.Array | None = None) -> NamedArray:
        assert_type(self.norm(x), NamedArray)
        assert_type(self.mlp(x, key=key), NamedArray)
        return x + self.mlp(self.norm(x), key=key)


key = jax.random.key(0)
linear = axn.nn.Linear.init(Embed, Axis("out", 2), key=key)
assert_type(linear, axn.nn.Linear)
assert_type(linear(x), NamedArray)
assert_type(axn.nn.Embedding.init(Axis("vocab", 8), Embed, key=key).embed(axn.arange(Batch)), NamedArray)
layers = axn.nn.Stacked.init(Axis("layers", 2), axn.nn.LayerNorm)(Embed)
assert_type(layers, axn.nn.Stacked[axn.nn.LayerNorm])
assert_type(layers.stacked, axn.nn.LayerNorm)
assert_type(layers.fold(x), NamedArray)
assert_type(axn.nn.BlockSeq.init(Axis("layers", 2), axn.nn.LayerNorm)(Embed).unstacked(), Sequence[axn.nn.LayerNorm])
assert_type(axn.nn.RmsNorm.init(Embed)(x), NamedArray)
assert_type(axn.nn.Dropout(0.1)(x, key=key), NamedArray)
assert_type(axn.nn.Conv.init("batch", Embed, Axis("out", 2), kernel_size=1, key=key)(x), NamedArray)
assert_type(axn.nn.cross_entropy_loss(x, Embed, axn.arange(Batch)), NamedArray)
assert_type(axn.nn.cross_entropy_loss(x, Embed, axn.arange(Batch)).scalar(), jax.Array)
assert_type(axn.nn.softmax(x, Embed), NamedArray)
assert_type(axn.nn.relu(x), NamedArray)
assert_type(axn.random.normal(key, (Batch, Embed)), NamedArray)
assert_type(axn.tree.maybe_rng_split(key), jax.Array)
assert_type(axn.tree.maybe_rng_split(None), list[None])


def refused() -> None:
    """Calls that type checkers reject: an unnecessary `ignore` is an error."""
    axn.typo  # type: ignore[attr-defined]
    axn.nn.typo  # type: ignore[attr-defined]
    x.typo  # type: ignore[attr-defined]
    x[:, 0]  # type: ignore[arg-type]
    x[0]  # type: ignore[arg-type]
    x.sum(Embed, wear=x > 0)  # type: ignore[call-arg]
    x.mean(dtype=3)  # type: ignore[arg-type]
    axn.zeros(Embed, dtype=1.0)  # type: ignore[arg-type]
    axn.nn.Stacked.init(Axis("layers", 2), 3)  # type: ignore[arg-type]
    x @ x  # type: ignore[arg-type]
