"""A U-Net that removes noise from pictures."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision
from blocks import BF16, abstract, floats, key_of, state_of

Batch, Height, Width, Color = axn.make_axes(batch=32, height=128, width=128, color=3)
SPACE = ("height", "width")
Levels = [axn.Axis("channels", size) for size in (128, 256, 512)]

MESH = {"data": 4, "model": 2}
MAPPING = {"batch": "data", "channels": "model"}


class Residual(eqx.Module):
    norm: nn.GroupNorm
    first: nn.Conv
    noise: nn.Linear
    second: nn.Conv

    @staticmethod
    def init(channels, *, key):
        keys = jax.random.split(key, 3)
        return Residual(
            nn.GroupNorm.init(channels, 32, SPACE),
            nn.Conv.init(SPACE, channels, channels, kernel_size=3, padding="SAME", key=keys[0]),
            nn.Linear.init((), channels, key=keys[1]),
            nn.Conv.init(SPACE, channels, channels, kernel_size=3, padding="SAME", key=keys[2]),
        )

    def __call__(self, x, level):
        h = self.first(nn.silu(self.norm(x))) + self.noise(level)
        return x + self.second(nn.silu(h))


class UNet(eqx.Module):
    enter: nn.Conv
    down: list
    middle: Residual
    up: list
    leave: nn.Conv

    @staticmethod
    def init(*, key):
        keys = iter(jax.random.split(key, 16))
        pairs = list(zip(Levels, Levels[1:]))
        return UNet(
            nn.Conv.init(SPACE, Color, Levels[0], kernel_size=3, padding="SAME", key=next(keys)),
            [
                (
                    Residual.init(a, key=next(keys)),
                    nn.Conv.init(SPACE, a, b, kernel_size=2, stride=2, key=next(keys)),
                )
                for a, b in pairs
            ],
            Residual.init(Levels[-1], key=next(keys)),
            [
                (
                    nn.Conv.init(SPACE, b, a, kernel_size=3, padding="SAME", key=next(keys)),
                    Residual.init(a, key=next(keys)),
                )
                for a, b in reversed(pairs)
            ],
            nn.Conv.init(SPACE, Levels[0], Color, kernel_size=3, padding="SAME", key=next(keys)),
        )

    def __call__(self, x, level):
        x = self.enter(x)
        kept = []
        for block, shrink in self.down:
            x = block(x, level)
            kept.append(x)
            x = shrink(x)
        x = self.middle(x, level)
        for widen, block in self.up:
            x = axn.repeat(axn.repeat(x, 2, "height"), 2, "width")
            x = block(widen(x) + kept.pop(), level)
        return self.leave(x)


optimizer = optax.adamw(1e-4)
forward = mixed_precision(BF16, UNet.__call__)


def loss(model, pictures, noise, level):
    noisy = axn.sqrt(1 - level) * pictures + axn.sqrt(level) * noise
    return ((forward(model, noisy, level) - noise) ** 2).mean()


def train(model, state, pictures, noise, level):
    value, gradients = axn.value_and_grad(loss)(model, pictures, noise, level)
    updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
    return value, eqx.apply_updates(model, updates), state


def arguments():
    model = abstract(UNet.init, key=key_of())
    pictures = floats(Batch, Color, Height, Width)
    return model, state_of(optimizer, model), pictures, pictures, floats(Batch)
