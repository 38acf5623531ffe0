"""Predicts distances between the residues of a protein, from a representation of all pairs."""

import equinox as eqx
import jax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision


class Triangle(eqx.Module):
    """Each pair learns from the triangles that it is a side of."""

    norm: nn.LayerNorm
    sides: nn.Linear
    gate: nn.Linear
    out: nn.Linear

    @staticmethod
    def init(Pair, Hidden, *, key):
        keys = jax.random.split(key, 3)
        return Triangle(
            norm=nn.LayerNorm.init(Pair),
            sides=nn.Linear.init(Pair, (axn.Axis("side", 2), Hidden), key=keys[0]),
            gate=nn.Linear.init(Pair, (axn.Axis("side", 2), Hidden), key=keys[1]),
            out=nn.Linear.init(Hidden, Pair, key=keys[2]),
        )

    def __call__(self, z):
        z = axn.unshard(self.norm(z))
        a, b = (self.sides(z) * nn.sigmoid(self.gate(z))).unbind("side")
        a, b = a.rename({"col": "third"}), b.rename({"row": "col", "col": "third"})
        return self.out(axn.dot(a, b, axis="third") * a.axis_size("third") ** -0.5)


class Layer(eqx.Module):
    triangle: Triangle
    norm: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear

    @staticmethod
    def init(Pair, Hidden, Mlp, *, key):
        keys = jax.random.split(key, 3)
        return Layer(
            triangle=Triangle.init(Pair, Hidden, key=keys[0]),
            norm=nn.LayerNorm.init(Pair),
            up=nn.Linear.init(Pair, Mlp, key=keys[1]),
            down=nn.Linear.init(Mlp, Pair, key=keys[2]),
        )

    def __call__(self, z):
        z = z + self.triangle(z)
        return z + self.down(nn.relu(self.up(self.norm(z))))


class Folder(eqx.Module):
    left: nn.Embedding
    right: nn.Embedding
    layers: nn.Stacked
    head: nn.Linear

    @staticmethod
    def init(Residue, Pair, Hidden, Mlp, Layers, Bin, *, key):
        keys = jax.random.split(key, 4)
        return Folder(
            left=nn.Embedding.init(Residue, Pair, key=keys[0]),
            right=nn.Embedding.init(Residue, Pair, key=keys[1]),
            layers=nn.Stacked.init(Layers, Layer, gradient_checkpointing=True)(Pair, Hidden, Mlp, key=keys[2]),
            head=nn.Linear.init(Pair, Bin, key=keys[3]),
        )

    def __call__(self, rows):
        left, right = self.left(rows), self.right(rows.rename({"row": "col"}))
        z = left.broadcast_axis(right.resolve_axis("col")) + right
        return self.head(self.layers.fold(z))


forward = mixed_precision("params=float32,compute=bfloat16,output=float32", Folder.__call__)


def loss(model, residues, bins):
    return nn.cross_entropy_loss(forward(model, residues), "bin", bins).scalar()
