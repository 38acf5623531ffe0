"""Check the installed wheel as somebody meets it who has no copy of the repository.

`python check_wheel.py README.md`, in a folder outside of the repository: the README's program runs and prints what it
says, `python -m axonym.insight` answers, files that are not code are there, and the README of the wheel has whole
addresses.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import axonym


def main(readme: str) -> None:
    package = Path(axonym.__file__).parent
    assert "site-packages" in package.parts, f"axonym is not installed, but imported from {package}"
    missing = [n for n in ("py.typed", "core/foreign_names.toml", "insight/page.html") if not (package / n).is_file()]
    assert not missing, f"not in the wheel: {missing}"

    about = importlib.metadata.metadata("axonym")
    assert about["Version"] == axonym.__version__
    addresses = re.findall(r'\]\(([^)]+)\)|\bsrc(?:set)?="([^"]+)"', about.get_payload())
    relative = [a or b for a, b in addresses if not (a or b).startswith("https://")]
    assert addresses and not relative, f"relative addresses in the README of the wheel: {relative}"

    text = Path(readme).read_text()
    program, printed = re.findall(r"```python\n(import jax\n.*?)```\n\n```output\n(.*?)```", text, re.DOTALL)[0]
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
        assert ran.stdout == printed, f"{ran.stdout}\n{ran.stderr}"
        asked = subprocess.run([sys.executable, "-m", "axonym.insight", "--help"], cwd=folder, capture_output=True)
        assert asked.returncode == 0, asked.stderr.decode()
    print(f"the wheel of {axonym.__version__} works outside of the repository, with {len(addresses)} whole addresses")


if __name__ == "__main__":
    main(sys.argv[1])
