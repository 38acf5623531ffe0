"""Activation functions."""

# ruff: noqa: I001
# fmt: off
from ...nn import (
    celu as celu, elu as elu, gelu as gelu, glu as glu, hard_sigmoid as hard_sigmoid, hard_silu as hard_silu,
    hard_tanh as hard_tanh, leaky_relu as leaky_relu, log_sigmoid as log_sigmoid, quick_gelu as quick_gelu, relu
    as relu, relu6 as relu6, relu_squared as relu_squared, selu as selu, sigmoid as sigmoid, silu as silu,
    soft_sign as soft_sign, softplus as softplus, squareplus as squareplus,
)
# fmt: on

hard_swish = hard_silu
swish = silu
