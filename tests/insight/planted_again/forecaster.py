"""Forecasts demand: a recurrent network reads a long history, and predicts the next value at each time."""

import equinox as eqx
import jax
import jax.numpy as jnp

import axonym as axn
from axonym import nn


class Cell(eqx.Module):
    inward: axn.NamedArray
    recurrent: axn.NamedArray
    bias: axn.NamedArray

    @staticmethod
    def init(In, Hidden, *, key):
        first, second = jax.random.split(key)
        Gate, Next = axn.Axis("gate", 4), Hidden.alias("next")
        scale = Hidden.size**-0.5
        return Cell(
            inward=scale * axn.random.normal(first, (In, Gate, Next)),
            recurrent=scale * axn.random.normal(second, (Hidden, Gate, Next)),
            bias=axn.zeros((Gate, Next)),
        )

    def __call__(self, x):
        In, Gate, Next = self.inward.axes

        def advance(carry, now):
            h, c = carry
            driven = axn.dot(now, self.inward, axis=In)
            z = driven + axn.dot(h, self.recurrent, axis="hidden") + self.bias
            i, f, o, u = z.rename({"next": "hidden"}).unbind("gate")
            c = nn.sigmoid(f) * c + nn.sigmoid(i) * axn.tanh(u)
            h = nn.sigmoid(o) * axn.tanh(c)
            return (h, c), h

        nothing = axn.zeros((x.resolve_axis("batch"), Next.alias("hidden")), dtype=x.dtype)
        _, outputs = axn.scan(advance, "time")((nothing, nothing), x)
        return outputs


class Forecaster(eqx.Module):
    cells: list[Cell]
    head: nn.Linear

    @staticmethod
    def init(Features, Hidden, depth, *, key):
        keys = jax.random.split(key, depth + 1)
        return Forecaster(
            cells=[Cell.init(Hidden if i else Features, Hidden, key=keys[i]) for i in range(depth)],
            head=nn.Linear.init(Hidden, (), key=keys[depth]),
        )

    def __call__(self, x):
        for cell in self.cells:
            x = cell(x)
        return self.head(x)


def loss(model, history, following):
    small = jax.tree.map(lambda w: w.astype(jnp.bfloat16), model)
    error = small(history).astype("float32") - following
    return axn.mean(error * error).scalar()
