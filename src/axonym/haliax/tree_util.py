"""Trees whose leaves are named arrays."""

from .. import tree
from ..tree import hashable_combine as hashable_combine, maybe_rng_split as maybe_rng_split, resize_axis as resize_axis
from ._signatures import with_parameters

hashable_partition = with_parameters(tree.hashable_partition, tree="pytree")
scan_aware_tree_map = tree.scan_aware_map
tree_flatten = tree.flatten
tree_leaves = tree.leaves
tree_map = tree.map
tree_structure = tree.structure
tree_unflatten = tree.unflatten
