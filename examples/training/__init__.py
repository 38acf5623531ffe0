"""The parts of `train_lm.py`, one subject in each file."""

import importlib.util

_NEEDED = ("tyro", "optax", "rich", "matplotlib", "orbax")

if _missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
    raise SystemExit(
        f"The training script needs {', '.join(_missing)}: install what it needs with pip install -e '.[examples]'."
    )
