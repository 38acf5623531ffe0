"""`python -m axonym.insight FILE:CASE --mesh data=64,model=8 --mapping NAME` explains a step on a mesh of any size.

It simulates as many devices as the mesh has, so the machine needs none of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from ..sharding.meshes import make_mesh
from .chips import CHIPS
from .comparing import compare
from .explaining import TIERS, explain


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report of the case that the command line names, or the comparison of several mappings."""
    parser = argparse.ArgumentParser(prog="python -m axonym.insight", description="Report the cost of a step.")
    parser.add_argument(
        "case", metavar="FILE:CASE", help="a function without parameters that returns the step and its arguments"
    )
    parser.add_argument("--mesh", required=True, metavar="AXIS=SIZE,...", help="the mesh, as in data=64,model=8")
    several = (
        "a mapping, or a parameter and a compute mapping: the name of one in the file or JSON; several are compared"
    )
    parser.add_argument("--mapping", action="append", metavar="MAPPING", help=several)
    how = "how the report is made; %(default)s by default"
    parser.add_argument("--by", choices=TIERS, default="partitioner", help=how)
    parser.add_argument("--topology", help="TPUs to compile for with their own compiler, as in v5e:4x4")
    parser.add_argument("--between", metavar="AXIS,...", help="the mesh axes that cross slices")
    parser.add_argument("--chip", choices=CHIPS, help="the chip to give lower bounds on time for")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--html", action="store_true", help="write a page for a browser")
    form.add_argument("--json", action="store_true", help="write JSON")
    options = parser.parse_args(arguments)
    try:
        sizes: dict[str, int] = {}
        for part in options.mesh.split(","):
            name, _, size = part.partition("=")
            if not name.strip() or not size.strip().isdecimal() or int(size) < 1 or name.strip() in sizes:
                raise ValueError(f"--mesh is the size of each mesh axis, as in data=64,model=8; got {options.mesh!r}.")
            sizes[name.strip()] = int(size)
        print(f"Explaining {options.case} on {options.mesh}.", file=sys.stderr, flush=True)  # it may take minutes
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", math.prod(sizes.values()))
        module, (step, *args) = _case(options.case)
        mappings = {text: _mapping(module, text) for text in options.mapping or ()}
        settings: dict[str, Any] = {"mesh": make_mesh(sizes), "by": options.by, "chip": options.chip}
        settings["between"] = options.between.split(",") if options.between else None
        if options.topology:
            settings |= {"by": "compiled", "topology": options.topology}
        if len(mappings) > 1:
            found: Any = compare(step, args, mappings, **settings)
        else:
            found = explain(step, *args, mapping=next(iter(mappings.values()), None), **settings)
    except (ValueError, TypeError, OSError) as e:
        print(e, file=sys.stderr)
        return 2
    print(found.to_html() if options.html else found.to_json() if options.json else found)
    return 0


def _case(text: str) -> tuple[ModuleType, tuple[Any, ...]]:
    """Import the file, and call its function, which returns a step and its arguments."""
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not name or not path.is_file():
        raise ValueError(f"The case is given as FILE:CASE; there is no file {file or text!r}.")
    sys.path.insert(0, str(path.resolve().parent))  # as if the file were run
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "the file has the suffix of a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    case = getattr(module, name, None)
    found = case() if callable(case) else None
    if not isinstance(found, tuple) or not found or not callable(found[0]):
        raise TypeError(
            f"{text}: a case is a function without parameters that returns a tuple: the step, then its arguments."
        )
    return module, found


def _mapping(module: ModuleType, text: str) -> Any:
    if hasattr(module, text):
        return getattr(module, text)
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise ValueError(f"--mapping {text!r} is neither the name of a mapping in the file nor JSON.") from None


if __name__ == "__main__":
    sys.exit(main())
