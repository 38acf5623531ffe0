"""Names for code that has none."""

from ._sources import LeafNames as LeafNames, names_of_leaves as names_of_leaves
from .naming import name as name, names_of as names_of
