"""Meshes of every kind."""

from __future__ import annotations

import pytest
from jax.sharding import AxisType, Mesh


@pytest.fixture(params=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest, auto_mesh: Mesh, explicit_mesh: Mesh) -> Mesh:
    """The (4, 2) mesh, once with Auto and once with Explicit axes."""
    return auto_mesh if request.param == "auto" else explicit_mesh


@pytest.fixture(scope="session")
def mixed_mesh(auto_mesh: Mesh) -> Mesh:
    """The same with one axis of each type."""
    return Mesh(auto_mesh.devices, auto_mesh.axis_names, axis_types=(AxisType.Explicit, AxisType.Auto))
