"""Write the page of names from elsewhere: `python docs/names_elsewhere.py` writes `docs/names_elsewhere.md`.

What it says is the advice that the library gives for such names in its errors. Each name is a heading, since headings
come first in a search.
"""

from __future__ import annotations

import re
from pathlib import Path

from axonym.core import foreign_names

PAGE = Path(__file__).parent / "names_elsewhere.md"

HEAD = """# Names elsewhere

What to write instead of names that you know from NumPy, JAX, PyTorch, Flax, xarray and einops. If you use one of them,
the error says the same, with the axes of your array. Whole programs are side by side in the guides from
[PyTorch](from_pytorch.md), [Haliax](from_haliax.md), [scalax](from_scalax.md) and [plain JAX](from_jax.md), and on the
[cheat sheet](cheat_sheet.md).
"""

_FLAX, _TORCH, _XARRAY = (
    "[Keep your Flax model](keep_your_flax_model.md)",
    "[From PyTorch](from_pytorch.md)",
    "[With xarray](xarray.md)",
)
_PLACES, _FILES = "[Distributing by name](partitioning.md)", "[State dicts and checkpoints](checkpoints.md)"
MORE = {
    "DataLoader": "[Data loaders](other_libraries.md#data-loaders)",
    "einops": "[Patterns of einops](other_libraries.md#patterns-of-einops)",
    "matmul": "[Contractions](contractions.md)",
    "unsqueeze": "[Broadcasting](broadcasting.md)",
    **dict.fromkeys(("DDP", "DistributedDataParallel", "FSDP", "DTensor", "DeviceMesh"), _PLACES),
    **dict.fromkeys(("state_dict", "save", "load"), _FILES),
    **dict.fromkeys(
        ("coords", "groupby", "resample", "rolling", "loc", "sel", "isel", "DataArray", "Dataset"), _XARRAY
    ),
    **dict.fromkeys(("Module", "nn.Module", "nn.Parameter"), _TORCH),
    **dict.fromkeys(("nn.Param", "nn.Variable", "nn.Rngs", "nn.GraphDef", "nn.with_partitioning"), _FLAX),
}
"""Pages to read about some names."""


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for name, advice in sorted(_advice().items(), key=lambda pair: (pair[0].removeprefix("nn.").lower(), pair[0])):
        used = dict.fromkeys(re.findall(r"\baxonym\.(\w[\w.]*?)(?=\.init\b|[(`])", advice))
        links = [f"[`axonym.{found}`][axonym.{found}]" for found in used if found not in ("nn", "quantization")]
        links += [MORE[name]] if name in MORE else []
        more = f" More: {', '.join(links)}." if links else ""
        parts.append(f"## `{name}`\n\n{advice}{more}\n")
    return "\n".join(parts)


def _advice() -> dict[str, str]:
    """Return what the library says about each name."""
    found: dict[str, str] = {}
    for package, names in (("", foreign_names.ARRAY), ("", foreign_names.PACKAGE), ("nn.", foreign_names.NETWORKS)):
        for name, answer in names.items():
            said = foreign_names.sentence(answer, ("'batch'", "'embed'")).strip()
            if said not in found.get(package + name, ""):
                found[package + name] = f"{found.get(package + name, '')} {said}".strip()
    return found


if __name__ == "__main__":
    PAGE.write_text(page())
