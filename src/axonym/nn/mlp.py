"""`MLP`: linear layers with activations between them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax

from ..axis import Axis, AxisSpec
from ..core import errors
from ..core.named_scope import named_call
from ..named_array import NamedArray
from ..tree import maybe_rng_split
from .activations import relu
from .linear import Linear


@errors.say_how_to_make
class MLP(eqx.Module):
    """A multi-layer perceptron.

    The axes of the hidden layers are called `mlp` and `mlp2` in turn. If a mapping shards only `mlp`, the weight of the
    first layer is sharded over its output and the weight of the second over its input, so no all-gather is needed
    between them.

    >>> In, Out = axn.make_axes(feature=3, label=2)
    >>> mlp = axn.nn.MLP.init(In, Out, width=8, depth=2, key=jax.random.key(0))
    >>> [axn.debug.describe_array(layer.weight) for layer in mlp.layers]
    ['float32[mlp=8, feature=3]', 'float32[mlp2=8, mlp=8]', 'float32[label=2, mlp2=8]']
    >>> mlp(axn.ones({"batch": 4, "feature": 3})).shape
    {'batch': 4, 'label': 2}
    """

    activation: Callable[[Any], Any] = eqx.field(static=True)
    layers: Sequence[Linear]

    def __check_init__(self) -> None:
        if not callable(self.activation):
            raise TypeError(
                f"MLP: `activation` is a function, got {type(self.activation).__name__}. "
                "Write `MLP.init(In, Out, width, depth, key=key)`."
            )

    @staticmethod
    def init(
        Input: AxisSpec,
        Output: AxisSpec,
        width: int | Axis,
        depth: int,
        activation: Callable[[Any], Any] = relu,
        *,
        out_first: bool = True,
        use_bias: bool = True,
        use_final_bias: bool = True,
        key: jax.Array,
        dot_general: Callable[..., jax.Array] | None = None,
        init_scale: float = 1.0,
    ) -> MLP:
        """Make layers with random weights and biases of zeros.

        Arguments:
            width: the size of the hidden layers, or an axis; every other layer has its name with a 2 appended.
            depth: the number of hidden layers; 0 gives a single linear layer.
            key, out_first, dot_general, init_scale: as in `Linear.init`.

        >>> mlp = axn.nn.MLP.init((), axn.Axis("label", 2), axn.Axis("hidden", 4), 1, key=jax.random.key(0))
        >>> [axn.debug.describe_array(layer.weight) for layer in mlp.layers]
        ['float32[hidden=4]', 'float32[label=2, hidden=4]']
        """
        if depth < 0:
            raise ValueError(f"MLP: `depth`, the number of hidden layers, must not be negative, got {depth}.")
        hidden = width if isinstance(width, Axis) else Axis("mlp", width)
        turns = hidden, hidden.alias(f"{hidden.name}2")
        specs = [Input, *(turns[i % 2] for i in range(depth)), Output]
        make = functools.partial(Linear.init, out_first=out_first, dot_general=dot_general, init_scale=init_scale)
        layers = []
        for i, layer_key in enumerate(jax.random.split(key, depth + 1)):
            has_bias = use_final_bias if i == depth else use_bias
            layers.append(make(specs[i], specs[i + 1], key=layer_key, use_bias=has_bias))
        return MLP(activation, tuple(layers))

    @property
    def In(self) -> AxisSpec:
        """Return the axes of the input.

        >>> axn.nn.MLP.init(axn.Axis("x", 3), axn.Axis("y", 2), 8, 1, key=jax.random.key(0)).In
        Axis(name='x', size=3)
        """
        return self.layers[0].In

    @property
    def Out(self) -> AxisSpec:
        """Return the axes of the output.

        >>> axn.nn.MLP.init(axn.Axis("x", 3), axn.Axis("y", 2), 8, 1, key=jax.random.key(0)).Out
        Axis(name='y', size=2)
        """
        return self.layers[-1].Out

    @named_call
    def __call__(self, x: NamedArray, *, key: jax.Array | None = None) -> NamedArray:
        """Apply the layers, with the activation between them; a `key` is split among the layers."""
        keys = maybe_rng_split(key, len(self.layers))
        for layer, layer_key in zip(self.layers[:-1], keys, strict=False):
            x = self.activation(layer(x, key=layer_key))
        return self.layers[-1](x, key=keys[-1])
