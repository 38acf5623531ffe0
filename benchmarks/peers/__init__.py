"""Measure a transformer in several libraries: its block, its training step and its sharded step.

All libraries compute the same from the same weights; this is checked before the measurements. Each program follows the
documentation of its library, in a file of this folder, and all run in one process, in turn. Libraries that are not
installed are skipped: `python -m pip install -e '.[peers]'` installs all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import io
import math
import statistics
import time
import tokenize
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

import axonym as axn

from ..communication import bytes_moved
from ..harness import Row, in_turn
from ..program import instructions

PLAIN, OURS = "plain JAX", "Axonym"
LIBRARIES = {
    PLAIN: ("plain_jax", "jax"),
    OURS: ("by_axonym", "axonym"),
    "Haliax": ("by_haliax", "haliax"),
    "Flax NNX": ("by_flax_nnx", "flax"),
    "Equinox": ("by_equinox", "equinox"),
    "Penzai": ("by_penzai", "penzai"),
}
"""Each library's file and package."""
PROGRAMS = ("block", "step", "sharded_step")
SMALL = {"pos": 8, "vocab": 16, "embed": 16, "heads": 2, "head_size": 8, "mlp": 16}
"""Sizes at which the time of a call is that of Python, more or less."""

MEASURES: dict[str, tuple[str, float]] = {
    "call": ("call with small arrays", 1.5),
    "run": ("call", 1.2),
    "trace": ("tracing and lowering", 1.3),
    "first": ("first call", 1.3),
    "instructions": ("instructions", 1.1),
    "memory": ("temporary memory of a device", 1.1),
    "moved": ("bytes sent to a device", 1.0),
}
"""What is measured, and the limit of our ratio to plain JAX."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a program costs: seconds, counts and bytes."""

    call: float
    run: float
    trace: float
    first: float
    instructions: int
    memory: int
    moved: int


def installed() -> dict[str, ModuleType]:
    """The libraries that can be imported; of the others, say so."""
    found = {}
    for name, (file, _) in LIBRARIES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name] = importlib.import_module(f".{file}", __name__)
        except ImportError as error:
            print(f"{name} is left out: {error}. The extra `peers` installs it.")
    return found


def versions(names: Mapping[str, Any]) -> dict[str, str]:
    found = {name: importlib.metadata.version(LIBRARIES[name][1]) for name in names if name != OURS}
    return found | {OURS: axn.__version__}


def lines_of(module: ModuleType) -> int:
    """Lines with code that a user writes, without imports, comments and docstrings."""
    text = Path(str(module.__file__)).read_text().partition("# --- for the comparison ---")[0]
    text = text[text.index("\n\n\n") :]  # after the imports
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({row for t in tokens if t.type not in skipped for row in range(t.start[0], t.end[0] + 1)})


def prepare(program: str, sizes: Any) -> dict[str, Any]:
    """Make a program with every library, and check that all compute the same."""
    libraries = installed()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)) if program == "sharded_step" else None
    weights = libraries[PLAIN].make_weights(sizes)
    made, results = {}, {}
    with _jax_defaults():
        for name, module in libraries.items():
            make = _scoped(getattr(module, f"make_{program}"), mesh)
            unscoped = make(sizes, weights, *() if mesh is None else (mesh,))
            made[name] = type(unscoped)(_scoped(unscoped.call, mesh), _scoped(unscoped.lower, mesh))
            results[name] = [_scoped(unscoped.array, mesh)(made[name].call()) for _ in range(3)]
        for name, values in results.items():
            for value, expected in zip(values, results[PLAIN], strict=True):
                np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-4, err_msg=name)
    return made


def measure(program: str, sizes: Any, *, repeats: int = 10, rounds: int = 3) -> dict[str, Figures]:
    """Measure a program of all libraries, in turn. JAX forgets what it has compiled."""
    tiny = prepare(program, type(sizes)(**SMALL, batch=sizes.batch, layers=sizes.layers))
    large = prepare(program, sizes)
    with _jax_defaults():
        calls = in_turn([p.call for p in tiny.values()], repeats=5 * repeats, rounds=rounds)
        runs = in_turn([p.call for p in large.values()], repeats=repeats, rounds=rounds)
        lowered = {name: p.lower() for name, p in large.items()}
        compiled = {name: getattr(low, "lowered", low).compile() for name, low in lowered.items()}
        traces = [_colds({name: p.lower for name, p in large.items()}, i) for i in range(rounds)]
        firsts = [_colds({name: p.call for name, p in large.items()}, i) for i in range(rounds)]
    return {
        name: Figures(
            call=statistics.median(calls[i]),
            run=statistics.median(runs[i]),
            trace=statistics.median(times[name] for times in traces),
            first=statistics.median(times[name] for times in firsts),
            instructions=sum(instructions(made).values()),
            memory=made.memory_analysis().temp_size_in_bytes,
            moved=sum(m.bytes for m in bytes_moved(made).values()),
        )
        for i, (name, made) in enumerate(compiled.items())
    }


def _scoped(fn: Callable[..., Any], mesh: jax.sharding.Mesh | None) -> Callable[..., Any]:
    """A function that is called on a mesh, and waits for the device."""

    def call(*args: Any) -> Any:
        with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
            return jax.block_until_ready(fn(*args))

    return call


@contextlib.contextmanager
def _jax_defaults() -> Iterator[None]:
    """What users of the libraries have."""
    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")
        yield


def _colds(fns: Mapping[str, Callable[[], Any]], start_with: int) -> dict[str, float]:
    """Seconds of a call of each when JAX has compiled nothing yet. What the libraries keep themselves stays."""
    seconds, names = {}, list(fns)
    for name in names[2 * start_with :] + names[: 2 * start_with]:
        jax.clear_caches()
        start = time.perf_counter()
        fns[name]()
        seconds[name] = time.perf_counter() - start
    return seconds


def shown(measure: str, value: float) -> str:
    if measure in ("call", "run", "trace", "first"):
        return f"{value * 1e3:.2f} ms" if value < 0.1 else f"{value:.2f} s"
    return f"{value / 1024:,.0f} KiB" if measure in ("memory", "moved") else f"{value:,.0f}"


def rows() -> list[Row]:
    """Axonym against plain JAX, and the other libraries' ratios in the notes."""
    if PLAIN not in installed():  # Optax is missing
        return []
    from .case import Sizes

    found = []
    for program in PROGRAMS:
        figures = measure(program, Sizes())
        for name, (what, limit) in MEASURES.items():
            values = {library: getattr(f, name) for library, f in figures.items()}
            if not values[PLAIN]:
                continue
            ratios = {library: value / values[PLAIN] for library, value in values.items()}
            others = ", ".join(f"{n} {r:.2f}" for n, r in ratios.items() if n not in (OURS, PLAIN))
            ours, theirs = shown(name, values[OURS]), shown(name, values[PLAIN])
            words = f"{program.replace('_', ' ')}: {what}"
            found.append(Row("peers", words, ours, theirs, ratios[OURS], limit, f"({others})" if others else ""))
    lines = {n: lines_of(m) for n, m in installed().items()}
    others = ", ".join(f"{n} {k}" for n, k in lines.items() if n not in (OURS, PLAIN))
    ratio = lines[OURS] / lines[PLAIN]
    found.append(Row("peers", "lines of code", str(lines[OURS]), str(lines[PLAIN]), ratio, math.inf, f"({others})"))
    return found
