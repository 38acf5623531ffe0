"""A mesh of mixed kind."""

from __future__ import annotations

import pytest
from jax.sharding import AxisType, Mesh


@pytest.fixture(scope="session")
def mixed_mesh(auto_mesh: Mesh) -> Mesh:
    """Return a mesh with one axis of each type."""
    return Mesh(auto_mesh.devices, auto_mesh.axis_names, axis_types=(AxisType.Explicit, AxisType.Auto))
