"""Shardy's propagation, which knows nothing of names, agrees about the axes of whole training steps.

Each name is an axis of a mesh that need not exist, and arguments are sharded by their own names: where Shardy shards a
result, it says the name of that axis. It runs in a process of its own, since it ends the process for some programs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
from jaxlib.mlir.passmanager import PassManager

import axonym as axn
from axonym.names._sources import names_of_leaves
from tests.names.models import EQUAL, MODELS

CHECKED = ("gpt2", "llama", "nnx_mlp", "gnn", "lstm")


def by_shardy(fn: Any, args: tuple[Any, ...], names: Any) -> list[tuple[tuple[str, ...], ...]]:
    """Return the mesh axes over which Shardy shards each axis of each result."""
    leaves, structure = jax.tree.flatten(args)
    given = [own.names or () for own in names_of_leaves(fn, args, {}, names)]
    words = sorted({n for own in given for n in own if n is not None and n.isidentifier()})
    mesh = AbstractMesh((2,) * len(words), tuple(words), axis_types=(AxisType.Auto,) * len(words))

    def sharded(x: Any, own: Any) -> Any:
        spec = P(*(n if n in words and size % 2 == 0 else None for n, size in zip(own, x.shape, strict=False)))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    placed = [sharded(x, own) if hasattr(x, "shape") else x for x, own in zip(leaves, given, strict=True)]
    lowered = jax.jit(fn).trace(*structure.unflatten(placed)).lower(lowering_platforms=("cpu",))
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        PassManager.parse("builtin.module(inline,symbol-dce,sdy-propagation-pipeline)").run(module.operation)
    functions = [f for f in module.body.operations if f.operation.name == "func.func"]
    (main,) = [f for f in functions if f.name.value == "main"]
    return [over(result, own) for result, own in zip(main.attributes["res_attrs"], main.type.results, strict=True)]


def over(attributes: Any, result: Any) -> tuple[tuple[str, ...], ...]:
    """Read the mesh axes of a result, such as `#sdy.sharding<@mesh, [{"a"}, {}]>`."""
    if "sdy.sharding" not in attributes:
        return ((),) * len(result.shape)
    axes = re.findall(r"\{([^{}]*)\}", str(attributes["sdy.sharding"]))
    return tuple(tuple(re.findall(r'"([^"]+)"', one)) for one in axes)


def main(models: list[str]) -> None:
    """Print, for each model, how many axes both name, and where they differ."""
    for model in models:
        case = MODELS[model](EQUAL)
        found = axn.names.infer(case.fn, *case.args, names=case.given)
        both, differ = 0, []
        for x, over in zip(found.body.results, by_shardy(case.fn, case.args, case.given), strict=True):
            for name, axes in zip(found.names_of(x), over, strict=True):
                if name is not None and axes:
                    both += 1
                    words = name.replace("'", "").split("*")
                    if not {a.partition(":")[0] for a in axes} <= set(words):
                        differ.append(f"{name}: {axes}")
        print(model, both, "differ:", differ)


def test_shardy_agrees() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.names.test_oracle", *CHECKED], capture_output=True, text=True, timeout=300
    )
    lines = run.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*CHECKED], run.stderr[-2000:]
    for line in lines:
        assert line.endswith("differ: []"), line
        assert int(line.split()[1]) > 10, line


if __name__ == "__main__":
    with jax.numpy_rank_promotion("allow"):
        main(sys.argv[1:] or [*MODELS])
