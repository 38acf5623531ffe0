"""Meshes of both kinds."""

from __future__ import annotations

import pytest
from jax.sharding import Mesh


@pytest.fixture(params=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest, auto_mesh: Mesh, explicit_mesh: Mesh) -> Mesh:
    """The (4, 2) mesh, once with Auto and once with Explicit axes."""
    return auto_mesh if request.param == "auto" else explicit_mesh
