"""A diffusion transformer over latents, with a moving average of its parameters for sampling."""

import equinox as eqx
import jax
import optax
from jax.flatten_util import ravel_pytree

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision
from blocks import BF16, Encoder, abstract, floats, key_of, state_of

Batch, Pos, Latent = axn.make_axes(batch=128, pos=256, latent=16)
Embed, Heads, HeadSize, Mlp, Layers = axn.make_axes(embed=1536, heads=16, head_size=96, mlp=4096, layers=24)

MESH = {"data": 8}
STORED = {"embed": "data"}
COMPUTE = {"batch": "data"}


class Denoiser(eqx.Module):
    enter: nn.Linear
    level: nn.MLP
    encoder: Encoder
    leave: nn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 4)
        return Denoiser(
            nn.Linear.init(Latent, Embed, key=keys[0]),
            nn.MLP.init((), Embed, width=Mlp, depth=1, key=keys[1]),
            Encoder.init(Layers, Embed, Heads, HeadSize, Mlp, key=keys[2]),
            nn.Linear.init(Embed, Latent, key=keys[3]),
        )

    def __call__(self, x, level):
        return self.leave(self.encoder(self.enter(x) + self.level(level)))


optimizer = optax.adamw(1e-4)
forward = mixed_precision(BF16, Denoiser.__call__)
DECAY = 0.9999


def loss(model, latents, noise, level):
    velocity = noise - latents
    mixed = (1 - level) * latents + level * noise
    return ((forward(model, mixed, level) - velocity) ** 2).mean()


def start(model):
    """The state of the optimizer, and the average, which starts at the parameters."""
    params = eqx.filter(model, eqx.is_inexact_array)
    return optimizer.init(params), ravel_pytree(params)[0]


def train(model, state, average, latents, noise, level):
    value, gradients = axn.value_and_grad(loss)(model, latents, noise, level)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, state = optimizer.update(gradients, state, params)
    model = eqx.apply_updates(model, updates)
    now, _ = ravel_pytree(eqx.filter(model, eqx.is_inexact_array))
    average = DECAY * average + (1 - DECAY) * now
    return value, model, state, average


def arguments():
    model = abstract(Denoiser.init, key=key_of())
    latents = floats(Batch, Pos, Latent)
    return model, *abstract(start, model), latents, latents, floats(Batch)
