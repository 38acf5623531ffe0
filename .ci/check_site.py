"""`python .ci/check_site.py site`: what `zensical build --strict` does not check.

Every name that the reference lists is on its page, with a docstring; examples came out as code; no signature shows a
private name; links within the site lead somewhere; the search finds what people type, and the errors that the site
explains; and nothing that a page needs lies elsewhere, so that the site can be read without a network.
"""

from __future__ import annotations

import html
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

DOCS = Path(__file__).parent.parent / "docs"

SEARCHES = {
    **dict.fromkeys(
        ("matmul", "transpose", "squeeze", "cat", "reshape", "unsqueeze", "Conv2d", "einops", "dataloader", "DDP"),
        "names_elsewhere.html#",
    ),
    **dict.fromkeys(("OOM", "out of memory", "RESOURCE_EXHAUSTED", "hang"), "troubleshooting.html"),
    **dict.fromkeys(("halo", "convolution", "dropout"), "nn.html"),
    "softmax": "api/nn.html#axonym.nn.softmax",
    "einsum": "api/contractions.html#axonym.einsum",
    "vmap": "api/transforms.html#axonym.vmap",
    "all-gather": "glossary.html#all-gather",
    "tensor parallelism": "glossary.html",
    "torch": "from_pytorch.html",
    "ShardingTypeError": "from_jax.html",
    "Unreleased": "changelog.html",
}
"""What people type, and a page or section that has to be among the answers. Errors are added from their page."""


class Page(HTMLParser):
    """The anchors of a page, its links, and what it loads."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.text = path.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {found[key] or "" for key in ("id", "name") if key in found}
        target = found.get("href") or found.get("src") or ""
        if tag in ("script", "img", "source") or (tag == "link" and found.get("rel") in ("stylesheet", "icon")):
            self.loads.add(target)
        elif tag == "a":
            self.links.add(target)


def leads_nowhere(site: Path, pages: dict[Path, Page], source: Path, link: str) -> bool:
    """Whether a relative link from a page has no target."""
    path = unquote(urlsplit(link).path)
    target = (source.parent / path).resolve() if path else source
    if target.is_dir():
        target = target / "index.html"
    if not target.is_relative_to(site) or not target.is_file():
        return True
    anchor = unquote(urlsplit(link).fragment)
    return bool(anchor) and target in pages and anchor not in pages[target].anchors


def missing_answers(site: Path) -> list[str]:
    """Return what a search does not find: an answer has all words of the query, each at the beginning of a word."""
    items = json.loads((site / "search.json").read_text())["items"]
    texts = [
        (item["location"], html.unescape(re.sub(r"<[^>]+>", " ", f"{item['title']} {item['text']}")).lower())
        for item in items
    ]
    headings = re.findall(r"^### (.+)$", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    errors = {re.sub(r"[`…]", " ", heading): "troubleshooting.html#" for heading in headings}
    problems = []
    for query, location in (SEARCHES | errors).items():
        words = [re.compile(rf"(?<!\w){re.escape(word)}") for word in re.findall(r"\w+", query.lower())]
        if not any(where.startswith(location) and all(w.search(text) for w in words) for where, text in texts):
            problems.append(f"a search for {query!r} does not find {location}")
    return problems


def main(site: Path) -> int:
    pages = {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    problems = []
    for path, page in pages.items():
        name = path.relative_to(site)
        for link in sorted(page.links | page.loads):
            if urlsplit(link).scheme or link.startswith("//"):
                if link in page.loads and not link.startswith("data:"):
                    problems.append(f"{name}: loads {link}, which lies elsewhere")
            elif link and leads_nowhere(site, pages, path, link):
                problems.append(f"{name}: nothing at {link}")
        text = re.sub(r"<pre.*?</pre>", "", page.text, flags=re.DOTALL)
        if "&gt;&gt;&gt;" in text or "Arguments:" in text:
            problems.append(f"{name}: an example or a list of arguments that was not recognized")
    problems += missing_answers(site)
    names = 0
    for source in sorted((DOCS / "api").glob("*.md")):
        page = pages[site / "api" / f"{source.stem}.html"]
        for name, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", source.read_text(), flags=re.MULTILINE):
            names += 1
            if "show_root_heading: false" not in options and name not in page.anchors:
                problems.append(f"{source.name}: {name} is not on the page")
    print(f"{len(pages)} pages, {names} names in the reference, {len(problems)} problems")
    print("".join(f"  {problem}\n" for problem in problems), end="")
    return int(bool(problems) or not names)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
