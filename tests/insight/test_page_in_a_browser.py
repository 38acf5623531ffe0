"""The pages in a real browser: they fit, can be read, and are used with the keyboard and a screen reader.

It needs a Chromium or Chrome on the machine, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import axonym as axn
from axonym import insight
from tests.insight import pages
from tests.insight.browser import FOUND, Browser, browser

pytestmark = [
    pytest.mark.oldest,
    pytest.mark.skipif(FOUND is None, reason="no Chromium or Chrome is on PATH, in which pages could be looked at"),
]

PAGES = {
    "report": lambda: pages.large().reports["heads"],
    "compiled": pages.compiled,
    "compare": pages.large,
    "plan": pages.planned,
    "hostile": pages.hostile,
    "unrolled": pages.unrolled,
}
WIDTHS = {1280: 900, 390: 844}

CONTRAST = """(() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const over = ([r, g, b, alpha = 1], below) => [r, g, b].map((v, i) => alpha * v + (1 - alpha) * below[i]);
  const light = (color) => {
    const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = color.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    if (!e) return [255, 255, 255];
    const color = numbers(getComputedStyle(e).backgroundColor);
    return (color[3] ?? 1) === 1 ? color : over(color, behind(e.parentElement));
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; node = walker.nextNode();) {
    const e = node.parentElement;
    if (!node.textContent.trim() || e.closest("script, option")) continue;
    if (!e.checkVisibility({ opacityProperty: true })) continue;
    const style = getComputedStyle(e), below = behind(e);
    const color = over(numbers(e.closest("svg") ? style.fill : style.color), below);
    const [a, b] = [light(color), light(below)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push([node.textContent.trim(), ratio]);
  }
  return found;
})()"""


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


def opened(window: Browser, folder: Path, name: str, width: int, dark: bool = False) -> Browser:
    path = folder / f"{name}.html"
    if not path.exists():
        page: insight.Page = PAGES[name]()
        page.save(path)
    window.open(path, width, WIDTHS[width], dark)
    return window


@pytest.mark.parametrize("name", PAGES)
def test_fits_and_can_be_read(name: str, window: Browser, folder: Path) -> None:
    for width in WIDTHS:
        for dark in (False, True):
            opened(window, folder, name, width, dark)
            assert window.run("document.documentElement.scrollWidth") == width, "it scrolls sideways"
            assert window.run(CONTRAST) == []
            background = window.run("getComputedStyle(document.body).backgroundColor")
            assert background == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_asked_of_the_network_and_nothing_fails(name: str, window: Browser, folder: Path) -> None:
    opened(window, folder, name, 1280)
    requests = [e["params"]["request"]["url"] for e in window.events if e.get("method") == "Network.requestWillBeSent"]
    assert requests == [(folder / f"{name}.html").as_uri()]
    failed = {"Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening"}
    assert [e for e in window.events if e.get("method") in failed] == []
    assert window.run("typeof hacked") == "undefined"
    assert window.run("document.querySelectorAll('script').length") == 1


def test_the_first_screen_has_the_verdict(window: Browser, folder: Path) -> None:
    bottom = "document.querySelector('{}').getBoundingClientRect().bottom"
    opened(window, folder, "report", 1280)
    assert window.run(bottom.format(".two .item")) <= 900
    opened(window, folder, "report", 390)
    assert window.run(bottom.format(".card")) <= 844


@pytest.mark.parametrize("name", ["report", "compare"])
def test_the_keyboard_reaches_what_opens(name: str, window: Browser, folder: Path) -> None:
    opened(window, folder, name, 1280)
    window.run("window.seen = []; document.addEventListener('focusin', (e) => seen.push(e.target))")
    count = window.run("document.querySelectorAll('summary, a, select, input, button').length")
    for _ in range(count + 20):
        window.press("Tab")
    missed = """[...document.querySelectorAll('summary, a, select, input, button, .wide, pre')]
        .filter((e) => e.checkVisibility() && !seen.includes(e)).map((e) => e.outerHTML.slice(0, 200))"""
    assert window.run(missed) == []
    closed = window.run("(window.row = document.querySelector('details:not([open]) > summary')).focus()")
    assert closed is None
    window.press("Enter")
    assert window.run("row.parentElement.open && getComputedStyle(row).outlineStyle") == "solid"


def test_filtering(window: Browser, folder: Path) -> None:
    opened(window, folder, "report", 1280)
    window.run("filter.value = 'reduce-scatter mlp'; filter.dispatchEvent(new Event('input'))")
    rows = window.run("""[...document.querySelectorAll("#transfers .row")]
        .filter((e) => e.checkVisibility()).map((e) => e.closest("details").textContent)""")
    assert rows and all("reduce-scatter" in row and "mlp" in row for row in rows)


@pytest.mark.parametrize("name", PAGES)
def test_a_screen_reader_has_names_for_everything(name: str, window: Browser, folder: Path) -> None:
    opened(window, folder, name, 1280)
    nodes = [n for n in window("Accessibility.getFullAXTree")["nodes"] if not n["ignored"]]
    named = {
        "link",
        "button",
        "combobox",
        "searchbox",
        "DisclosureTriangle",
        "image",
        "navigation",
        "heading",
        "region",
    }
    roles = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes]
    assert [role for role, text in roles if role in named and not text.strip()] == []
    assert {"heading", "region"} <= {role for role, _ in roles}
    assert window.run("document.querySelectorAll('h1').length") == 1
    assert window.run("document.documentElement.lang") == "en"


# How notebooks say their scheme. In a trusted folder, VS Code puts an output into a page with its policy and styles.
# Elsewhere it shows no HTML.
VSCODE = """<meta http-equiv="Content-Security-Policy"
content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; child-src https: data:">
<style>thead, tr:nth-child(even) { background-color: rgba(130, 130, 130, 0.16) } table { width: 100% }</style>"""
NOTEBOOKS = {
    "JupyterLab": ("", "", 'data-jp-theme-light="{light}"'),
    "VS Code": (VSCODE, "", 'class="vscode-{scheme}"'),
    "Colab": ("", 'theme="{scheme}"', ""),
}


def in_notebook(path: Path, notebook: str, output: str, dark: bool) -> None:
    """Write a page that shows an output as a notebook does."""
    head, root, body = (
        part.format(light=str(not dark).lower(), scheme="dark" if dark else "light") if "Policy" not in part else part
        for part in NOTEBOOKS[notebook]
    )
    style = "color-scheme: dark; background: #111; color: #ddd" if dark else "background: white; color: black"
    head = f'<meta charset="utf-8">{head}<title>a notebook</title>'
    path.write_text(f'<!DOCTYPE html><html lang="en" {root}>{head}<body {body} style="{style}">{output}', "utf-8")


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_frame_takes_the_scheme_of_its_notebook(notebook: str, window: Browser, tmp_path: Path) -> None:
    for dark in (False, True):
        path = tmp_path / f"{dark}.html"
        in_notebook(path, notebook, pages.compiled()._repr_html_(), dark)
        window.open(path, dark=not dark)
        color = "getComputedStyle(document.querySelector('iframe').contentDocument.body).backgroundColor"
        assert window.run(color) == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_arrays_and_trees_in_a_notebook(notebook: str, window: Browser, tmp_path: Path) -> None:
    """They fit, can be read in both schemes of the notebook, and hide nothing that cannot be opened."""
    mesh = axn.make_mesh({"data": 4, "model": 2})
    model = {"blocks": [{"up": axn.ones({"embed": 64, "mlp": 256})}, {"norm": axn.ones({"embed": 64})}]}
    placed = axn.shard(model, {"mlp": "model", "embed": "data"}, mesh)
    shown = axn.debug.show(model, ({"embed": "data"}, {"batch": "data", "mlp": "model", "heads": "model"}), mesh)
    outputs = "".join(x._repr_html_() for x in (placed["blocks"][0]["up"], axn.ones({"pos": 3}), shown))
    for dark in (False, True):
        path = tmp_path / f"{dark}.html"
        in_notebook(path, notebook, outputs, dark)
        for width in WIDTHS:
            window.open(path, width, WIDTHS[width], dark=not dark)
            assert window.run("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
            assert window.run(CONTRAST) == []
        fill = "getComputedStyle(document.querySelector('.held')).fill"
        assert window.run(fill) == ("rgb(169, 180, 193)" if dark else "rgb(75, 85, 96)")
        cut = "getComputedStyle(document.querySelector('.cut1')).stroke"
        assert window.run(cut) == ("rgb(86, 180, 233)" if dark else "rgb(0, 114, 178)")
