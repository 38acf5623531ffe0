"""Additions are complete: each function and class of a family is exported, tested in the family's table, documented.

A family is defined in some modules. Every name there without an underscore belongs to it, except the `internal` ones.
Add a name to these only if no user needs it. The messages say what to add, and where.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Collection
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
REFERENCE = "".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))


@dataclasses.dataclass(frozen=True)
class Family:
    """Functions and classes of one kind."""

    defined_in: str
    """A pattern of the modules that define them."""
    exported_in: str
    """The file that exports them."""
    tested_in: str
    """The table to add a case to, or the file."""
    tested: Callable[[str, Any], bool]
    """Whether a function or class with a name has a case there."""
    internal: Collection[str] = ()
    public: str = "axonym"
    """The module from which users import them."""


def _used_in(*patterns: str) -> Callable[[str, Any], bool]:
    """Return whether test modules use a function, a class, or a class derived from it; an import does not count."""
    text = "".join(path.read_text() for pattern in patterns for path in sorted(TESTS.glob(pattern)))
    text = re.sub(r"^from \S+ import (\(.*?\)|.*?)$", "", text, flags=re.MULTILINE | re.DOTALL)

    def used(name: str, thing: Any) -> bool:
        derived = thing.__subclasses__() if isinstance(thing, type) else []
        return re.search(rf"\b{name}\b", text) is not None or any(used(c.__name__, c) for c in derived)

    return lambda name, thing: getattr(thing, "_is_protocol", False) or used(name, thing)


def _in(*tables: Collection[str]) -> Callable[[str, Any], bool]:
    """Return whether a table has a case whose name begins with this word."""
    words = {re.split(r"\W", name)[0] for table in tables for name in table}
    return lambda name, thing: name in words


def _has_case(name: str, operation: Any) -> bool:
    return any(operation is tested for tested in TESTED_OPERATIONS)


TESTED_OPERATIONS = [public_name(name) for name in {case.name for case in CASES} | ELSEWHERE.keys()]
ROOT = "src/axonym/__init__.py"
FAMILIES: dict[str, Family] = {
    "operations": Family(
        "axonym.ops.*", ROOT, "the CASES of its module tests/ops/cases_*.py", _has_case,
        {"get_kernel", "mask_names", "Median", "Quantile", "Indexer", "IndexedArray", "Update",
         "convolve_by_products"},
    ),
    **{
        f"operations of {room}": Family(
            f"axonym.{room}", f"`__all__` of src/axonym/{room}.py", "the CASES of tests/ops/cases_linalg.py", _has_case,
            public=f"axonym.{room}",
        )
        for room in ("fft", "linalg", "poly")
    },
    "collectives": Family(
        "axonym.manual.collectives", "src/axonym/_late_names.py",
        "CASES or EXCHANGES of tests/manual/test_collectives.py (and to LINEAR or a test of its own for the gradient)",
        _in(test_collectives.CASES, test_collectives.EXCHANGES), {"axis_size", "sharded_over"},
    ),
    "samplers": Family(
        "axonym.random.distributions", "src/axonym/random/__init__.py",
        "SAMPLERS of tests/random/samplers.py, or VECTORS of tests/random/test_vectors.py",
        _in(SAMPLERS, VECTORS, ["orthogonal"]), public="axonym.random",
    ),
    "other samplers": Family(
        "axonym.random.*", "src/axonym/random/__init__.py", "tests/random/ or tests/vocabulary/test_sampling.py",
        _used_in("random/test_*.py", "vocabulary/test_*.py"), public="axonym.random",
    ),
    "rules": Family(
        "axonym.sharding.rules", "src/axonym/sharding/__init__.py", "tests/sharding/test_rules.py",
        _used_in("sharding/test_rules.py", "interop/test_flax.py"), public="axonym.sharding",
        internal=("is_axis_names",),
    ),
    "activations": Family(
        "axonym.nn.activations", "src/axonym/nn/__init__.py", "POSITIONAL of tests/nn/test_activations.py",
        _in(POSITIONAL, ["glu"]), public="axonym.nn",
    ),
    "losses": Family(
        "axonym.nn.loss", "src/axonym/nn/__init__.py", "tests/nn/test_loss.py", _used_in("nn/test_loss.py"),
        {"Unspecified"}, "axonym.nn",
    ),
    "layers": Family(
        "axonym.nn.*", "src/axonym/nn/__init__.py, or of its folder", "the module of its name in tests/nn/",
        _used_in("nn/test_*.py"),
        {
            "check_input", "static_spec", "as_truth_values", "SequenceSharding", "attend_along_sequence",
            "fused_attention",
        },
        "axonym.nn",
    ),
}  # fmt: skip


def _family_of(module: str) -> str | None:
    """Return the first family whose pattern a module matches."""
    return next((name for name, f in FAMILIES.items() if fnmatch.fnmatchcase(module, f.defined_in)), None)


def _defined(family: str) -> dict[str, Any]:
    """Return what the public modules of a family define."""
    return {
        f"{module.__name__}.{name}": thing
        for module in modules(native=True)
        if _family_of(module.__name__) == family and "._" not in module.__name__
        for name, thing in definitions(module).items()
    }


EXPORTED = [thing for module in modules(native=True) for thing in exports(module).values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_member_is_exported_tested_and_documented(family: str) -> None:
    rules, missing = FAMILIES[family], []
    defined = _defined(family)
    assert defined and {path.rpartition(".")[2] for path in defined} >= {*rules.internal}
    for path, thing in defined.items():
        name = path.rpartition(".")[2]
        if name in rules.internal:
            continue
        if not any(thing is e for e in EXPORTED):
            missing.append(
                f"{path} is not exported: add it to {rules.exported_in}, or, if no user needs it, to `internal` in "
                "tests/test_completeness.py"
            )
        if not rules.tested(name, thing):
            missing.append(f"{path} is not tested: add a case to {rules.tested_in}")
        if not re.search(rf"^::: axonym\.([\w.]+\.)?{name}$", REFERENCE, flags=re.MULTILINE):
            missing.append(f"{path} is not documented: add `::: {rules.public}.{name}` to a page of docs/api/")
    assert not missing, "\n".join(missing)


def test_what_is_tested_elsewhere_is() -> None:
    for name, file in ELSEWHERE.items():
        assert f"axn.{name}(" in (TESTS / file).read_text(), f"{file} does not test {name}"


# --- methods ---

METHODS = {n: getattr(m, "fget", m) for n, m in vars(Methods).items() if not n.startswith("_") and n != "at"}
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
