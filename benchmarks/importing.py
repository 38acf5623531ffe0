"""What `import axonym` costs on top of JAX and Equinox."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from .harness import Row

HEAVY = ("treescope", "optax", "torch", "transformers", "flax", "orbax", "safetensors", "matplotlib", "IPython")


def _seconds(code: str) -> float:
    # As installed: with the bytecode that a first import, or pip, leaves behind.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    program = f"import time; start = time.perf_counter(); {code}; print(time.perf_counter() - start)"
    command = [sys.executable, "-c", program]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def rows() -> list[Row]:
    """Whole processes in turn; and that no heavy package is loaded before it is used."""
    _seconds("import axonym")
    pairs = [(_seconds("import axonym"), _seconds("import jax, jax.numpy, equinox")) for _ in range(7)]
    ours, theirs = ([p[i] for p in pairs] for i in range(2))
    ratio = statistics.median(ours) / statistics.median(theirs)
    loaded = subprocess.run(
        [sys.executable, "-c", f"import axonym, sys; print(sum(m in sys.modules for m in {HEAVY!r}))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    return [
        Row(
            "import",
            "import axonym",
            f"{statistics.median(ours):.2f} s",
            f"{statistics.median(theirs):.2f} s",
            ratio,
            1.3,
        ),
        Row("import", "heavy packages loaded", loaded, "0", 1.0 if loaded == "0" else float("inf"), 1.0),
    ]
