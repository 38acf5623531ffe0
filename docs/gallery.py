"""Write the page of examples, with their output: `python docs/gallery.py` runs each, and writes `docs/gallery.md`.

`python docs/gallery.py NAME...` runs only the named ones, and keeps the output of the others. The first paragraph of an
example's docstring says what it is. The tests write the page again from the outputs that it shows, and compare; they
also run the quick examples, which must print what the page shows.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "gallery.md"
SOURCE = "https://github.com/axonym/axonym/blob/main"
LINES, WIDTH = 14, 110
"""How much of an output is shown."""

EXAMPLES: dict[str, tuple[str, str]] = {
    "tour.py": ("A short tour", ""),
    "named_arrays_tour.py": ("A longer tour, as a notebook", ""),
    "image_classifier.py": ("An image classifier", "--epochs 3"),
    "train_lm.py": ("A language model", ""),
    "small_weights.py": ("A Llama with weights of 8 and 4 bits", "--steps 100"),
    "generate.py": (
        "Text from a model of Hugging Face's hub",
        'runs/rhyme --prompt "The rain" --length 36',
    ),
    "trainer_to_sampler.py": ("Weights from a trainer to a sampler", "--steps 30"),
    "mixture_of_experts.py": ("A mixture of experts", "--steps 100 --every 50"),
    "language_model_fsdp.py": ("A model of plain arrays, by a rule", ""),
    "language_model_tensor_parallel.py": ("Tensor parallelism, by rules", ""),
    "names_nnx.py": ("A Flax NNX transformer, unchanged", ""),
    "diloco.py": ("Replicas that train alone, and agree now and then", "--rounds 6"),
    "shallow_water.py": ("Shallow water on a staggered grid", "--report"),
    "spectral.py": ("Turbulence by Fourier transforms along a sharded axis", ""),
    "atmosphere.py": ("Layers of air on a globe, with physics in columns", ""),
    "explain.py": ("What a mapping costs, before it runs", ""),
    "per_device.py": ("Per-device code", ""),
    "custom_partitioning.py": ("Operations with their own partitioning", ""),
    "pallas_kernel.py": ("A Pallas kernel on sharded arrays", ""),
}
"""The title of each example, and the arguments that it is run with here."""

BEFORE = {"generate.py": "small_weights.py --out runs/rhyme"}
"""The command to run before an example, which makes what the example reads."""

WIDE = '<div class="wide" markdown>'
"""Around an output whose lines are not to be broken, since it has tables and drawings."""

HEAD = """# Examples

Programs to run and to copy from. Each is one file in the folder `examples`, and runs on any machine: without an
accelerator, eight devices are simulated. The outputs are from a CPU, and the longer ones are cut short.
"""


def run(name: str, arguments: str, folder: Path) -> str:
    """Run an example, and return what the page shows of its output."""
    if name in BEFORE:
        run(*BEFORE[name].split(maxsplit=1), folder)
    command = [sys.executable, str(ROOT / "examples" / name), *shlex.split(arguments)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src"), "COLUMNS": str(WIDTH)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return cut(done.stdout)


def cut(text: str) -> str:
    """An output, or of a long one the first and the last lines."""
    text = text.replace(sys.executable, "python").replace(f"{ROOT}/", "")
    lines = [line[: WIDTH - 1] + "…" if len(line) > WIDTH else line for line in text.rstrip().splitlines()]
    lines = [line for line in lines if not re.match(r"\d+ s of training", line)]  # it depends on the machine
    while lines and not lines[0].strip():
        del lines[0]
    if len(lines) > LINES:
        lines = [*lines[: LINES // 2], "…", *lines[-LINES // 2 :]]
    return "\n".join(line.rstrip() for line in lines)


def page(outputs: dict[str, str]) -> str:
    """The text of the page."""
    parts = [HEAD]
    for name, (title, arguments) in EXAMPLES.items():
        commands = [BEFORE[name]] if name in BEFORE else []
        command = "\n".join(f"python examples/{c}".rstrip() for c in (*commands, f"{name} {arguments}"))
        parts.append(
            f"## {title}\n\n{about(name)}\n\n[Source of `{name}`]({SOURCE}/examples/{name})\n\n"
            f"```bash\n{command}\n```\n\n{WIDE}\n\n```output\n{outputs.get(name, '')}\n```\n\n</div>\n"
        )
    return "\n".join(parts)


def about(name: str) -> str:
    """The first paragraphs of what an example says of itself: its docstring, or its first cell."""
    text = (ROOT / "examples" / name).read_text()
    words = ast.get_docstring(ast.parse(text))
    if words is None:
        cell = text.partition("\n\n")[0]
        words = "\n".join(line.removeprefix("#").strip() for line in cell.splitlines()[3:])
    return words.replace(f": `python examples/{name}`", "")


def shown(text: str) -> dict[str, str]:
    """The outputs that a page shows, by example."""
    return dict(
        re.findall(r"\npython examples/(\S+)[^\n]*\n```\n\n[^\n]*\n\n```output\n(.*?)\n```", text, flags=re.DOTALL)
    )


if __name__ == "__main__":
    import tempfile

    outputs = shown(PAGE.read_text()) if PAGE.exists() else {}
    for name in sys.argv[1:] or EXAMPLES:
        with tempfile.TemporaryDirectory() as folder:
            outputs[name] = run(name, EXAMPLES[name][1], Path(folder))
        print(f"{name}\n{outputs[name]}\n")
    PAGE.write_text(page(outputs))
