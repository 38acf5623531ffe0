"""The meshes and mappings for tests of operations: Auto and Explicit; one axis sharded, the other, both, neither."""

import jax
import pytest

import axonym as axn

# The most demanding one is tested with every version of JAX.
BOTH = {"batch": "data", "vocab": "model"}
OTHERS = [pytest.param(m, marks=pytest.mark.oldest) for m in ({"batch": "data"}, {"vocab": "model"}, {"batch": None})]


@pytest.fixture(params=["auto", "explicit"])
def mesh(request, auto_mesh, explicit_mesh):
    mesh = {"auto": auto_mesh, "explicit": explicit_mesh}[request.param]
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture(params=[BOTH, *OTHERS], ids=lambda m: "+".join(n for n, a in m.items() if a) or "neither")
def mapping(request):
    with axn.axis_mapping(request.param):
        yield request.param


@pytest.fixture
def both_split():
    """Return the most demanding mapping, for tests that would take long with all of them."""
    with axn.axis_mapping(BOTH):
        yield
