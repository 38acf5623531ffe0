"""Optimizers that see the matrices of a model by the names of their axes, in Optax's style. May change before 1.0.

Optax is an optional dependency: install `axonym[optim]`.
"""

from .matrices import muon as muon, on_matrices as on_matrices, shampoo as shampoo
from .roles import (
    Role as Role,
    Roles as Roles,
    check as check,
    dimension_numbers as dimension_numbers,
    per_layer as per_layer,
    roles as roles,
)
