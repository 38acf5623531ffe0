"""A convolutional network that finds defects in photos of products."""

import equinox as eqx
import jax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision


class Residual(eqx.Module):
    first: nn.Conv
    first_norm: nn.GroupNorm
    second: nn.Conv
    second_norm: nn.GroupNorm

    @staticmethod
    def init(Space, Width, *, key):
        Middle = Width.alias("m" + Width.name)
        keys = jax.random.split(key)
        return Residual(
            first=nn.Conv.init(Space, Width, Middle, kernel_size=3, padding="SAME", key=keys[0]),
            first_norm=nn.GroupNorm.init(Middle, 16, ("height", "width")),
            second=nn.Conv.init(Space, Middle, Width, kernel_size=3, padding="SAME", key=keys[1]),
            second_norm=nn.GroupNorm.init(Width, 16, ("height", "width")),
        )

    def __call__(self, x):
        y = nn.relu(self.first_norm(self.first(x)))
        return nn.relu(x + self.second_norm(self.second(y)))


class Inspector(eqx.Module):
    stem: nn.Conv
    shrink: list[nn.Conv]
    blocks: list[list[Residual]]
    head: nn.Linear

    @staticmethod
    def init(Space, Color, Widths, Defect, *, key):
        keys = iter(jax.random.split(key, 4 * len(Widths) + 2))
        shrink = [
            nn.Conv.init(Space, a, b, kernel_size=2, stride=2, key=next(keys)) for a, b in zip(Widths, Widths[1:])
        ]
        return Inspector(
            stem=nn.Conv.init(Space, Color, Widths[0], kernel_size=4, stride=4, key=next(keys)),
            shrink=shrink,
            blocks=[[Residual.init(Space, w, key=next(keys)) for _ in range(2)] for w in Widths],
            head=nn.Linear.init(Widths[-1], Defect, key=next(keys)),
        )

    def __call__(self, x):
        x = self.stem(x)
        for i, blocks in enumerate(self.blocks):
            for block in blocks:
                x = block(x)
            if i < len(self.shrink):
                x = self.shrink[i](x)
        return self.head(x.mean(("height", "width")))


forward = mixed_precision("params=float32,compute=bfloat16,output=float32", Inspector.__call__)


def loss(model, photos, defects):
    return nn.cross_entropy_loss(forward(model, photos), "defect", defects).scalar()
