"""The code is easy to read: no function has many branches, and few parameters of public functions can be anything."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import axonym as axn

ROOT = Path(axn.__file__).parent
MOST_BRANCHES = 20
_BRANCHES = ast.If | ast.For | ast.While | ast.Try | ast.ExceptHandler | ast.IfExp | ast.comprehension | ast.Assert


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path.relative_to(ROOT): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def branches(function: ast.FunctionDef) -> int:
    """Count the conditions and loops of a function, without those of functions inside it."""
    count = 0
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else isinstance(node, _BRANCHES)
        waiting += ast.iter_child_nodes(node)
    return count


def test_branches() -> None:
    """A function with more is two functions, or a table."""
    functions = ((path, f) for path, tree in trees().items() for f in ast.walk(tree) if isinstance(f, ast.FunctionDef))
    found = {f"{path.as_posix()} {f.name}" for path, f in functions if branches(f) > MOST_BRANCHES}
    assert not found


def public_functions(body: list[ast.stmt], of_class: bool = False) -> Iterator[list[ast.arg]]:
    """Yield the parameters of each function that a checker shows; of one with overloads, the overloads."""
    overloaded: set[str] = set()
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body, True)
        elif isinstance(node, ast.FunctionDef) and not (
            node.name.startswith("_") and not (of_class and node.name in ("__init__", "__call__"))
        ):
            decorators = [ast.unparse(d) for d in node.decorator_list]
            if "overload" in decorators:
                overloaded.add(node.name)
            elif node.name in overloaded:
                continue
            positional = [*node.args.posonlyargs, *node.args.args]
            yield [*positional[of_class and "staticmethod" not in decorators :], *node.args.kwonlyargs]


def is_any(annotation: ast.expr | None) -> bool:
    if isinstance(annotation, ast.BinOp):
        return is_any(annotation.left) or is_any(annotation.right)
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


def test_parameters_have_types() -> None:
    """At most 8% of the parameters of public functions, in public modules, are `Any`: trees and arrays of any kind."""
    private = re.compile(r"(^|/)_(?!_init__)")
    modules = [tree for path, tree in trees().items() if not private.search(path.as_posix())]
    parameters = [p for tree in modules for function in public_functions(tree.body) for p in function]
    share = sum(is_any(p.annotation) for p in parameters) / len(parameters)
    assert 0 < share < 0.08
