"""Transforms of functions: over a named axis (`vmap`, `scan`, ...), or from positions to names (`lift`)."""
