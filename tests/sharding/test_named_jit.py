"""`named_jit`: placements, static parts, donation, lowering, caches."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import threading
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec as P

import axonym as axn
from tests.sharding.test_shard import spec


class Model(eqx.Module):
    weight: axn.NamedArray
    activation: Any
    depth: int
    name: str = eqx.field(static=True)

    @staticmethod
    def init(size: int = 8) -> Model:
        return Model(axn.ones(axn.make_axes(embed=size, mlp=8)), jnp.tanh, 3, "m")

    @axn.named_jit
    def __call__(self, x):
        return axn.dot(x, self.weight, axis="embed") * self.depth


@pytest.fixture
def x() -> axn.NamedArray:
    return axn.arange(axn.make_axes(batch=8, embed=8)) * 1.0


def test_results_go_where_the_mapping_says(x, mesh) -> None:
    with jax.set_mesh(mesh):
        double = axn.named_jit(lambda a: a * 2, {"batch": "data"})
        y = double(x)
        assert spec(y) == ("data", None)
        np.testing.assert_array_equal(y.array, 2 * x.array)
        elsewhere = axn.shard(x, {"embed": "data"})
        assert spec(double(elsewhere)) == ("data", None), "a committed argument that lies elsewhere"
        assert spec(double(axn.named(np.ones((8, 8)), ("batch", "embed")))) == ("data", None), "an argument on the host"


@pytest.mark.parametrize("explicit", [False, True])
def test_results_of_size_0(x, explicit) -> None:
    """On Auto axes XLA replicates them: there is nothing to place."""
    mesh = axn.make_mesh({"data": 4, "model": 2}, explicit=explicit)
    empty = axn.named_jit(lambda a: (a["batch", :0], a.array, "static"), {"batch": "data", "embed": "model"})
    with jax.set_mesh(mesh):
        none, kept, _ = empty(x)
        assert spec(none) == spec(empty.lower(x).compile()(x)[0]) == (("data", "model") if explicit else (None, None))
        assert none.array.dtype == x.array.dtype
        np.testing.assert_array_equal(none.array, np.ones((0, 8)))
        np.testing.assert_array_equal(kept, x.array)
        with pytest.warns(UserWarning, match="'batsh'") as said:
            axn.named_jit(lambda a: a["batch", :0], out_placement={"batsh": "data"})(x)
        assert len(said) == 1
        batched = jax.vmap(axn.named_jit(lambda a: a["batch", :0]))(jax.tree.map(lambda a: jnp.stack([a, a]), x))
        assert batched.array.shape == (2, 0, 8)


def test_arguments_and_results_have_their_own_mappings(x, mesh) -> None:
    seen = []

    def fn(a):
        seen.append((axn.current_mapping(), jax.typeof(a.array).sharding.spec))
        return a * 2

    with jax.set_mesh(mesh):
        y = axn.named_jit(fn, {"batch": "data"}, in_placement={"embed": "model"}, out_placement={"embed": "data"})(x)
    assert spec(y) == (None, "data")
    assert seen[0][0] == {"batch": "data"}
    if mesh.axis_types[0].name == "Explicit":
        assert seen[0][1] == P(None, "model")


def test_by_default_the_mapping_around_the_call_is_in_force(x, mesh) -> None:
    double = axn.named_jit(lambda a: a * 2)
    with jax.set_mesh(mesh):
        for target in ("data", "model", "data"):
            with axn.axis_mapping({"batch": target}):
                assert spec(double(x)) == (target, None)
        assert double(x).shape == x.shape


def test_its_own_mapping_does_not_compile_again_under_another(x, auto_mesh) -> None:
    traces = 0

    @axn.named_jit(mapping={"batch": "data"})
    def fn(a):
        nonlocal traces
        traces += 1
        return a

    with jax.set_mesh(auto_mesh):
        fn(x)
        with axn.axis_mapping({"batch": "model"}):
            assert spec(fn(x)) == ("data", None)
    assert traces == 1


def test_raw_arguments_of_another_rank(mesh) -> None:
    """What a call does depends on the arguments of that call alone."""
    fn = axn.named_jit(lambda a: axn.named(a, ("batch", "embed")[: a.ndim]), {"batch": "data"})
    with jax.set_mesh(mesh):
        assert spec(fn(jnp.ones((8, 4)))) == ("data", None)
        assert spec(fn(jnp.ones(8))) == ("data",)


def test_models_with_fields_that_are_not_arrays(x, mesh) -> None:
    @axn.named_jit(mapping={"embed": "data"})
    def grow(model, factor, *, label):
        return eqx.tree_at(lambda m: m.weight, model, model.weight * factor), label, None

    with jax.set_mesh(mesh):
        model, label, nothing = grow(Model.init(), 2.0, label="kept")
    assert model.activation is jnp.tanh and model.depth == 3 and model.name == "m"
    assert label == "kept" and nothing is None
    assert spec(model.weight) == ("data", None)
    np.testing.assert_array_equal(model.weight.array, 2 * np.ones((8, 8)))


def test_python_numbers_are_static() -> None:
    traces = []

    @axn.named_jit
    def fn(a, n):
        traces.append(n)
        return a.broadcast_axis(axn.Axis("n", int(n))).sum("n")

    a = axn.ones({"x": 2})
    for n in (2, 3, 2, True):
        np.testing.assert_array_equal(fn(a, n).array, n * np.ones(2))
    assert traces == [2, 3, True]


@pytest.mark.parametrize("number", [True, 1, 1.0, 1j])
def test_numbers_are_told_from_arrays_that_jit_takes_for_the_same(number) -> None:
    seen = []
    fn = axn.named_jit(lambda a, n: seen.append(n if type(n) is type(number) else type(n)) or a * n)
    for n in (jnp.asarray(number), number, jnp.asarray(number), number):
        np.testing.assert_array_equal(fn(axn.ones({"x": 2}), n).array, number * np.ones(2))
    assert len(seen) == 2 and issubclass(seen[0], Tracer) and seen[1] is number


def test_static_arguments_beside_arrays_of_any_structure() -> None:
    """Each value and structure is traced once, zeros by their sign, and an argument with a static part is no array."""
    traces: list[Any] = []

    @axn.named_jit
    def fn(a: Any, f: Any, n: Any) -> Any:
        traces.append(n)
        return jax.tree.map(lambda x: n / f(x) if isinstance(x, axn.NamedArray) else type(x).__name__, a, is_leaf=leaf)

    leaf = lambda x: isinstance(x, axn.NamedArray)
    x = axn.ones({"x": 2})
    for _ in range(3):
        for n in (2, 2.0, 0.0, -0.0, True):
            for a in (x, [x, x]):
                for found in jax.tree.leaves(fn(a, axn.negative, n), is_leaf=leaf):
                    np.testing.assert_array_equal(np.signbit(found.array), [np.signbit(-n)] * 2)
                    np.testing.assert_array_equal(found.array, [-n] * 2)
    assert len(traces) == 10
    for _ in range(3):
        found = fn([x, 1, "s", np.float32(1)], axn.negative, 2)
        assert found[1:3] == ["int", "str"] and "Tracer" in found[3]
        np.testing.assert_array_equal(fn(x, axn.negative, n=2).array, [-2, -2])
        np.testing.assert_array_equal(fn(x, axn.negative, 3).array, [-3, -3])
    with pytest.raises(ZeroDivisionError):
        axn.named_jit(lambda a, f, n: a * f(1 / n))(x, abs, 0)


def test_numbers_that_no_array_can_hold() -> None:
    fn = axn.named_jit(lambda a, seed: a * (seed % 7))
    for _ in range(2):
        np.testing.assert_array_equal(fn(axn.ones({"x": 2}), 2**40).array, np.full(2, 2**40 % 7))


def test_what_was_compiled_for_arrays_is_found_again_after_other_arguments() -> None:
    traces = []

    @axn.named_jit
    def fn(a, by):
        traces.append(by)
        return a * by

    a, by = axn.ones({"x": 2}), axn.ones({"x": 2})
    for argument in (by, 2.0, by, 2.0):
        fn(a, argument)
    assert len(traces) == 2


def test_what_cannot_be_hashed_is_an_error() -> None:
    class Odd:
        __hash__: Any = None  # pyright: ignore[reportIncompatibleMethodOverride]

    with pytest.raises(TypeError, match="so it must be hashable, but this Odd is not"):
        axn.named_jit(lambda a: a)(Odd())


def test_methods_and_classes(x, mesh) -> None:
    model = Model.init()
    np.testing.assert_allclose(model(x).array, 3 * x.array @ np.ones((8, 8)))
    with jax.set_mesh(mesh):
        built = axn.named_jit(Model, {"embed": "data"})(model.weight, jnp.sin, 2, "other")
    assert isinstance(built, Model) and built.activation is jnp.sin and built.name == "other"
    assert spec(built.weight) == ("data", None)


def test_a_model_is_initialized_split(mesh) -> None:
    size = 512
    init = axn.named_jit(Model.init, {"embed": ("data", "model")})
    with jax.set_mesh(mesh):
        compiled = init.lower(size).compile()
        model = init(size)
    memory: Any = compiled.memory_analysis()
    whole = model.weight.nbytes
    assert memory.output_size_in_bytes == whole // 8
    assert memory.temp_size_in_bytes < whole // 4, "a full copy was made on some device"
    assert model.weight.array.addressable_shards[0].data.shape == (size // 8, 8)


def test_donation(x, mesh) -> None:
    with jax.set_mesh(mesh):

        def make():
            return axn.shard(x * 1, {"batch": "data"})

        step = axn.named_jit(lambda a, b: a + b, {"batch": "data"}, donate_args=(True, False))
        a, b = make(), make()
        jax.block_until_ready(step(a, b))
        assert a.array.is_deleted() and not b.array.is_deleted()

        named = axn.named_jit(lambda *, a: a * 2, {"batch": "data"}, donate_kwargs={"a": True})
        a = make()
        jax.block_until_ready(named(a=a))
        assert a.array.is_deleted()

        part = axn.named_jit(lambda t: (t[0] * 2, t[1]), {"batch": "data"}, donate_args=((True, False),))
        a, b = make(), make()
        jax.block_until_ready(part((a, b)))
        assert a.array.is_deleted() and not b.array.is_deleted()


def test_donation_by_parameter(auto_mesh) -> None:
    def fn(a, b=None):
        return a * 2 if b is None else (a * 2, b * 2)

    def fresh():
        return axn.shard(axn.ones({"batch": 8}), {"batch": "data"})

    with jax.set_mesh(auto_mesh):
        for options in ({"donate_args": (True,)}, {"donate_kwargs": {"a": True}}, {"donate_args": (True, None)}):
            compiled = axn.named_jit(fn, {"batch": "data"}, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]
            for call in (lambda f, a, b: f(a, b), lambda f, a, b: f(a, b=b), lambda f, a, b: f(b=b, a=a)):
                a, b = fresh(), fresh()
                call(compiled, a, b)
                assert a.array.is_deleted() and not b.array.is_deleted()
    for number in (0, (0,), {"a": 1}):
        with pytest.raises(TypeError, match="takes True or False for each argument, not numbers"):
            axn.named_jit(fn, donate_args=number)  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_lower_and_trace_with_abstract_arguments(x, auto_mesh) -> None:
    fn = axn.named_jit(lambda a: a * 2, {"batch": "data"})
    abstract = jax.eval_shape(lambda: x)
    with jax.set_mesh(auto_mesh):
        compiled = fn.lower(abstract).compile()
        assert compiled.output_shardings.array.spec == P("data")
        result = compiled(x)
        assert fn.trace(abstract).jaxpr.out_avals[0].shape == (8, 8)
    assert spec(result) == ("data", None)


def test_what_is_compiled_ahead_is_called_like_the_function(x, auto_mesh) -> None:
    def fn(a, n=2, *, label="k"):
        return a * n, label, {"n": n}

    lowered = axn.named_jit(fn).lower(x, 3, label="l")
    assert lowered.out_info[0].array.shape == (8, 8) and lowered.out_info[1:] == ("l", {"n": 3})
    for compiled in (lowered.compile(), axn.named_jit(fn).trace(x, 3, label="l").lower().compile()):
        result, label, rest = compiled(x, 3, label="l")
        np.testing.assert_array_equal(result.array, 3 * np.asarray(x.array))
        assert (label, rest) == ("l", {"n": 3}) and compiled.memory_analysis() is not None
        with pytest.raises(TypeError, match="pass the same tree structure and the same non-array values"):
            compiled(x, 4, label="l")
    with jax.set_mesh(auto_mesh):
        placed = axn.shard(x, {"batch": "data"})
        donating = axn.named_jit(lambda a, b: a + b, {"batch": "data"}, donate_args=(True,)).lower(placed, x).compile()
        expected = 2 * np.asarray(x.array)
        np.testing.assert_array_equal(donating(placed, x).array, expected)
    assert placed.array.is_deleted()


def test_a_compiled_method_as_an_argument_is_told_by_its_object() -> None:
    traces = []

    class Layer(eqx.Module):
        w: axn.NamedArray

        @axn.named_jit
        def apply(self, a):
            return a * self.w

    layer = Layer(axn.ones({"x": 2}))
    run = axn.named_jit(lambda f, a: traces.append(f) or f(a))
    for scale in (1.0, 2.0, 3.0):
        scaled = eqx.tree_at(lambda m: m.w, layer, layer.w * scale)
        np.testing.assert_array_equal(run(scaled.apply, axn.ones({"x": 2})).array, np.full(2, scale))
    assert len(traces) == 1


def test_arguments_of_jit_pass_through(x) -> None:
    assert axn.named_jit(lambda a: a, keep_unused=True).lower(x) is not None
    with pytest.raises(TypeError, match="use `in_placement`"):
        axn.named_jit(lambda a: a, in_shardings=None)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="use `donate_args`"):
        axn.named_jit(lambda a: a, donate_argnums=0)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="`mapping` is made active"):
        axn.named_jit(lambda a: a, P("data"))  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_errors_inside_are_the_users_own() -> None:
    def fn(*args):
        raise TypeError("mine")

    wrapped = axn.named_jit(fn)
    for arguments in ((axn.ones({"x": 2}),), (axn.ones({"x": 2}), "with a string"), (axn.ones({"x": 2}),)):
        with pytest.raises(TypeError, match=r"^mine"):
            wrapped(*arguments)


def test_identity_and_collection() -> None:
    def fn(a):
        """Documented."""
        return a

    wrapped = axn.named_jit(fn)
    assert vars(wrapped)["__name__"] == "fn" and wrapped.__doc__ == "Documented." and "fn" in repr(wrapped)
    wrapped(axn.ones({"x": 2}))
    watch = weakref.ref(wrapped), weakref.ref(fn)
    del wrapped, fn
    gc.collect()
    assert [w() for w in watch] == [None, None]


def test_mixed_with_other_jits(x, auto_mesh) -> None:
    inner = axn.named_jit(lambda a: a * 2, {"batch": "data"})
    outer = jax.jit(lambda a: inner(a) + 1)
    with jax.set_mesh(auto_mesh):
        np.testing.assert_array_equal(outer(x).array, 2 * x.array + 1)
        grads = jax.grad(lambda a: inner(a).sum().array)(x)
    np.testing.assert_array_equal(grads.array, np.full((8, 8), 2.0))


def test_a_sharding_as_placement(x, auto_mesh) -> None:
    fn = axn.named_jit(lambda a: a, out_placement=NamedSharding(auto_mesh, P(None, "model")))
    with jax.set_mesh(auto_mesh):
        assert spec(fn(x)) == (None, "model")


# --- what is static ---


def test_first_calls_of_several_threads() -> None:
    """What one thread learns of the arguments does not change what another is about to do."""
    x = axn.ones({"x": 2})
    for _ in range(5):
        scaled = axn.named_jit(lambda x, n: (x * n, n))
        doubled = axn.named_jit(lambda x, mode: x * 2 if mode == "twice" else x)
        barrier = threading.Barrier(4)

        def call(
            scaled: Any = scaled, doubled: Any = doubled, barrier: threading.Barrier = barrier
        ) -> tuple[type, list[float]]:
            barrier.wait()
            return type(scaled(x, 2)[1]), doubled(x, "twice").tolist()

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = [future.result() for future in [pool.submit(call) for _ in range(4)]]
        assert found == [(int, [2.0, 2.0])] * 4


def test_scalars_that_jax_does_not_tell_from_numbers_are_arrays() -> None:
    """Before and after a static argument was seen, and in a program found by structure."""
    double = axn.named_jit(lambda x: x * 2)
    assert isinstance(double(jnp.asarray(True)), jax.Array) and double(jnp.asarray(True)) == 2
    assert double(jnp.ones(2)).tolist() == [2.0, 2.0] and double(2.0) == 4.0
    weak = jnp.asarray(3.0) * 1
    assert double(weak) == 6.0 and double(jnp.ones(())) == 2.0 and double(jnp.asarray(False)) == 0
    assert axn.named_jit(lambda x: x * 2).lower(weak).compile()(weak) == 6.0


def test_numpy_strings_are_static() -> None:
    assert axn.named_jit(lambda x, m: x * 2 if m == "a" else x)(jnp.ones(()), np.str_("a")) == 2.0


def test_dataclasses_with_a_hash_of_their_own_are_static() -> None:
    @dataclasses.dataclass
    class Config:
        options: dict[str, int]
        n: int = 2

        def __hash__(self) -> int:
            return hash((tuple(self.options), self.n))

    scale = axn.named_jit(lambda x, c: x * c.n)
    assert scale(jnp.ones(()), Config({"a": 1})) == 2.0 and scale(jnp.ones(()), Config({"a": 1}, 3)) == 3.0


def test_keywords_are_told_from_a_dictionary() -> None:
    """Also where some argument is static, and each call is found again by its structure."""

    def count(*args: Any, **kwargs: Any) -> tuple[int, list[str]]:
        return len(args), sorted(kwargs)

    fn = axn.named_jit(count)
    x = jnp.ones(2)
    for _ in range(2):
        assert fn((x, 3), {"k": x}) == (2, [])
        assert fn(x, 3, k=x) == (2, ["k"])
        assert fn([(x, 3), {"k": x}]) == (1, [])


def test_axes_that_mesh_axes_do_not_divide_can_be_replicated(auto_mesh) -> None:
    mapping, x = {"x": "data"}, axn.ones({"x": 6})

    def inside(x: axn.NamedArray) -> axn.NamedArray:
        with axn.axis_mapping(merge=True, y="model"):
            return axn.shard(x * 2)

    with jax.set_mesh(auto_mesh):
        with pytest.warns(UserWarning, match="is replicated, since data=4 gives 4 shards"):
            found = axn.named_jit(inside, mapping, uneven="replicate")(x)
        assert found.array.sharding.is_fully_replicated
        with pytest.raises(ValueError, match="6 is not a multiple of 4"):
            axn.named_jit(inside, mapping)(x)
        with pytest.raises(ValueError, match="6 is not a multiple of 4"), axn.axis_mapping(mapping, uneven="replicate"):
            axn.shard(x)  # outside of compiled functions


def test_an_argument_on_other_devices_than_the_mesh_is_named() -> None:
    """As after a restore without a placement: without `in_placement`, arguments stay where they are."""
    model = {"step": axn.zeros({}), "w": jax.device_put(axn.ones({"embed": 8}), jax.devices()[3])}
    with jax.set_mesh(axn.make_mesh({"data": 8})):
        with pytest.raises(ValueError, match=r"argument 0/w \(embed=8\) lies on 1 device, and the mesh \(data=8\)"):
            axn.named_jit(lambda m: m["w"] * 2, {"embed": "data"})(model)
        placed = axn.named_jit(lambda m: m["w"] * 2, {"embed": "data"}, in_placement={"embed": "data"})(model)
    assert placed.array.sharding.spec == jax.P("data")


def test_results_without_elements_are_printed(explicit_mesh) -> None:
    with axn.set_mesh(explicit_mesh), axn.axis_mapping({"batch": "data"}):
        x = axn.shard(axn.ones({"batch": 8, "embed": 2}))
        empty = axn.named_jit(lambda x: x["embed", 0:0])(x)
    assert repr(empty) == "NamedArray(float32[batch=8, embed=0], [])"
