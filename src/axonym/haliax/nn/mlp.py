"""`MLP`: linear layers with activations between them."""

from ...nn.mlp import MLP as MLP

DEFAULT_WIDTH_NAME = "mlp"
