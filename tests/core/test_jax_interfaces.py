"""The interfaces of JAX that the library uses and JAX does not promise: one list, with what fails first when they move.

Public ones are in `jax`, `jax.numpy`, `jax.lax`, `jax.tree_util`, `jax.sharding` and so on; `jax.core`, `jax.extend`,
`jax.experimental`, `jax.interpreters` and `jaxlib` are not. Neither are attributes of programs, and texts of messages.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import axonym as axn
from axonym.core import jax_versions
from axonym.core.source_lines import frames_of

SOURCE = Path(axn.__file__).parent
SEMI_PRIVATE = ("jax.core", "jax.extend", "jax.experimental", "jax.interpreters", "jaxlib")

IMPORTED = {
    "jax.core": {"ShapedArray", "Tracer", "eval_jaxpr"},
    "jax.experimental": {"mesh_utils", "multihost_utils", "topologies"},
    "jax.experimental.custom_partitioning": {
        "ArrayMapping", "CompoundFactor", "SdyShardingRule", "custom_partitioning",
    },
    "jax.experimental.pallas.ops.tpu": {"splash_attention"},
    "jax.experimental.pallas.ops.tpu.megablox": {"gmm"},
    "jax.extend": {"core"},
    "jax.extend.core": {"ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "Primitive", "jaxpr_as_fun", "primitives"},
    "jax.extend.source_info_util": {"summarize"},
    "jax.extend.xla": {"PipelineStage", "clear_hlo_module_transformation", "register_hlo_module_transformation"},
    "jax.interpreters": {"ad", "batching", "mlir"},
    "jax.interpreters.partial_eval": {"dce_jaxpr"},
    "jaxlib": {"_hlo"},
}  # fmt: skip
"""What is imported, by module. `test_imports_exist` fails first."""
IN_ONE_PLACE = {"jax.interpreters": "core/jax_versions.py", "jax.interpreters.partial_eval": "core/jax_versions.py"}
"""The modules that only one file may import from."""
WITHOUT = {"register_hlo_module_transformation", "clear_hlo_module_transformation", "PipelineStage", "_hlo"}
"""What the library does without where a version of JAX lacks it, slower or less exact."""


def _imports() -> dict[str, dict[str, set[str]]]:
    """Return the names that the source imports from semi-private modules, each with its files."""
    found: dict[str, dict[str, set[str]]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and (node.module + ".").startswith(tuple(f"{m}." for m in SEMI_PRIVATE))
            ):
                for name in node.names:
                    files = found.setdefault(node.module, {}).setdefault(name.name, set())
                    files.add(path.relative_to(SOURCE).as_posix())
            elif isinstance(node, ast.Import):
                assert not any(a.name.startswith(SEMI_PRIVATE) for a in node.names), f"{path}: import the names"
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [getattr(node, "module", None) or "", *(a.name for a in node.names)]
                assert not any(n.startswith(("jax._src", "jaxlib.xla")) for n in names), path
    return found


def test_the_list_is_complete() -> None:
    found = _imports()
    assert {module: set(names) for module, names in found.items()} == IMPORTED
    for module, file in IN_ONE_PLACE.items():
        assert set().union(*found[module].values()) == {file}


@pytest.mark.parametrize("name", [f"{module}:{name}" for module, names in IMPORTED.items() for name in sorted(names)])
def test_imports_exist(name: str) -> None:
    module, attribute = name.split(":")
    if not hasattr(importlib.import_module(module), attribute):
        try:
            importlib.import_module(f"{module}.{attribute}")
        except ImportError:
            assert attribute in WITHOUT


# --- attributes of programs, and texts ---


def _program(fn: Callable[..., Any]) -> Any:
    return jax.make_jaxpr(fn)(jnp.ones(4))


def _name_stack() -> None:
    def fn(x: Any) -> Any:
        with jax.named_scope("inner"):
            return jnp.sin(x).sum()

    stacks = [str(eqn.source_info.name_stack) for eqn in _program(jax.grad(fn)).eqns]
    assert any("jvp(" in s and "inner" in s for s in stacks) and any("transpose(" in s for s in stacks)


def _frames() -> None:
    assert any(frame.file == __file__ for frame in frames_of(_program(lambda x: x + 1).eqns[0]))


def _func_src_info() -> None:
    assert Path(__file__).name in str(_program(lambda x: x + 1).jaxpr.debug_info.func_src_info)


def _referent() -> None:
    array, seen = jnp.ones(()), []
    jax.grad(lambda x: (seen.append(jax_versions.followed_by(x)), x)[1])(array)
    assert isinstance(seen[0], jax.Array)


def _unused() -> None:
    program = _program(lambda x: (jnp.sin(x), x + 1)[1]).jaxpr
    assert [eqn.primitive.name for eqn in jax_versions.without_unused(program).eqns] == ["add"]


def _asked_by_grad() -> None:
    with pytest.raises(ValueError, match="end it with"):
        jax.grad(lambda x: axn.named(x, "a").sum())(jnp.ones(3))


def _module_attributes() -> None:
    module: Any = jax.jit(jnp.sin).lower(jnp.ones(4)).compiler_ir("stablehlo")
    attributes = module.operation.attributes
    assert "mhlo.num_partitions" in attributes and "sym_name" in attributes


def _varying() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    seen: list[Any] = []
    fn = jax.shard_map(
        lambda x: (seen.append(jax_versions.varying_axes(x)), x)[1],
        mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"),
    )  # fmt: skip
    jax.make_jaxpr(fn)(jnp.ones(4))
    assert seen == [frozenset({"data"})]


def _made_manual() -> None:
    """Of nested ones, each names its own."""
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("data", "model"))
    inner = jax.shard_map(
        lambda x: x + 1, in_specs=PartitionSpec("model"), out_specs=PartitionSpec("model"), axis_names={"model"}
    )
    outer = jax.shard_map(
        inner, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"), axis_names={"data"}
    )
    (around,) = jax.make_jaxpr(outer)(jnp.ones(4)).eqns
    (inside,) = around.params["jaxpr"].eqns
    assert [jax_versions.axes_made_manual(e) for e in (around, inside)] == [{"data"}, {"model"}]


def _devices() -> None:
    one, two = (Mesh(np.array(jax.devices()[i : i + 2]), ("data",)) for i in (0, 2))
    x, y = (jax.device_put(jnp.ones(4), NamedSharding(mesh, PartitionSpec("data"))) for mesh in (one, two))
    with pytest.raises(ValueError) as refusal:
        jax.jit(jnp.add)(x, y)
    assert jax_versions.is_about_devices(refusal.value)


def _taken_axis() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    mapped = axn.vmap(lambda x: axn.shard(x, {"x": "data"}), "batch")
    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data"}), pytest.raises(ValueError, match="batch"):
        jax.jit(mapped)(axn.ones({"batch": 2, "x": 2}))


PROBES: dict[str, tuple[str, Callable[[], None]]] = {
    "the stack of scopes of an equation": (r"source_info\.name_stack", _name_stack),
    "the frames of an equation": (r'source_info, "traceback"', _frames),
    "where a function is defined": (r"func_src_info", _func_src_info),
    "the array that a tracer follows": (r'"get_referent"', _referent),
    "operations that no result needs": (r"dce_jaxpr\(", _unused),
    "the check of `jax.grad` that a result is a scalar": (r'"_check_scalar"', _asked_by_grad),
    "attributes of a lowered module": (r'compiler_ir\("stablehlo"\)', _module_attributes),
    "the mesh axes over which a value varies": (r'kind, "vma"', _varying),
    "the mesh axes that a `shard_map` makes manual": (r'"newly_manual_axes"', _made_manual),
    'the text "incompatible devices"': (r"incompatible devices", _devices),
    'the texts "spmd_axis_name" and "duplicate entries"': (r'"spmd_axis_name" in', _taken_axis),
}
"""What is read otherwise: the pattern of the code that reads it, and what fails first."""
TESTED_ELSEWHERE = {
    r'"_prim"': "names/test_odd_programs.py",
    r"Length of device assignment": "sharding/test_active_mesh.py",
    r'"check_vma" not in': "nn/test_moe.py",
    r'"varying" not in': "manual/test_shard_map.py",
    r"CustomSPMDPartitioning not found": "insight/test_topologies.py",
}
"""The same, with the file of tests that fails first, because it needs more than a few lines."""


@pytest.mark.parametrize("what", PROBES)
def test_what_is_read_is_still_there(what: str) -> None:
    PROBES[what][1]()


def test_the_list_has_what_is_read() -> None:
    text = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    patterns = [*(pattern for pattern, _ in PROBES.values()), *TESTED_ELSEWHERE]
    assert [p for p in patterns if not re.search(p, text)] == []
    assert [file for file in TESTED_ELSEWHERE.values() if not (Path(__file__).parents[1] / file).exists()] == []
