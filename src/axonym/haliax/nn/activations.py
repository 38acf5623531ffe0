"""Activation functions."""

from ...nn.activations import *  # noqa: F403  # the same names, and those below
from ...nn.activations import hard_silu, silu

hard_swish = hard_silu
swish = silu
