"""Measure `import axonym` against `import jax`, and a first layer against one of Equinox."""

from __future__ import annotations

import os
import subprocess
import sys

from .harness import Row

HEAVY = ("treescope", "optax", "torch", "transformers", "flax", "orbax", "safetensors", "matplotlib", "IPython")
LAYER = ("import axonym as axn; axn.nn.Linear; axn.named_jit", "import equinox as eqx; eqx.nn.Linear; eqx.filter_jit")


def _seconds(code: str) -> float:
    # As installed: with the bytecode that a first import, or pip, leaves behind.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    program = f"import time; start = time.perf_counter(); {code}; print(time.perf_counter() - start)"
    command = [sys.executable, "-c", program]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def _row(what: str, code: str, other: str, limit: float) -> Row:
    """Compare the fastest of processes that run in turn: what else the machine does only ever adds."""
    _seconds(code)
    pairs = [(_seconds(code), _seconds(other)) for _ in range(15)]
    ours, theirs = (min(p[i] for p in pairs) for i in range(2))
    return Row("import", what, f"{ours:.2f} s", f"{theirs:.2f} s", ours / theirs, limit)


def rows() -> list[Row]:
    """Whole processes in turn; and that no heavy package is loaded before it is used."""
    loaded = subprocess.run(
        [sys.executable, "-c", f"import axonym, sys; print(sum(m in sys.modules for m in {(*HEAVY, 'equinox')!r}))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    return [
        _row("import axonym", "import axonym", "import jax", 1.1),
        _row("a layer and named_jit, against Equinox", *LAYER, 1.25),
        Row("import", "heavy packages loaded", loaded, "0", 1.0 if loaded == "0" else float("inf"), 1.0),
    ]
