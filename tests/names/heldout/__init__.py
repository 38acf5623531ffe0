"""Programs that were written without knowledge of the inference; `python -m tests.names.heldout.score` measures it."""
