"""Write the page that measures other libraries beside this one: `python docs/peers.py`, with the extra `peers`.

It runs `benchmarks/peers`, keeps the figures in `docs/peers.json`, and writes `docs/peers.md`; `docs/pictures.py` draws
from the figures. `python docs/peers.py PROGRAM...` measures only the named programs and keeps the figures of the
others, and with `--write` nothing is measured. The tests write the page again from the figures, and compare.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE, FIGURES = ROOT / "docs" / "peers.md", ROOT / "docs" / "peers.json"
sys.path.insert(0, str(ROOT))

from benchmarks import peers  # noqa: E402

PROGRAMS = {
    "block": (
        "A block",
        "The forward pass of one block, jitted.",
    ),
    "step": ("A training step", "The loss, its gradient and an AdamW update, jitted, on one device."),
    "sharded_step": (
        "A sharded training step",
        "The same step on eight simulated devices: the batch is sharded over all of them, and so are parameters and "
        "optimizer state, along the features of the residual stream.",
    ),
}

HEAD = """# Beside other libraries

See what the same transformer costs in plain JAX, Axonym, Haliax, Flax NNX, Equinox and Penzai. Each version follows its
library's documentation, in a file of `benchmarks/peers`. In the sharded step, Equinox and Penzai therefore leave
activations to the compiler; the others constrain them. All get the same weights, and must compute the same results
before anything is measured. The libraries take turns in one process.

![What each library adds to plain JAX](assets/pictures/peers-light.svg#gh-light-mode-only)
![What each library adds to plain JAX](assets/pictures/peers-dark.svg#gh-dark-mode-only)

Measured on {date} on {device}, with {versions}.

Times are medians of alternating calls; differences of less than a tenth may be chance. Before a first call, and before
tracing, JAX's caches are cleared; the libraries' own caches are not. Instructions and bytes do not vary.
Measure on your machine:

```bash
python -m pip install -e '.[peers]'
python -m benchmarks peers
```

The transformer has {layers} blocks with {embed} features, {heads} heads and {mlp} hidden features, for {batch} texts of
{pos} tokens. Its arrays are small, so that the libraries' overhead shows. For "call, small" they are smaller still,
and a block spends nearly all of its time in Python.
"""

COLUMNS = {
    "call": "call, small",
    "run": "call",
    "trace": "trace and lower",
    "first": "first call",
    "instructions": "instructions",
    "memory": "temporary memory",
    "moved": "bytes sent to a device",
}


def page(recorded: dict[str, Any]) -> str:
    """The text of the page."""
    versions = ", ".join(f"{'JAX' if n == peers.PLAIN else n} {v}" for n, v in recorded["versions"].items())
    parts = [HEAD.format(versions=versions, **recorded["sizes"], date=recorded["date"], device=recorded["device"])]
    for program, (title, about) in PROGRAMS.items():
        figures = recorded["figures"][program]
        columns = [c for c in COLUMNS if figures[peers.PLAIN][c]]
        rows = [[name, *(peers.shown(c, values[c]) for c in columns)] for name, values in figures.items()]
        parts.append(f"## {title}\n\n{about}\n\n{table(['library', *(COLUMNS[c] for c in columns)], rows)}\n")
    about = (
        "Lines of the model, the loss, the step and functions that place arrays. Axonym and Haliax place arrays with "
        "calls, which are not counted:"
    )
    parts.append(f"## Lines of code\n\n{about}\n\n{table([*recorded['lines']], [[*recorded['lines'].values()]])}\n")
    parts.append(f"## Where others are ahead\n\n{ahead(recorded)}\n\n{REASONS}\n")
    return "\n".join(parts)


REASONS = """\
The model in Axonym consists of Equinox modules, which JAX flattens in Python at each call. `equinox.partition` or a
flat list of its arrays avoids that: see [how to avoid costs](performance.md#how-to-avoid-costs). In the sharded step,
each use of a parameter is a `jax.shard_map` of its own, which takes time to trace, and saves bytes. The temporary
memory of a block holds the same large arrays as in plain JAX, which XLA arranges in another way: in plain JAX it is
2,304 KiB, too, if weights and values are multiplied as `bhpk,bkhs->bhps`, since XLA then keeps the sum with the input
beside the buffer of the result."""


def table(head: list[str], rows: list[list[Any]]) -> str:
    lines = (f"| {' | '.join(map(str, row))} |" for row in (head, *rows))
    return "\n".join([next(lines), "|" + "---|" * len(head), *lines])


def ahead(recorded: dict[str, Any]) -> str:
    """List where another library needs less than Axonym, by more than the figures vary."""
    found = []
    for program, (title, _) in PROGRAMS.items():
        figures = recorded["figures"][program]
        for column, what in COLUMNS.items():
            ours = figures[peers.OURS][column]
            margin = 1.1 if column in ("call", "run", "trace", "first") else 1.01
            less = sorted((v[column], n) for n, v in figures.items() if v[column] * margin < ours)
            if less:
                names = ", ".join(f"{n} {peers.shown(column, v)}" for v, n in less)
                found.append(f"- {title}, {what}: {names}; Axonym {peers.shown(column, ours)}.")
    fewer = ", ".join(f"{n} {k}" for n, k in recorded["lines"].items() if k < recorded["lines"][peers.OURS])
    if fewer:
        found.append(f"- Lines of code: {fewer}; Axonym {recorded['lines'][peers.OURS]}.")
    return "\n".join(found) or "Nowhere by more than the figures vary."


def main() -> None:
    import dataclasses
    import datetime
    import platform

    import jax

    from benchmarks.peers.case import Sizes

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    recorded: dict[str, Any] = json.loads(FIGURES.read_text()) if FIGURES.exists() else {"figures": {}}
    if sys.argv[1:] != ["--write"]:
        libraries, sizes = peers.installed(), Sizes()
        assert libraries.keys() == peers.LIBRARIES.keys(), "the page needs all of them: the extra `peers`"
        recorded |= {
            "versions": peers.versions(libraries),
            "lines": {name: peers.lines_of(module) for name, module in libraries.items()},
            "sizes": dataclasses.asdict(sizes),
            "date": datetime.date.today().isoformat(),
            "device": f"a CPU, Python {platform.python_version()}",
        }
        for program in sys.argv[1:] or peers.PROGRAMS:
            figures = peers.measure(program, sizes)
            recorded["figures"][program] = {name: dataclasses.asdict(f) for name, f in figures.items()}
            FIGURES.write_text(json.dumps(recorded, indent=1) + "\n")
    PAGE.write_text(page(recorded))


if __name__ == "__main__":
    main()
