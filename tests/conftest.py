"""The surroundings of every test: eight simulated devices and strict numerics.

The devices must be asked for before JAX starts its backend, so this module does it while it is imported. Tests that
need several devices take a mesh fixture; they never skip.
"""

import gc
import os
import zlib
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the time goes into compiling, here and in processes that tests start. The machine code need not be fast: the
# communication and the memory of a compiled program are the same.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import hypothesis
import jax
import pytest
from hypothesis import strategies
from jax.sharding import AxisType, Mesh

DEVICES = 8
MESH_SHAPE = (4, 2)
MESH_AXES = ("data", "model")

# Many small programs are compiled quickest in one piece each; and of the two code generators that older versions have,
# the new one takes longer. That of jax 0.10.0 rounds wrongly to 8-bit floats.
FLAGS = ["--xla_cpu_parallel_codegen_split_count=1"]
if (0, 10, 0) < jax.__version_info__ < (0, 11):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])

# JAX's caches live until the end, and searching them again and again for garbage would take a tenth of the time.
gc.set_threshold(100_000, 50, 100)

jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example of a property compiles, so it has no deadline. CI draws the same examples every time.
hypothesis.settings.register_profile("axonym", deadline=None, print_blob=True, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("axonym")


# --- collection ---

# Slow tests: training, separate processes, properties drawn many times. None of them is quick.
SLOW = (
    "tests/examples/",
    "tests/fuzz/",
    "tests/interop/test_models.py",
    "tests/nn/test_moe.py::test_gmm",
    "tests/nn/test_attention_fused.py::test_splash",
    "tests/sharding/test_fsdp.py::test_a_step_gives_the_result_of_one_device_and_moves_little",
    "tests/processes/",
    "tests/test_docstrings.py::test_examples_run",
    "tests/test_properties.py",
    "tests/test_repository.py::test_example_runs",
    "tests/test_repository.py::test_page_runs",
    "tests/ops/test_indexing_properties.py",
    "tests/ops/test_shaping_properties.py",
)
QUICK_FUNCTIONS = 2

# Modules that `.ci/run` runs with the oldest JAX only: other libraries' names for functions tested under ours; files,
# command lines and pages; values composed of operations that are tested with every version; and parsing, comparisons
# and messages without JAX. With the newest JAX, `tests/processes` trains the example.
WITH_OLDEST = (
    "tests/examples/",
    "tests/fuzz/test_fuzz.py::test_planted",
    "tests/fuzz/test_fuzz.py::test_a_program_that_ends_the_process",
    "tests/fuzz/test_invariance.py",
    "tests/haliax/",
    "tests/interop/test_golden.py",
    "tests/interop/test_models.py",
    "tests/interop/test_xarray.py",
    "tests/nn/test_activations.py",
    "tests/nn/test_mup.py",
    "tests/nn/test_pool.py",
    "tests/ops/test_indexing_properties.py",
    "tests/ops/test_shaping_properties.py",
    "tests/quantization/test_weights.py",
    "tests/random/test_vectors.py",
    "tests/scalax/",
    "tests/state/test_hostile_files.py",
    "tests/test_advice.py",
    "tests/test_axis.py",
    "tests/test_docstrings.py",
    "tests/test_documentation.py",
    "tests/test_foreign_names.py",
    "tests/test_interface.py",
    "tests/test_layers.py",
    "tests/test_parsing.py",
    "tests/test_properties.py",
    "tests/test_testing.py",
    "tests/test_why.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import the modules of which `.ci/run` selects nothing: importing takes seconds in each worker."""
    path = f"{collection_path.relative_to(config.rootpath).as_posix()}/"
    return True if config.option.markexpr == "not oldest" and path.startswith(WITH_OLDEST) else None


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark a sample as `quick`, and what `.ci/run` runs with one version of JAX only as `oldest` or `newest`.

    The sample, which runs with both, is the first case of the first two test functions of each module, since modules
    begin with the basics; slow tests do not count. A checksum of their names deals an eighth of the others to the
    newest JAX, which compiles more slowly, and the rest to the oldest, so that both get some of every subject and of
    every kind of mesh. A test may also be marked where it is defined, as one call of every operation is quick.
    """
    functions: dict[object, set[str]] = {}
    for item in items:
        function, seen = item.nodeid.partition("[")[0], functions.setdefault(item.path, set())
        sampled = function not in seen and len(seen) < QUICK_FUNCTIONS and not item.nodeid.startswith(SLOW)
        if sampled:
            seen.add(function)
            item.add_marker("quick")
        if item.nodeid.startswith(WITH_OLDEST):
            item.add_marker("oldest")
        elif not any(map(item.get_closest_marker, ("quick", "oldest", "newest"))):
            item.add_marker("oldest" if zlib.crc32(item.nodeid.encode()) % 8 else "newest")
        both = item.get_closest_marker("oldest") and item.get_closest_marker("newest")
        assert not both, f"{item.nodeid} would run with no version of JAX"


# --- fixtures ---


@pytest.fixture(scope="session", autouse=True)
def _hypothesis_has_started() -> None:
    """Let Hypothesis start before objects are frozen: it then looks for references to its random generator."""
    hypothesis.find(strategies.none(), lambda _: True)


@pytest.fixture(scope="module", autouse=True)
def _older_modules_are_not_searched(_hypothesis_has_started: None) -> None:
    """Freeze the objects that other modules left: `gc.collect()` would take seconds to search them."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _simulated_devices() -> None:
    """Fail the whole run, rather than skip part of it, if the devices did not come up."""
    count = jax.device_count()
    assert count == DEVICES, f"the tests need {DEVICES} devices and JAX started with {count}: {jax.devices()}"


def _make_mesh(axis_type: AxisType) -> Mesh:
    return jax.make_mesh(MESH_SHAPE, MESH_AXES, axis_types=(axis_type,) * len(MESH_AXES))


@pytest.fixture(scope="session")
def auto_mesh() -> Mesh:
    """Return a (4, 2) mesh of Auto axes, "data" and "model"."""
    return _make_mesh(AxisType.Auto)


@pytest.fixture(scope="session")
def explicit_mesh() -> Mesh:
    """Return a (4, 2) mesh of Explicit axes, "data" and "model"."""
    return _make_mesh(AxisType.Explicit)


@pytest.fixture(params=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest, auto_mesh: Mesh, explicit_mesh: Mesh) -> Mesh:
    """Return the (4, 2) mesh, once with Auto and once with Explicit axes."""
    return auto_mesh if request.param == "auto" else explicit_mesh
