"""The golden files agree with `transformers`, if the extra `interop` is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parent / "make_golden.py"
GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.npz"))

installed = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
needs_interop = pytest.mark.skipif(not installed, reason="needs the extra: pip install -e '.[interop]'")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files again, in a separate process, so that PyTorch and JAX are not loaded together."""
    folder = tmp_path_factory.mktemp("golden")
    made = subprocess.run([sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    return folder


@needs_interop
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_files_agree_with_transformers(path: Path, fresh: Path) -> None:
    with np.load(path) as kept, np.load(fresh / path.name) as made:
        assert set(kept) == set(made)
        for name in set(kept) - {"config"}:  # which also has the version of transformers
            # PyTorch sums in an order of its own, which depends on its threads.
            np.testing.assert_allclose(kept[name], made[name], rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_files_are_small(path: Path) -> None:
    assert path.stat().st_size < 200_000
