"""The pages of reports, comparisons and plans: their words, their size, and that nothing in a name is code."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import pytest

from axonym import insight
from axonym.core.html import visible
from tests.insight import pages

pytestmark = pytest.mark.oldest


def parsed(page: insight.Page) -> ElementTree.Element:
    """Return a page without its script, which has to be well-formed XML."""
    text = page.to_html().removeprefix("<!DOCTYPE html>")
    return ElementTree.fromstring(re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL))


def words(page: insight.Page) -> str:
    return " ".join("".join(part.itertext()) for part in [*parsed(page)[1]])


def plain(text: str) -> str:
    return "".join(text.split())


def test_the_page_says_the_words_of_the_verdict() -> None:
    report = pages.large().reports["heads"]
    said, verdict = plain(words(report)), report.verdict
    lines = [verdict.binds, verdict.explanation, *verdict.costliest, *verdict.fine]
    lines += [part for f in verdict.suspicious for part in (f.cause, *f.consequences, f.advice)]
    assert verdict.suspicious and len(lines) > 8
    for line in lines:
        for part in line.split(": "):  # the bytes and the time of a transfer are beside its share
            assert plain(part) in said, line


def test_a_comparison_says_what_differs() -> None:
    said = plain(words(pages.large()))
    assert pages.large().change("heads", "kv_heads") in str(pages.large())
    lines = [pages.large().change("heads", "kv_heads"), *pages.large().differences("heads", "kv_heads")]
    assert len(lines) > 8 and "a step takes at least" in lines[0]
    for line in lines:
        for part in re.split(": ", line.lstrip("+- ")):
            assert plain(part) in said, line
    assert "heads:model→notsharded" in said


def test_the_best_mapping_is_one_that_fits() -> None:
    reports = pages.large().reports
    (heads, time), (kv_heads, _) = ((name, r.bounds.longest if r.bounds else 0.0) for name, r in reports.items())
    assert time > 13 and f"{kv_heads} takes the least: at least" in words(pages.large())
    (memory,) = {r.memory for name, r in reports.items() if name == kv_heads}
    assert memory is not None
    large = {
        n: dataclasses.replace(r, memory=dataclasses.replace(memory, temporaries=2**40)) for n, r in reports.items()
    }
    small = dataclasses.replace(large[heads], memory=dataclasses.replace(memory, temporaries=0))
    assert "None of the mappings fits." in words(insight.Comparison(large))
    assert f"{heads} takes the least" in words(insight.Comparison({**large, heads: small}))
    unbound = {name: dataclasses.replace(r, bounds=None) for name, r in reports.items()}
    assert f"{heads} sends the least" in words(insight.Comparison(unbound))


def test_what_names_tell_of_a_large_step() -> None:
    """Compute by pass, temporaries by name, and the parameters of transfers in the loop over layers."""
    report = pages.large().reports["kv_heads"]
    assert report.flops == sum(report.computed.values())
    assert report.computed["backward"] > 2 * report.computed["recomputed"] > report.computed["forward"]
    assert report.memory is not None and sum(x.bytes for x in report.temporaries) == report.memory.temporaries
    assert any("layers=80" in x.array for x in report.temporaries)
    gathers = [c for c in report.collectives if c.kind == "all-gather" and c.stored]
    assert gathers and all(c.parameters for c in gathers)
    assert any(path.endswith("attention/q_proj/weight") for c in gathers for path in c.parameters)
    said = words(report)
    assert "computed" in said and "The temporaries that are counted" in said and "layers=80" in said


def test_a_plan_says_why_the_first_is_first() -> None:
    plan = pages.planned()
    said = plain(words(plan))
    assert plan.why() and plan.why() in str(plan)
    assert plain(plan.why()) in said and plain(plan.best.code()) in said
    assert all(plain(what) in said for what in plan.left_out)


def test_a_plan_shows_estimates_and_choices() -> None:
    plan = pages.planned()
    estimate = insight.Estimate({"products": 2.0, "gathering parameters over data": 0.523})
    best = dataclasses.replace(plan.best, estimate=estimate, choices={"remat": "full"})
    said = plain(words(dataclasses.replace(plan, found=(best, *plan.found[1:]))))
    assert "rematfull" in said and "About2.5sastep,by" in said and "atleast" in said


def test_a_plan_names_what_it_draws() -> None:
    plan = pages.planned()
    estimate = insight.Estimate(
        {"products": 2.0, "offloading": 0.5, "waiting for links": 0.1, "waiting of stages": 0.0}
    )
    waiting = dataclasses.replace(plan, found=(dataclasses.replace(plan.best, estimate=estimate),))
    assert plain("computing, then sending, offloading and waiting for links") in plain(words(waiting))
    assert not [e for e in parsed(waiting).iter() if e.tag.endswith("}th") and not "".join(e.itertext()).strip()]


def test_arguments_are_drawn_as_in_notebooks() -> None:
    """Filled is what the first device holds, and each cut has the color of its mesh axis."""
    report = pages.compiled()
    (tree,) = [e for e in parsed(report).iter() if e.get("class") == "tree"]
    pictures = [e for e in tree.iter() if e.tag.endswith("svg")]
    assert len(pictures) > 1
    for picture in pictures:
        assert [e.get("class") for e in picture].count("held") == 1


def test_the_time_of_a_transfer_is_a_share_of_the_bound() -> None:
    """The bound has the branches that send least, so it has to be a share of these."""
    report = pages.compiled()
    (first, *_) = report.collectives
    assert report.bounds is not None
    one = dataclasses.replace(first, axes=("data",), sent=100, times=1, branches=())
    apart = [dataclasses.replace(one, sent=300, branches=((0, 2, i),), reason=f"branch {i}") for i in range(2)]
    bounds = dataclasses.replace(report.bounds, links={("data",): 4.0})
    found = dataclasses.replace(report, collectives=(one, *apart), bounds=bounds)
    assert plain("1 × 100 B = 100 B, 1 s") in plain(words(found))


def test_sizes() -> None:
    for report in pages.large().reports.values():
        assert len(report.to_html().encode()) < 300_000
    page = pages.unrolled().to_html()
    assert len(page.encode()) < 1_000_000 and "smaller: report.to_json() has them" in page


def test_layers_without_a_loop_are_one_row() -> None:
    report = pages.large().reports["kv_heads"]
    (first, *_) = report.placed
    layers = [dataclasses.replace(first, path=f"model/layers/{i}/{name}") for i in range(80) for name in ("up", "down")]
    page = dataclasses.replace(report, placed=tuple(layers)).to_html()
    assert "0 to 79" in page and page.count('class="leaf"') == 2


class Loads(HTMLParser):
    """What a page would load, and the attributes that would run."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.found += [(tag, attributes[a]) for a in attributes if a in ("src", "srcset", "data") or a.startswith("on")]
        if not (attributes.get("href") or "#").startswith("#"):
            self.found.append((tag, attributes["href"]))
        if tag in ("link", "base", "object", "embed", "img", "iframe"):
            self.found.append((tag, None))


@pytest.mark.parametrize("name", ["large", "compiled", "planned", "hostile"])
def test_nothing_is_loaded_and_no_name_is_code(name: str) -> None:
    page: insight.Page = getattr(pages, name)()
    text = page.to_html()
    assert Loads(text).found == []
    assert "url(" not in text and "@import" not in text and str(Path.home()) not in text
    assert text.count("<script>") == 1 and "<h1>" in text
    parsed(page)
    assert ElementTree.fromstring(f"<all>{page._repr_html_()}</all>") is not None


def test_hostile_names_are_shown() -> None:
    said = words(pages.hostile())
    assert all(visible(name) in said for name in pages.HOSTILE)
    assert "\\u202eexe.eman\\u202c" in said and "\u202e" not in said and "a\\x00b" in said


def test_a_notebook_that_is_not_trusted_shows_the_words() -> None:
    """JupyterLab then drops frames, styles and pictures."""
    for page in (pages.large().reports["heads"], pages.large(), pages.planned()):
        left = ElementTree.fromstring(f"<all>{page._repr_html_()}</all>")
        (frame,) = left.findall("iframe")
        left.remove(frame)
        said = "".join(left.itertext())
        assert {e.tag for e in left.iter()} == {"all", "p", "b", "details", "summary", "pre"}
        assert str(page) in said and page._headline()[0] in said and page._headline()[1] in said
        assert frame.get("srcdoc") == page.to_html()


def test_files(tmp_path: Path) -> None:
    report = pages.compiled()
    report.save(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text("utf-8") == report.to_html()
    with mock.patch("webbrowser.open") as opened:
        path = report.show()
    opened.assert_called_once_with(path.as_uri())
    assert path.read_text("utf-8") == report.to_html()
    path.unlink()


def test_steps_that_send_nothing_or_are_not_known_have_a_page() -> None:
    report = pages.compiled()
    bare = dataclasses.replace(
        report, collectives=(), memory=None, bounds=None, placed=(), timeline=None, mesh={}, mapping={},
        parameter_mapping={},
    )  # fmt: skip
    assert "Nothing is sent" in words(bare)
    unknown = tuple(dataclasses.replace(c, sent=None, axes=None, source=None, reason=None) for c in report.collectives)
    assert "depends on values" in words(dataclasses.replace(report, collectives=unknown, bounds=None))


def test_command_line() -> None:
    case = "examples/explain.py:case", "--mesh", "data=4,model=2", "--mapping", "fsdp", "--by", "names", "--html"
    done = subprocess.run([sys.executable, "-m", "axonym.insight", *case], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("<!DOCTYPE html>") and "</html>" in done.stdout
