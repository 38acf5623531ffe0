"""Functions of raw arrays under a mapping: the same values, and no more communication than placed by hand."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float

import axonym as axn

DATA, TENSOR = {"data": 8}, {"model": 8}
BOTH = {"data": 2, "model": 4}
SHARDED = {"mlp": "model", "heads": "model"}
MAPPINGS: dict[str, tuple[dict[str, int], dict[str, str], dict[str, str] | None]] = {
    "data": (DATA, {"batch": "data"}, None),
    "tensor": (TENSOR, SHARDED, None),
    "fsdp": (DATA, {"batch": "data"}, {"embed": "data"}),
    "fsdp+tensor": (BOTH, {"batch": "data", **SHARDED}, {"embed": "data", **SHARDED}),
}
TYPES = [AxisType.Auto, AxisType.Explicit]
OPTIMIZER = optax.adamw(1e-3)
Place = Callable[[jax.Array, str], jax.Array]


def mesh_of(sizes: dict[str, int], kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    assert jax.device_count() == 8
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def nothing(x: jax.Array, _: str) -> jax.Array:
    return x


def train_step(loss: Callable[..., jax.Array], placed: Callable[[Any], Any] = lambda tree: tree) -> Any:
    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        gradients = placed(gradients)
        updates, state = OPTIMIZER.update(gradients, state, params)
        return placed(optax.apply_updates(params, updates)), state, gradients, value

    return step


def specs(names: Any, mapping: dict[str, str]) -> Any:
    return jax.tree.map(lambda own: P(*map(mapping.get, own.split())), names)


def close(found: Any, right: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), found, right)


def communication(fn: Any, *args: Any) -> tuple[int, Counter[str]]:
    """Return the bytes that each device sends in a call, and how many collectives there are of each kind."""
    found = axn.insight.explain(fn, *args, by="partitioner").collectives
    return sum((c.sent or 0) * (c.times or 1) for c in found), Counter(c.kind for c in found)


def check(
    loss_of: Callable[[Place], Callable[..., jax.Array]],
    params: Any,
    names: Any,
    batch: tuple[tuple[jax.Array, str], ...],
    given: Any,
    mapping: str,
    kinds: list[AxisType],
) -> None:
    """Check that a distributed training step equals one on one device, and one that is placed by hand.

    Arguments:
        loss_of: a loss that calls a function with each product and the names of its axes.
        names: the names of all parameters.
        batch: the other arguments of the loss, each with its names.
        given: the names that `distribute` gets.
    """
    sizes, compute, stored = MAPPINGS[mapping]
    known = " ".join([*jax.tree.leaves(names), *(own for _, own in batch)]).split()
    compute = {axis: to for axis, to in compute.items() if axis in known}
    stored = None if stored is None else {axis: to for axis, to in stored.items() if axis in known}
    own = specs(names, stored or compute)
    constrained: Any = jax.lax.with_sharding_constraint
    by_hand = train_step(
        loss_of(lambda x, axes: constrained(x, P(*map(compute.get, axes.split())))),
        lambda tree: jax.tree.map(constrained, tree, own),
    )
    arrays = [x for x, _ in batch]
    right = jax.jit(train_step(loss_of(nothing)))(params, OPTIMIZER.init(params), *arrays)
    sent = None
    for kind in kinds:
        with jax.set_mesh(mesh_of(sizes, kind)):
            step = axn.names.distribute(train_step(loss_of(nothing)), compute, stored, names=given)
            found = jax.block_until_ready(step(params, OPTIMIZER.init(params), *arrays))
        close(found[2:], right[2:])
        mesh = mesh_of(sizes)

        def put(x: Any, spec: Any, mesh: Any = mesh) -> Any:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

        first = found[1][0]
        for tree in (found[0], found[2], first.mu, first.nu):
            for x, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(own), strict=True):
                assert x.sharding.is_equivalent_to(NamedSharding(x.sharding.mesh, spec), x.ndim), (x.sharding, spec)
        if sent is None:
            with jax.set_mesh(mesh):
                state = first._replace(mu=jax.tree.map(put, first.mu, own), nu=jax.tree.map(put, first.nu, own))
                placed = [put(x, P(*map(compute.get, axes.split()))) for x, axes in batch]
                sent = communication(by_hand, jax.tree.map(put, params, own), (state, *found[1][1:]), *placed)
        with jax.set_mesh(mesh_of(sizes, kind)):
            assert communication(step, *found[:2], *arrays) <= sent, mapping


# --- models ---


def mlp_loss(place: Place) -> Callable[..., jax.Array]:
    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = jnp.tanh(place(x @ p["up"], "batch mlp") + p["bias"][None])
        h = jax.nn.relu(place(h @ p["down"], "batch embed"))
        logits = place(h @ p["head"], "batch classes")
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return loss


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_raw_arrays(mapping: str) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    names = {"up": "embed mlp", "bias": "mlp", "down": "mlp embed", "head": "embed classes"}
    shapes = {"up": (16, 32), "bias": (32,), "down": (32, 16), "head": (16, 8)}
    params = {n: 0.3 * jax.random.normal(k, shapes[n]) for n, k in zip(shapes, keys, strict=True)}
    batch = (jax.random.normal(keys[0], (8, 16)), "batch embed"), (jax.random.randint(keys[1], (8,), 0, 8), "batch")
    given = ({"up": "embed mlp", "bias": None, "down": "_ embed", "head": "_ classes"}, None, "batch _", None)
    check(mlp_loss, params, names, batch, given, mapping, TYPES if mapping == "fsdp+tensor" else TYPES[:1])


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, place: Place):
        self.norm1, self.norm2 = nnx.LayerNorm(16, rngs=rngs), nnx.RMSNorm(16, rngs=rngs)
        self.query, self.key, self.value = (nnx.LinearGeneral(16, (4, 8), rngs=rngs) for _ in range(3))
        self.out = nnx.LinearGeneral((4, 8), 16, axis=(-2, -1), rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
        self.place = place

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        h = self.norm1(x)
        q, k, v = (self.place(f(h), "batch pos heads head_dim") for f in (self.query, self.key, self.value))
        attended = self.place(nnx.dot_product_attention(q, k, v, mask=mask), "batch pos heads head_dim")
        x = x + self.place(self.out(attended), "batch pos embed")
        h = self.place(self.up(self.norm2(x)), "batch pos mlp")
        return x + self.place(self.down(nnx.gelu(h)), "batch pos embed")


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, place: Place):
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.block, self.norm = Block(rngs, place), nnx.LayerNorm(16, rngs=rngs)
        self.place = place

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.block(self.place(self.embed(x), "batch pos embed"), nnx.make_causal_mask(x))
        return self.place(self.embed.attend(self.norm(h)), "batch pos vocab")


def transformer_loss(place: Place) -> Callable[..., jax.Array]:
    graph, _ = nnx.split(nnx.eval_shape(lambda: Transformer(nnx.Rngs(0), place)))

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(nnx.merge(graph, params)(x), y).mean()

    return loss


RULES = {
    "embedding": "vocab embed",
    "(query|value)/kernel": "embed heads head_dim",
    "out/kernel": "heads head_dim embed",
    "up/kernel": "embed mlp",
    "down/kernel": "mlp embed",
    "key/kernel": "embed heads head_dim",
    "(query|key|value)/bias": "heads head_dim",
    "up/bias": "mlp",
    "": "embed",
}
"""The names of all parameters, by regular expressions."""
GIVEN = {key: RULES[key] for key in ("embedding", "(query|value)/kernel", "up/kernel")}


@pytest.mark.parametrize("mapping", ["fsdp+tensor", "positions"])
def test_nnx_transformer(mapping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAPPINGS, "positions", (DATA, {"pos": "data"}, None))
    _, params = nnx.split(Transformer(nnx.Rngs(0), nothing))

    def name(path: Any, _: Any) -> str:
        text = jax.tree_util.keystr(path, simple=True, separator="/")
        return next(own for pattern, own in RULES.items() if re.search(pattern, text))

    x = jax.random.randint(jax.random.key(1), (4, 8), 0, 32)
    batch = (x, "batch pos"), (jnp.roll(x, 1, 1), "batch pos")
    names = jax.tree.map_with_path(name, params)
    kinds = TYPES if mapping == "positions" else TYPES[:1]
    check(transformer_loss, params, names, batch, (GIVEN, None, "batch pos", None), mapping, kinds)


class EquinoxMLP(eqx.Module):
    up: Float[Array, "mlp embed"]
    down: Float[Array, "embed mlp"]

    def __call__(self, x: Float[Array, " embed"], place: Place) -> Float[Array, " embed"]:
        return self.down @ place(jax.nn.gelu(self.up @ x), "mlp")


def equinox_loss(place: Place) -> Callable[..., jax.Array]:
    def loss(model: EquinoxMLP, x: Float[Array, "batch embed"], y: Float[Array, "batch embed"]) -> jax.Array:
        return ((jax.vmap(lambda x: model(x, place))(x) - y) ** 2).mean()

    return loss


def test_equinox() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    model = EquinoxMLP(0.3 * jax.random.normal(keys[0], (32, 16)), 0.3 * jax.random.normal(keys[1], (16, 32)))
    names = EquinoxMLP("mlp embed", "embed mlp")  # pyright: ignore[reportArgumentType]
    batch = tuple((jax.random.normal(k, (8, 16)), "batch embed") for k in keys[2:])
    # The fields say the names of the parameters.
    check(equinox_loss, model, names, batch, (None, None, "batch _", None), "tensor", TYPES[:1])


# --- transforms ---


def scanned_loss(w: Any, x: Float[Array, "batch embed"]) -> jax.Array:
    def block(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return jax.checkpoint(lambda h: h + jax.nn.silu(h @ w["up"]) @ w["down"])(h), None

    return (jax.lax.scan(block, x, w)[0] ** 2).mean()


KEYS = jax.random.split(jax.random.key(0), 3)
STACKED = {"up": 0.3 * jax.random.normal(KEYS[0], (3, 16, 32)), "down": 0.3 * jax.random.normal(KEYS[1], (3, 32, 16))}
ROWS = jax.random.normal(KEYS[2], (8, 16))
NAMES = {"w": {"up": "layers embed mlp", "down": None}}
MAPPING = {"batch": "data", "mlp": "model"}


def test_transforms() -> None:
    """On Explicit axes; those above are on both."""
    traces = []

    def loss(w: Any, x: Float[Array, "batch embed"]) -> jax.Array:
        traces.append(1)
        return scanned_loss(w, x)

    value, gradient = jax.value_and_grad(scanned_loss)(STACKED, ROWS)
    right = jax.jvp(jax.grad(scanned_loss), (STACKED, ROWS), (STACKED, ROWS))[1]
    distributed = axn.names.distribute(loss, MAPPING, names=NAMES)
    two = jnp.stack([ROWS, ROWS])
    with jax.set_mesh(mesh_of(BOTH, AxisType.Explicit)):
        for found in (distributed(STACKED, ROWS), jax.jit(distributed)(STACKED, ROWS), distributed(STACKED, ROWS)):
            close(jax.block_until_ready(found), value)
        for of in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.checkpoint(f))):
            found = jax.block_until_ready(of(distributed)(STACKED, ROWS))
            close(found, gradient)
            assert found["up"].sharding.spec[-1:] == ("model",)
        assert len(traces) == 1
        close(jax.jvp(jax.grad(distributed), (STACKED, ROWS), (STACKED, ROWS))[1], right)
        found = jax.jit(jax.vmap(jax.grad(distributed), (None, 0)))(STACKED, two)
        close(found, jax.tree.map(lambda x: jnp.stack([x, x]), gradient))
        total, _ = jax.lax.scan(lambda total, x: (total + distributed(STACKED, x), None), 0.0, two)
        close(total, 2 * value)


def test_active_mapping() -> None:
    traces = []

    def double(x: jax.Array) -> jax.Array:
        traces.append(1)
        return x @ x.T

    f = jax.jit(axn.names.distribute(double, names="batch embed"))
    x = jnp.ones((8, 4))
    with jax.set_mesh(mesh_of(DATA)):
        for mapping, spec in (({"batch": "data"}, P("data")), ({"batch": None}, P()), ({"batch": "data"}, P("data"))):
            with axn.axis_mapping(mapping):
                assert jax.block_until_ready(f(x)).sharding.spec == spec
    assert len(traces) == 2


def test_sharding_does_not_change_values() -> None:
    gradient = axn.names.distribute(jax.grad(scanned_loss), MAPPING, names=NAMES)
    with jax.set_mesh(mesh_of(BOTH)):
        axn.testing.check_shard_invariance(gradient, STACKED, ROWS)


@pytest.mark.parametrize("kind", TYPES)
def test_each_device_transforms_its_rows(kind: AxisType) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.fft.rfft(x @ w).real).sum(1)

    w, right = STACKED["up"][0], jax.value_and_grad(lambda w: loss(w, ROWS).sum())(STACKED["up"][0])
    step = axn.names.distribute(loss, {"batch": "data"}, names=("embed mlp", "batch embed"))
    with jax.set_mesh(mesh_of(DATA, kind)):
        close(jax.block_until_ready(jax.value_and_grad(lambda w: step(w, ROWS).sum())(w)), right)
        assert communication(step, w, ROWS) == (0, Counter())


# --- what is wrong, or not known ---


def test_mix_ups() -> None:
    x = jnp.ones((8, 8))
    wrong = lambda x, w: x @ w
    names = ("batch embed", "mlp embed")
    mesh = mesh_of(DATA)
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=r"(?s)'embed'.*'mlp'.*test_distribute.py.*allow=\['names'\]"):
            axn.names.distribute(wrong, {"batch": "data"}, names=names)(x, x)
        allowed = axn.names.distribute(wrong, {"batch": "data"}, names=names, allow=["names"])
        assert allowed(x, x).sharding.spec == P("data")


def test_what_is_not_sharded_is_said() -> None:
    x, w = jnp.ones((8, 4)), jnp.ones((4, 6))
    f = lambda x, w: x @ w
    with jax.set_mesh(mesh_of(DATA)):
        with pytest.warns(UserWarning, match=r"(?s)1 axis has no name.*size 6: axis 1 of w"):
            axn.names.distribute(f, {"batch": "data"}, names=("batch embed", None))(x, w)
        with pytest.raises(ValueError, match=r"'bach' of the mapping names no axis .*Did you mean 'batch'\?"):
            axn.names.distribute(f, {"bach": "data"}, names=("batch embed", "embed mlp"))(x, w)
        with pytest.raises(ValueError, match="'vocab' of the mapping names no axis"):
            axn.names.distribute(f, {"batch": "data"}, {"vocab": "data"}, names=("batch embed", "embed mlp"))(x, w)
        step = axn.names.distribute(f, names=("batch embed", "embed mlp"))
        with axn.axis_mapping({"batch": "data", "vocab": "data"}):  # which is for other functions too
            assert step(x, w).sharding.spec == P("data")
        with axn.axis_mapping({"bach": "data"}), pytest.warns(UserWarning, match="'bach' .*Did you mean 'batch'"):
            step(x, w)
        one = axn.names.distribute(f, {"batch": "data", "mlp": None}, names=("batch embed", "embed mlp"))(x[:1], w)
        assert one.shape == (1, 6)  # a name that is given names its axis, whatever its size
        with pytest.raises(ValueError, match=r"x \(batch=8, embed=4\): axis 'embed' of size 4 .*over data=8"):
            axn.names.distribute(f, {"embed": "data"}, names=("batch embed", "embed mlp"))(x, w)
        with pytest.raises(ValueError, match=r"mesh axis 'dta'.*'data'"):
            axn.names.distribute(f, {"batch": "dta"}, names=("batch embed", "embed mlp"))(x, w)
    with pytest.warns(UserWarning, match="no mesh is active"):
        axn.names.distribute(f, {"batch": "data"}, names=("batch embed", "embed mlp"))(x, w)


def test_axes_that_the_mesh_does_not_divide() -> None:
    x, w = jnp.ones((6, 4)), jnp.ones((4, 6))
    f, names = lambda x, w: x @ w, ("batch embed", "embed mlp")
    made = functools.partial(axn.names.distribute, f, {"batch": "data"}, names=names)
    with jax.set_mesh(mesh_of(DATA)):
        with pytest.raises(ValueError, match=r"6 is not a multiple of 8.*map it elsewhere\.\n"):
            made()(x, w)
        with pytest.raises(ValueError, match="Raw arrays are not stored padded"):
            made(uneven="pad")  # pyright: ignore[reportArgumentType]
        with pytest.warns(UserWarning, match="'batch' is replicated"):
            assert made(uneven="replicate")(x, w).sharding.is_fully_replicated
        with axn.axis_mapping({"mlp": "data"}, uneven="replicate"), pytest.warns(UserWarning, match="is replicated"):
            assert axn.names.distribute(f, names=names)(x, w).shape == (6, 6)


@pytest.mark.parametrize("kind", TYPES)
def test_results_of_size_0(kind: AxisType) -> None:
    """On Auto axes XLA replicates them: there is nothing to place."""
    step = axn.names.distribute(lambda x: (x[:0], x * 2), {"embed": "model"}, names="batch embed")
    with jax.set_mesh(mesh_of(TENSOR, kind)):
        empty, _ = step(jnp.ones((4, 8)))
    assert empty.sharding.spec == (P() if kind == AxisType.Auto else P(None, "model"))


def test_slices_need_not_be_divisible() -> None:
    """The axis of all positions is sharded; those without the last are not a multiple of the devices."""
    loss = lambda x: ((x[:, :-1] @ x[:, 1:].T) ** 2).sum()
    x = jax.random.normal(KEYS[0], (4, 8))
    with jax.set_mesh(mesh_of(DATA)):
        found = axn.names.distribute(loss, {"pos": "data"}, names="batch pos")(x)
    close(found, loss(x))


def test_report_speaks_of_names() -> None:
    step = axn.names.distribute(jax.grad(scanned_loss), names=NAMES)
    report = axn.insight.explain(step, STACKED, ROWS, mapping=MAPPING, mesh=mesh_of(BOTH), by="partitioner")
    reasons = {c.reason for c in report.collectives}
    assert "sums over mlp, which is sharded over model" in reasons, report
    assert any("sums over batch" in str(reason) for reason in reasons), report


@pytest.mark.parametrize("kind", TYPES)
def test_constraints_that_the_code_has(kind: AxisType) -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), P("data", "model"))

    x, w = jnp.arange(64.0).reshape(8, 8) / 64, jnp.ones((8, 8))
    compiled = axn.names.distribute(f, {"batch": "data", "mlp": "model"}, names=("batch embed", "embed mlp"))
    with jax.set_mesh(mesh_of(BOTH, kind)):
        found = jax.block_until_ready(compiled(x, w))
    assert found.sharding.spec == P("data", "model")
    close(found, jnp.tanh(x @ w))
