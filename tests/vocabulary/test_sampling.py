"""`categorical`: the same tokens on every mesh, the right ones on one device, and communication."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym.random import categorical
from axonym.random.sampling import STEPS
from benchmarks.communication import bytes_moved
from tests.vocabulary.helpers import LOGITS, Batch, run

KEY = jax.random.key(7)
BOTH = {"batch": "data", "vocab": "model"}
PER_EXAMPLE: dict[str, Any] = {
    "temperature": axn.named(np.linspace(0, 2, 8, dtype=np.float32), Batch),
    "top_p": axn.named(np.linspace(0.2, 1, 8, dtype=np.float32), Batch),
    "min_p": axn.named(np.linspace(0, 0.3, 8, dtype=np.float32), Batch),
}
COUNTS = axn.named(np.arange(8) * 3, Batch)
TEMPERATURES: dict[str, Any] = {"temperature": PER_EXAMPLE["temperature"]}
VARIANTS = {
    "everything": PER_EXAMPLE,
    "candidates": TEMPERATURES | {"top_k": COUNTS, "max_k": 24},
    "plain": TEMPERATURES,
}


def compiled(options, x):
    """Return the program, and the tokens that it draws."""
    program = jax.jit(lambda x: categorical(KEY, x, "vocab", **options)).lower(x).compile()
    return program, np.asarray(jax.block_until_ready(program(x)).array).tolist()


@pytest.fixture(scope="module")
def expected():
    """Return the tokens on one device."""
    return {what: compiled(options, LOGITS)[1] for what, options in VARIANTS.items()}


# --- all shardings ---

PLACEMENTS = [
    ("auto", BOTH, "everything"),
    ("auto", {"vocab": ("data", "model")}, "candidates"),
    ("auto", {"batch": "data"}, "plain"),
    ("explicit", {"vocab": "model"}, "everything"),
    ("explicit", BOTH, "candidates"),
    ("explicit", {"batch": None}, "plain"),
]


@pytest.mark.parametrize(("kind", "mapping", "what"), PLACEMENTS, ids=str)
def test_same_tokens_however_axes_are_split_and_few_numbers_move(
    auto_mesh, explicit_mesh, expected, kind, mapping, what
):
    with jax.set_mesh({"auto": auto_mesh, "explicit": explicit_mesh}[kind]), axn.axis_mapping(mapping):
        program, tokens = compiled(VARIANTS[what], axn.shard(LOGITS))
    assert tokens == expected[what]
    a_number = 4 * (2 if mapping.get("batch") else 8)
    parts = {None: 0, "model": 2, ("data", "model"): 8}[mapping.get("vocab")]
    found = {kind: x.bytes for kind, x in bytes_moved(program).items()}
    if parts == 0:
        assert found == {}
    elif what == "candidates":
        assert found == {"all-gather": 2 * parts * min(24, 64 // parts) * a_number}
    else:  # a candidate of each device; the largest logit, the sum of all, and sums in a loop
        assert found == {"all-gather": 2 * parts * a_number, "all-reduce": (1 + 3 + 3) * a_number}


def test_eager_tokens_and_where_they_lie(mesh, expected):
    with axn.axis_mapping(BOTH):
        tokens = jax.block_until_ready(categorical(KEY, axn.shard(LOGITS), "vocab", **VARIANTS["plain"]))
    assert tokens.array.tolist() == expected["plain"]
    assert tokens.array.sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P("data")), 1)


def test_inside_other_transformations(auto_mesh):
    def of_temperatures(x):
        draw = jax.vmap(lambda t: categorical(KEY, x, "vocab", top_k=4, temperature=t).array)
        return jax.lax.scan(lambda t, _: (t + 1, draw(t)), jnp.array([0.0, 1.0]), length=2)[1]

    with jax.set_mesh(auto_mesh), axn.axis_mapping(BOTH):
        found = run(of_temperatures, axn.shard(LOGITS))
    one = categorical(KEY, LOGITS, "vocab", top_k=4).tolist()
    assert found[0].tolist() == [LOGITS.array.argmax(1).tolist(), one] and found[1, 0].tolist() == one


def test_gradients_do_not_go_through(auto_mesh):
    """So no mapping has to be active."""
    x = axn.shard(LOGITS, BOTH, auto_mesh)
    with jax.set_mesh(auto_mesh):
        gradient = run(jax.grad(lambda x: axn.sum(x["vocab", categorical(KEY, x, "vocab", top_k=3)]).scalar()), x)
    assert gradient.array.sum() == 8


# --- what is drawn ---

PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.3, 0.15], np.float32)
Draw = axn.Axis("draw", 4000)


def check_frequencies(wanted, **parameters):
    """Check the frequencies of draws, for several parameters at once."""
    logits = axn.broadcast_axis(axn.named(np.log(PROBABILITIES), "vocab"), (axn.Axis("case", len(wanted)), Draw))
    named: dict[str, Any] = {
        what: axn.named(np.array(x), "case") if isinstance(x, list) else x for what, x in parameters.items()
    }
    tokens = run(lambda x: categorical(KEY, x, "vocab", **named), logits).rearrange(("case", "draw")).array
    for drawn, (temperature, *kept) in zip(tokens, wanted, strict=True):
        expected = np.where(np.isin(np.arange(5), kept), PROBABILITIES ** (1 / temperature), 0)
        found = np.bincount(drawn, minlength=5) / Draw.size
        np.testing.assert_allclose(found, expected / expected.sum(), atol=0.03)
        assert ((found > 0) == (expected > 0)).all()


def test_how_often_things_are_drawn():
    check_frequencies(
        [(1, 0, 1, 2, 3, 4), (0.5, 0, 1, 2, 3, 4), (1, 1, 3, 4), (1, 1), (1, 1, 3, 4), (1, 1), (0.5, 1, 3)],
        temperature=[1.0, 0.5, 1, 1, 1, 1, 0.5],
        top_p=[1.0, 1, 0.72, 0, 1, 1, 0.85],
        min_p=[0.0, 0, 0, 0, 0.3, 1, 0],
    )


def test_how_often_candidates_are_drawn():
    """The share is one of what `top_k` leaves: here, 0.7 of 0.85."""
    check_frequencies(
        [(1, 0, 1, 2, 3, 4), (1, 1, 3), (1, 1), (1, 1, 3)],
        top_k=[5, 2, 0, 3],
        top_p=[1.0, 1, 1, 0.8],
        max_k=5,
    )


def test_shares_are_those_of_sorting():
    """Whatever the logits are: the least likely that is kept is the one at which the sorted sum reaches the share."""
    x = np.random.default_rng(1).normal(size=(32, 20)).astype(np.float32) * 3
    shares = np.random.default_rng(2).uniform(size=32).astype(np.float32)
    logits = axn.broadcast_axis(axn.named(x, ("batch", "vocab")), axn.Axis("draw", 100))
    tokens = run(lambda x: categorical(KEY, x, "vocab", top_p=axn.named(shares, "batch")), logits)
    probabilities = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    counts = (np.cumsum(np.sort(probabilities, axis=1)[:, ::-1], axis=1) < shares[:, None]).sum(1) + 1
    for row in range(32):
        drawn = set(tokens["batch", row].array.tolist())
        kept = np.argsort(-x[row])[: counts[row]]
        assert drawn <= set(kept.tolist())
        likely = kept[probabilities[row, kept] > 0.1]
        assert drawn >= set(likely.tolist())


def test_filters_do_not_change_what_is_drawn_among_what_they_leave():
    def several(x):
        few = categorical(KEY, x, "vocab", top_k=4)
        return (
            categorical(KEY, x, "vocab"),
            few,
            categorical(KEY, x, "vocab", top_k=64),
            categorical(KEY, x, "vocab", top_p=1.0),
        )

    plain, few, *unfiltered = (x.array for x in run(several, LOGITS))
    for tokens in unfiltered:
        assert tokens.tolist() == plain.tolist()
    rank = np.argsort(np.argsort(-LOGITS.array, axis=1), axis=1)[np.arange(8), plain]
    assert (few[rank < 4] == plain[rank < 4]).all() and (rank < 4).any() and (rank >= 4).any()


def test_one_parameter_for_each_example_is_one_after_the_other(expected):
    fn = jax.jit(lambda x, given: categorical(KEY, x, "vocab", **given))
    for i in range(8):
        assert fn(LOGITS, {what: x.array[i] for what, x in PER_EXAMPLE.items()}).array[i] == expected["everything"][i]


def test_order_of_axes_does_not_matter():
    x = LOGITS.unflatten_axis("batch", axn.make_axes(a=2, b=4))
    tokens = categorical(KEY, x, "vocab", top_k=2)
    turned = categorical(KEY, x.rearrange(("vocab", "b", "a")), "vocab", top_k=2)
    assert tokens.names == ("a", "b") and turned.names == ("b", "a")
    assert tokens.array.tolist() == turned.array.T.tolist()


@pytest.mark.parametrize("options", [{"top_p": 0.5, "min_p": 0.5}, {"top_k": 2}], ids=str)
def test_ties_and_numbers_that_are_none(options):
    """Without a temperature, it is the first of the largest."""
    rows = [
        (0.0, [0.0, 2.0, 2.0], 1),
        (0.0, [1.0, 1.0, 1.0], 0),
        (1.0, [-np.inf] * 3, 0),
        (1.0, [0.0, np.nan, np.inf], 1),
        (1.0, [0.0, np.inf, np.inf], 1),
        (1.0, [-np.inf, -np.inf, 0.0], 2),
    ]
    temperature, x, expected = zip(*rows, strict=True)
    x = axn.named(np.array(x, np.float32), ("batch", "vocab"))
    tokens = categorical(KEY, x, "vocab", temperature=axn.named(np.array(temperature), "batch"), **options)
    assert tokens.tolist() == list(expected)


@pytest.mark.parametrize("options", [{}, {"top_k": 2}], ids=str)
def test_a_nan_shows_whatever_its_sign(mesh, options):
    """inf - inf has its sign bit set, and XLA's top-k ranks that last."""
    raw = np.array([[0.0, 1.0, -np.nan, 2.0], [0.0, np.nan, -np.nan, 3.0]], np.float32)
    assert np.signbit(raw[:, 2]).all()
    with axn.axis_mapping({"vocab": "model"}):
        x = axn.shard(axn.named(raw, ("batch", "vocab")))
        assert run(lambda x: categorical(KEY, x, "vocab", **options), x).tolist() == [2, 1]


def test_keys_of_all_kinds():
    tokens = categorical(KEY, LOGITS, "vocab").tolist()
    for key in (jax.random.PRNGKey(7), axn.named(KEY, ())):
        assert categorical(key, LOGITS, "vocab").tolist() == tokens
    other = categorical(jax.random.key(7, impl="rbg"), LOGITS["batch", 0].astype(jnp.bfloat16), "vocab")
    assert other.shape == {} and 0 <= other.item() < 64


def test_refusals():
    with pytest.raises(ValueError, match=r"random.categorical: `temperature` must be at least 0, got -1"):
        categorical(KEY, LOGITS, "vocab", temperature=-1)
    with pytest.raises(ValueError, match=r"`top_p` must be at least 0 and at most 1, got 1\.5"):
        categorical(KEY, LOGITS, "vocab", top_p=1.5)
    with pytest.raises(ValueError, match=r"`min_p` has axes \(pos\) that the array \(batch\) lacks"):
        categorical(KEY, LOGITS, "vocab", min_p=axn.named([0.1], "pos"))
    with pytest.raises(ValueError, match="top_k=65, but axis 'vocab' has 64 elements"):
        categorical(KEY, LOGITS, "vocab", top_k=65)
    with pytest.raises(ValueError, match="there must be at least one element to choose from"):
        categorical(KEY, LOGITS, "vocab", top_k=0)
    with pytest.raises(TypeError, match="`top_k` is an array"):
        categorical(KEY, LOGITS, "vocab", top_k=COUNTS)
    with pytest.raises(TypeError, match="`max_k` is the most that `top_k` can be"):
        categorical(KEY, LOGITS, "vocab", max_k=3)
    with pytest.raises(TypeError, match="logits are floating point numbers"):
        categorical(KEY, axn.arange(axn.Axis("vocab", 3)), "vocab")
    with pytest.raises(ValueError, match="expected one random key"):
        categorical(jax.random.split(KEY, 2), LOGITS, "vocab")
    assert STEPS == 30  # as the documentation says
