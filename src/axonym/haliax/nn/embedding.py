"""`Embedding`: a table with a vector for each token."""

from ...nn import Embedding as Embedding
