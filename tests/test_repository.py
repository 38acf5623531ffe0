"""The code on the repository's pages runs, and their links work."""

import ast
import fnmatch
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

import axonym as axn

ROOT = Path(__file__).parent.parent

# Arguments that make an example small enough for a test. Examples without an entry run without arguments.
SMALL: dict[str, list[str]] = {
    "image_classifier.py": ["--epochs", "1", "--batch", "512"],
    "mixture_of_experts.py": ["--steps", "2", "--every", "1"],
    "small_weights.py": ["--steps", "3"],
    "trainer_to_sampler.py": ["--steps", "10"],
    "train.py": ["llama", "--strategies", "mixed", "--steps", "2"],
}

# Training a language model has tests of its own, in tests/examples.
SCRIPTS = {*(ROOT / "examples").glob("*.py"), ROOT / "examples" / "models" / "train.py"}
EXAMPLES = sorted(SCRIPTS - {ROOT / "examples" / name for name in ("generate.py", "train_lm.py")})
# The examples that depend most on JAX's behavior. The others run with the oldest JAX only.
WITH_EVERY_VERSION = ("custom_partitioning.py", "language_model_fsdp.py", "pallas_kernel.py", "tour.py")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

NOTEBOOKS = runpy.run_path(str(ROOT / "docs" / "notebooks.py"))


def _run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python as a reader would, in a separate process, with warnings as errors."""
    settings = {"JAX_PLATFORMS": "cpu", "JAX_NUMPY_RANK_PROMOTION": "raise"}
    environment = os.environ | settings
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def _without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts and documentation builders spell them."""
    headings = re.findall(r"^#+ +(.+)$", _without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


README_BLOCKS = _blocks(ROOT / "README.md", "python")


def test_readme_has_an_example() -> None:
    assert README_BLOCKS


@pytest.mark.parametrize("block", README_BLOCKS, ids=range(1, len(README_BLOCKS) + 1))
def test_readme_block_runs(block: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block)
    result = _run(str(script), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    text = (ROOT / "README.md").read_text()
    if (after := text.partition(block)[2].removeprefix("```\n\n")).startswith("```output\n"):
        assert result.stdout == after.removeprefix("```output\n").partition("```")[0]


DOCS = [page for page in PAGES if page.is_relative_to(ROOT / "docs") and _blocks(page, "python")]


@pytest.mark.oldest
@pytest.mark.parametrize("page", DOCS, ids=_relative)
def test_page_runs(page: Path, tmp_path: Path) -> None:
    """The blocks of a page run in order as one program, and print what the page says they print.

    So its notebook, if it has one, has the outputs of a run.
    """
    name = page.stem if page.parent == ROOT / "docs" and page.stem in NOTEBOOKS["NEEDS"] else None
    found = [(kind, part) for kind, part in NOTEBOOKS["blocks"](page.read_text()) if kind]
    script = tmp_path / "page.py"
    codes = [part for kind, part in found if kind == "python"]
    script.write_text(NOTEBOOKS["program"](codes, show=name is not None))
    result = _run(str(script), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    outputs = NOTEBOOKS["outputs"](result.stdout)
    printed = iter(outputs)
    for i, (kind, _) in enumerate(found):
        if kind == "python":
            expected = found[i + 1][1] if i + 1 < len(found) and found[i + 1][0] == "output" else ""
            output = next(printed)
            assert output.printed + output.shown == expected
    if name is not None:
        file = ROOT / "docs" / "notebooks" / f"{name}.ipynb"
        assert file.read_text() == NOTEBOOKS["written"](name, outputs), "write it again: python docs/notebooks.py"


def _without_digits(text: str) -> str:
    """Return the text without digits, which depend on rounding."""
    return re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "0", text)


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, id=_relative(path), marks=[] if path.name in WITH_EVERY_VERSION else pytest.mark.oldest)
        for path in EXAMPLES
    ],
)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    result = _run(str(example), *SMALL.get(example.name, []), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout, f"{_relative(example)} shows nothing"
    gallery = runpy.run_path(str(ROOT / "docs" / "gallery.py"))
    if gallery["EXAMPLES"].get(example.name, ("", "small"))[1] == "":  # run as the page does
        shown = gallery["shown"](gallery["PAGE"].read_text())[example.name]
        assert _without_digits(gallery["cut"](result.stdout)) == _without_digits(shown), "run docs/gallery.py"


FIRST_OUTPUT = (ROOT / "tests" / "first_output.py").read_text()  # as a file, its folder would be on the path

# The commands of the README, the pages and the examples, by the words after `python`; some have arguments.
COMMANDS = {
    **{f"examples/{path.name}": [] for path in (ROOT / "examples").glob("*.py")},
    "examples/generate.py": ["model", "--prompt", "a"],
    "-m axonym.insight": ["examples/explain.py:case", "--mesh", "data=64,model=8", "--mapping", "fsdp"],
    "-m axonym.state": ["verify", "model"],
    "-m benchmarks": [],
}


def test_commands_of_pages_are_known() -> None:
    command = re.compile(r"(?<![\w/])(?:\.venv/bin/)?python3? (-m (?:axonym|benchmarks)[\w.]*|examples/\w+\.py)")
    found = {words for page in PAGES for words in command.findall(page.read_text())}
    assert found <= COMMANDS.keys()


@pytest.mark.oldest
@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_command_shows_something_at_once(command: str, tmp_path: Path) -> None:
    """Before it compiles programs or imports large packages: after that, nobody would know whether it runs."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "model" / "tokenizer.json"))
    for name in ("examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    result = _run("-c", FIRST_OUTPUT, *command.split(), *COMMANDS[command], cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert "error" not in result.stdout


@pytest.mark.parametrize("page", PAGES, ids=_relative)
def test_relative_links_exist(page: Path) -> None:
    broken = []
    for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", _without_code(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
            broken.append(link)
    assert not broken, f"{_relative(page)} links to what is not there: {', '.join(broken)}"


def test_readme_commands_are_single_lines() -> None:
    """A reader copies one line, and continuous integration runs the one that tests."""
    commands = [block.strip() for block in _blocks(ROOT / "README.md", "bash")]
    assert all("\n" not in command for command in commands), commands
    assert sum("pytest" in command for command in commands) == 1, commands
    assert sum("examples/tour.py" in command for command in commands) == 1, commands


def test_the_readme_says_how_long_its_commands_take() -> None:
    """So does the page for contributors, and in the same words."""
    readme, contributing = ((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
    training = readme.partition("examples/train_lm.py\n```")[2].partition("```")[0]
    tests = readme.partition("-m pytest\n```")[2].partition("##")[0]
    assert re.search(r"about \w+ minutes on two\s+cores", training)
    (whole,) = re.findall(r"take about \w+ minutes on two\s+cores", tests)
    assert re.search(r"`-m quick`.*?less than two\s+minutes", tests, flags=re.DOTALL)
    assert whole.replace("take ", "takes ") in contributing and "takes less than two minutes" in contributing


def test_the_resumed_run_trains_on_and_leaves_nothing_for_git() -> None:
    (command,) = [c for block in _blocks(ROOT / "README.md", "bash") for c in block.splitlines() if "--resume" in c]
    default = re.search(r"^    steps: int = (\d+)$", (ROOT / "examples/training/config.py").read_text(), re.MULTILINE)
    steps = re.search(r"--steps (\d+)", command)
    assert default and steps and int(steps[1]) > int(default[1])
    exported = re.search(r"--export (\S+)", command)
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert exported and any(fnmatch.fnmatch(exported[1], pattern.strip("/")) for pattern in ignored)


SOURCES = sorted({*(ROOT / "examples").glob("*.py"), *(ROOT / "examples" / "models").glob("*.py")})


@pytest.mark.parametrize("source", SOURCES, ids=_relative)
def test_examples_explain_a_missing_extra(source: Path) -> None:
    """What only the extra brings is imported where a missing package is explained."""
    extra = {"matplotlib", "optax", "orbax", "rich", "sklearn", "tokenizers", "transformers", "tyro"}
    for statement in ast.parse(source.read_text()).body:
        if isinstance(statement, ast.Try):
            assert "install axonym[examples]" in ast.unparse(statement)
            continue
        for node in ast.walk(statement):
            found = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            found += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not extra & {name.partition(".")[0] for name in found}, "imported without an explanation"


def test_extras_named_in_commands_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "".join((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", ".ci/run"))
    named = set(re.findall(r"'\.\[(\w+)\]'", text))
    assert named and named <= extras.keys(), f"extras named but not defined: {named - extras.keys()}"


def test_sdist_holds_what_its_tests_need(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        held = {name.partition("/")[2] for name in file.getnames()}
    folders = ("src", "tests", "docs", "examples", "benchmarks")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".txt")]
    found += [*ROOT.glob("*.md"), *(ROOT / name for name in (".ci/run", ".gitignore", "mkdocs.yml", "pyproject.toml"))]
    missing = {_relative(path) for path in found if "egg-info" not in path.as_posix()} - held
    assert not missing, f"not in the sdist: {sorted(missing)}"


@pytest.mark.oldest
def test_benchmarks_start() -> None:
    """They choose the number of devices, so none may ask JAX for its devices when it is imported."""
    command = [sys.executable, "-m", "benchmarks", "--help"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_every_dependency_has_a_lower_bound() -> None:
    """So that an environment with something older is refused by the installer, and not by a traceback."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    every = [r for found in (project["dependencies"], *extras) for r in found if not r.startswith("axonym[")]
    assert not [r for r in every if not re.fullmatch(r"[\w.-]+(\[\w+\])?[>=]=[\d.]+(dev\d+)?", r)]


def test_version_and_changelog_agree() -> None:
    """Each release has a section of its own; changes since the last one stand under "Unreleased"."""
    sections = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert sections[1] == axn.__version__


def test_package_is_typed() -> None:
    assert (Path(axn.__file__).parent / "py.typed").is_file()
