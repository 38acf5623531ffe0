"""Quantising the layers of a model that is there already."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..axis import axes_of_spec
from ..nn.linear import Linear
from .fp8 import Fp8DotGeneralOp
from .int8 import Int8DotGeneralOp
from .overwriting import T

__all__ = ["QuantizationConfig", "quantize_linear_layers"]


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """Which linear layers to quantise, and how.

    A layer is known by where it is in the model: `blocks.mlp.up` is `model.blocks.mlp.up`, `layers.0` is the first of
    a list `layers`.

    Arguments:
        targets: None for all layers; a regular expression that the place of a layer begins with; or a list with names
            of layers, in full or the last part of them.
        amax_history_length: how many steps the scales of 8-bit floats follow from.
        compute_dtype: the dtype that 8-bit floats are multiplied in; by default, that of the operands.
        fp8: round to 8-bit floats.
        int8: round to 8-bit integers.

    >>> axn.quantization.QuantizationConfig(targets=["up", "down"], fp8=True).amax_history_length
    1024
    """

    targets: Sequence[str] | str | None = None
    amax_history_length: int = 1024
    compute_dtype: Any = None
    fp8: bool = False
    int8: bool = False

    def __post_init__(self) -> None:
        if self.fp8 and self.int8:
            raise ValueError("QuantizationConfig: both `fp8` and `int8` are asked for; a layer is quantised one way.")


def quantize_linear_layers(tree: T, config: QuantizationConfig) -> T:
    """A model whose linear layers multiply as a configuration says. Their weights stay as they are.

    Arguments:
        tree: the model.
        config: which layers, and how.

    >>> embed = axn.Axis("embed", 3)
    >>> model = {name: axn.nn.Linear.init(embed, embed, key=jax.random.key(0)) for name in ("up", "down")}
    >>> model = axn.quantization.quantize_linear_layers(model, axn.quantization.QuantizationConfig("up", int8=True))
    >>> model["up"].dot_general, model["down"].dot_general
    (Int8DotGeneralOp(), None)
    """
    if not (config.fp8 or config.int8):
        return tree
    seen: dict[str, bool] = {}

    def visit(path: Any, x: Any) -> Any:
        if not isinstance(x, Linear):
            return x
        place = jax.tree_util.keystr(path, simple=True, separator=".")
        seen[place] = _is_meant(place, config.targets)
        return dataclasses.replace(x, dot_general=_operation(x, config)) if seen[place] else x

    quantised = jax.tree_util.tree_map_with_path(visit, tree, is_leaf=lambda x: isinstance(x, Linear))
    if not any(seen.values()):
        there = f"; they are {', '.join(seen)}" if seen else ""
        raise ValueError(f"quantize_linear_layers: no linear layer is meant by targets {config.targets!r}{there}.")
    return quantised


def _is_meant(place: str, targets: Sequence[str] | str | None) -> bool:
    if targets is None:
        return True
    if isinstance(targets, str):
        return re.match(targets, place) is not None
    return place in targets or place.rpartition(".")[2] in targets


def _operation(layer: Linear, config: QuantizationConfig) -> Any:
    if config.int8:
        return Int8DotGeneralOp.init()
    op = Fp8DotGeneralOp.init(config.amax_history_length, config.compute_dtype)
    # Of layers that are stacked, each has a state of its own.
    own = {a.name for a in (*axes_of_spec(layer.Out), *layer.weight_in)}
    stack = [size for name, size in zip(layer.weight.names, layer.weight.array.shape, strict=True) if name not in own]
    return jax.tree.map(lambda x: jnp.tile(x, (*stack, 1)), op) if stack else op
