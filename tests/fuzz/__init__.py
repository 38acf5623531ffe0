"""Random programs of named operations, compared with NumPy, with positional JAX, and under every way to run them."""
