"""Parametrisations: how the weights of a layer start, what they are multiplied by, and how fast they learn.

Under the standard parametrisation the best learning rate changes with the width of a model, because the steps of wide
layers change their outputs by more. The maximal-update parametrisation (muP, for Adam and its relatives) scales each
layer by its role, so that activations and their changes stay of one size at any width, and a learning rate found for a
small model is right for a large one.

| class                    | standard deviation at the start | output times    | learning rate times |
|--------------------------|---------------------------------|-----------------|---------------------|
| `LinearStandardParam`    | 1 / sqrt(in)                    | 1               | 1                   |
| `InputLinearMup`         | 1                               | 1               | 1                   |
| `HiddenLinearMup`        | 1 / sqrt(in)                    | 1               | 1 / in              |
| `OutputLinearMup`        | 1                               | 1 / in          | 1                   |
| `EmbeddingStandardParam` | 1 / embed                       | 1               | 1                   |
| `EmbeddingMup`           | 1                               | unembed 1 / embed | 1                 |

A layer takes one of these classes as `reparam_cls` and has it as `layer.reparam`. The first two columns are the
layer's business; the last one is the optimiser's, to which `learning_rate_scales` hands it.

>>> In, Out = axn.make_axes(embed=4, mlp=8)
>>> layer = axn.nn.Linear.init(In, Out, key=jax.random.key(0), reparam_cls=axn.nn.mup.HiddenLinearMup)
>>> layer.reparam.lr_scale
0.25
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, TypeVar

import equinox as eqx
import jax

from ..axis import AxisSpec, axis_size

__all__ = [
    "AbstractEmbeddingReparam",
    "AbstractLinearReparam",
    "AbstractReparam",
    "EmbeddingMup",
    "EmbeddingStandardParam",
    "HiddenLinearMup",
    "InputLinearMup",
    "LinearStandardParam",
    "OutputLinearMup",
    "ReparamEnabled",
    "learning_rate_scales",
]

T = TypeVar("T")


class AbstractReparam(abc.ABC):
    """How a layer is scaled. What a class does not say is one.

    >>> issubclass(axn.nn.mup.HiddenLinearMup, axn.nn.mup.AbstractReparam)
    True
    """

    @staticmethod
    @abc.abstractmethod
    def init_scale(In: AxisSpec, Out: AxisSpec) -> float:
        """The standard deviation of the weights at the start.

        Arguments:
            In: the axes that the layer takes away.
            Out: the axes that it brings.

        >>> axn.nn.mup.LinearStandardParam.init_scale(axn.Axis("embed", 4), axn.Axis("mlp", 8))
        0.5
        """

    @property
    def lr_scale(self) -> float:
        """What the learning rate of the weights is multiplied by.

        >>> axn.nn.mup.HiddenLinearMup(axn.Axis("embed", 4), axn.Axis("mlp", 8)).lr_scale
        0.25
        """
        return 1.0

    @property
    def active_scale(self) -> float:
        """What the output of the layer is multiplied by, before its bias is added.

        >>> axn.nn.mup.OutputLinearMup(axn.Axis("embed", 4), axn.Axis("vocab", 8)).active_scale
        0.25
        """
        return 1.0


@dataclasses.dataclass(frozen=True)
class AbstractLinearReparam(AbstractReparam):
    """How a linear layer is scaled.

    Arguments:
        In: the axes of its input.
        Out: the axes of its output.

    >>> isinstance(axn.nn.mup.InputLinearMup(axn.Axis("x", 2), axn.Axis("y", 3)), axn.nn.mup.AbstractLinearReparam)
    True
    """

    In: AxisSpec
    Out: AxisSpec


@dataclasses.dataclass(frozen=True)
class AbstractEmbeddingReparam(AbstractReparam):
    """How an embedding is scaled.

    Arguments:
        Embed: the axes of an embedding.
        Vocab: the axis of the tokens.

    >>> isinstance(axn.nn.mup.EmbeddingMup(axn.Axis("x", 2), axn.Axis("v", 3)), axn.nn.mup.AbstractEmbeddingReparam)
    True
    """

    Embed: AxisSpec
    Vocab: AxisSpec

    @property
    def unembed_active_scale(self) -> float:
        """What the logits are multiplied by.

        >>> axn.nn.mup.EmbeddingMup(axn.Axis("embed", 4), axn.Axis("vocab", 8)).unembed_active_scale
        0.25
        """
        return 1.0


class LinearStandardParam(AbstractLinearReparam):
    """The usual linear layer: the output starts as large as the input.

    >>> axn.nn.mup.LinearStandardParam(axn.Axis("embed", 4), axn.Axis("mlp", 8)).lr_scale
    1.0
    """

    @staticmethod
    def init_scale(In: AxisSpec, Out: AxisSpec) -> float:
        return 1 / math.sqrt(axis_size(In))


class InputLinearMup(AbstractLinearReparam):
    """A linear layer whose input does not grow with the width, such as the first.

    >>> axn.nn.mup.InputLinearMup.init_scale(axn.Axis("pixel", 4), axn.Axis("embed", 8))
    1.0
    """

    @staticmethod
    def init_scale(In: AxisSpec, Out: AxisSpec) -> float:
        return 1.0


class HiddenLinearMup(AbstractLinearReparam):
    """A linear layer whose input and output both grow with the width.

    >>> axn.nn.mup.HiddenLinearMup.init_scale(axn.Axis("embed", 4), axn.Axis("mlp", 8))
    0.5
    """

    @staticmethod
    def init_scale(In: AxisSpec, Out: AxisSpec) -> float:
        return 1 / math.sqrt(axis_size(In))

    @property
    def lr_scale(self) -> float:
        return 1 / axis_size(self.In)


class OutputLinearMup(AbstractLinearReparam):
    """A linear layer whose output does not grow with the width, such as the last.

    >>> axn.nn.mup.OutputLinearMup.init_scale(axn.Axis("embed", 4), axn.Axis("vocab", 8))
    1.0
    """

    @staticmethod
    def init_scale(In: AxisSpec, Out: AxisSpec) -> float:
        return 1.0

    @property
    def active_scale(self) -> float:
        return 1 / axis_size(self.In)


class EmbeddingStandardParam(AbstractEmbeddingReparam):
    """The usual embedding.

    >>> axn.nn.mup.EmbeddingStandardParam.init_scale(axn.Axis("vocab", 8), axn.Axis("embed", 4))
    0.25
    """

    @staticmethod
    def init_scale(In: AxisSpec, Out: AxisSpec) -> float:
        return 1 / axis_size(Out)


class EmbeddingMup(AbstractEmbeddingReparam):
    """An embedding of which the embedding axes grow with the width. Its logits are scaled as in `OutputLinearMup`.

    >>> axn.nn.mup.EmbeddingMup.init_scale(axn.Axis("vocab", 8), axn.Axis("embed", 4))
    1.0
    """

    @staticmethod
    def init_scale(In: AxisSpec, Out: AxisSpec) -> float:
        return 1.0

    @property
    def unembed_active_scale(self) -> float:
        return 1 / axis_size(self.Embed)


class ReparamEnabled(abc.ABC):
    """A layer that knows its parametrisation. The field that it speaks of is called `weight`.

    >>> issubclass(axn.nn.Linear, axn.nn.mup.ReparamEnabled)
    True
    """

    weight: Any

    @property
    @abc.abstractmethod
    def reparam(self) -> AbstractReparam:
        """The parametrisation.

        >>> layer = axn.nn.Linear.init(axn.Axis("embed", 4), axn.Axis("mlp", 8), key=jax.random.key(0))
        >>> layer.reparam
        LinearStandardParam(In=Axis(name='embed', size=4), Out=Axis(name='mlp', size=8))
        """


def learning_rate_scales(model: T) -> T:
    """What the learning rate of each array of a model is multiplied by, as a tree of the model's structure.

    It is the `lr_scale` of the layer for its weight, and one for all else. Multiply the updates of the optimiser, those
    of Adam or a relative, with it.

    Arguments:
        model: a tree of layers; of its arrays, or of updates for them.

    >>> In, Out = axn.make_axes(embed=4, mlp=8)
    >>> layer = axn.nn.Linear.init(In, Out, key=jax.random.key(0), reparam_cls=axn.nn.mup.HiddenLinearMup)
    >>> scales = axn.nn.mup.learning_rate_scales(layer)
    >>> scales.weight.array, scales.bias.array
    (0.25, 1.0)
    """

    def is_layer(node: Any) -> bool:
        return isinstance(node, ReparamEnabled)

    def scales(node: Any) -> Any:
        if not is_layer(node):
            return 1.0
        ones = jax.tree.map(lambda _: 1.0, node)
        weight = jax.tree.map(lambda _: node.reparam.lr_scale, node.weight)
        return eqx.tree_at(lambda layer: layer.weight, ones, weight, is_leaf=lambda x: x is None)

    return jax.tree.map(scales, model, is_leaf=is_layer)
