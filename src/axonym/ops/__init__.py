"""The operations, a file for each family."""
