"""Marks for tests with pytest."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax


def skip_if_not_enough_devices(count: int, reason: str | None = None) -> Any:
    """Return a mark of pytest that skips a test where JAX has fewer devices.

    >>> hax.testing.skip_if_not_enough_devices(1).args
    (False,)
    """
    import pytest

    found = len(jax.devices())
    why = f"needs {count} devices, has {found}" + (f": {reason}" if reason else "")
    return pytest.mark.skipif(found < count, reason=why)


def has_torch() -> bool:
    """Return whether PyTorch is installed.

    >>> isinstance(hax.testing.has_torch(), bool)
    True
    """
    return importlib.util.find_spec("torch") is not None


def skip_if_no_torch(f: Any) -> Any:
    """Mark a test of pytest as one that needs PyTorch.

    >>> def test_export(): ...
    >>> hax.testing.skip_if_no_torch(test_export).pytestmark[0].name
    'skipif'
    """
    import pytest

    return pytest.mark.skipif(not has_torch(), reason="PyTorch is not installed")(f)
