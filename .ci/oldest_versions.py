"""Print constraints for pip: the oldest version that pyproject.toml allows of each dependency of library and tests."""

import pathlib
import tomllib

project = tomllib.loads((pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
tested = [extras[name] for name in extras if name not in ("dev", "docs", "interop")]
requirements = set(project["dependencies"]).union(*tested)
print(*sorted(r.replace(">=", "==") for r in requirements if ">=" in r), sep="\n")
