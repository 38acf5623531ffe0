"""Optimizers that see the matrices of a model by the names of their axes, in Optax's style. May change before 1.0.

Optax's own transformations see arrays by position: `optax.contrib.muon` takes each array of rank two for a matrix from
its first axis to its second. So it orthogonalizes a stack of biases across layers, gives a stack of weights to Adam,
and reads the outputs of `Linear` as its inputs. `roles` says by names which axes are rows, columns and batch.

Optax is an optional dependency: install `axonym[optim]`.
"""

from .matrices import muon as muon, on_matrices as on_matrices, shampoo as shampoo
from .per_layer import check as check, per_layer as per_layer
from .roles import Role as Role, Roles as Roles, dimension_numbers as dimension_numbers, roles as roles
