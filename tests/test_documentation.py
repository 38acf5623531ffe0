"""The reference has every public name, the navigation every page, and the cheat sheet is right."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
import pytest

import axonym as axn
from axonym.core import foreign_names
from axonym.core.errors import describe_bytes
from tests.helpers import exports, modules, public_name

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
REFERENCE = {page.name: page.read_text() for page in sorted((DOCS / "api").glob("*.md"))}


def _listed() -> list[str]:
    """Return the names in the reference: those that its blocks render, and dtypes, which are rows of a table."""
    text = "".join(REFERENCE.values())
    blocks = re.findall(r"^::: axonym\.(\S+)$(?!\n    options:\n      show_root)", text, flags=re.MULTILINE)
    rows = re.findall(r"^\| (`axonym\.[^|]*) \|", REFERENCE["typing.md"], flags=re.MULTILINE)
    return blocks + re.findall(r"`axonym\.([^`]*)`", "".join(rows))


def _public() -> dict[str, Any]:
    """Return everything that users import, except type variables and names that JAX documents."""
    visible = [m for m in modules(native=True) if not any(part.startswith("_") for part in m.__name__.split("."))]
    found = {f"{m.__name__}.{name}": value for m in visible for name, value in exports(m).items()}
    theirs = {id(v) for v in vars(jax.sharding).values()}
    return {
        n: v
        for n, v in found.items()
        if not (inspect.ismodule(v) or isinstance(v, (TypeVar, ParamSpec)) or id(v) in theirs)
    }


def test_reference_has_every_public_name() -> None:
    rendered = {id(public_name(name)) for name in _listed()}
    missing = [name for name, value in _public().items() if id(value) not in rendered]
    assert not missing, f"add a line `::: axonym.name` to the page of its subject in docs/api/ for {', '.join(missing)}"


def test_reference_has_each_name_once() -> None:
    names = _listed()
    assert len(names) > 500
    assert sorted(names) == sorted(set(names))


def table_of(section: str) -> list[str]:
    """Return the table rows for the functions of a section, each with the first sentence of its docstring."""
    rows = []
    for name in re.findall(r"^::: axonym\.(\w+)$", section, flags=re.MULTILINE):
        first = (inspect.getdoc(getattr(axn, name)) or "").partition("\n\n")[0]
        first = " ".join(first.split()).replace("|", "\\|")
        rows.append(f"| [`{name}`][axonym.{name}] | {first} |")
    return rows


def test_elementwise_operations_are_in_tables() -> None:
    sections = REFERENCE["elementwise.md"].split("\n## ")[1:]
    assert len(sections) > 5
    for section in sections:
        rows = re.findall(r"^\| \[.*$", section, flags=re.MULTILINE)
        title = section.partition("\n")[0]
        assert rows == table_of(section), f"docs/api/elementwise.md, {title}: one row for each function, as shown"


def test_navigation_has_every_page() -> None:
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    navigation = re.findall(r"^ +- (?:[^:\n]*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert len(navigation) == len(set(navigation))
    assert set(navigation) == pages


def test_links_stay_within_the_site() -> None:
    """A link to another part of the repository works on a code host, and leads nowhere on the site."""
    outside = []
    for page in DOCS.rglob("*.md"):
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path = link.partition("#")[0]
            if not re.match(r"[a-z]+:", link) and not (page.parent / path).resolve().is_relative_to(DOCS):
                outside.append(f"{page.name}: {link}")
    assert outside == []


# --- the cheat sheet ---

CHEAT_SHEET = (DOCS / "cheat_sheet.md").read_text()
ROWS = re.findall(r"^\| [^|]*\| `(.+)` \| `(.+)` \|$", CHEAT_SHEET.partition("## Distribute")[0], flags=re.MULTILINE)


def _raw(result: Any) -> list[Any]:
    leaves = jax.tree.leaves(result, is_leaf=axn.is_named_array)
    return [leaf.array if isinstance(leaf, axn.NamedArray) else leaf for leaf in leaves]


@pytest.fixture(scope="module")
def sheet() -> dict[str, Any]:
    """Return the names that the block at the top of the sheet defines."""
    namespace: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```$", CHEAT_SHEET, flags=re.MULTILINE | re.DOTALL)[0], namespace)
    return namespace


def test_cheat_sheet_has_rows() -> None:
    assert len(ROWS) > 50 and len(set(ROWS)) == len(ROWS)


@pytest.mark.parametrize(("by_name", "on_raw"), ROWS, ids=[by_name for by_name, _ in ROWS])
def test_both_sides_of_the_cheat_sheet_agree(by_name: str, on_raw: str, sheet: dict[str, Any]) -> None:
    named = _raw(eval(by_name, sheet))
    with jax.numpy_rank_promotion("allow"):  # which is JAX's default
        raw = _raw(eval(on_raw, sheet))
    assert len(named) == len(raw)
    for ours, theirs in zip(named, raw, strict=True):
        assert np.shape(ours) == np.shape(theirs)
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-6, atol=1e-6)


# --- names in the text ---


def test_names_in_the_text_exist() -> None:
    """Also in the text between blocks, which does not run."""
    modules()  # some exist only once they are imported
    unknown = set()
    for page in DOCS.rglob("*.md"):
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for name in re.findall(r"`(?:axn|axonym)\.([A-Za-z_][\w.]*\w)", text):
            try:
                public_name(name)
            except AttributeError:
                unknown.add(f"{page.name}: {name}")
    assert not unknown


# --- output of scripts ---


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_those_that_the_script_draws() -> None:
    drawn = _script("pictures").files()
    files = {path.name: path.read_text() for path in (DOCS / "assets" / "pictures").glob("*.svg")}
    assert drawn.keys() == files.keys()
    if jax.__version_info__ >= (0, 11):  # whose XLA for CPUs needs less memory for the step of that page
        drawn |= {name: files[name] for name in files if name.startswith("page-memory")}
    assert drawn == files, "write them again: python docs/pictures.py"
    shown = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    assert all(f"assets/pictures/{name}" in shown for name in files)
    assert all(len(text) < 20_000 for text in files.values())


def test_the_first_picture_has_the_figures_of_reports() -> None:
    """What the partitioner makes of the layer, in the picture, and in the texts beside it."""
    pictures = _script("pictures")
    texts = (ROOT / "README.md").read_text(), (DOCS / "index.md").read_text()
    for name in pictures.HOME:
        report = pictures.home_report(name, by="partitioner")
        sent = pictures.sent_at_home(report)
        assert sum(sent.values()) == report.total_sent() > 0
        weights = f"holds {describe_bytes(report.arguments['weights'])} of weights"
        figures = [f"{describe_bytes(size)} {what}" for (what, _), size in sent.items()]
        over = [f"over {' and '.join(axes)}" for _, axes in sent]
        for scheme in ("light", "dark"):
            file = DOCS / "assets" / "pictures" / f"{name}-{scheme}.svg"
            title, said = file.read_text().partition("</title>")[::2]
            title = title.partition("<title>")[2]
            said = re.sub(r"<(?!text)[^>]*>", "", said)
            for text in (title, said):
                assert all(words in text for words in (weights, *figures, *over))
                assert len(re.findall(r"\d+ [KM]iB", text)) == len(sent) + 1
            assert all(title in text and f"{name}-{scheme}.svg" in text for text in texts)


def test_the_picture_of_a_slow_step_has_the_times_that_its_page_prints() -> None:
    printed = "".join(re.findall(r"^```output\n(.*?)^```$", (DOCS / "slow_step.md").read_text(), re.M | re.S))
    times = re.findall(r"(compute|memory|sending over \w+) (\d+ us)", printed)
    (bottleneck,) = re.findall(r"^bottleneck: (.*)$", printed, re.M)
    (mended,) = re.findall(r"^at least .*$", printed, re.M)
    longest = max((time for _, time in times), key=lambda time: int(time.split()[0]))
    assert len(times) == 4
    for scheme in ("light", "dark"):
        text = (DOCS / "assets" / "pictures" / f"slow-{scheme}.svg").read_text()
        texts = [re.sub(r"<[^>]*>", "", line) for line in text.splitlines() if line.startswith("<text")]
        assert texts[:2] == ["center=axn.median", f"at least {longest}: {bottleneck}"]
        assert list(zip(texts[2:10:2], texts[3:10:2], strict=True)) == times
        assert texts[10:12] == ["center=axn.mean", mended]


def test_a_color_is_a_mesh_axis_with_its_name() -> None:
    """All else is gray; the colors are those of pages, which tell two mesh axes apart for everyone."""
    pictures = _script("pictures")
    for scheme, colors in (("light", pictures.LIGHT), ("dark", pictures.DARK)):
        axes = {colors[f"m{i}"]: f"m{i}" for i in range(1, 6)}
        for name in (name for name in pictures.PICTURES if not name.startswith("page-")):
            text = (DOCS / "assets" / "pictures" / f"{name}-{scheme}.svg").read_text()
            for color in set(re.findall(r"#[0-9a-f]{6}", text)):
                red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
                assert color in axes or max(red, green, blue) - min(red, green, blue) < 32, (name, color)
            used = set(re.findall(r'class="(?:m|cut)(\d)"', text))
            named = set(re.findall(r'<tspan class="m(\d)">', text))
            assert used == named, (name, "a color without its name")


# Of Machado, Oliveira and Fernandes (2009): what people see who lack one of the three kinds of cones.
WITHOUT = {
    "red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


@pytest.mark.parametrize("lacking", [None, *WITHOUT])
def test_two_mesh_axes_have_colors_that_everyone_tells_apart(lacking: str | None) -> None:
    pictures = _script("pictures")

    def seen(color: str) -> np.ndarray:
        """Return the color in Lab, in which a distance of 2 is just noticeable."""
        srgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
        linear = linear if lacking is None else np.clip(np.array(WITHOUT[lacking]) @ linear, 0, 1)
        xyz = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]]) @ linear
        f = np.cbrt(xyz / [0.9505, 1, 1.089])  # all are far from black
        return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

    for colors in (pictures.LIGHT, pictures.DARK):
        assert np.linalg.norm(seen(colors["m1"]) - seen(colors["m2"])) > 60


def test_gallery_is_what_the_script_writes() -> None:
    gallery = _script("gallery")
    text = gallery.PAGE.read_text()
    outputs = gallery.shown(text)
    assert gallery.page(outputs) == text, "write it again: python docs/gallery.py"
    assert all(output and len(output.splitlines()) <= gallery.LINES + 1 for output in outputs.values())
    assert outputs.keys() == gallery.EXAMPLES.keys()


def test_names_elsewhere_are_what_the_script_writes() -> None:
    names = _script("names_elsewhere")
    text = names.PAGE.read_text()
    assert names.page() == text, "write it again: python docs/names_elsewhere.py"
    headings = re.findall(r"^## `(.+)`$", text, flags=re.MULTILINE)
    tables = {*foreign_names.ARRAY, *foreign_names.PACKAGE, *(f"nn.{name}" for name in foreign_names.NETWORKS)}
    assert sorted(headings) == sorted(tables)
    assert names.MORE.keys() <= set(headings)


def test_the_page_of_peers_is_what_the_script_writes() -> None:
    peers = _script("peers")
    recorded = json.loads(peers.FIGURES.read_text())
    assert peers.page(recorded) == peers.PAGE.read_text(), "write it again: python docs/peers.py --write"


# --- metadata of the site ---


def test_the_site_leads_to_the_repository_and_has_the_version() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    settings = dict(re.findall(r"^ *(\w+): (\S.*)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert settings["site_url"].rstrip("/") == urls["Documentation"]
    assert settings["repo_url"] == urls["Source"] and urls["Source"].endswith(settings["repo_name"])
    assert axn.__version__ in settings["copyright"].replace(",", "").split()
    assert (DOCS / settings["favicon"]).is_file() and (DOCS / settings["logo"]).is_file()
    card = re.findall(r"site_url }}(\S+)\"", (DOCS / "theme" / "main.html").read_text())
    header = (DOCS / card[0]).read_bytes()[:24]
    assert (int.from_bytes(header[16:20]), int.from_bytes(header[20:24])) == (1200, 630)
