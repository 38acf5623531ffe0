"""`MLP`: linear layers with activations between them."""

from ...nn import MLP as MLP

DEFAULT_WIDTH_NAME = "mlp"
