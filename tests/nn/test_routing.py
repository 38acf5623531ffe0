"""Rows are sent to their experts and back: values and gradients agree with all experts on all rows."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import axonym as axn
from axonym import nn
from axonym.nn import moe, routing
from axonym.testing import check_shard_invariance
from tests.executed import executed
from tests.helpers import assert_named, spec

Experts, Tokens, Choice, Embed, Mlp, Out = axn.make_axes(experts=8, tokens=64, choice=2, embed=4, mlp=6, out=5)
UP = nn.MoELinear.init(Experts, Embed, Mlp, key=jax.random.key(0))
DOWN = nn.MoELinear.init(Experts, Mlp, Out, key=jax.random.key(1))
X = axn.random.normal(jax.random.key(2), (Tokens, Embed))
WEIGHTS = axn.random.uniform(jax.random.key(3), (Tokens, Choice))
CHOSEN = axn.random.randint(jax.random.key(4), (Tokens, Choice), -1, 9)  # -1 and 8 are no experts
ONE_EXPERT = CHOSEN * 0 + 3  # of the same type, for which nothing is compiled again


def of_experts(layers: Any, rows: axn.NamedArray, sizes: axn.NamedArray) -> axn.NamedArray:
    up, down = layers
    return down(nn.gelu(up(rows, sizes)), sizes)


def mixture(layers: Any, x: axn.NamedArray, chosen: axn.NamedArray, **options: Any) -> axn.NamedArray:
    return nn.dispatch(of_experts, layers, x, chosen, Experts, **options)


def dense(layers: Any, x: axn.NamedArray, chosen: axn.NamedArray) -> axn.NamedArray:
    """Run all experts on all rows, and select one result for each row."""
    up, down = layers
    hidden = nn.gelu(axn.dot(x, up.weight, axis=Embed) + up.bias)
    return axn.dot(axn.dot(hidden, down.weight, axis=Mlp) + down.bias, nn.one_hot(chosen, Experts), axis=Experts)


def loss(model: Any, layers: Any, x: Any, weights: Any, chosen: Any, **options: Any) -> tuple[jax.Array, Any]:
    y = model(layers, x, chosen, **options)
    return axn.sum(axn.sin(axn.dot(y, weights, axis=Choice))).scalar(), y


def gradient(model: Any, **options: Any) -> Any:
    return jax.jit(
        jax.value_and_grad(lambda *xs: loss(model, *xs, **options), (0, 1, 2), has_aux=True),
    )


def close(found: Any, expected: Any) -> None:
    for a, b in zip(axn.tree.leaves(found), axn.tree.leaves(expected), strict=True):
        if isinstance(b, axn.NamedArray):
            assert_named(axn.to_host(a).rearrange(b.names), b, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-4)


@pytest.fixture(scope="module")
def expected() -> Any:
    compute = gradient(dense)
    return [compute((UP, DOWN), X, WEIGHTS, chosen) for chosen in (CHOSEN, ONE_EXPERT)]


def test_on_one_device(expected: Any) -> None:
    compute = gradient(mixture)
    for chosen, wanted in zip((CHOSEN, ONE_EXPERT), expected, strict=True):
        close(compute((UP, DOWN), X, WEIGHTS, chosen), wanted)
    y = mixture((UP, DOWN), X, CHOSEN)
    assert y.names == ("tokens", "choice", "out")
    close(y, dense((UP, DOWN), X, CHOSEN))
    numbers = axn.named(np.asarray(CHOSEN.array), CHOSEN.names)
    close(jax.jit(lambda x: mixture((UP, DOWN), x, numbers))(X), y)


MAPPINGS: list[Any] = [
    {"tokens": "data", "experts": "data"},
    {"tokens": "data", "experts": "model"},
    {"experts": "data", "mlp": "model"},
    pytest.param({"tokens": ("data", "model"), "experts": ("data", "model"), "embed": None}, marks=pytest.mark.oldest),
    pytest.param({"tokens": "data"}, marks=pytest.mark.oldest),
]


@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_on_a_mesh(mapping: dict[str, Any], mesh: Mesh, expected: Any) -> None:
    """As many rounds as it takes: with rounds of three rows, and where all rows go to one expert."""
    with jax.set_mesh(mesh), axn.axis_mapping(mapping):
        compute = gradient(mixture, round_size=3)
        for chosen, wanted in zip((CHOSEN, ONE_EXPERT), expected, strict=True):
            found = compute(*axn.shard(((UP, DOWN), X, WEIGHTS, chosen)))
            close(found, wanted)
            if mesh.axis_types[0] is AxisType.Explicit:
                assert spec(found[0][1])[0] == mapping.get("tokens")


def test_the_kernel_for_tpus(auto_mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megablox, simulated: on complete rows and experts it is right, and on shards of them it is refused by name."""
    monkeypatch.setattr(moe, "active_platform", lambda: "tpu")
    monkeypatch.setattr(moe, "_megablox", functools.partial(moe._megablox, interpret=True))
    layers = [nn.MoELinear(x.weight, x.bias, x.Experts, x.In, x.Out, use_gmm=True) for x in (UP, DOWN)]
    assert_named(mixture(layers, X, CHOSEN), mixture((UP, DOWN), X, CHOSEN), rtol=1e-4, atol=1e-5)
    with jax.set_mesh(auto_mesh), axn.axis_mapping({"tokens": "data", "experts": "data"}):
        arguments = axn.shard((layers, X, CHOSEN))
        with pytest.raises(ValueError, match=r"MoELinear: .*\(`use_gmm`\) does not run where JAX tracks .* Leave"):
            jax.jit(mixture)(*arguments)
        with pytest.raises(ValueError, match=r"dispatch: `fn` gets some of the rows and experts here.*MoELinear"):
            jax.jit(axn.shard_map(mixture, check_vma=False))(*arguments)


def test_only_rows_move(mesh: Mesh) -> None:
    """Each round moves rows, the numbers of their experts, and results: so many for each device, whatever is chosen."""
    mapping = {"tokens": ("data", "model"), "experts": ("data", "model")}
    with jax.set_mesh(mesh), axn.axis_mapping(mapping):
        arguments = axn.shard(((UP, DOWN), X, CHOSEN))
        program = jax.jit(lambda *xs: mixture(*xs, round_size=4)).lower(*arguments).compile()
        found = executed(program)
    rows = Tokens.size * Choice.size // 8
    rounds = rows // 4  # at most: as many as it takes where all rows go to one device
    assert set(found) == {"all-to-all", "all-reduce"}
    assert found["all-to-all"] == (3 * rounds, rounds * 8 * 4 * 4 * (Embed.size + 1 + Out.size))
    assert found["all-reduce"] == (1, 4), "how many rounds it takes"


def test_gradients_of_experts_are_summed_once(auto_mesh: Mesh) -> None:
    """Not in each round: experts are sharded over one mesh axis, and rows over both."""
    with jax.set_mesh(auto_mesh), axn.axis_mapping({"tokens": "data", "experts": "model"}):
        arguments = axn.shard(((UP, DOWN), X, WEIGHTS, CHOSEN))
        found = executed(gradient(mixture, round_size=4).lower(*arguments).compile())
    assert "all-gather" not in found
    weights = sum(p.array.size for p in (UP.weight, UP.bias, DOWN.weight, DOWN.bias) if p is not None)
    assert found["all-reduce"][1] < 4 * weights + 4 * X.array.size


def test_weights_stay_sharded_over_other_auto_axes(auto_mesh: Mesh) -> None:
    """Tensor parallelism among the devices that share an expert: results are summed, and nothing is gathered."""
    with jax.set_mesh(auto_mesh), axn.axis_mapping({"tokens": "data", "experts": "data", "mlp": "model"}):
        arguments = axn.shard(((UP, DOWN), X, WEIGHTS, CHOSEN))
        found = executed(gradient(mixture).lower(*arguments).compile())
    assert "all-gather" not in found and "all-reduce" in found


# --- ragged: XLA's CPU backend does not have it, so the rows move by an all-gather, and as the definition says ---


def by_all_gather(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: tuple[str, ...],
) -> jax.Array:
    rows, starts, sizes, places = (
        jax.lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets)
    )
    me = jax.lax.axis_index(axis_name)
    at = jnp.arange(len(output))
    for device in range(len(rows)):
        place, size, start = (x[device, me] for x in (places, sizes, starts))
        size = jnp.where(size == recv_sizes[device], size, 0)  # what both sides do not agree on does not move
        here = (at >= place) & (at < place + size)
        moved = rows[device, jnp.clip(at - place + start, 0, len(operand) - 1)]
        output = jnp.where(here.reshape(-1, *[1] * (output.ndim - 1)), moved, output)
    return output


@pytest.fixture
def ragged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "active_platform", lambda: "tpu")
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", by_all_gather)


@pytest.mark.usefixtures("ragged")
@pytest.mark.parametrize("mapping", MAPPINGS[:3], ids=str)
def test_ragged_exchange(mapping: dict[str, Any], mesh: Mesh, expected: Any) -> None:
    """In rounds on Auto axes, and at once on Explicit axes."""
    options: Any = {"round_size": 3} if mesh.axis_types[0] is AxisType.Auto else {"exchange": "ragged"}
    with jax.set_mesh(mesh), axn.axis_mapping(mapping):
        compute = gradient(mixture, **options)
        for chosen, wanted in zip((CHOSEN, ONE_EXPERT), expected, strict=True):
            close(compute(*axn.shard(((UP, DOWN), X, WEIGHTS, chosen))), wanted)


@pytest.mark.usefixtures("ragged")
def test_what_does_not_arrive_has_no_part(auto_mesh: Mesh) -> None:
    """Rows without an expert move nowhere, and have no gradient."""
    chosen = axn.where(axn.arange(Tokens) % 3 == 0, axn.arange(Tokens) % 8, -1)
    x = axn.exp(X)

    def total(up: Any, x: axn.NamedArray) -> jax.Array:
        y = nn.dispatch(lambda up, x, n: up(axn.log(x), n), up, x, chosen, Experts)
        return axn.sum(y * y).scalar()

    wanted = jax.grad(total, (0, 1))(UP, x)
    with jax.set_mesh(auto_mesh), axn.axis_mapping({"tokens": ("data", "model"), "experts": ("data", "model")}):
        found = axn.to_host(jax.jit(jax.grad(total, (0, 1)))(*axn.shard((UP, x))))
    close(found, wanted)
    assert not np.asarray(found[1].array)[np.asarray(chosen.array) < 0].any()


@pytest.mark.parametrize("chosen, rounds", [("even", 1), ("one", 4)])
def test_rounds_are_as_many_as_needed(chosen: str, rounds: int, auto_mesh: Mesh) -> None:
    calls: list[int] = []

    def counted(layer: Any, rows: axn.NamedArray, sizes: axn.NamedArray) -> axn.NamedArray:
        jax.debug.callback(lambda _: calls.append(1), sizes.array)
        return layer(rows, sizes)

    expert = axn.arange(Tokens) % 8 if chosen == "even" else axn.full(Tokens, 5)
    with jax.set_mesh(auto_mesh), axn.axis_mapping({"tokens": ("data", "model"), "experts": ("data", "model")}):
        compute = jax.jit(lambda up, x, expert: nn.dispatch(counted, up, x, expert, Experts, round_size=2))
        y = jax.block_until_ready(compute(*axn.shard((UP, X, expert))))
        jax.effects_barrier()
        assert spec(y)[0] == ("data", "model")
    assert len(calls) == 8 * rounds


def test_memory_is_that_of_one_round(auto_mesh: Mesh) -> None:
    """Where rounds are short, temporaries are, too, and for the gradient."""
    tokens = axn.Axis("tokens", 1024)
    x, chosen = axn.zeros((tokens, Embed)), axn.zeros((tokens, Choice), dtype=np.int32)
    weights = axn.zeros((tokens, Choice))
    with jax.set_mesh(auto_mesh), axn.axis_mapping({"tokens": ("data", "model"), "experts": ("data", "model")}):
        arguments = axn.shard(((UP, DOWN), x, weights, chosen))
        short, long = (
            gradient(mixture, round_size=n).lower(*arguments).compile().memory_analysis().temp_size_in_bytes
            for n in (16, 256)  # 256: what one device sends at most
        )
    assert short < long / 3


@pytest.mark.oldest
def test_it_is_the_same_on_every_mesh() -> None:
    """With a norm among the experts, whose derivative at zero is not finite."""

    def of_norm(up: Any, x: axn.NamedArray, n: axn.NamedArray) -> axn.NamedArray:
        return up(x / axn.sqrt(axn.sum(x * x, Embed)), n)

    found = check_shard_invariance(
        lambda x, up, chosen: nn.dispatch(of_norm, up, x, chosen, Experts), X, UP, CHOSEN, draws=3, seed=2
    )
    assert found.compared >= 2


def test_numbers_of_experts_that_are_not_sharded(explicit_mesh: Mesh) -> None:
    """The rows stay sharded as the array is."""
    numbers = axn.named(np.asarray(CHOSEN.array), CHOSEN.names)
    with jax.set_mesh(explicit_mesh), axn.axis_mapping({"tokens": "data"}):
        y = jax.jit(lambda layers, x: mixture(layers, x, numbers))(*axn.shard(((UP, DOWN), X)))
    assert spec(y)[0] == "data"
    close(y, dense((UP, DOWN), X, CHOSEN))


def of_each_row(values: axn.NamedArray, rows: axn.NamedArray, sizes: axn.NamedArray) -> axn.NamedArray:
    """Return the value of the expert of each row."""
    One, Out = axn.make_axes(one=1, out=1)
    layer = nn.MoELinear(values.broadcast_axis(One).broadcast_axis(Out), None, Experts, One, Out)
    return layer(axn.ones((rows.resolve_axis("rows"), One), values.dtype), sizes)["out", 0]


@pytest.mark.parametrize("numbers", [np.uint32, np.int8, np.int32])
def test_dtypes(numbers: Any, auto_mesh: Mesh) -> None:
    """Of the numbers of experts; and gradients of bfloat16 do not depend on how long a round is."""
    tokens = axn.Axis("tokens", 1024)
    x, weight = axn.ones(tokens, jnp.bfloat16), axn.ones(Experts, jnp.bfloat16)
    expert = axn.zeros(tokens, dtype=numbers)

    def total(weight: axn.NamedArray, x: axn.NamedArray, expert: axn.NamedArray) -> jax.Array:
        y = nn.dispatch(lambda w, x, n: x * of_each_row(w, x, n), weight, x, expert, Experts, round_size=8)
        return axn.sum(y.astype(jnp.float32)).scalar()

    with jax.set_mesh(auto_mesh), axn.axis_mapping({"tokens": "model", "experts": "model"}):
        found = jax.jit(jax.grad(total))(*axn.shard((weight, x, expert)))
    assert found["experts", 0].item() == 1024 and found.dtype == jnp.bfloat16


@pytest.mark.parametrize("tokens", ["data", ("model", "data")], ids=str)
def test_shards_of_experts_that_are_stored_sharded(tokens: Any, mesh: Mesh) -> None:
    """They are gathered where they are used, and their gradients are scattered as they are summed.

    Over mesh axes that only the rows are sharded over, shards of gradients are summed.
    """
    up = {"weight": UP.weight.rename({"embed": "hidden"})}

    def total(up: Any, x: axn.NamedArray, chosen: axn.NamedArray) -> jax.Array:
        x = x.rename({"embed": "hidden"})
        y = nn.dispatch(lambda up, x, n: axn.dot(x, up["weight"]["experts", 0], axis="hidden"), up, x, chosen, Experts)
        return axn.sum(y * y).scalar()

    chosen = axn.zeros(Tokens, dtype=np.int32)
    wanted = jax.grad(total)(up, X, chosen)
    with jax.set_mesh(mesh), axn.axis_mapping({"tokens": tokens, "hidden": "data"}):
        arguments = axn.shard((up, X, chosen))
        program = jax.jit(jax.grad(total)).lower(*arguments).compile()
        close(axn.to_host(program(*arguments)), wanted)
    found = executed(program)
    shard = 4 * UP.weight.array.size // mesh.shape["data"]
    assert found["reduce-scatter"][1] == shard
    assert found.get("all-reduce", (0, 0))[1] == (0 if tokens == "data" else shard)


def test_where_shards_are_there_already(auto_mesh: Mesh) -> None:
    """In shard_map, how many experts there are tells whether they are sharded, and -1 and 8 are none."""
    x, chosen = axn.ones({"tokens": 8, "embed": 4}), axn.named([0, 3, 8, 1, -1, 5, 7, 2], "tokens")
    weight = axn.arange(Experts) + 1.0

    def scaled(weight: axn.NamedArray, x: axn.NamedArray, chosen: axn.NamedArray, experts: Any = Experts) -> Any:
        def fn(weight: axn.NamedArray, rows: axn.NamedArray, n: axn.NamedArray) -> axn.NamedArray:
            return rows * of_each_row(weight, rows, n)

        return nn.dispatch(fn, weight, x, chosen, experts, round_size=1)

    wanted = x * axn.named([1.0, 4, 0, 2, 0, 6, 8, 3], "tokens")
    both = {"tokens": "data", "experts": "data"}
    with jax.set_mesh(auto_mesh), axn.axis_mapping(both):
        for where in ({}, {"experts": None}):  # sharded, and replicated under a mapping that shards them
            for checked in (True, False):
                placed = (both | where, both, both)
                compute = axn.shard_map(scaled, in_specs=placed, out_specs=both, check_vma=checked)
                assert_named(axn.to_host(jax.jit(compute)(weight, x, chosen)), wanted)
        with pytest.raises(ValueError, match=r"'experts'.*16.*2"):
            axn.shard_map(lambda w, x, n: scaled(w, x, n, axn.Axis("experts", 16)))(weight, x, chosen)
    with jax.set_mesh(auto_mesh), axn.axis_mapping({"tokens": "data", "experts": "model"}):
        with pytest.raises(ValueError, match=r"mesh axis 'model', over which the rows \(tokens\) are replicated"):
            jax.jit(axn.shard_map(scaled))(*axn.shard((weight, x, chosen)))


def test_no_rows() -> None:
    layers, x, chosen = (UP, DOWN), axn.ones({"tokens": 0, "embed": 4}), axn.zeros({"tokens": 0}, dtype=np.int32)
    assert mixture(layers, x, chosen).shape == {"tokens": 0, "out": 5}
    assert mixture(layers, X, axn.zeros({"choice": 0, "tokens": 64}, dtype=np.int32)).shape["choice"] == 0


def test_inside_shard_map_and_loops(auto_mesh: Mesh) -> None:
    """Where mesh axes are manual already, and with a layer after another."""

    def twice(layer: Any, x: axn.NamedArray, expert: axn.NamedArray) -> axn.NamedArray:
        def step(x: axn.NamedArray) -> axn.NamedArray:
            return x + nn.dispatch(lambda layer, x, n: layer(x, n), layer, x, expert, Experts)

        return axn.fori_loop(0, 2, lambda i, x: step(x), x)

    square = nn.MoELinear.init(Experts, Embed, Embed, key=jax.random.key(5))
    expert = CHOSEN["choice", 0]
    wanted = twice(square, X, expert)
    with jax.set_mesh(auto_mesh), axn.axis_mapping({"tokens": "data", "experts": "data"}):
        arguments = axn.shard((square, X, expert))
        for compute in (jax.jit(twice), jax.jit(axn.shard_map(twice))):
            assert_named(axn.to_host(compute(*arguments)), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"expert": X}, "integers, not float32"),
        ({"expert": axn.zeros({"tokens": 8}, dtype=np.int32)}, r"'tokens'.*64.*8"),
        ({"params": X}, r"no array of `params` has the axis 'experts' .*\(tokens, embed\)"),
        ({"rows": "tokens"}, r"'tokens' is an axis of the rows .*`rows=\.\.\.`"),
        ({"round_size": 0}, "at least 1, got 0"),
        ({"exchange": "gather"}, '"all_to_all", "ragged" or None, got .gather.'),
        ({"exchange": "ragged"}, 'no ragged all-to-all for CPUs.*`exchange="all_to_all"`'),
        ({"experts": Experts.resize(9)}, r"'experts'.*9.*8"),
        ({"fn": lambda layer, x, n: layer(x, n).rename({"mlp": "tokens"})}, "'tokens' would name more than one axis"),
        ({"fn": lambda layer, x, n: x.sum("rows")}, r"its axis 'rows' of rows, got \(embed=4\)"),
    ],
)
def test_errors(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {
        "fn": lambda layer, x, n: layer(x, n),
        "params": UP,
        "x": X,
        "expert": CHOSEN,
        "experts": Experts,
    }
    with pytest.raises((TypeError, ValueError), match=words):
        nn.dispatch(**arguments | change)


def test_rows_that_devices_cannot_share(auto_mesh: Mesh) -> None:
    x, expert = axn.ones({"tokens": 6, "embed": 4}), axn.zeros({"tokens": 6}, dtype=np.int32)
    with jax.set_mesh(auto_mesh), axn.axis_mapping({"experts": "data"}):
        with pytest.raises(ValueError, match=r"mesh axes 'data'.* cannot share the rows \(tokens=6\)"):
            nn.dispatch(lambda layer, x, n: layer(x, n), axn.shard(UP), x, expert, Experts)


# --- routers ---


def test_limited_capacity() -> None:
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, 8, (64, 2))
    seen = np.zeros(8, int)
    wanted = chosen.copy()
    for place in np.ndindex(chosen.shape):
        seen[chosen[place]] += 1
        if seen[chosen[place]] > 12:  # 0.75 of 128 rows for 8 experts
            wanted[place] = -1
    for layout in ((Tokens, Choice), (Choice, Tokens)):
        expert = axn.named(chosen, (Tokens, Choice)).rearrange(layout).astype(np.uint32)
        found = nn.limit_capacity(expert, Experts, 0.75, order=(Tokens, Choice))
        assert found.axes == expert.axes
        np.testing.assert_array_equal(found.rearrange((Tokens, Choice)).array, wanted)
    assert 0 < int((found < 0).sum().array) < 64
    with pytest.raises(ValueError, match=r"say which rows are the first ones, such as `order=\('tokens', 'choice'\)`"):
        nn.limit_capacity(expert, Experts, 0.75)
    with pytest.raises(TypeError, match="integers, not float32"):
        nn.limit_capacity(X, Experts, 1.0)
    assert (nn.limit_capacity(axn.zeros(axn.Axis("x", 100), dtype=int), axn.Axis("e", 10), 1.1) == 0).sum().item() == 11


def test_dropped_rows_are_the_same_on_every_mesh() -> None:
    def limited(x: axn.NamedArray) -> axn.NamedArray:
        return nn.limit_capacity(axn.argmax(x, Embed), Embed, 0.75)

    assert check_shard_invariance(limited, X, draws=4, gradients=False).compared >= 2


def test_losses_of_routers() -> None:
    logits = axn.random.normal(jax.random.key(6), (Tokens, Experts))
    probabilities, chosen = nn.softmax(logits, Experts), axn.top_k(logits, Experts, 2, "choice")[1]
    share = np.bincount(np.asarray(chosen.array).ravel(), minlength=8) / 128
    wanted = 8 * np.sum(share * np.asarray(probabilities.array).mean(0))
    np.testing.assert_allclose(nn.load_balancing_loss(probabilities, chosen, Experts).array, wanted, rtol=1e-5)
    wanted = np.mean(np.log(np.exp(np.asarray(logits.array)).sum(1)) ** 2)
    np.testing.assert_allclose(nn.router_z_loss(logits, Experts).array, wanted, rtol=1e-5)
    even = nn.load_balancing_loss(axn.full((Tokens, Experts), 1 / 8), axn.arange(Tokens) % 8, Experts)
    np.testing.assert_allclose(even.array, 1, rtol=1e-6)
    with jax.enable_x64(True):
        assert nn.load_balancing_loss(probabilities, chosen, Experts).dtype == jnp.float32


def test_a_mixture_with_its_router(mesh: Mesh) -> None:
    """Tokens and experts are sharded over one mesh axis, so the scores have an axis of their own."""
    scores = axn.Axis("scores", 8)
    router = nn.Linear.init(Embed, scores, key=jax.random.key(7))

    def total(model: Any, x: axn.NamedArray) -> jax.Array:
        router, layers = model
        logits = router(x)
        probabilities = nn.softmax(logits, scores)
        weights, chosen = axn.top_k(probabilities, scores, 2, "choice")
        balance = nn.load_balancing_loss(probabilities, chosen, scores) + nn.router_z_loss(logits, scores)
        chosen = nn.limit_capacity(chosen, scores, 0.9, order=("choice", "tokens"))
        y = axn.dot(mixture(layers, x, chosen), weights, axis="choice")
        return (axn.mean(y * y) + balance).scalar()

    compute = jax.jit(jax.value_and_grad(total))
    model = router, (UP, DOWN)
    wanted = compute(model, X)
    with jax.set_mesh(mesh), axn.axis_mapping({"tokens": "data", "experts": "data"}):
        close(axn.to_host(compute(*axn.shard((model, X)))), wanted)


@jax.custom_vjp
def _clipped(x: jax.Array) -> jax.Array:
    return x * 1.0


def _norm_of_one(_: None, g: jax.Array) -> tuple[jax.Array]:
    return (g / jnp.linalg.norm(g),)


_clipped.defvjp(lambda x: (x * 1.0, None), _norm_of_one)


def test_a_derivative_that_needs_the_gradient_of_all_rows_is_refused() -> None:
    """On rows it is right; of a parameter, each device would have the gradient by its own rows."""

    def step(layers: Any, x: axn.NamedArray, of_rows: bool) -> jax.Array:
        def fn(layers: Any, rows: axn.NamedArray, sizes: axn.NamedArray) -> axn.NamedArray:
            up = layers[0]
            if of_rows:
                return up(axn.named(jax.vmap(_clipped)(rows.array), rows.names), sizes)
            weight = axn.named(_clipped(up.weight.array), up.weight.names)
            return dataclasses.replace(up, weight=weight)(rows, sizes)

        return axn.sum(axn.sin(nn.dispatch(fn, layers, x, CHOSEN, Experts))).scalar()

    expected = jax.jit(jax.grad(functools.partial(step, of_rows=True)))((UP,), X)
    with jax.set_mesh(axn.make_mesh({"expert": 4})), axn.axis_mapping({"tokens": "expert", "experts": "expert"}):
        close(jax.jit(jax.grad(functools.partial(step, of_rows=True)))(*axn.shard(((UP,), X))), expected)
        with pytest.raises(ValueError, match=r"'mul' in test_routing.py:\d+ is no function of each row alone"):
            jax.jit(jax.grad(functools.partial(step, of_rows=False)))(*axn.shard(((UP,), X)))


@jax.custom_vjp
def _scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * scale


_scaled.defvjp(
    lambda x, scale: (x * scale, (x, scale)), lambda kept, g: (g * kept[1], jnp.sum(g * kept[0], 0, keepdims=True))
)


def test_a_derivative_that_adds_up_rows(mesh: Mesh) -> None:
    def step(layers: Any, x: axn.NamedArray) -> jax.Array:
        def fn(layers: Any, rows: axn.NamedArray, sizes: axn.NamedArray) -> axn.NamedArray:
            up, scale = layers
            return up(axn.named(_scaled(rows.array, scale.array[None]), rows.names), sizes)

        return axn.sum(axn.sin(nn.dispatch(fn, layers, x, CHOSEN, Experts))).scalar()

    arguments = (UP, 2 * axn.ones(Embed)), X
    expected = jax.jit(jax.grad(step, (0, 1)))(*arguments)
    with jax.set_mesh(mesh), axn.axis_mapping({"tokens": "data", "experts": "data"}):
        close(axn.to_host(jax.jit(jax.grad(step, (0, 1)))(*axn.shard(arguments))), expected)
