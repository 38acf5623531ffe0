"""The surroundings of every test: eight simulated devices and strict numerics.

The devices must be asked for before JAX starts its backend, so this module does it while it is imported. Tests that
need several devices take a mesh fixture; they never skip.
"""

import os
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest
from jax.sharding import AxisType, Mesh

DEVICES = 8
MESH_SHAPE = (4, 2)
MESH_AXES = ("data", "model")

if jax.__version_info__ < (0, 11):  # the new one of their two code generators takes longer
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"

jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example of a property compiles, so its time says nothing. CI draws the same examples every time.
hypothesis.settings.register_profile("axonym", deadline=None, print_blob=True, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("axonym")


@pytest.fixture(scope="session", autouse=True)
def _simulated_devices() -> None:
    """Fails the whole run, rather than skipping part of it, when the devices did not come up."""
    count = jax.device_count()
    assert count == DEVICES, f"the tests need {DEVICES} devices and JAX started with {count}: {jax.devices()}"


def _make_mesh(axis_type: AxisType) -> Mesh:
    return jax.make_mesh(MESH_SHAPE, MESH_AXES, axis_types=(axis_type,) * len(MESH_AXES))


@pytest.fixture(scope="session")
def auto_mesh() -> Mesh:
    """A (4, 2) mesh of Auto axes, "data" and "model"."""
    return _make_mesh(AxisType.Auto)


@pytest.fixture(scope="session")
def explicit_mesh() -> Mesh:
    """A (4, 2) mesh of Explicit axes, "data" and "model"."""
    return _make_mesh(AxisType.Explicit)


@pytest.fixture(params=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest, auto_mesh: Mesh, explicit_mesh: Mesh) -> Mesh:
    """The (4, 2) mesh, once with Auto and once with Explicit axes."""
    return auto_mesh if request.param == "auto" else explicit_mesh


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Values and placements do not depend on optimisation, and without it the compiler takes half the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def optimised() -> Iterator[None]:
    """For tests that read an optimised program in modules that are compiled quickly."""
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
