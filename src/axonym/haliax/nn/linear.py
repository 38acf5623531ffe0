"""Linear layers."""

from ...nn.linear import Linear as Linear
from ...nn.moe import MoELinear as MoELinear
