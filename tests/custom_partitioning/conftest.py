"""The meshes and mappings that operations are tried on: Auto and Explicit; one axis split, the other, both, neither."""

import jax
import pytest

import axonym as axn

MAPPINGS = [{"batch": "data"}, {"vocab": "model"}, {"batch": "data", "vocab": "model"}, {"batch": None}]


@pytest.fixture(params=["auto", "explicit"])
def mesh(request, auto_mesh, explicit_mesh):
    mesh = {"auto": auto_mesh, "explicit": explicit_mesh}[request.param]
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture(params=MAPPINGS, ids=lambda m: "+".join(n for n, a in m.items() if a) or "neither")
def mapping(request):
    with axn.axis_mapping(request.param):
        yield request.param


@pytest.fixture
def both_split():
    """The one mapping that asks most, for what would take long with all of them."""
    with axn.axis_mapping({"batch": "data", "vocab": "model"}):
        yield
