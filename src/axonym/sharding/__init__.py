"""Distributing by name: mappings, meshes, placements, and what applies them."""
