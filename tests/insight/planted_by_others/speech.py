"""A recurrent network that labels frames of speech with phones."""

import equinox as eqx
import jax
import optax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision
from blocks import BF16, abstract, floats, integers, key_of, state_of

Batch, Time, Bands, Phones = axn.make_axes(batch=1024, time=200, bands=80, phones=2048)
Units, Gates = axn.make_axes(units=2048, gates=3)

MESH = {"data": 8}
STORED = {"units": "data"}
COMPUTE = {"batch": "data"}


class Recurrent(eqx.Module):
    read: nn.Linear
    update: nn.Linear

    @staticmethod
    def init(inputs, *, key):
        first, second = jax.random.split(key)
        return Recurrent(
            nn.Linear.init(inputs, (Gates, Units.alias("new")), key=first),
            nn.Linear.init(Units, (Gates, Units.alias("new")), key=second, use_bias=False),
        )

    def __call__(self, x):
        inputs = self.read(x)
        hidden = axn.zeros_like(inputs["time", 0, "gates", 0]).rename({"new": "units"})

        def frame(hidden, inputs):
            of_input, of_hidden = inputs.rename({"new": "units"}), self.update(hidden).rename({"new": "units"})
            keep, reset = (nn.sigmoid(of_input["gates", i] + of_hidden["gates", i]) for i in (0, 1))
            candidate = axn.tanh(of_input["gates", 2] + reset * of_hidden["gates", 2])
            hidden = keep * hidden + (1 - keep) * candidate
            return hidden, hidden

        return axn.scan(frame, Time)(hidden, inputs)[1]


class Listener(eqx.Module):
    first: Recurrent
    second: Recurrent
    head: nn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 3)
        return Listener(
            Recurrent.init(Bands, key=keys[0]),
            Recurrent.init(Units, key=keys[1]),
            nn.Linear.init(Units, Phones, key=keys[2]),
        )

    def __call__(self, x):
        return self.head(self.second(self.first(x)))


optimizer = optax.adam(3e-4)
forward = mixed_precision(BF16, Listener.__call__)


def loss(model, sound, phones):
    return nn.cross_entropy_loss(forward(model, sound), "phones", phones)


def train(model, state, sound, phones):
    value, gradients = axn.value_and_grad(loss)(model, sound, phones)
    updates, state = optimizer.update(gradients, state)
    return value, eqx.apply_updates(model, updates), state


def arguments():
    model = abstract(Listener.init, key=key_of())
    return model, state_of(optimizer, model), floats(Batch, Time, Bands), integers(Batch, Time)
