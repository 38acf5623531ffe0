"""A Fourier neural operator: from a field of flow to the field some time later."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import axonym as axn
from axonym import nn
from blocks import abstract, floats, key_of, state_of

Batch, X, Y, Fields, Channels, Layers = axn.make_axes(batch=64, x=256, y=256, fields=3, channels=64, layers=4)
Kx, Ky, Part = axn.make_axes(kx=32, ky=32, part=2)

MESH = {"data": 8}
MAPPING = {"x": "data"}

to_waves = axn.lift(lambda u: jnp.fft.rfft2(u)[: Kx.size, : Ky.size], "x y -> kx ky")
to_space = axn.lift(lambda w: jnp.fft.irfft2(w, s=(X.size, Y.size)), "kx ky -> x y")


class Spectral(eqx.Module):
    waves: axn.NamedArray
    local: nn.Linear

    @staticmethod
    def init(*, key):
        first, second = jax.random.split(key)
        axes = (Part, Kx, Ky, Channels, Channels.alias("mixed"))
        return Spectral(
            axn.random.normal(first, axes) / Channels.size,
            nn.Linear.init(Channels, Channels.alias("mixed"), key=second),
        )

    def __call__(self, u):
        real, imaginary = self.waves.unbind("part")
        mixed = axn.dot(to_waves(u), real + 1j * imaginary, axis="channels")
        new = to_space(mixed) + self.local(u)
        return u + nn.gelu(new).rename({"mixed": "channels"})


class Operator(eqx.Module):
    enter: nn.Linear
    layers: nn.Stacked
    leave: nn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 3)
        return Operator(
            nn.Linear.init(Fields, Channels, key=keys[0]),
            nn.Stacked.init(Layers, Spectral, gradient_checkpointing=True)(key=keys[1]),
            nn.Linear.init(Channels, Fields, key=keys[2]),
        )

    def __call__(self, u):
        return u + self.leave(self.layers.fold(self.enter(u)))


optimizer = optax.adam(1e-3)


def loss(model, now, later):
    return ((model(now) - later) ** 2).mean()


def train(model, state, now, later):
    value, gradients = axn.value_and_grad(loss)(model, now, later)
    updates, state = optimizer.update(gradients, state)
    return value, eqx.apply_updates(model, updates), state


def arguments():
    model = abstract(Operator.init, key=key_of())
    field = floats(Batch, X, Y, Fields)
    return model, state_of(optimizer, model), field, field
