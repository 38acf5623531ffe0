"""Additions are complete: each function and class of a family is exported, tested in the family's table, documented.

A family is defined in some modules. Every name there without an underscore belongs to it, except the `internal` ones.
Add a name to these only if no user needs it. Functions of other modules must be used in the tests that OTHERS names.
The messages say what to add, and where.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

import axonym as axn
from axonym._methods import Methods
from tests.helpers import definitions, exports, modules, public_name
from tests.manual import test_collectives
from tests.nn.test_activations import POSITIONAL
from tests.ops.test_operations import CASES, ELSEWHERE
from tests.random.samplers import SAMPLERS
from tests.random.test_vectors import VECTORS

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
DOCUMENTED = {
    path
    for page in sorted((DOCS / "api").glob("*.md"))
    for path in re.findall(r"^::: (\S+)$", page.read_text(), flags=re.MULTILINE)
}


Test = Callable[[str, Any], bool]
"""Whether a function or class with a name is tested."""


@dataclasses.dataclass(frozen=True)
class Family:
    """Functions and classes of one kind."""

    defined_in: str
    """Patterns of the modules that define them."""
    exported_in: str
    """The file that exports them."""
    tested: Mapping[str, Test]
    """For each table to add a case to, or file, whether it has one."""
    internal: Collection[str] = ()
    public: str = "axonym"
    """The module from which users import them."""
    named_in: Collection[str] = ()
    """Files whose text names each, in backquotes."""


@functools.cache
def _uses(pattern: str) -> set[str]:
    """Return what test modules import, or take from a module, and call, index, pass on, or take `init` from."""
    found = set()
    for path in TESTS.glob(pattern):
        used: list[ast.expr] = []
        imported: dict[str, str] = {}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                used += [node.func, *node.args, *(k.value for k in node.keywords)]
            elif isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "init"):
                used.append(node.value)
            elif isinstance(node, ast.Tuple | ast.List):
                used += node.elts
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                used += node.decorator_list
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imported |= {a.asname or a.name: a.name for a in node.names}
        for parts in (ast.unparse(x).split(".") for x in used if isinstance(x, ast.Name | ast.Attribute)):
            if parts[0] in imported:
                found.add(parts[-1] if len(parts) > 1 else imported[parts[0]])
    return found


def _used_in(*patterns: str) -> Test:
    """Return whether test modules use a function, a class, or a class derived from it; a mention does not count."""

    def used(name: str, thing: Any) -> bool:
        derived = thing.__subclasses__() if isinstance(thing, type) else []
        return any(name in _uses(pattern) for pattern in patterns) or any(used(c.__name__, c) for c in derived)

    return lambda name, thing: getattr(thing, "_is_protocol", False) or used(name, thing)


def _in(*tables: Collection[str]) -> Test:
    """Return whether a table has a case whose name begins with this word."""
    words = {re.split(r"\W", name)[0] for table in tables for name in table}
    return lambda name, thing: name in words


def _has_case(name: str, operation: Any) -> bool:
    return any(operation is tested for tested in TESTED_OPERATIONS)


TESTED_OPERATIONS = [public_name(name) for name in {case.name for case in CASES} | ELSEWHERE.keys()]
ROOT = "src/axonym/__init__.py"
LATE = "src/axonym/_late_names.py"
NO_GRADIENT = {
    "pmax": "JAX does not differentiate it",
    "pmin": "JAX does not differentiate it",
    "pvary": "its gradient is the sum of CASES's `psum`, which tests/manual/test_shard_map.py takes",
    "axis_index": "an integer",
    "axis_offset": "an integer",
}
"""The collectives that are not in LINEAR."""
FAMILIES: dict[str, Family] = {
    "operations": Family(
        "axonym.ops.* axonym.custom_partitioning._top_k", f"{ROOT} or {LATE}",
        {"the CASES of its module tests/ops/cases_*.py": _has_case},
        {"get_kernel", "mask_names", "look_up", "write_slice", "Indexer", "IndexedArray", "Update",
         "convolve_by_products", "elementwise_kernel", "sort_along", "positions_along", "take_in_order"},
    ),
    **{
        f"operations of {room}": Family(
            f"axonym.{room}", f"`__all__` of src/axonym/{room}.py",
            {"the CASES of tests/ops/cases_linalg.py": _has_case}, public=f"axonym.{room}",
        )
        for room in ("fft", "linalg", "poly")
    },
    "stencils": Family(
        "axonym.manual.stencils", LATE, {"tests/manual/test_stencils.py": _used_in("manual/test_stencils.py")}
    ),
    "code of one device": Family(
        "axonym.manual.shard_map axonym.manual._axis_environment", LATE,
        {"tests/manual/test_shard_map.py": _used_in("manual/test_shard_map.py", "manual/test_collectives.py")},
        {"ShardMapOptions"},
    ),
    "collectives": Family(
        "axonym.manual.*", LATE,
        {
            "CASES or EXCHANGES of tests/manual/test_collectives.py, under its name": _in(
                test_collectives.CASES, test_collectives.EXCHANGES
            ),
            "tests/manual/test_collectives.py that calls it": _used_in("manual/test_collectives.py"),
            "LINEAR of tests/manual/test_collectives.py for its gradient, or say in NO_GRADIENT of "
            "tests/test_completeness.py why it has none": _in(test_collectives.LINEAR, NO_GRADIENT),
        },
        {"axis_size", "sharded_over"},
        named_in=["the table in the docstring of src/axonym/manual/collectives.py", "docs/shard_map.md"],
    ),
    "transforms": Family(
        "axonym.transforms.*", LATE, {"tests/transforms/": _used_in("transforms/*.py")},
        {"policy_of", "checkpointed_scan", "checkpointed_steps", "layers_at", "as_named", "as_leaf", "layer_of",
         "layers_are_first"},
    ),
    "quantization": Family(
        "axonym.quantization.*", "src/axonym/quantization/__init__.py",
        {"tests/quantization/": _used_in("quantization/test_*.py")}, {"replace_layers"}, "axonym.quantization",
    ),
    "samplers": Family(
        "axonym.random.distributions", "src/axonym/random/__init__.py",
        {
            "SAMPLERS of tests/random/samplers.py, or VECTORS of tests/random/test_vectors.py": _in(
                SAMPLERS, VECTORS, ["orthogonal"]
            )
        },
        public="axonym.random",
    ),
    "other samplers": Family(
        "axonym.random.*", "src/axonym/random/__init__.py",
        {"tests/random/ or tests/vocabulary/test_sampling.py": _used_in("random/test_*.py", "vocabulary/test_*.py")},
        public="axonym.random",
    ),
    "rules": Family(
        "axonym.sharding.rules", "src/axonym/sharding/__init__.py",
        {"tests/sharding/test_rules.py": _used_in("sharding/test_rules.py", "interop/test_flax.py")},
        {"is_axis_names"}, "axonym.sharding",
    ),
    "activations": Family(
        "axonym.nn.activations", "src/axonym/nn/__init__.py",
        {"POSITIONAL of tests/nn/test_activations.py": _in(POSITIONAL, ["glu"])}, public="axonym.nn",
    ),
    "losses": Family(
        "axonym.nn.loss", "src/axonym/nn/__init__.py", {"tests/nn/test_loss.py": _used_in("nn/test_loss.py")},
        {"Unspecified"}, "axonym.nn",
    ),
    "layers": Family(
        "axonym.nn.*", "src/axonym/nn/__init__.py, or of its folder",
        {"the module of its name in tests/nn/": _used_in("nn/test_*.py")},
        {
            "check_input", "static_spec", "as_truth_values", "SequenceSharding", "attend_along_sequence",
            "fused_attention", "default_attention", "why_named", "stored_inputs",
        },
        "axonym.nn",
    ),
    "optim": Family(
        "axonym.optim.*", "src/axonym/optim/__init__.py",
        {"tests/optim/": _used_in("optim/test_*.py")}, {"roles_of_leaves", "axes_of_stacks", "with_values"},
        "axonym.optim",
    ),
}  # fmt: skip


def _family_of(module: str) -> str | None:
    """Return the first family with a pattern that a module matches."""
    return next(
        (name for name, f in FAMILIES.items() if any(fnmatch.fnmatchcase(module, p) for p in f.defined_in.split())),
        None,
    )


def _defined(family: str) -> dict[str, Any]:
    """Return what the modules of a family define; private modules, only what is exported."""
    return {
        f"{module.__name__}.{name}": thing
        for module in modules(native=True)
        if _family_of(module.__name__) == family
        for name, thing in definitions(module).items()
        if "._" not in module.__name__ or any(thing is x for x in EXPORTED.values())
    }


EXPORTED = {
    f"{module.__name__}.{name}": thing
    for module in modules(native=True)
    if "._" not in module.__name__
    for name, thing in exports(module).items()
}


def _public_paths(public: str, thing: Any) -> list[str]:
    """Return the paths by which users import something from a module, or from a package inside it."""
    return [
        path
        for path, x in EXPORTED.items()
        if thing is x and (path.rpartition(".")[0] == public or (public != "axonym" and path.startswith(f"{public}.")))
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_member_is_exported_tested_and_documented(family: str) -> None:
    rules, missing = FAMILIES[family], []
    defined = _defined(family)
    assert defined and {path.rpartition(".")[2] for path in defined} >= {*rules.internal}
    for path, thing in defined.items():
        name = path.rpartition(".")[2]
        if name in rules.internal:
            continue
        paths = _public_paths(rules.public, thing)
        if not paths:
            missing.append(
                f"{path} is not exported: add it to {rules.exported_in}, or, if no user needs it, to `internal` in "
                "tests/test_completeness.py"
            )
        missing += [
            f"{path} is not tested: add a case to {where}"
            for where, tested in rules.tested.items()
            if not tested(name, thing)
        ]
        if DOCUMENTED.isdisjoint(paths or [f"{rules.public}.{name}"]):
            missing.append(f"{path} is not documented: add `::: {rules.public}.{name}` to a page of docs/api/")
        missing += [
            f"{path} is not described: name it in {place}"
            for place in rules.named_in
            if not re.search(
                rf"{'^[|].*' if 'table' in place else ''}`(axn\.)?{name}\b",
                (TESTS.parent / place.split()[-1]).read_text(),
                re.MULTILINE,
            )
        ]
    assert not missing, "\n".join(missing)


OTHERS = {
    "axonym._xarray": "interop/*.py",
    "axonym.axis": "test_axis.py",
    "axonym.core.module_field": "test_named_array.py",
    "axonym.core.*": "processes/*.py",
    "axonym.custom_partitioning.*": "custom_partitioning/*.py",
    "axonym._display": "test_display.py",
    "axonym.debug": "test_debug.py",
    "axonym.distribution.*": "sharding/*.py",
    "axonym.insight.*": "insight/*.py",
    "axonym.named_array": "test_named_array.py",
    "axonym.names.*": "names/*.py",
    "axonym.precision": "test_precision.py",
    "axonym.ref": "test_ref.py",
    "axonym.schedules.*": "test_schedules.py",
    "axonym.sharding.annotations": "scalax/*.py",
    "axonym.sharding.*": "sharding/*.py",
    "axonym.state.*": "state/*.py",
    "axonym.testing.*": "test_testing.py",
    "axonym.tree": "test_tree.py",
    "axonym.typing.*": "test_typing.py",
}
"""Modules whose functions belong to no family, and the tests that use each of them."""
USED_BY_OTHERS = {
    "axonym.debug.describe_array": "writes the arrays in messages",
    "axonym.debug.describe_devices": "tests/processes/checks.py calls it",
    "axonym.state.lazy_loading": "decorates the methods that load layers",
    "axonym.state.stacked_from_state_dict": "loads `axonym.nn.Stacked`",
    "axonym.state.stacked_to_state_dict": "saves `axonym.nn.Stacked`",
    "axonym.sharding.current_annotations": "`axonym.scalax` has it under a name of its own",
    **dict.fromkeys(
        ("axonym.sharding.leaves_of", "axonym.sharding.resolve", "axonym.sharding.shard_quietly"),
        "`axonym.haliax` and `axonym.scalax` place trees by it",
    ),
    **dict.fromkeys(
        ("axonym.typing.matches_axes", "axonym.typing.matching.matches_axes"), "tests/test_typing.py calls the method"
    ),
}


def test_exported_functions_belong_to_a_family_or_have_tests() -> None:
    missing = []
    for path, thing in EXPORTED.items():
        home, name = getattr(thing, "__module__", None) or "", path.rpartition(".")[2]
        if not inspect.isfunction(thing) or not home.startswith("axonym.") or _family_of(home):
            continue
        where = next((tests for pattern, tests in OTHERS.items() if fnmatch.fnmatchcase(home, pattern)), None)
        if where is None:
            missing.append(f"{path} is in no family: add {home} to FAMILIES or OTHERS in tests/test_completeness.py")
        elif name not in _uses(where) and path not in USED_BY_OTHERS:
            missing.append(f"{path} is not tested: use it in tests/{where}")
    assert not missing, "\n".join(missing)


def test_what_is_tested_elsewhere_is() -> None:
    for name, file in ELSEWHERE.items():
        assert f"axn.{name}(" in (TESTS / file).read_text(), f"{file} does not test {name}"


# --- methods ---

METHODS = {n: getattr(m := getattr(Methods, n), "fget", m) for n in vars(Methods) if n[0] != "_" and n != "at"}
METHOD_TABLE = set(re.findall(r"\[`(\w+)`\]\[axonym\.", (DOCS / "api" / "named_array.md").read_text()))


def test_methods_are_the_functions() -> None:
    """Each method is the public function of its name, and stands in the table of methods."""
    assert len(METHODS) > 30
    missing = []
    for name, method in METHODS.items():
        if name != "matches_axes" and getattr(axn, name, None) is not method:
            missing.append(f"NamedArray.{name} is not `axonym.{name}`: export it in {ROOT}")
        if name not in METHOD_TABLE:
            row = f"[`{name}`][axonym.{name}]"
            missing.append(f"NamedArray.{name} is in no row: add {row} to the table in docs/api/named_array.md")
    assert not missing, "\n".join(missing)
    gone = METHOD_TABLE - METHODS.keys() - {"index"}
    assert not gone, f"the table in docs/api/named_array.md has {', '.join(gone)}, which is no method"
    assert all(getattr(axn.NamedArray, n) is getattr(Methods, n) for n in METHODS)
