"""Pages in HTML, on which reports, comparisons and plans are looked at in a browser or a notebook."""

from __future__ import annotations

import abc
import base64
import functools
import hashlib
import importlib.resources
import os
import re
import tempfile
import webbrowser
from pathlib import Path
from xml.sax.saxutils import quoteattr

from ..core.html import STYLE, Html, element, html, light_dark


class Page(abc.ABC):
    """A result that can be looked at as a page: a `Report`, a `Comparison` or a `MappingPlan`.

    The page is one file, which loads nothing. It shows what the text shows, in the same words, with bars and pictures.
    In a notebook, a cell that ends with it shows the page.

    >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
    >>> isinstance(report, axn.insight.Page)
    True
    """

    def to_html(self) -> str:
        """Return the page in HTML.

        >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
        >>> "<h1>Nothing is sent between devices.</h1>" in report.to_html()
        True
        """
        title, body = self._page()
        script = _parts()["script"]
        known = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        filled = {"title": html(title), "body": body, "script": script, "known": known}
        filled |= {"colors": light_dark(), "style": STYLE}
        return re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], _parts()["page"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file.

        Arguments:
            path: the file, such as `report.html`.

        >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
        >>> import os, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report.save(f"{folder}/report.html")
        ...     os.listdir(folder)
        ['report.html']
        """
        Path(path).write_text(self.to_html(), encoding="utf-8", newline="\n")

    def show(self) -> Path:
        """Open the page in the browser, and return the temporary file that it is in.

        >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
        >>> import unittest.mock
        >>> with unittest.mock.patch("webbrowser.open"):  # nothing opens here
        ...     report.show().suffix
        '.html'
        """
        with tempfile.NamedTemporaryFile(prefix="axonym-", suffix=".html", delete=False) as file:
            path = Path(file.name)
        self.save(path)
        webbrowser.open(path.as_uri())
        return path

    @abc.abstractmethod
    def _page(self) -> tuple[str, Html]:
        """Return the title and the body of the page."""

    @abc.abstractmethod
    def _headline(self) -> tuple[str, str]:
        """Return a sentence, and the ones that explain it."""

    def _repr_html_(self) -> str:
        """Return the page in a frame, after its headline and its text.

        Notebooks that are not trusted drop the frame and every style, so the rest stands by itself.
        """
        headline, more = self._headline()
        said = element("p", element("b", headline), " ", more)
        text = element("details", element("summary", "as text"), element("pre", str(self)))
        style = "width:100%;height:640px;border:0;resize:vertical"
        return f'{said}{text}<iframe title="report" style="{style}" srcdoc={quoteattr(self.to_html())}></iframe>'


@functools.lru_cache(1)
def _parts() -> dict[str, str]:
    """Return the page around a body, and its script."""
    folder = importlib.resources.files("axonym.insight")
    page = (folder / "page.html").read_text("utf-8")
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert script is not None, "the page has a script"
    return {"script": script[1], "page": page.replace(script[1], "{{script}}")}
