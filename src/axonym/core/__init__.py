"""Modules that the rest of the library stands on: errors, parsing, trees, caches, and what versions of JAX change."""
