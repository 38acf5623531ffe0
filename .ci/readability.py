"""Prints figures about how the code reads: lines by package, long decisions, untyped parameters, private names.

They are for people who review a change, and fail nothing: a long body that reads from top to bottom is fine.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "axonym"
MANY_BRANCHES = 20
SHARED_NAME_PLACES = 3
_BRANCHES = ast.If | ast.For | ast.While | ast.Try | ast.ExceptHandler | ast.IfExp | ast.comprehension | ast.Assert


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


def main() -> None:
    texts = {path.relative_to(ROOT): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}

    lines: Counter[str] = Counter()
    for path, text in texts.items():
        lines[path.parts[0] if len(path.parts) > 1 else "(root)"] += text.count("\n")
    print(f"lines: {lines.total():,} ({', '.join(f'{package} {n:,}' for package, n in lines.most_common())})")

    functions = [(path, f) for path, tree in trees.items() for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
    long = {f"{path.as_posix()} {f.name}": n for path, f in functions if (n := branches(f)) > MANY_BRANCHES}
    print(f"functions with more than {MANY_BRANCHES} branches: {len(long)}", *long.items(), sep="\n    ")

    private = re.compile(r"(^|/)_(?!_init__)")
    modules = [tree for path, tree in trees.items() if not private.search(path.as_posix())]
    parameters = [p for tree in modules for function in public_functions(tree.body) for p in function]
    share = sum(is_any(p.annotation) for p in parameters) / len(parameters)
    print(f"parameters of public functions that are `Any`: {share:.1%}")

    # Methods and functions inside others are read where they are; these are what a search has to find.
    places: defaultdict[str, set[Path]] = defaultdict(set)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and not node.name.startswith("__"):
                places[node.name].add(path)
    count = sum(map(len, places.values()))
    one_word = sum(len(found) for name, found in places.items() if "_" not in name.strip("_"))
    shared = {name: len(found) for name, found in places.items() if len(found) >= SHARED_NAME_PLACES}
    print(f"private functions of modules: {count}, {one_word / count:.0%} of them named by one word")
    print(f"names of private functions in {SHARED_NAME_PLACES} modules or more: {len(shared)}")
    print("   ", ", ".join(f"{name} {n}" for name, n in sorted(shared.items(), key=lambda item: -item[1])))


if __name__ == "__main__":
    main()
