"""Marks organs in large medical images: a U-Net."""

import equinox as eqx
import jax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision


class Double(eqx.Module):
    """Two convolutions, each normalized."""

    first: nn.Conv
    first_norm: nn.GroupNorm
    second: nn.Conv
    second_norm: nn.GroupNorm

    @staticmethod
    def init(Space, In, Out, *, key):
        Middle = axn.Axis("m" + Out.name, Out.size)
        keys = jax.random.split(key)
        return Double(
            first=nn.Conv.init(Space, In, Middle, kernel_size=3, padding="SAME", key=keys[0]),
            first_norm=nn.GroupNorm.init(Middle, 8, ("height", "width")),
            second=nn.Conv.init(Space, Middle, Out, kernel_size=3, padding="SAME", key=keys[1]),
            second_norm=nn.GroupNorm.init(Out, 8, ("height", "width")),
        )

    def __call__(self, x):
        x = nn.silu(self.first_norm(self.first(x)))
        return nn.silu(self.second_norm(self.second(x)))


class Segmenter(eqx.Module):
    down: list[Double]
    bottom: Double
    widen: list[nn.ConvTranspose]
    up: list[Double]
    head: nn.Linear

    @staticmethod
    def init(Space, Color, Widths, Organ, *, key):
        keys = iter(jax.random.split(key, 3 * len(Widths) + 2))
        *Levels, Bottom = Widths
        down, ins = [], [Color, *Levels]
        for In, Out in zip(ins, Levels):
            down.append(Double.init(Space, In, Out, key=next(keys)))
        widen, up = [], []
        for Lower, Level in zip(reversed(Widths), reversed(Levels)):
            Both = axn.Axis(Level.name, 2 * Level.size)
            options = {"kernel_size": 2, "stride": 2, "key": next(keys)}
            widen.append(nn.ConvTranspose.init(Space, Lower, Level.alias("v" + Level.name), **options))
            up.append(Double.init(Space, Both, Level.alias("u" + Level.name), key=next(keys)))
        up = up[:-1] + [Double.init(Space, axn.Axis(Levels[0].name, 2 * Levels[0].size), Levels[0].alias("top"), key=next(keys))]
        return Segmenter(
            down=down,
            bottom=Double.init(Space, Levels[-1], Bottom, key=next(keys)),
            widen=widen,
            up=up,
            head=nn.Linear.init(Levels[0].alias("top"), Organ, key=next(keys)),
        )

    def __call__(self, x):
        skips = []
        for layer in self.down:
            x = layer(x)
            skips.append(axn.shard(x, {"batch": "data"}))
            x = nn.max_pool(x, {"height": 2, "width": 2}, stride=2)
        x = self.bottom(x)
        for widen, layer, skip in zip(self.widen, self.up, reversed(skips)):
            x = widen(x)
            wide, level = widen.Out.name, widen.Out.name[1:]
            x = layer(axn.concatenate([skip, x.rename({wide: level})], level))
            if "u" + level in x.shape:
                x = x.rename({"u" + level: level})
        return self.head(x)


forward = mixed_precision("params=float32,compute=bfloat16,output=float32", Segmenter.__call__)


def loss(model, images, organs):
    return nn.cross_entropy_loss(forward(model, images), "organ", organs).scalar()
