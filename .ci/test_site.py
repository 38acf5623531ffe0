"""The built site in a real browser: pages fit, can be read, show their pictures first, and are found.

`python -m pytest --noconftest .ci/test_site.py` serves the folder `site` to a Chromium or Chrome on the machine.
"""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.insight.browser import FOUND, Browser, browser
from tests.insight.test_page_in_a_browser import CONTRAST, WIDTHS

SITE = Path(__file__).parent.parent / "site"

pytestmark = pytest.mark.skipif(
    FOUND is None, reason="no Chromium or Chrome is on PATH, in which pages could be looked at"
)

PAGES = {
    "index": "home-data",
    "getting_started": "named",
    "partitioning": "placement",
    "several_hosts": "hosts",
    "which_mapping": "batches",
    "slow_step": "slow",
    "names_elsewhere": None,
    "insight": None,
    "out_of_memory": None,
    "tutorial": None,
    "fields": None,
}
"""Pages, and the picture on the first screen of each."""

SEARCHES = {
    **{
        name: f"names_elsewhere.html#{name.lower().replace('.', '')}"
        for name in (
            "matmul",
            "einops",
            "DataLoader",
            "dataloader",
            "DDP",
            "nn.Parameter",
            "nn.Rngs",
            "unsqueeze",
        )
    },
    **dict.fromkeys(("KV cache", "KVCache"), "nn.html#kv-cache-kvcache"),
    "state_dict": "checkpoints.html",
    **{
        query: f"how_do_i.html#how-do-i-{section}"
        for query, section in {
            "how do I shard my model": "shard-my-model",
            "data parallel": "train-data-parallel-with-fsdp-or-zero-3",
            "zero-3": "train-data-parallel-with-fsdp-or-zero-3",
            "context parallelism": "train-tensor-parallel-or-with-sequence-or-context-parallelism",
            "multihost": "run-on-multiple-hosts",
            "multiple hosts": "run-on-multiple-hosts",
            "multi host": "run-on-multiple-hosts",
            "huggingface": "load-llama-weights-or-another-model-of-hugging-face",
            "load llama weights": "load-llama-weights-or-another-model-of-hugging-face",
            "export to safetensors": "convert-weights-from-pytorch-and-export-to-safetensors",
            "resume training": "save-checkpoints-and-resume-training",
            "learning rate schedule": "set-a-learning-rate-schedule-warmup-or-gradient-clipping",
            "weight decay": "exclude-biases-and-norms-from-weight-decay",
            "use bfloat16": "use-mixed-precision-bfloat16-or-float8",
            "make an attention mask": "make-an-attention-mask",
            "gradient checkpointing": "save-memory-gradient-checkpointing-rematerialization-offloading",
            "debug nan": "debug-nan-or-wrong-values",
            "custom kernel": "write-a-custom-kernel-with-pallas-or-triton",
        }.items()
    },
    "isel": "api/other_libraries.html#axonym.Coordinates.isel",
    "gradient accumulation": "training.html#gradient-accumulation",
    "split axes": "api/layout.html#splitting-and-merging-axes",
    "mixture of experts": "nn.html#mixtures-of-experts",
    "out of memory": "troubleshooting.html#resource_exhausted-out-of-memory-oom",
}
"""What people type, and the first answer."""


FONTS = 1.08
"""How much more room the fonts of another machine may take."""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """Serve the site, without which the search would find nothing, and give its address."""
    assert (SITE / "index.html").is_file(), "build it first: zensical build"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_and_can_be_read(page: str, width: int, dark: bool, window: Browser, site: str) -> None:
    window.open(f"{site}/{page}.html", width, WIDTHS[width], dark)
    assert window.run("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
    assert window.run("document.body.dataset.mdColorScheme") == ("slate" if dark else "default")
    assert window.run(CONTRAST.replace("document.body", "document.querySelector('article')")) == []
    shown = "[...document.querySelectorAll('article img')].filter((e) => e.checkVisibility())"
    assert all(len(alt.split()) > 3 for alt in window.run(f"{shown}.map((e) => e.alt)"))
    pictures = window.run(f"{shown}.map((e) => [e.src.split('/').pop(), e.getBoundingClientRect().bottom + scrollY])")
    assert all(f"-{'dark' if dark else 'light'}.svg" in name for name, _ in pictures)
    if first := PAGES[page]:
        assert pictures[0][0].startswith(first) and pictures[0][1] <= FONTS * WIDTHS[width]


def test_the_first_screen(window: Browser, site: str) -> None:
    """Of the home page: the layer, two buttons, one picture of three mappings, and the beginning of four cards."""
    bottoms = (
        "[...document.querySelectorAll('article :is({})')].filter((e) => e.checkVisibility())"
        ".map((e) => e.getBoundingClientRect().bottom)"
    )
    window.open(f"{site}/index.html", 1280, 900)
    for what, count in ((".start pre", 1), (".md-button", 2), (".three img", 3), (".cards li strong", 4)):
        found = window.run(bottoms.format(what))
        assert len(found) == count and max(found) <= FONTS * 900, what
    window.open(f"{site}/index.html", 390, 844)
    assert max(window.run(bottoms.format(".start pre, .md-button"))) <= FONTS * 844


def test_no_word_of_a_picture_is_cut_off(window: Browser) -> None:
    inside = """(() => {
      const all = document.documentElement.getBoundingClientRect();
      const ends = (e) => e.getBoundingClientRect();
      const out = (e) => Math.max(all.left - ends(e).left, ends(e).right - all.right, all.top - ends(e).top,
        ends(e).bottom - all.bottom);
      return [...document.querySelectorAll("text")].filter((e) => out(e) > 0.08 * ends(e).width)
        .map((e) => e.textContent);
    })()"""
    found = {}
    for path in (SITE / "assets" / "pictures").glob("*-light.svg"):
        if not path.name.startswith("page-"):  # of which only the beginning is shown
            window.open(path)
            found[path.name] = window.run(inside)
    assert found and not any(found.values()), found


def test_nothing_is_loaded_from_elsewhere(window: Browser, site: str) -> None:
    for page in PAGES:
        window.open(f"{site}/{page}.html")
        urls = [e["params"]["request"]["url"] for e in window.events if e.get("method") == "Network.requestWillBeSent"]
        assert urls and all(url.startswith((site, "data:", "blob:")) for url in urls)


def test_the_search_finds_the_right_page_first(window: Browser, site: str) -> None:
    window.open(f"{site}/index.html")
    results = "document.activeElement.shadowRoot.querySelectorAll('[role=option]')"
    until = """new Promise((done) => {{
        const ask = (left) => ({}) || left === 0 ? done() : setTimeout(ask, 50, left - 1);
        ask(200);
    }})"""
    window.run("document.querySelector('.md-search__button').click()")
    window.run(until.format("document.activeElement?.shadowRoot?.querySelector('input')"))
    found = {}
    for query in SEARCHES:
        field = "document.activeElement.shadowRoot.querySelector('input')"
        window.run(f"{field}.select()")
        window("Input.insertText", text=query)
        # An answer has the query in its address.
        window.run(until.format(f"[...{results}].some((e) => e.href.includes('h={query.partition(' ')[0]}'))"))
        window.run("new Promise((done) => setTimeout(done, 200))")
        address = window.run(f"{results}[0]?.href ?? ''").removeprefix(f"{site}/")
        page, _, rest = address.partition("?")
        found[query] = page + (f"#{rest.partition('#')[2]}" if "#" in rest else "")
    assert found == SEARCHES
