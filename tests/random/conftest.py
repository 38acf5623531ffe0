"""Fixtures of the tests of samplers."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest
from jax.sharding import Mesh


@pytest.fixture(scope="module", autouse=True)
def _quick_compilation() -> Iterator[None]:
    """Most of the time here goes into compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(params=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest, auto_mesh: Mesh, explicit_mesh: Mesh) -> Mesh:
    return auto_mesh if request.param == "auto" else explicit_mesh
