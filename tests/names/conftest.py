"""A fixture for programs that promote ranks, as most do."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def promotes_ranks() -> Iterator[None]:
    """Let programs broadcast arrays of fewer axes."""
    with jax.numpy_rank_promotion("allow"):
        yield
