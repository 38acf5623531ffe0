"""What notebooks show of named arrays, of trees and of mappings."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym.debug import show

pytestmark = pytest.mark.oldest

# What JupyterLab keeps of the output of a notebook that is not trusted, as far as it is used here. It drops other
# elements, and what is in a style.
KEPT = {"b", "code", "details", "div", "i", "li", "p", "pre", "span", "summary", "table", "tbody", "td", "th"}
KEPT |= {"thead", "tr", "u", "ul"}


class Untrusted(HTMLParser):
    """The text that is left in a notebook that is not trusted, and the elements that are dropped."""

    def __init__(self, html: str):
        super().__init__()
        self.text, self.dropped, self._style = "", set[str](), False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.dropped |= {tag} - KEPT
        self._style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._style = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._style else data


def text_of(shown: Any) -> str:
    """Return the text of an output, which is the same where styles and pictures are dropped."""
    untrusted = Untrusted(shown._repr_html_())
    assert untrusted.dropped <= {"style", "svg", "rect", "path"}
    return " ".join(untrusted.text.split())


def picture_of(shown: Any) -> tuple[list[str], list[str]]:
    """Return the filled rectangle and the classes of the cuts."""
    html = shown._repr_html_().partition("</style>")[2]
    held = re.findall(r'width="([\d.]+)" height="([\d.]+)" class="held"', html)
    return held, re.findall(r'class="(cut\d)"', html)


def test_where_an_array_lies(mesh: Mesh) -> None:
    x = axn.ones({"layers": 2, "mlp": 128, "embed": 64})
    placed = axn.shard(x, {"mlp": "model", "embed": "data"}, mesh)
    each = "8 KiB of 64 KiB on each of 8 CPU devices"
    assert text_of(placed) == f"float32[layers=2, mlp=128/model, embed=64/data] {each}"
    order = [*mesh.shape]
    columns, rows = (f"cut{order.index(a) + 1}" for a in ("data", "model"))
    held, cuts = picture_of(placed)
    assert held == [(f"{90 / mesh.shape['data']:g}", f"{44 / mesh.shape['model']:g}")]
    assert sorted(cuts) == sorted([columns] * (mesh.shape["data"] - 1) + [rows] * (mesh.shape["model"] - 1))
    copies = text_of(axn.shard(axn.ones({"batch": 8}), {"batch": "data"}, mesh))
    assert (
        f"{32 // mesh.shape['data']} B of 32 B on each of 8 CPU devices, {mesh.shape['model']} copies along model"
        in copies
    )
    assert text_of(axn.arange(axn.Axis("pos", 3))) == "int32[pos=3] 12 B on CPU 0values[0 1 2]"


def test_more_cuts_than_fit() -> None:
    mesh = jax.sharding.AbstractMesh((512,), ("data",))
    _, cuts = picture_of(show(axn.ones({"batch": 1024}), {"batch": "data"}, mesh))
    assert 4 < len(cuts) < 16


def test_arrays_that_have_no_values() -> None:
    shown = []
    jax.jit(lambda a: shown.append(a._repr_html_()))(axn.ones({"batch": 2}))
    jax.vmap(lambda a: shown.append(axn.NamedArray(a, "pos")._repr_html_()))(jnp.ones((2, 3)))
    assert all("being traced" in html for html in shown)
    gone = axn.ones({"a": 2})
    gone.array.delete()
    assert text_of(gone) == "float32[a=2] 8 B, deleted, or donated to a function"
    assert text_of(jax.eval_shape(lambda: axn.ones({"a": 2}))) == "float32[a=2] 8 B, abstract"
    assert text_of(axn.named(np.ones(2), "a")) == "float64[a=2] 16 B, on the hostvalues[1. 1.]"
    assert text_of(axn.ones(())) == "float32[] 4 B on CPU 0values1."
    assert text_of(axn.named(jax.random.split(jax.random.key(0), 2), "a")) == "key<fry>[a=2] 16 B on CPU 0"
    parts = eqx.partition({"w": axn.ones({"a": 2})}, lambda _: False)
    assert text_of(parts[0]["w"]) == "NoneType(a)" and "0 arrays" in text_of(show(parts[0]))
    mapped = jax.vmap(lambda a: a)(axn.ones({"a": 2}))
    wrong = jax.tree.map(lambda a: a[0], mapped)
    assert text_of(wrong) == "float32[a] over shape ()" and "float32[]" in text_of(show(wrong))


class Computing:
    """An array that is not ready, and fails the test if its values are requested."""

    shape, dtype, size, ndim, is_fully_addressable = (4,), np.dtype("float32"), 4, 1, True
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return False

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the values were fetched")


def test_nothing_is_waited_for_or_moved(monkeypatch: pytest.MonkeyPatch, mesh: Mesh) -> None:
    large = axn.shard(axn.ones({"a": 64, "b": 64}), {"a": "data"}, mesh)
    with jax.transfer_guard("disallow"):
        assert "values" not in text_of(large) and "values" not in text_of(show({"w": large}))
    monkeypatch.setattr(jax, "Array", (jax.Array, Computing))
    assert text_of(axn.named(Computing(), "a")) == "float32[a=4] 16 B on CPU 0"


@pytest.fixture
def model() -> dict[str, Any]:
    return {"table": axn.ones({"vocab": 16, "embed": 8}), "norm": axn.ones({"embed": 8}), "raw": jnp.ones(4)}


def test_a_model_and_its_optimizer_state(mesh: Mesh, model: dict[str, Any]) -> None:
    placed = axn.shard(model, {"vocab": "model", "embed": None}, mesh)
    shown = show({"model": placed, "state": optax.adam(0.1).init(placed)})
    text, size = text_of(shown), 512 // mesh.shape["model"]
    assert f"table {size} B float32[vocab=16/model, embed=8] {mesh.shape['data']} copies along data" in text
    assert "sharded as model" in text  # the two moments
    assert f"model/table: float32[vocab=16/model, embed=8], {size} B" in str(shown) and repr(shown) == str(shown)
    assert str(show(model)).startswith("dict: 3 arrays, 560 B; 560 B on CPU 0\n")
    assert text_of(show([])) == "list 0 arrays, 0 B"
    here, there = (axn.make_mesh({"data": 4}, devices=jax.devices()[i : i + 4]) for i in (0, 4))
    apart = [axn.shard(axn.ones({"vocab": 8}), {"vocab": "data"}, m) for m in (here, there)]
    assert str(show(apart)).startswith("list: 2 arrays, 64 B\n"), "on no device are both"


def test_what_a_mapping_does(mesh: Mesh, model: dict[str, Any]) -> None:
    shown = show(model, {"vocab": "model", "embd": "data"}, mesh)
    for text in (text_of(shown), str(shown)):
        assert "unused: axis 'embd' is in the mapping but not in the tree. Did you mean 'embed'?" in text
    with axn.set_mesh(mesh):
        pair = show(model, ({"embed": "data"}, {"batch": "data", "vocab": "model"}))
    assert "table: float32[vocab=16/model, embed=8/data]" in str(pair)
    wrong = show(model, {"embed": "rows"}, mesh)
    assert "rows" in text_of(wrong) and wrong.findings
    by_rule = show(model, axn.sharding.TreePathShardingRule(("table", jax.P("model")), (".*", jax.P())), mesh)
    assert "table: float32[vocab=16/model, embed=8]" in str(by_rule)
    with pytest.raises(ValueError, match="shown on a mesh, and none is active: pass `mesh`"):
        show(model, {"embed": "data"})
