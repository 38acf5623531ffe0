"""The interface of replacements for `jax.lax.dot_general`, and quantized ones for the linear layers of a model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..axis import axes_of_spec
from ..nn.linear import Linear
from .fp8 import Fp8DotGeneralOp
from .int8 import Int8DotGeneralOp
from .overwriting import T

__all__ = ["DefaultDotGeneralOp", "DotGeneralOp", "QuantizationConfig", "quantize_linear_layers"]


class DotGeneralOp(Protocol):
    """The call signature of a replacement for `jax.lax.dot_general`. Make it a module if it holds arrays.

    >>> op: axn.quantization.DotGeneralOp = axn.quantization.DefaultDotGeneralOp()
    >>> op(jnp.ones((1, 2)), jnp.ones((2, 1)), (((1,), (0,)), ((), ())))
    Array([[2.]], dtype=float32)
    """

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: jax.lax.DotDimensionNumbers,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> jax.Array: ...

    @staticmethod
    def default() -> DefaultDotGeneralOp:
        """Return the operation of layers that are not quantized.

        >>> axn.quantization.DotGeneralOp.default()
        DefaultDotGeneralOp()
        """
        return DefaultDotGeneralOp()


class DefaultDotGeneralOp(eqx.Module):
    """`jax.lax.dot_general` itself.

    >>> axn.dot(axn.ones({"x": 2}), axn.ones({"x": 2}), axis="x", dot_general=axn.quantization.DefaultDotGeneralOp())
    NamedArray(float32[], 2.)
    """

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: jax.lax.DotDimensionNumbers,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> jax.Array:
        return jax.lax.dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type)

    @staticmethod
    def init() -> DefaultDotGeneralOp:
        """Make the operation.

        >>> axn.quantization.DefaultDotGeneralOp.init()
        DefaultDotGeneralOp()
        """
        return DefaultDotGeneralOp()


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """The linear layers to quantize, and the kind of quantization.

    A layer is named by its path in the model: `blocks.mlp.up` is `model.blocks.mlp.up`, `layers.0` is the first layer
    of a list `layers`.

    Arguments:
        targets: None for all layers; a regular expression that matches the beginning of a layer's path; or a list of
            paths, or of their last parts.
        amax_history_length: the length of the history that the scales of 8-bit floats follow from.
        compute_dtype: the dtype that 8-bit floats are multiplied in; by default, the dtype of the operands.
        fp8: round to 8-bit floats.
        int8: round to 8-bit integers.

    >>> axn.quantization.QuantizationConfig(targets=["up", "down"], fp8=True).amax_history_length
    1024
    """

    targets: Sequence[str] | str | None = None
    amax_history_length: int = 1024
    compute_dtype: DTypeLike | None = None
    fp8: bool = False
    int8: bool = False

    def __post_init__(self) -> None:
        if self.fp8 and self.int8:
            raise ValueError("QuantizationConfig: `fp8` and `int8` are both set; choose one of them.")


def quantize_linear_layers(tree: T, config: QuantizationConfig) -> T:
    """Replace the `dot_general` of a model's linear layers with a quantized one. The weights do not change.

    >>> embed = axn.Axis("embed", 3)
    >>> model = {name: axn.nn.Linear.init(embed, embed, key=jax.random.key(0)) for name in ("up", "down")}
    >>> model = axn.quantization.quantize_linear_layers(model, axn.quantization.QuantizationConfig("up", int8=True))
    >>> model["up"].dot_general, model["down"].dot_general
    (Int8DotGeneralOp(), None)
    """
    if not (config.fp8 or config.int8):
        return tree

    def replace(name: str, layer: Any) -> Any:
        if config.int8:
            return dataclasses.replace(layer, dot_general=Int8DotGeneralOp.init())
        op = Fp8DotGeneralOp.init(config.amax_history_length, config.compute_dtype)
        # Each of several stacked layers has its own state.
        own = {a.name for a in (*axes_of_spec(layer.Out), *layer.weight_in)}
        stack = [size for name, size in layer.weight.shape.items() if name not in own]
        op = jax.tree.map(lambda x: jnp.tile(x, (*stack, 1)), op) if stack else op
        return dataclasses.replace(layer, dot_general=op)

    return replace_layers("quantize_linear_layers", tree, (Linear,), config.targets, replace)


def replace_layers(
    what: str,
    tree: T,
    kinds: tuple[type, ...],
    targets: Sequence[str] | str | None,
    replace: Callable[[str, Any], Any],
) -> T:
    """Replace the layers of a model that are targets; `replace` gets the path and the layer."""
    seen: dict[str, bool] = {}

    def visit(path: Any, x: Any) -> Any:
        if not isinstance(x, kinds):
            return x
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if targets is None or isinstance(targets, str):
            seen[name] = targets is None or re.match(targets, name) is not None
        else:
            seen[name] = name in targets or name.rpartition(".")[2] in targets
        return replace(name or "the layer", x) if seen[name] else x

    replaced = jax.tree_util.tree_map_with_path(visit, tree, is_leaf=lambda x: isinstance(x, kinds))
    if not any(seen.values()):
        known = f"; the layers are {', '.join(seen)}" if seen else ""
        kind = "linear layer" if len(kinds) == 1 else "linear layer or embedding"
        raise ValueError(f"{what}: no {kind} matches targets {targets!r}{known}.")
    return replaced
