"""Parametrizations: the initial scale, output scale and learning-rate scale of a layer's weights.

Under the standard parametrization, the best learning rate depends on the width of a model, because an update changes
the outputs of wide layers more. The maximal-update parametrization (muP, for Adam and its relatives) scales each layer
by its role. Activations and their changes then have the same size at any width, and a learning rate tuned on a small
model works for a large one.

| class                    | standard deviation at the start | output times    | learning rate times |
|--------------------------|---------------------------------|-----------------|---------------------|
| `LinearStandardParam`    | 1 / sqrt(in)                    | 1               | 1                   |
| `InputLinearMup`         | 1                               | 1               | 1                   |
| `HiddenLinearMup`        | 1 / sqrt(in)                    | 1               | 1 / in              |
| `OutputLinearMup`        | 1                               | 1 / in          | 1                   |
| `EmbeddingStandardParam` | 1 / embed                       | 1               | 1                   |
| `EmbeddingMup`           | 1                               | unembed 1 / embed | 1                 |

A layer takes one of these classes as `reparam_cls`, and `layer.reparam` is its instance. The layer applies the first
two columns; the last is for the optimizer, see `learning_rate_scales`.

>>> In, Out = axn.make_axes(embed=4, mlp=8)
>>> layer = axn.nn.Linear.init(In, Out, key=jax.random.key(0), reparam_cls=axn.nn.mup.HiddenLinearMup)
>>> layer.reparam.lr_scale
0.25
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
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


class AbstractReparam:
    """The scales of a layer's weights, output and learning rate; one by default.

    >>> issubclass(axn.nn.mup.HiddenLinearMup, axn.nn.mup.AbstractReparam)
    True
    """

    def __init_subclass__(cls, start: Callable[[AxisSpec, AxisSpec], float] | None = None, **inverse: str):
        """Set the scales of a class: the first one by a function, others as the inverse of the size of a field."""
        super().__init_subclass__()
        own: dict[str, Any] = {} if start is None else {"init_scale": staticmethod(start)}
        for name, field in inverse.items():
            own[name] = property(lambda self, field=field: 1 / axis_size(getattr(self, field)))
        for name, scale in own.items():
            setattr(cls, name, scale)

    @staticmethod
    def init_scale(In: AxisSpec, Out: AxisSpec) -> float:
        """Return the initial standard deviation of the weights, from the axes of the layer's input and output.

        >>> axn.nn.mup.LinearStandardParam.init_scale(axn.Axis("embed", 4), axn.Axis("mlp", 8))
        0.5
        """
        return 1.0

    @property
    def lr_scale(self) -> float:
        """Return the factor for the learning rate of the weights.

        >>> axn.nn.mup.HiddenLinearMup(axn.Axis("embed", 4), axn.Axis("mlp", 8)).lr_scale
        0.25
        """
        return 1.0

    @property
    def active_scale(self) -> float:
        """Return the factor for the output of the layer, before its bias is added.

        >>> axn.nn.mup.OutputLinearMup(axn.Axis("embed", 4), axn.Axis("vocab", 8)).active_scale
        0.25
        """
        return 1.0


@dataclasses.dataclass(frozen=True)
class AbstractLinearReparam(AbstractReparam):
    """The scales of a linear layer, from the axes of its input and output.

    >>> isinstance(axn.nn.mup.InputLinearMup(axn.Axis("x", 2), axn.Axis("y", 3)), axn.nn.mup.AbstractLinearReparam)
    True
    """

    In: AxisSpec
    Out: AxisSpec


@dataclasses.dataclass(frozen=True)
class AbstractEmbeddingReparam(AbstractReparam):
    """The scales of an embedding layer, from the axes of an embedding and the axis of the tokens.

    >>> isinstance(axn.nn.mup.EmbeddingMup(axn.Axis("x", 2), axn.Axis("v", 3)), axn.nn.mup.AbstractEmbeddingReparam)
    True
    """

    Embed: AxisSpec
    Vocab: AxisSpec

    @property
    def unembed_active_scale(self) -> float:
        """Return the factor for the logits.

        >>> axn.nn.mup.EmbeddingMup(axn.Axis("embed", 4), axn.Axis("vocab", 8)).unembed_active_scale
        0.25
        """
        return 1.0


def _of_input(In: AxisSpec, Out: AxisSpec) -> float:
    return 1 / math.sqrt(axis_size(In))


def _of_embedding(In: AxisSpec, Out: AxisSpec) -> float:
    return 1 / axis_size(Out)


class LinearStandardParam(AbstractLinearReparam, start=_of_input):
    """The standard linear layer: at initialization, the output is as large as the input.

    >>> axn.nn.mup.LinearStandardParam(axn.Axis("embed", 4), axn.Axis("mlp", 8)).lr_scale
    1.0
    """


class InputLinearMup(AbstractLinearReparam):
    """A linear layer whose input does not grow with the width, such as the first layer.

    >>> axn.nn.mup.InputLinearMup.init_scale(axn.Axis("pixel", 4), axn.Axis("embed", 8))
    1.0
    """


class HiddenLinearMup(AbstractLinearReparam, start=_of_input, lr_scale="In"):
    """A linear layer whose input and output both grow with the width.

    >>> axn.nn.mup.HiddenLinearMup.init_scale(axn.Axis("embed", 4), axn.Axis("mlp", 8))
    0.5
    """


class OutputLinearMup(AbstractLinearReparam, active_scale="In"):
    """A linear layer whose output does not grow with the width, such as the last layer.

    >>> axn.nn.mup.OutputLinearMup.init_scale(axn.Axis("embed", 4), axn.Axis("vocab", 8))
    1.0
    """


class EmbeddingStandardParam(AbstractEmbeddingReparam, start=_of_embedding):
    """The standard embedding.

    >>> axn.nn.mup.EmbeddingStandardParam.init_scale(axn.Axis("vocab", 8), axn.Axis("embed", 4))
    0.25
    """


class EmbeddingMup(AbstractEmbeddingReparam, unembed_active_scale="Embed"):
    """An embedding whose embedding axes grow with the width. Its logits are scaled as in `OutputLinearMup`.

    >>> axn.nn.mup.EmbeddingMup.init_scale(axn.Axis("vocab", 8), axn.Axis("embed", 4))
    1.0
    """


class ReparamEnabled(abc.ABC):
    """A layer with a parametrization, which applies to its field `weight`.

    >>> issubclass(axn.nn.Linear, axn.nn.mup.ReparamEnabled)
    True
    """

    weight: Any

    @property
    @abc.abstractmethod
    def reparam(self) -> AbstractReparam:
        """Return the parametrization.

        >>> layer = axn.nn.Linear.init(axn.Axis("embed", 4), axn.Axis("mlp", 8), key=jax.random.key(0))
        >>> layer.reparam
        LinearStandardParam(In=Axis(name='embed', size=4), Out=Axis(name='mlp', size=8))
        """


def learning_rate_scales(tree: T) -> T:
    """Return the factor for the learning rate of each array, in a tree of the same structure.

    The factor of a weight is its layer's `lr_scale`; all others are one. Multiply the updates of the optimizer, Adam or
    a relative, by these factors.

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

    return jax.tree.map(scales, tree, is_leaf=is_layer)
