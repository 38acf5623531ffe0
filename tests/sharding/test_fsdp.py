"""`fsdp`: real placements, and the compiled program's communication."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import axonym as axn
from benchmarks import models
from benchmarks.communication import bytes_moved
from tests.sharding.test_shard import spec

BATCH = 8
LAYOUTS = {
    "one axis": ({"data": 8}, {"embed": "data"}, {"batch": "data"}),
    "replicas": ({"replica": 2, "data": 4}, {"embed": "data"}, {"batch": ("replica", "data")}),
    "with tensor parallelism": (
        {"data": 4, "model": 2},
        {"embed": "data", "mlp": "model", "heads": "model"},
        {"batch": "data", "mlp": "model", "heads": "model"},
    ),
}


def batch(seed: int = 0) -> tuple[axn.NamedArray, axn.NamedArray]:
    rng = np.random.default_rng(seed)
    axes = (models.Batch.resize(BATCH), models.Pos)
    draw = lambda: axn.named(rng.integers(0, models.VOCAB, (BATCH, models.POS)), axes)
    return draw(), draw()


def step(params: Any, tokens: Any, targets: Any) -> tuple[Any, Any]:
    loss, grads = jax.value_and_grad(models.named_loss)(params, tokens, targets)
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


@pytest.fixture(scope="module")
def params() -> Any:
    return models.name_params(models.make_params(2))


@pytest.fixture(scope="module")
def expected(params) -> Any:
    return jax.jit(step)(params, *batch())


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "layout", ["one axis", pytest.param("replicas", marks=pytest.mark.oldest), "with tensor parallelism"]
)
def test_a_step_gives_the_result_of_one_device_and_moves_little(params, expected, layout: str, explicit: bool) -> None:
    sizes, storage, compute = LAYOUTS[layout]
    with jax.set_mesh(axn.make_mesh(sizes, explicit=explicit)):
        sharded = axn.fsdp(step, storage, compute)
        loss, updated = jax.block_until_ready(sharded(params, *batch()))
        moved = bytes_moved(sharded.lower(params, *batch()).compile())
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(updated), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)
    assert spec(updated["layers"][1]["up"]) == ("data", storage.get("mlp"))
    assert spec(updated["layers"][1]["scale1"]) == ("data",)
    assert spec(updated["embed"])[1] == "data"

    gathered = [p for layer in params["layers"] for p in layer.values()] + [params["out"]]
    local = sum(p.nbytes // sizes.get("model", 1) if _has_model(p, storage) else p.nbytes for p in gathered)
    # A look-up in the split table sends around the tokens, and then each device the rows of its part of the batch, once
    # and once more backwards. That is less than the table.
    tokens = BATCH // sizes.get("replica", 1) * models.POS * 4
    rows = BATCH // (sizes["data"] * sizes.get("replica", 1)) * models.POS * models.EMBED * 4
    assert moved["all-gather"].bytes == local + tokens, "each parameter is gathered once"
    assert moved["all-gather"].count == len(gathered) + 1
    assert moved["all-to-all"].bytes == 2 * rows
    assert moved["reduce-scatter"].count == len(gathered), "each gradient is reduce-scattered"
    assert moved["reduce-scatter"].bytes == local // sizes["data"]
    if layout == "one axis":
        assert moved["all-reduce"].bytes <= 64, "nothing but the loss is all-reduced"


def _has_model(p: axn.NamedArray, storage: dict[str, Any]) -> bool:
    return any(storage.get(n) == "model" for n in p.names)


def test_parameters_may_arrive_anyhow(params, mesh) -> None:
    sharded = axn.fsdp(lambda p, x: axn.dot(x, p, axis="embed"), {"embed": "data"}, {"batch": "data"})
    w, x = axn.ones(axn.make_axes(embed=8, mlp=4)), axn.ones(axn.make_axes(batch=8, embed=8))
    on_one = jax.device_put(w, jax.devices()[1])
    with jax.set_mesh(mesh):
        host = axn.to_host(w)
        for given in (w, host, axn.shard(w, {"embed": "model"}), axn.shard(w, {"embed": None}), on_one):
            y = jax.block_until_ready(sharded(given, x))
            assert spec(y) == ("data", None)
            np.testing.assert_array_equal(y.array, np.full((8, 4), 8.0))


def test_arguments_that_no_mapping_places_may_lie_elsewhere_too(mesh) -> None:
    """As a counter or a learning rate that was restored on one device."""
    one = jax.devices()[1]
    w, rate = axn.ones({"embed": 8, "mlp": 4}), jax.device_put(jnp.float32(2), one)
    scaled = axn.fsdp(lambda w, rate: w * rate, {"embed": "data"}, {"batch": "data"})
    with jax.set_mesh(mesh):
        assert spec(scaled(w, rate)) == spec(scaled(jax.device_put(w, one), rate)) == ("data", None)
        placed = axn.named_jit(lambda w, rate: w * rate, in_placement={"w": {"embed": "data"}})
        assert spec(placed(w, rate)) == ("data", None)


def test_arguments_elsewhere_without_the_newer_mesh_context(auto_mesh) -> None:
    w = jax.device_put(axn.ones({"embed": 8, "mlp": 4}), jax.devices()[1])
    by_sharding = axn.named_jit(lambda w: w * 2, in_placement=NamedSharding(auto_mesh, P("data")))
    assert spec(by_sharding(w)) == ("data", None)
    scaled = axn.fsdp(lambda w, rate: w * rate, {"embed": "data"}, {"batch": "data"})
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        with auto_mesh:
            assert spec(scaled(w, 2.0)) == ("data", None)


def test_moving_arguments_under_eager_transformations(mesh) -> None:
    square = axn.named_jit(lambda w: (w * w).sum().scalar(), in_placement={"embed": "data"})
    w = jax.device_put(axn.ones({"embed": 8}), jax.devices()[1])

    def mine(w):
        raise ValueError("mine")

    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.grad(square)(w).array, np.full(8, 2.0))
        with pytest.raises(ValueError, match=r"^mine"):
            jax.grad(axn.named_jit(mine, in_placement={"embed": "data"}))(w)


def test_where_parameters_rest_is_known_in_compiled_parts(auto_mesh) -> None:
    product = lambda x, w: axn.dot(x, w, axis="embed")

    def step(w, x, product):
        loss, gradient = jax.value_and_grad(lambda w: (product(x, w) ** 2).sum().scalar())(w)
        return loss, w - 0.1 * gradient

    w, x = axn.ones({"embed": 16, "mlp": 8}), axn.ones({"batch": 16, "embed": 16})
    with jax.set_mesh(axn.make_mesh({"data": 8})):
        for part in (product, axn.named_jit(product, {"batch": "data"})):
            compiled = axn.fsdp(functools.partial(step, product=part), {"embed": "data"}, {"batch": "data"}).lower(w, x)
            assert len(re.findall(r" reduce-scatter\(", str(compiled.compile().as_text()))) == 1


class Layer(eqx.Module):
    weight: axn.NamedArray

    def __call__(self, x: axn.NamedArray) -> axn.NamedArray:
        return axn.dot(x, self.weight, axis="embed")


def _recursive(layer: Layer, depth: int = 0) -> Any:
    def call(x: axn.NamedArray, depth: int = depth) -> axn.NamedArray:
        return call(x, depth - 1) if depth else layer(x)

    return call


UNDER_VMAP = {
    "an argument": lambda layer, x: axn.vmap(lambda layer, x: layer(x), "batch")(layer, x),
    "a layer": lambda layer, x: axn.vmap(layer, "batch")(x),
    "a method": lambda layer, x: axn.vmap(layer.__call__, "batch")(x),
    "a partial function": lambda layer, x: axn.vmap(functools.partial(Layer.__call__, layer), "batch")(x),
    "a variable outside": lambda layer, x: axn.vmap(lambda x: layer(x), "batch")(x),
    "a recursive function": lambda layer, x: axn.vmap(_recursive(layer), "batch")(x),
    "two axes": lambda layer, x: axn.vmap(lambda layer, x: layer(x), ("heads", "batch"))(layer, x),
    "rematerialized": lambda layer, x: axn.vmap(jax.checkpoint(lambda x: layer(x)), "batch")(x),
}


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("held", UNDER_VMAP)
def test_under_vmap_over_the_batch(held: str, explicit: bool) -> None:
    """The function sees one element, and parameters are gathered and their gradients scattered all the same."""
    rng, call = np.random.default_rng(0), UNDER_VMAP[held]
    layer = Layer(axn.named(rng.normal(size=(3, 16, 4)), ("heads", "embed", "mlp")))
    x = axn.named(rng.normal(size=(16, 16)), ("batch", "embed"))
    gradient = jax.grad(lambda layer, x: axn.sum(call(layer, x) ** 2).scalar())
    expected = gradient(layer, x).weight
    with jax.set_mesh(axn.make_mesh({"replica": 2, "data": 4}, explicit=explicit)):
        sharded = axn.fsdp(gradient, {"embed": "data"}, {"batch": ("replica", "data")})
        found = jax.block_until_ready(sharded(layer, x)).weight
        moved = bytes_moved(sharded.lower(layer, x).compile())
    np.testing.assert_allclose(found.rearrange(expected.axes).array, expected.array, rtol=1e-4)
    assert spec(found.rearrange(expected.axes)) == (None, "data", None)
    size = expected.array.nbytes
    assert moved["all-gather"].bytes == size
    assert moved["reduce-scatter"].bytes == moved["all-reduce"].bytes == size // 4, "each shard, over the replicas"
    assert moved["reduce-scatter"].count == moved["all-reduce"].count == 1


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_an_axis_that_is_mapped_over_stays_where_it_is(explicit: bool) -> None:
    """Replicas send nothing to each other, also where the function closes over arrays and takes raw ones."""
    rng = np.random.default_rng(0)
    w, x, bias = (
        axn.named(rng.normal(size=[2 if n == "replica" else 16 for n in names]), names)
        for names in (("replica", "embed", "mlp"), ("replica", "batch", "embed"), ("mlp",))
    )
    scale = jnp.asarray(rng.normal(size=2))

    def gradient(w: axn.NamedArray, x: axn.NamedArray, scale: jax.Array, bias: axn.NamedArray) -> axn.NamedArray:
        of_one = lambda w, x, scale: axn.mean((axn.dot(x, w, axis="embed") + bias) ** 2).scalar() * scale
        return axn.vmap(jax.grad(of_one), "replica")(w, x, scale)

    expected = gradient(w, x, scale, bias)
    with jax.set_mesh(axn.make_mesh({"slice": 2, "data": 4}, explicit=explicit)):
        compute = {"replica": "slice", "batch": "data"}
        step = axn.fsdp(gradient, compute | {"embed": "data"}, compute)
        found = jax.block_until_ready(step(w, x, scale, bias))
        axn.insight.contract(max_sent={"slice": 0}).check(step, w, x, scale, bias)
    np.testing.assert_allclose(found.array, expected.array, rtol=1e-4, atol=1e-6)
    assert spec(found) == ("slice", "data", None)


def test_stacked_layers_under_vmap_are_gathered_one_at_a_time(mesh) -> None:
    """On Explicit axes JAX refuses that, so all are gathered before."""
    Layers, Embed = axn.make_axes(layers=3, embed=16)
    stack = axn.nn.Stacked.init(Layers, axn.nn.Linear)(Embed, Embed, key=jax.random.key(0))
    step = axn.fsdp(lambda stack, x: axn.vmap(stack.fold, "batch")(x), {"embed": "data"}, {"batch": "data"})
    with jax.set_mesh(mesh):
        text = str(step.lower(stack, axn.ones({"batch": 8, "embed": 16})).compile().as_text())
    gathered_at_once = re.search(r"f32\[3,16,16\]\S* all-gather", text) is not None
    assert gathered_at_once == (mesh.axis_types[0] == jax.sharding.AxisType.Explicit)


def test_a_function_under_vmap_writes_to_its_variables(mesh) -> None:
    seen: list[Any] = []
    w, x = axn.ones({"embed": 8, "mlp": 8}), axn.ones({"batch": 8, "embed": 8})

    def step(w: axn.NamedArray, x: axn.NamedArray) -> axn.NamedArray:
        def of_one(x: axn.NamedArray) -> axn.NamedArray:
            seen.append(x.shape)
            return axn.dot(x, w, axis="embed")

        return axn.vmap(of_one, "batch")(x)

    with jax.set_mesh(mesh):
        jax.block_until_ready(axn.fsdp(step, {"embed": "data"}, {"batch": "data"})(w, x))
    assert seen and all(shape == {"embed": 8} for shape in seen)


def test_parameters_on_the_mesh_axis_of_the_batch_under_vmap(auto_mesh) -> None:
    """They cannot be gathered for each shard of the batch, so the function runs as usual."""
    w, x = axn.ones({"experts": 8, "embed": 8}), axn.ones({"batch": 8, "embed": 8})
    call = lambda w, x: axn.vmap(lambda x: axn.dot(w, x, axis="embed").sum("experts"), "batch")(x)
    compute, storage = {"batch": ("data", "model"), "experts": "data"}, {"embed": "model"}
    with jax.set_mesh(auto_mesh):
        found = jax.block_until_ready(axn.fsdp(call, storage, compute)(w, x))
        assert np.array_equal(found.array, call(w, x).array)


def test_gradients_of_each_example_under_vmap(mesh) -> None:
    rng = np.random.default_rng(0)
    w, x = (axn.named(rng.normal(size=(8, 8)), names) for names in (("embed", "mlp"), ("batch", "embed")))
    of_one = lambda w, x: jax.grad(lambda w: axn.sum(axn.dot(x, w, axis="embed") ** 2).scalar())(w)
    each = lambda w, x: axn.sum(axn.vmap(lambda x: of_one(w, x), "batch")(x) ** 2, "mlp").rename({"embed": "of"})
    with jax.set_mesh(mesh):
        found = jax.block_until_ready(axn.fsdp(each, {"embed": "data"}, {"batch": "data"})(w, x))
    np.testing.assert_allclose(found.array, each(w, x).array, rtol=1e-4)
    assert spec(found) == ("data", None)


def test_a_misspelled_mapping_is_seen(mesh) -> None:
    w, x = axn.ones({"embed": 8, "mlp": 8}), axn.ones({"batch": 8, "embed": 8})
    with jax.set_mesh(mesh):
        with pytest.warns(UserWarning, match="'hidden' of its mapping names no axis of the arguments or results"):
            axn.fsdp(lambda w, x: w, {"hidden": "data"}, {"batch": "data"})(w, x)
        with pytest.warns(UserWarning, match=r"'embd' of its mapping names no axis .* Did you mean 'embed'\?"):
            axn.fsdp(lambda w, x: w, {"embd": "data", "mlp": None}, {"batch": "data"})(w, x)
        axn.fsdp(lambda w, x: w, {"embed": "data", "vocab": "model"}, {"batch": "data"})(w, x)  # another model's too
        for storage, compute in (({"embed": "dta"}, {"batch": "data"}), ({"embed": "data"}, {"head": "dta"})):
            with pytest.raises(
                ValueError, match=r"mesh axis 'dta', which mesh \(.*\) does not have. Did you mean 'data'"
            ):
                axn.fsdp(lambda w: w.sum().scalar(), storage, compute)(axn.ones({"other": 8}))


def test_forms_of_the_call() -> None:
    fn = lambda w: w
    forms = [
        axn.fsdp(fn, {"embed": "data"}, {"batch": "data"}),
        axn.fsdp(fn, parameter_mapping={"embed": "data"}, compute_mapping={"batch": "data"}),
        axn.fsdp(fn, {"embed": "data"}, compute_mapping={"batch": "data"}),
        axn.fsdp({"embed": "data"}, {"batch": "data"})(fn),
        axn.fsdp(parameter_mapping={"embed": "data"}, compute_mapping={"batch": "data"})(fn),
    ]
    with jax.set_mesh(axn.make_mesh({"data": 8})):
        for form in forms:
            assert spec(form(axn.ones({"embed": 8}))) == ("data",)
    with pytest.raises(TypeError, match="`compute_mapping` is missing"):
        axn.fsdp(fn, {"embed": "data"})
    with pytest.raises(TypeError, match="`out_placement` is not an option: the two mappings place"):
        axn.fsdp(lambda x: x, {}, {}, out_placement={})  # pyright: ignore
    with pytest.raises(TypeError, match="too many arguments"):
        axn.fsdp(fn, {}, {}, {})  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="`parameter_mapping` is a resource mapping, got int"):
        axn.fsdp(fn, 3, {})  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(TypeError, match="given twice"):
        axn.fsdp(fn, {}, {}, compute_mapping={})


def test_the_optimizer_state_lies_with_the_parameters(mesh) -> None:
    params, optimizer = models.name_params(models.make_params(1)), optax.adam(1e-2)

    def train(p, state, tokens, targets):
        loss, grads = jax.value_and_grad(models.named_loss)(p, tokens, targets)
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state, loss

    sharded = axn.fsdp(train, {"embed": "data"}, {"batch": "data"}, donate_args=(True, True))
    state: Any
    p, state = params, optimizer.init(params)
    p = jax.tree.map(jnp.copy, p)
    losses = []
    with jax.set_mesh(mesh):
        p, state = axn.shard((p, state), {"embed": "data"})  # what is donated must lie where it will lie
        for i in range(3):
            p, state, loss = jax.block_until_ready(sharded(p, state, *batch(i)))
            losses.append(float(loss))
        moments = state[0]
        assert spec(moments.mu["layers"][0]["up"]) == spec(p["layers"][0]["up"]) == ("data", None)
        assert spec(moments.nu["embed"]) == (None, "data")
    single, state = params, optimizer.init(params)
    for i in range(3):
        single, state, loss = jax.jit(train)(single, state, *batch(i))
        np.testing.assert_allclose(losses[i], float(loss), rtol=1e-4)


def test_gathering_inside_a_scan_and_under_rematerialization(mesh) -> None:
    w = axn.ones(axn.make_axes(layer=3, embed=8, mlp=8)) * 0.1
    x = axn.ones(axn.make_axes(batch=8, embed=8))

    def loss(w, x, remat):
        def layer(h, row):
            weight = axn.named(row, ("embed", "mlp"))
            return axn.tanh(axn.dot(h, weight, axis="embed")).rename({"mlp": "embed"}), None

        body = jax.checkpoint(layer) if remat else layer
        return axn.mean(jax.lax.scan(body, x, w.array)[0]).array

    whole = [jax.jit(jax.grad(loss), static_argnums=2)(w, x, remat) for remat in (False, True)]
    with jax.set_mesh(mesh):
        for remat, expected in zip((False, True), whole, strict=True):
            fn = axn.fsdp(lambda w, x, remat=remat: jax.grad(loss)(w, x, remat), {"embed": "data"}, {"batch": "data"})
            grads = jax.block_until_ready(fn(w, x))
            np.testing.assert_allclose(np.asarray(grads.array), np.asarray(expected.array), rtol=1e-5)
            assert spec(grads) == (None, "data", None)
            moved = bytes_moved(fn.lower(w, x).compile())
            assert moved["reduce-scatter"].count >= 1
            one_layer = w.nbytes // 3
            assert moved["all-gather"].largest <= one_layer, "one layer is gathered at a time"


def test_what_cannot_be_split_evenly_is_left_to_the_ordinary_way(auto_mesh) -> None:
    """Inside, an axis that does not divide is computed with as it is; the placement of the argument is the error."""
    fn = axn.fsdp(lambda w, x: axn.dot(x, w, axis="embed"), {"embed": "data"}, {"batch": "data"})
    with (
        jax.set_mesh(auto_mesh),
        pytest.raises(ValueError, match="axis 'embed' of size 6 cannot be sharded over data=4"),
    ):
        fn(axn.ones(axn.make_axes(embed=6, mlp=4)), axn.ones(axn.make_axes(batch=8, embed=6)))


def test_without_a_mesh_it_just_computes() -> None:
    fn = axn.fsdp(lambda w, x: axn.dot(x, w, axis="embed"), {"embed": "data"}, {"batch": "data"})
    w, x = axn.ones({"embed": 2}), axn.ones({"batch": 3, "embed": 2})
    with pytest.warns(UserWarning, match=r"^fsdp\(.*<lambda>\): no mesh is active"):
        np.testing.assert_array_equal(fn(w, x).array, np.full(3, 2.0))
    np.testing.assert_array_equal(fn(w, x).array, np.full(3, 2.0))  # it has been said


def test_storage_keeps_the_axes_that_only_the_compute_mapping_shards(auto_mesh) -> None:
    step = axn.fsdp(lambda w: w * 2, {"embed": "data"}, {"batch": "data", "mlp": "model"})
    with jax.set_mesh(auto_mesh):
        assert spec(step(axn.ones({"embed": 8, "mlp": 4}))) == ("data", "model")


@pytest.mark.parametrize("by_name", [True, False])
def test_the_gradient_of_what_is_mapped_over_an_axis_on_an_explicit_mesh(by_name, explicit_mesh) -> None:
    def loss(w, x):
        def one(x):
            return axn.dot(axn.named(x, ("batch", "embed")), w, axis="embed").array

        mapped = axn.vmap(lambda x: one(x.array), "pos") if by_name else lambda x: jax.vmap(one)(x.array)
        return jnp.sum(mapped(x) ** 2)

    step = axn.fsdp(jax.grad(loss), {"embed": "data"}, {"batch": "data", "pos": "model"})
    w, x = axn.ones({"embed": 8, "mlp": 4}), axn.ones({"pos": 4, "batch": 8, "embed": 8})
    expected = jax.grad(loss)(w, x)
    with jax.set_mesh(explicit_mesh):
        found, moved = step(w, x), bytes_moved(step.lower(w, x).compile())
    assert spec(found) == ("data", None)
    np.testing.assert_array_equal(found.array, expected.array)
    assert moved["reduce-scatter"].count == 1
    assert moved["all-gather"].bytes == w.nbytes
