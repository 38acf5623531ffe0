"""Types that checkers see for compiled functions: those of the original functions."""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

import equinox as eqx
import jax

import axonym as axn
from axonym import NamedArray

Batch, Embed = axn.make_axes(batch=2, embed=4)
x = axn.ones((Batch, Embed))
weight = axn.ones(Embed)


def scores(x: NamedArray, weight: NamedArray, *, scale: float = 1.0) -> NamedArray:
    return scale * axn.dot(x, weight, axis=Embed)


class Model(eqx.Module):
    weight: NamedArray

    @axn.named_jit
    def __call__(self, x: NamedArray, label: str) -> tuple[NamedArray, str]:
        return axn.dot(x, self.weight, axis=Embed), label

    @axn.named_jit(mapping={"batch": "data"})
    def loss(self, x: NamedArray) -> jax.Array:
        return axn.sum(x).scalar()


# --- named_jit ---

compiled = axn.named_jit(scores)
assert_type(compiled(x, weight, scale=2.0), NamedArray)
assert_type(axn.named_jit(scores, {"batch": "data"}, keep_unused=True)(x, weight), NamedArray)


@axn.named_jit(mapping={"batch": "data"}, keep_unused=True)
def step(x: NamedArray, rate: float) -> tuple[NamedArray, float]:
    return x * rate, rate


assert_type(step(x, 0.1), tuple[NamedArray, float])
assert_type(step.lower(x, 0.1), jax.stages.Lowered)
assert_type(axn.named_jit(Model)(weight), Model)
assert_type(Model(weight)(x, "seen"), tuple[NamedArray, str])
assert_type(Model(weight).loss(x), jax.Array)

# --- fsdp ---

sharded = axn.fsdp(scores, {"embed": "data"}, {"batch": "data"})
assert_type(sharded(x, weight, scale=0.5), NamedArray)
assert_type(
    axn.fsdp(scores, parameter_mapping={"embed": "data"}, compute_mapping={"batch": "data"})(x, weight), NamedArray
)


@axn.fsdp({"embed": "data"}, {"batch": "data"}, keep_unused=True)
def train(x: NamedArray) -> NamedArray:
    return x * 2


assert_type(train(x), NamedArray)


def refused() -> None:
    """Calls that type checkers reject: an unnecessary `ignore` is an error."""
    compiled(x)  # type: ignore[call-arg]
    compiled(x, weight, scale="2")  # type: ignore[arg-type]
    step(x, rate="fast")  # type: ignore[arg-type]
    train(weight, x)  # type: ignore[call-arg]
    Model(weight)(x)  # type: ignore[call-arg]
