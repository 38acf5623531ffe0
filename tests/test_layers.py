"""Imports point down: from each package or module to those on the lines below it, and never in a cycle.

Imports inside functions count, and so do those under `TYPE_CHECKING`. There is one exception: `NamedArray` and its
methods know each other's types.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import axonym as axn

ROOT = Path(axn.__file__).parent

# From the top down; each is a module of axonym, or a folder. Those on one line do not import each other. Two modules of
# `core` stand higher than the others, since they know named arrays.
LAYERS = """
haliax scalax
__init__
_late_names debug insight precision testing
names
optim quantization
nn
schedules state
random
_methods custom_partitioning
_xarray
_display fft linalg manual poly ref transforms
tree
ops
sharding
core.function_cache
distribution typing
core.tree_spec
named_array
axis
core
"""

MODULES = {
    ".".join(("axonym", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


def imports(module: str) -> Iterator[str]:
    """Yield the modules of the package that a module imports, in functions too."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if module == "axonym.named_array" and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                found = f"{source}.{alias.name}"
                if found in MODULES or source in MODULES:
                    yield found if found in MODULES else source


def layer(module: str) -> str:
    names = [*module.split(".")[1:3], "__init__"]
    return ".".join(names[:2]) if ".".join(names[:2]) in LAYERS.split() else names[0]


@functools.cache
def graph() -> dict[str, set[str]]:
    return {module: set(imports(module)) for module in MODULES}


def test_no_cycles() -> None:
    """On an error, its second argument is the cycle."""
    TopologicalSorter(graph()).prepare()


def test_layers() -> None:
    height = {name: -i for i, line in enumerate(LAYERS.strip().splitlines()) for name in line.split()}
    assert height.keys() == {layer(module) for module in MODULES}, (
        "a module came or went: say where it stands in LAYERS"
    )
    up = [
        f"{module} imports {target}"
        for module, targets in graph().items()
        for target in sorted(targets)
        if layer(module) != layer(target) and height[layer(module)] <= height[layer(target)]
    ]
    assert not up, "imports that do not point down:\n" + "\n".join(up)


def test_nothing_reaches_up_at_run_time() -> None:
    """A module that is looked up while the program runs is an import that no reader sees."""
    reaching = {m for m, path in MODULES.items() if 'sys.modules["axonym' in path.read_text()}
    assert {layer(m) for m in reaching} <= {"haliax"}  # which stands on top, and reaches down


def test_no_two_classes_share_a_name() -> None:
    """A leading underscore does not count. The packages of compatibility have the names of the others' classes."""
    seen: dict[str, str] = {}
    for module, path in MODULES.items():
        if module.split(".")[1:2] in (["haliax"], ["scalax"]):
            continue
        for node in _at_top(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                known = seen.setdefault(node.name.lstrip("_"), module)
                assert known == module, f"{node.name} in {module} and in {known}"


def _at_top(block: ast.AST) -> Iterator[ast.stmt]:
    """Return the statements of a module, also those under an `if` and the like."""
    for node in ast.iter_child_nodes(block):
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _at_top(node)
