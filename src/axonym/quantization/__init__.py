"""Quantized replacements for `jax.lax.dot_general`, with 8-bit products, for `axonym.dot` and `axonym.nn.Linear`.

May change before 1.0.

>>> layer = axn.nn.Linear.init(axn.Axis("embed", 3), axn.Axis("mlp", 4), key=jax.random.key(0))
>>> layer = axn.quantization.quantize_linear_layers(layer, axn.quantization.QuantizationConfig(fp8=True))
>>> layer(axn.ones({"batch": 2, "embed": 3})).shape
{'batch': 2, 'mlp': 4}
"""

from .fp8 import (
    Fp8DotGeneralOp as Fp8DotGeneralOp,
    dot_general_with_precision as dot_general_with_precision,
    in_qdq as in_qdq,
    out_qdq as out_qdq,
)
from .int8 import Int8DotGeneralOp as Int8DotGeneralOp
from .layers import (
    DefaultDotGeneralOp as DefaultDotGeneralOp,
    DotGeneralOp as DotGeneralOp,
    QuantizationConfig as QuantizationConfig,
    quantize_linear_layers as quantize_linear_layers,
)
from .overwriting import (
    OverwriteWithGradient as OverwriteWithGradient,
    accumulate_gradients as accumulate_gradients,
    apply_updates as apply_updates,
    partition_for_grad_overwrite as partition_for_grad_overwrite,
)
from .weights import (
    SmallEmbedding as SmallEmbedding,
    SmallLinear as SmallLinear,
    quantize_weights as quantize_weights,
)
