"""Types that checkers see for transforms: those of the original functions."""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any, assert_type

import equinox as eqx
import jax
import jax.numpy as jnp

import axonym as axn
from axonym import NamedArray

Batch, Time, Embed = axn.make_axes(batch=2, time=3, embed=4)
x = axn.ones((Batch, Time, Embed))
weight = axn.ones(Embed)


class Cell(eqx.Module):
    decay: float

    def __call__(self, state: NamedArray, x: NamedArray) -> tuple[NamedArray, dict[str, NamedArray]]:
        state = self.decay * state + x
        return state, {"sum": state.sum(Embed)}


def scores(x: NamedArray, weight: NamedArray, *, scale: float = 1.0) -> NamedArray:
    return scale * axn.dot(x, weight, axis=Embed)


def norm_and_mean(x: NamedArray) -> tuple[NamedArray, NamedArray]:
    return x.max(), x.mean()


def step(total: NamedArray, x: NamedArray) -> NamedArray:
    return total + x


# --- vmap and map ---

mapped = axn.vmap(scores, Batch)
assert_type(mapped(x, weight), NamedArray)
assert_type(mapped(x, weight=weight, scale=2.0), NamedArray)
assert_type(axn.vmap(norm_and_mean, (Batch, Time))(x), tuple[NamedArray, NamedArray])
assert_type(axn.map(norm_and_mean, "time")(x), tuple[NamedArray, NamedArray])

assert_type(mapped(x, weight) + 1, NamedArray)

# --- scan and fold ---

final, outputs = axn.scan(Cell(0.9), Time)(axn.zeros((Batch, Embed)), x)
assert_type(final, NamedArray)
assert_type(outputs, dict[str, NamedArray])
assert_type(axn.fold(step, Time)(axn.zeros((Batch, Embed)), x), NamedArray)
assert_type(axn.fold(step, Time, reverse=True)(axn.zeros((Batch, Embed)), x=x), NamedArray)

# A checker does not know the parameters of a lambda, but what the call passes to it.
decayed = axn.scan(lambda h, x: (0.5 * h + x, h.sum()), Time)(axn.zeros((Batch, Embed)), x)
assert_type(decayed[0], NamedArray)
assert_type(axn.fold(lambda h, x: 0.5 * h + x, Time)(axn.zeros((Batch, Embed)), x), NamedArray)

# --- grad ---


class Scale(eqx.Module):
    weight: NamedArray


def loss(model: Scale, x: NamedArray, *, scale: float = 1.0) -> NamedArray:
    return scale * (model.weight * x).sum()


def loss_and_mean(x: NamedArray, *, scale: float = 1.0) -> tuple[NamedArray, float]:
    return scale * x.sum(), scale


assert_type(axn.grad(loss)(Scale(weight), x, scale=2.0), Scale)
assert_type(axn.grad(loss_and_mean, has_aux=True)(x), tuple[NamedArray, float])
assert_type(axn.grad(lambda x: (x * x).sum())(x), NamedArray)
assert_type(axn.value_and_grad(loss)(Scale(weight), x), tuple[NamedArray, Scale])
assert_type(axn.value_and_grad(loss_and_mean, has_aux=True)(x, scale=2.0), tuple[tuple[NamedArray, float], NamedArray])
assert_type(axn.value_and_grad(lambda x: (x * x).sum())(x)[1], NamedArray)

assert_type(axn.jacobian(scores)(x, weight, scale=2.0), Any)
assert_type(axn.hessian(loss)(Scale(weight), x), Any)

# --- control ---


def grown(state: dict[str, NamedArray]) -> dict[str, NamedArray]:
    return {name: 2 * x for name, x in state.items()}


assert_type(axn.while_loop(lambda x: x.sum() < 100, lambda x: 2 * x, x), NamedArray)
assert_type(axn.while_loop(lambda state: state["x"].sum() < 100, grown, {"x": x}), dict[str, NamedArray])
assert_type(axn.while_loop(lambda i: i < 3, lambda i: i + 1, 0), Any)
assert_type(axn.fori_loop(0, 3, lambda i, x: step(x, x), x), NamedArray)
assert_type(axn.cond(x.sum() > 2, norm_and_mean, norm_and_mean, x), tuple[NamedArray, NamedArray])
assert_type(axn.switch(1, [step, step], x, x), NamedArray)

# --- lift ---


def solve(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.linalg.solve(a, b)


def both(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    return a, a


@axn.lift("n -> n")
def shifted(a: jax.Array) -> jax.Array:
    return a + 1


assert_type(
    axn.lift(solve, "row col, row -> col")(axn.eye(axn.Axis("row", 2), axn.Axis("col", 2)), axn.ones({"row": 2})),
    NamedArray,
)
assert_type(axn.lift(both, "n -> n, n")(x, n="time"), tuple[NamedArray, ...])
assert_type(shifted(x, n=Time), NamedArray)


def one_or_both(a: jax.Array) -> jax.Array | tuple[jax.Array, jax.Array]:
    return a


assert_type(axn.lift(one_or_both, "n -> n")(x, n="time"), NamedArray | tuple[NamedArray, ...])


def refused() -> None:
    """Calls that type checkers reject: an unnecessary `ignore` is an error."""
    mapped(x)  # type: ignore[call-arg]
    mapped(x, "weight")  # type: ignore[arg-type]
    axn.fold(step, Time)(0, x)  # type: ignore[arg-type]
    axn.grad(loss)(x, x)  # type: ignore[arg-type]
    axn.grad(loss)(Scale(weight))  # type: ignore[call-arg]
    axn.value_and_grad(loss, 1)(Scale(weight), "x")  # type: ignore[arg-type]
    axn.jacobian(scores)(x)  # type: ignore[call-arg]
    axn.hessian(loss)(x, x)  # type: ignore[arg-type]
    axn.while_loop(lambda state: True, grown, x)  # type: ignore[arg-type]
    axn.cond(True, step, step, x, "x")  # type: ignore[arg-type]
    axn.switch(0, [norm_and_mean, step], x)  # type: ignore[arg-type]
