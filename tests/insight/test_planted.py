"""Bugs of distribution, planted one at a time in a clean step: contracts catch them, and reports have their lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh

import axonym as axn
from axonym import nn
from axonym.insight import BrokenContract, contract
from tests.insight import cases

Batch, Pos, Embed, Mlp, Vocab = axn.make_axes(batch=16, pos=8, embed=32, mlp=48, vocab=80)
COMPUTE = {"batch": "data", "mlp": "model", "vocab": "model"}
STORED = {"embed": "data", "mlp": "model", "vocab": "model"}
FSDP = STORED, COMPUTE

Arrays = dict[str, axn.NamedArray]
Change = Callable[[axn.NamedArray], axn.NamedArray]


def arguments(vocab: axn.Axis = Vocab) -> Any:
    def made() -> Any:
        shapes = {"table": (vocab, Embed), "scale": (Embed,), "up": (Embed, Mlp), "down": (Mlp, Embed)}
        return {name: axn.ones(axes) for name, axes in shapes.items()}, axn.zeros((Batch, Pos), dtype=int)

    return jax.eval_shape(made)


def as_it_is(x: axn.NamedArray) -> axn.NamedArray:
    return x


def step(
    *,
    up: Callable[[Arrays], axn.NamedArray] = lambda w: w["up"],
    ids: Change = as_it_is,
    hidden: Change = as_it_is,
    after: Change = as_it_is,
    scores: Change = as_it_is,
    loss: Callable[..., Any] = lambda scores, tokens: nn.cross_entropy_loss(scores, "vocab", tokens),
) -> Callable[..., Any]:
    """Make a training step that can be changed in each of its parts."""

    def trained(w: Arrays, tokens: axn.NamedArray) -> Any:
        def total(w: Arrays) -> jax.Array:
            x = nn.standardize(w["table"]["vocab", ids(tokens)], "embed") * w["scale"]
            mlp = hidden(axn.tanh(axn.dot(x, up(w), axis="embed")))
            x = after(x + axn.dot(mlp, w["down"], axis="mlp"))
            return axn.mean(loss(scores(axn.dot(x, w["table"], axis="embed")), tokens)).scalar()

        return jax.value_and_grad(total)(w)

    return trained


def positional(fn: Callable[[jax.Array], jax.Array]) -> Change:
    """Apply a function without names."""
    return lambda x: axn.named(fn(x.array), x.names)


NEVER: dict[str, Any] = {"never_gathers": ["vocab", "batch", "mlp"], "scatters_gradients": True}

LOST: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "a placement without batch": ("batch", "hidden", lambda x: axn.shard(x, {"batch": None, "mlp": "model"})),
    "a placement without mlp": ("mlp", "hidden", lambda x: axn.shard(x, {"batch": "data"})),
    "a placement after another": (
        "batch",
        "hidden",
        lambda x: axn.shard(axn.tanh(axn.shard(x, {"batch": "data", "mlp": "model"})), {"mlp": "model"}),
    ),
    "a placement in a compiled function": (
        "batch",
        "hidden",
        lambda x: jax.jit(lambda x: axn.shard(axn.tanh(x), {"mlp": "model"}))(x),
    ),
    "a placement along another axis": (
        "batch",
        "hidden",
        lambda x: axn.shard(x, {"pos": "data", "mlp": "model"}),
    ),
    "a placement of the tokens": ("batch", "ids", lambda x: axn.cumsum(axn.shard(x * 2, {"batch": None}), "pos")),
    "a positional placement": (
        "batch",
        "hidden",
        lambda x: axn.named(jax.lax.with_sharding_constraint(x.array, jax.P(None, None, "model")), x.names),
    ),
    "a positional cumulative sum": ("mlp", "hidden", lambda x: axn.named(jnp.cumsum(x.array, -1), x.names)),
    "a positional product": ("mlp", "hidden", lambda x: axn.named(x.array @ jnp.ones((48, 48)), x.names)),
    "a median": ("batch", "hidden", lambda x: x - axn.median(x, "batch")),
    "a quantile": ("batch", "hidden", lambda x: x - axn.quantile(x, 0.5, "batch")),
    "a sort": ("batch", "hidden", lambda x: axn.sort(x, "batch")),
    "the order of rows": ("batch", "hidden", lambda x: x * axn.argsort(axn.sum(x, ("pos", "mlp")), "batch")),
    "a scan over examples": (
        "batch",
        "hidden",
        lambda x: axn.scan(lambda c, a: (c + a, c + a), "batch")(axn.zeros((Pos, Mlp)), x)[1],
    ),
    "a positional loop over examples": ("batch", "hidden", lambda x: axn.named(jax.lax.map(jnp.sin, x.array), x.names)),
    "replicated scores": ("vocab", "scores", lambda x: axn.unshard(x)),
    "replicated scores, of examples": ("batch", "scores", lambda x: axn.shard(x, {"vocab": "model"})),
    "sorted scores": ("vocab", "scores", lambda x: axn.sort(x, "vocab")),
    "a replicated weight": ("mlp", "up", lambda w: axn.shard(w["up"], {"embed": None, "mlp": None})),
}
"""Bugs after which an axis is not sharded any more: the axis, the part of the step, and the line."""

SENDS: dict[str, tuple[dict[str, Any], str]] = {
    "rows are rolled": ({"after": lambda x: axn.roll(x, 1, "batch")}, r"over data"),
    "rows are reversed": ({"after": lambda x: axn.flip(x, "batch")}, r"over data.*moves shards along batch"),
    "rows are picked": (
        {"after": lambda x: x["batch", axn.named(jnp.arange(16)[::-1], "batch")]},
        r"over data.*in index",
    ),
    "statistics of the batch": ({"after": lambda x: x - axn.mean(x, "batch")}, r"over data"),
    "a norm over a sharded axis": (
        {"hidden": positional(lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True))},
        r"over model",
    ),
    "a positional softmax": ({"scores": positional(jax.nn.log_softmax)}, r"over model"),
    "the best of all scores": ({"scores": lambda s: s + axn.sum(axn.top_k(s, "vocab", 4)[0], "vocab")}, r"over model"),
    "a metric of all scores": (
        {"loss": lambda s, t: nn.cross_entropy_loss(s, "vocab", t) + (axn.argmax(s, "vocab") == t)},
        r"over model",
    ),
}
"""Bugs that send more than the clean step: the changed part of the step, and the text of the contract."""

MAPPINGS: dict[str, tuple[Any, str]] = {
    "no parameters are stored sharded": (COMPUTE, r"over data.*the gradient of \[vocab, embed\] sums over batch"),
    "one parameter axis is forgotten": (({"mlp": "model", "vocab": "model"}, COMPUTE), r"over data.*the gradient of"),
    "a name is misspelt": ((STORED, {**COMPUTE, "batch": None, "bacth": "data"}), r"over"),
    "a stored name is misspelt": (({**STORED, "embed": None, "embde": "data"}, COMPUTE), r"over data.*the gradient of"),
    "mesh axes are swapped": (
        ({k: {"data": "model", "model": "data"}[v] for k, v in STORED.items()}, COMPUTE),
        r"over",
    ),
    "an axis is stored elsewhere than used": (
        ({"embed": "data", "mlp": "model"}, {**COMPUTE, "vocab": None}),
        r"over data",
    ),
}
"""Mappings under which the step sends more than under `FSDP`, and the text of the contract."""

GATHERED = (
    "a placement without batch",
    "a placement without mlp",
    "a positional cumulative sum",
    "a positional product",
    "replicated scores",
)
ALLOWED = {"data": 23622, "model": 16768}
"""The bytes that each device sends in a clean step."""


def planted(bug: str) -> tuple[str, Callable[..., Any], int]:
    """Return the axis that is not sharded any more, the step, and the line of the bug."""
    axis, part, change = LOST[bug]
    return axis, step(**{part: change}), change.__code__.co_firstlineno


def test_a_clean_step_is_left_alone(mesh: Mesh) -> None:
    """Also where a table that is stored sharded is looked up, which gathers indices."""
    with jax.set_mesh(mesh):
        report = contract(**NEVER, max_sent=ALLOWED, mapping=FSDP).check(step(), *arguments())
        lost = [cases.first_lost(axis, step(), *arguments(), mapping=FSDP) for axis in ("batch", "mlp", "vocab")]
    assert {axis: report.total_sent(axis) for axis in ALLOWED} == ALLOWED
    assert [c.gathered for c in report.collectives if c.of_indices] == [("batch",)]
    assert lost == [None, None, None]


@pytest.mark.parametrize("bug", LOST)
def test_a_report_has_the_line(bug: str) -> None:
    axis, changed, line = planted(bug)
    with jax.set_mesh(cases.mesh_of(data=4, model=2)):
        culprit = cases.first_lost(axis, changed, *arguments(), mapping=FSDP)
    assert culprit is not None and culprit.source is not None
    assert (culprit.source.file, culprit.source.line) == (__file__, line)


@pytest.mark.parametrize("bug", ["a placement without mlp", "a positional product", "a sort", "replicated scores"])
def test_a_report_has_the_line_on_explicit_axes(bug: str) -> None:
    axis, changed, line = planted(bug)
    with jax.set_mesh(cases.mesh_of(AxisType.Explicit, data=4, model=2)):
        culprit = cases.first_lost(axis, changed, *arguments(), mapping=FSDP)
    assert culprit is not None and culprit.source is not None and culprit.source.line == line


@pytest.mark.parametrize("bug", GATHERED)
def test_a_contract_against_gathering_says_which_line(bug: str) -> None:
    axis, changed, line = planted(bug)
    expected = rf"gathers {axis}: all-gather over .*test_planted\.py:{line}[ ,].*map {axis} to None"
    with jax.set_mesh(cases.mesh_of(data=4, model=2)), pytest.raises(BrokenContract, match=expected):
        contract(**NEVER, mapping=FSDP).check(changed, *arguments())


@pytest.mark.parametrize("bug", SENDS)
def test_a_contract_on_bytes_sees_what_is_sent_besides(bug: str) -> None:
    changes, expected = SENDS[bug]
    with jax.set_mesh(cases.mesh_of(data=4, model=2)), pytest.raises(BrokenContract, match=f"sends .*{expected}"):
        contract(max_sent=ALLOWED, mapping=FSDP).check(step(**changes), *arguments())


@pytest.mark.parametrize("bug", MAPPINGS)
def test_a_contract_on_bytes_sees_wrong_mappings(bug: str) -> None:
    mapping, expected = MAPPINGS[bug]
    with jax.set_mesh(cases.mesh_of(data=4, model=2)), pytest.raises(BrokenContract, match=f"sends .*{expected}"):
        contract(max_sent=ALLOWED, mapping=mapping).check(step(), *arguments())


def test_an_axis_that_does_not_divide_is_named(mesh: Mesh) -> None:
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"'vocab'.*81"):
        contract(max_sent=ALLOWED, mapping=FSDP).check(step(), *arguments(Vocab.resize(81)))


def test_the_reason_is_the_user_and_not_the_layer_before() -> None:
    """Nothing but a constraint that shards mlp is between the product of the layer and what needs all of it."""
    summed = positional(lambda x: jnp.cumsum(x, -1))
    layer = jax.eval_shape(lambda: nn.Linear.init(Embed, Mlp, use_bias=False, key=jax.random.key(0)))

    def trained(layer: Any, x: axn.NamedArray) -> Any:
        return jax.grad(lambda layer: axn.sum(summed(layer(x)) ** 2).scalar())(layer)

    x = jax.eval_shape(lambda: axn.ones((Batch, Embed)))
    mesh = cases.mesh_of(data=4, model=2)
    report = axn.insight.explain(trained, layer, x, mapping=COMPUTE, mesh=mesh, by="partitioner")
    found = [c for c in report.collectives if c.gathered == ("mlp",)]
    needed = {c.reason for c in found}
    assert {c.phase for c in found} >= {"forward"} and all(c.source is not None for c in found)
    assert needed <= {
        "code without names needs all of mlp, which is sharded over model",
        "needs all of mlp, which is sharded over model",
    }
    assert not any("placement" in reason for reason in needed if reason)


def test_axes_that_a_placement_leaves_open_are_not_its_doing() -> None:
    """The line is that of the operation for which they are gathered."""

    def changed(x: axn.NamedArray) -> axn.NamedArray:
        open_ = jax.lax.with_sharding_constraint(x.array, jax.P("data", None, jax.P.UNCONSTRAINED))
        return axn.named(jnp.cumsum(open_, -1), x.names)

    with jax.set_mesh(cases.mesh_of(data=4, model=2)):
        culprit = cases.first_lost("mlp", step(hidden=changed), *arguments(), mapping=FSDP)
    assert culprit is not None and culprit.source is not None and "all of mlp" in (culprit.reason or "")
    assert culprit.source.line == changed.__code__.co_firstlineno + 2
