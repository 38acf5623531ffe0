"""Measurements of Axonym against raw JAX, side by side in one process: `python -m benchmarks`."""
