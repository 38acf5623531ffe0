"""Print constraints for pip: the oldest version that pyproject.toml allows of each dependency, in all extras."""

import pathlib
import tomllib

project = tomllib.loads((pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
requirements = set(project["dependencies"]).union(*project["optional-dependencies"].values())
# Constraints name no extras.
print(*sorted(r.replace(">=", "==") for r in requirements if ">=" in r and "[" not in r), sep="\n")
