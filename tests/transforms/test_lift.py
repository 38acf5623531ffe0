"""`lift`: against the positional function mapped by hand, for every kind of spec, and on meshes."""

from __future__ import annotations

import functools
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import axonym as axn
from axonym.transforms.lift import lift
from axonym.transforms.vmap import vmap
from tests.helpers import assert_named, compilations, draw, spec
from tests.ops.test_contraction_program import instructions

Batch, Heads, Row, Col, Time = axn.make_axes(batch=8, heads=2, row=4, col=4, time=6)
COLLECTIVE = re.compile(r"= (\S+) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(")

A, B = draw(Batch, Row, Col), draw(Batch, Row)
SQUARE = A * 0.1 + axn.eye(Row, Col).broadcast_axis(Batch)

solve = lift(jnp.linalg.solve, "row col, row -> col")
solved = axn.named(
    jnp.linalg.solve(SQUARE.rearrange((Batch, Row, Col)).array, B.array[..., None])[..., 0], (Batch, Col)
)
TRANSFORMS = pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])


# --- against the positional form ---


def by_heads(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("rh,bhr->bh", a, b)


@TRANSFORMS
@pytest.mark.parametrize(
    ("fn", "spec", "operands", "reference", "names"),
    [
        (jnp.linalg.solve, "row col, row -> col", (SQUARE, B), lambda a, b: solved.array, ("batch", "col")),
        (jnp.vdot, "row, row ->", (A, draw(Row)), lambda a, b: np.einsum("bij,i->bj", a, b), ("batch", "col")),
        (jnp.vdot, "row, row ->", (B, draw(Row, Heads)), lambda a, b: np.einsum("bi,ih->bh", a, b), ("batch", "heads")),
        (jnp.vdot, "row, row ->", (draw(Row, Heads), draw(Batch, Heads, Row)), by_heads, ("batch", "heads")),
        (jnp.transpose, "row col -> col row", (A,), lambda a: a, ("batch", "row", "col")),
        (jnp.matmul, "row col, col -> row", (A, draw(Col)), lambda a, b: a @ b, ("batch", "row")),
        (jnp.cumsum, "row -> row", (A,), lambda a: np.cumsum(a, 1), ("batch", "row", "col")),
        (jnp.outer, "row, col -> row col", (B, draw(Col)), lambda a, b: a[..., None] * b, ("batch", "row", "col")),
        (jnp.hypot, ", ->", (A, B), lambda a, b: np.hypot(a, b[..., None]), ("batch", "row", "col")),
        (jnp.hypot, ", ->", (B, A), lambda a, b: np.hypot(a[..., None], b), ("batch", "row", "col")),
        (lambda x: x[::2], "row -> half", (A,), lambda a: a[:, ::2], ("batch", "half", "col")),
        (lambda x: jnp.stack([x, -x]), "-> sign", (B,), lambda a: np.stack([a, -a], -1), ("batch", "row", "sign")),
        (lambda x: x.reshape(2, 2), "row -> p q", (A,), lambda a: a.reshape(8, 2, 2, 4), ("batch", "p", "q", "col")),
        (lambda x: x.T.ravel(), "row col -> rc", (A,), lambda a: np.swapaxes(a, 1, 2).reshape(8, 16), ("batch", "rc")),
        (lambda x, y: x * y, "row, -> row", (B, 2.0), lambda a, b: a * b, ("batch", "row")),
    ],
    ids="solve vdot outer-vdot second-has-all layout matmul cumsum outer elementwise elementwise-swapped resized new "
    "split merged scalar".split(),
)
def test_is_the_positional_form(
    transform: Any, fn: Any, spec: str, operands: Any, reference: Callable[..., Any], names: tuple[str, ...]
) -> None:
    found = transform(lift(fn, spec))(*operands)
    expected = reference(*(np.asarray(x.array) if isinstance(x, axn.NamedArray) else x for x in operands))
    assert_named(found, axn.named(jnp.asarray(expected), names), rtol=1e-5, atol=1e-5)


@hypothesis.given(st.permutations(["batch", "row", "col"]), st.permutations(["batch", "row"]))
@hypothesis.settings(max_examples=6)
def test_order_does_not_matter(a_order: list[str], b_order: list[str]) -> None:
    """Except to the layout of the result, which is that of the first operand."""
    found = solve(SQUARE.rearrange(tuple(a_order)), B.rearrange(tuple(b_order)))
    assert found.names == tuple(n for n in a_order if n != "row")
    assert_named(found.rearrange((Batch, Col)), solved, rtol=1e-4, atol=1e-5)


def test_gradient() -> None:
    found = jax.grad(lambda a, b: axn.sum(solve(a, b)).scalar(), argnums=(0, 1))(SQUARE, B)
    positional = jax.vmap(jnp.linalg.solve)
    expected = jax.grad(lambda a, b: positional(a, b).sum(), argnums=(0, 1))(SQUARE.array, B.array)
    for a, b, axes in zip(found, expected, (SQUARE.axes, B.axes), strict=True):
        assert_named(a, axn.named(b, axes), rtol=1e-4, atol=1e-5)


def test_under_vmap() -> None:
    assert_named(vmap(solve, Batch)(SQUARE, B), solved, rtol=1e-4, atol=1e-5)


# --- the spec ---


def test_words_stand_for_axes() -> None:
    generic = lift(jnp.linalg.solve, "i j, i -> j")
    for found in (
        generic(SQUARE, B, i="row", j=Col),
        lift(jnp.linalg.solve, "i j, i -> j", i=Row, j="col")(SQUARE, B),
        lift(jnp.linalg.solve, "i j, i -> j", i="nothing", j="col")(SQUARE, B, i="row"),
        lift(jnp.linalg.solve, "row col, row -> col", col=Col)(SQUARE, B),
    ):
        assert_named(found, solved, rtol=1e-4, atol=1e-5)


def test_several_results() -> None:
    largest = lift(jax.lax.top_k, "time -> best, best")
    x = draw(Batch, Time, Heads)
    values, indices = largest(x, 2, best=axn.Axis("best", 2))
    expected = jax.lax.top_k(jnp.moveaxis(x.array, 1, 2), 2)
    for found, reference in zip((values, indices), expected, strict=True):
        assert_named(found, axn.named(jnp.moveaxis(reference, 2, 1), ("batch", "best", "heads")))
    both = lift(lambda x: (x, x.sum()), "time -> time, ")(x)
    assert [r.names for r in both] == [("batch", "time", "heads"), ("batch", "heads")]


def test_a_new_axis_can_have_the_name_of_one_that_is_gone() -> None:
    x = draw(Batch, Time)
    shortened = lift(lambda x: x[1:], "n -> m", n="time")
    assert_named(shortened(x, m="time"), x["time", 1:])
    assert_named(shortened(x, m=axn.Axis("time", 5)), x["time", 1:])


def test_as_a_decorator() -> None:
    @lift("n -> n", n="time")
    def scaled(x: Any, factor: float = 2.0) -> Any:
        """What it does."""
        return x * factor

    class Model:
        factor = 3.0

        @lift("_, time -> time")
        def __call__(self, x: Any) -> Any:
            return x * self.factor

    x = draw(Time)
    assert_named(scaled(x), x * 2.0)
    assert_named(Model()(x), x * 3.0)
    assert (scaled.__name__, scaled.__doc__) == ("scaled", "What it does.")  # pyright: ignore


def test_arguments_that_are_handed_on() -> None:
    seen: list[Any] = []

    def fn(mode: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((mode, *args, kwargs))
        return x * 1

    lifted = lift(fn, "_, time -> time")
    x = draw(Batch, Time)
    calls = [
        ("a", (1,), {}),
        ("a", (1.0,), {}),
        ("a", (True,), {}),
        ("a", ((1, 2),), {}),
        ("a", ((1, 2.0),), {"k": None}),
    ]
    for _ in range(2):
        for mode, args, kwargs in calls:
            lifted(mode, x, *args, **kwargs)
    assert [(type(s[1]), s) for s in seen] == [(type(a[0]), (m, *a, k)) for m, a, k in calls]  # each traced once


def test_random_keys_are_scalars() -> None:
    keys = axn.named(jax.random.split(jax.random.key(0), 8), Batch)
    noisy = lift(lambda x, key: x + jax.random.normal(key, x.shape), "time, -> time")
    found = noisy(draw(Batch, Time), keys)
    expected = jax.vmap(lambda x, k: x + jax.random.normal(k, x.shape))(draw(Batch, Time).array, keys.array)
    assert_named(found, axn.named(expected, (Batch, Time)))
    assert noisy(draw(Time), jax.random.key(0)).shape == {"time": 6}


# --- what is kept ---


def test_compiled_once() -> None:
    lifted = lift(lambda x, y: x * y, "time, -> time")
    x, y = draw(Batch, Time), draw(Batch, Time)
    lifted(x, 1.0)
    with compilations() as seen:
        lifted(y, 2.0)
    assert seen == []


def test_a_lifted_function_can_be_collected() -> None:
    def fn(x: Any) -> Any:
        return x * 2

    lifted = lift(fn, "time -> time")
    lifted(draw(Batch, Time)), jax.jit(lifted)(draw(Batch, Time))
    gone = weakref.ref(fn)
    del fn, lifted
    gc.collect()
    assert gone() is None


def test_adds_nothing_to_the_program() -> None:
    x, w = draw(Batch, Time, Heads), draw(Time)

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.cumsum(x * w)

    by_hand = jax.vmap(jax.vmap(fn, (1, None), 1), (0, None))
    assert instructions(lift(fn, "time, time -> time"), x, w) == instructions(by_hand, x.array, w.array)


# --- on meshes ---


@TRANSFORMS
@pytest.mark.parametrize("mapping", [{"batch": "data"}, {"batch": "data", "row": "model"}], ids=str)
def test_keeps_shardings(mesh: Mesh, mapping: Any, transform: Any) -> None:
    """Along what is mapped over; the function's own axes may be split in any way."""
    with jax.set_mesh(mesh):
        a, b = axn.shard((SQUARE, B), mapping)
        found = jax.block_until_ready(transform(solve)(a, b))
    assert spec(found) == ("data", None)
    assert_named(axn.to_host(found), solved, rtol=1e-4, atol=1e-5)


def test_gradient_keeps_shardings(mesh: Mesh) -> None:
    with jax.set_mesh(mesh):
        a, b = axn.shard((SQUARE, B), {"batch": "data", "row": "model"})
        found = jax.block_until_ready(jax.jit(jax.grad(lambda a: axn.sum(solve(a, b)).scalar()))(a))
    assert spec(found)[0] == "data"


@TRANSFORMS
@pytest.mark.parametrize(
    "mapping", [{"row": "data", "col": "model"}, {"row": ("data", "model")}, {"batch": "model", "row": "data"}], ids=str
)
def test_contracts_a_sharded_axis(mesh: Mesh, mapping: Any, transform: Any) -> None:
    product = transform(lift(jnp.vdot, "row, row ->"))
    x, vector = draw(Batch, axn.Axis("row", 8), Col), draw(axn.Axis("row", 8))
    with jax.set_mesh(mesh):
        found = jax.block_until_ready(product(*axn.shard((x, vector), mapping)))
    assert spec(found) == (mapping.get("batch"), mapping.get("col"))
    assert_named(axn.to_host(found), axn.dot(x, vector, axis="row"), rtol=1e-5, atol=1e-5)


def test_a_contraction_gathers_nothing(mesh: Mesh) -> None:
    x, vector = draw(Batch, axn.Axis("row", 8)), draw(axn.Axis("row", 8))
    with jax.set_mesh(mesh):
        program = jax.jit(lift(jnp.vdot, "row, row ->")).lower(*axn.shard((x, vector), {"row": "data"})).compile()
    assert COLLECTIVE.findall(program.as_text() or "") == [("f32[8]{0}", "all-reduce")]


def test_a_new_axis_goes_where_the_mapping_says(explicit_mesh: Mesh) -> None:
    doubled = lift(lambda x: jnp.stack([x, x]), "-> copies")
    with jax.set_mesh(explicit_mesh), axn.axis_mapping({"copies": "model"}):
        assert spec(doubled(axn.shard(B, {"batch": "data"}))) == ("data", None, "model")


def test_a_function_that_places_things(auto_mesh: Mesh) -> None:
    """By position it knows nothing of the axes that are mapped over; the active mapping does."""

    def fn(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x * 2, P("model"))

    with jax.set_mesh(auto_mesh), axn.axis_mapping({"batch": "data"}):
        replicated = jax.device_put(B, jax.sharding.NamedSharding(auto_mesh, P()))
        assert spec(jax.jit(lift(fn, "row -> row"))(replicated)) == ("data", "model")


def test_a_function_that_holds_arrays(explicit_mesh: Mesh) -> None:
    with jax.set_mesh(explicit_mesh):
        held = jax.device_put(jnp.ones(4), P("data"))
        b = axn.shard(B, {"batch": "data"})
        with pytest.raises(Exception) as e:
            lift(lambda x: x * held, "row -> row")(b)
        expected = "lift(<lambda>): the function closes over arrays"
        assert any(expected in n and "operands" in n for n in e.value.__notes__)


def test_what_the_function_raises_says_what_it_saw() -> None:
    with pytest.raises(TypeError, match="matmul") as e:
        lift(jnp.matmul, "row col, heads -> row")(A, draw(Heads))
    assert e.value.__notes__[0] == (
        "lift(matmul): raised by the function on float32(row=4, col=4), float32(heads=2), mapped over (batch)."
    )
    with pytest.raises(ValueError, match=r"lift\(matmul\): operand 0"):
        lift(functools.partial(jnp.matmul, precision="high"), "row col, col -> row")(B, B)


# --- what is refused ---


def same(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: solve(A.rename({"row": "rows"}), B),
            r"operand 0 \(batch=8, rows=4, col=4\) has no axis 'row'\. Did you mean 'rows'\? Say by keyword",
        ),
        (lambda: solve(A, draw(Heads)), r"operand 1 \(heads=2\) has no axis 'row'"),
        (lambda: solve(A, draw(Row, Col)), r"the spec lists axis 'col' for one operand, but operand 1 also has it"),
        (lambda: solve(A, draw(axn.Axis("row", 3))), r"'row' has conflicting sizes: 4 in operand 0, 3 in operand 1"),
        (
            lambda: solve(A, B, row=axn.Axis("row", 5)),
            r"'row' has conflicting sizes: 4 in the array, 5 in the argument",
        ),
        (
            lambda: lift(same, "a b -> a")(A, a="row", b="row"),
            r"'a' and 'b' both stand for axis 'row'; use one word",
        ),
        (lambda: lift(jnp.add, ", ->")(draw(Row), draw(Time)), r"cannot broadcast \(row\) and \(time\).*outer product"),
        (lambda: lift(same, "row -> batch")(A), r"'batch' would name more than one axis in \(batch, col, batch\)"),
        (lambda: lift(same, "row -> a a")(A), r"'a' occurs a second time here"),
        (lambda: lift(lambda x: x[1:], "row -> row")(A), r"'row' has size 3 in result 0, but 4 elsewhere.*`n -> m`"),
        (
            lambda: lift(same, "row -> a")(A, a=axn.Axis("a", 9)),
            r"'a' has conflicting sizes: 9 in the argument, 4 in the",
        ),
        (lambda: lift(same, "row -> row new")(A), r"returned an array of shape \(4,\), where the spec says `row new`"),
        (lambda: lift(lambda x: (x, x, x), "row -> row, row")(A), r"returned 3 results, where the spec has 2 results"),
        (
            lambda: lift(same, "... row -> row"),
            "always mapped over; leave out the `...`.\n    ... row -> row\n    \\^\\^\\^",
        ),
        (lambda: lift(same, "(a b) -> a"), "axes are not split or merged here.*\n.*\n    \\^\\^\\^\\^\\^"),
        (lambda: lift(same, "{a b} -> a"), r"written without braces"),
        (lambda: lift(same, "a b"), r"expected `->`"),
        (lambda: lift(same, "_, a -> _"), "`_` stands alone, .*\n.*\n            \\^"),
        (lambda: lift(same, "_ a -> a"), "`_` stands alone, .*\n.*\n    \\^\\^\\^"),
    ],
)
def test_refuses(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as e:
        call()
    assert str(e.value).startswith("lift(")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lift(3, "a -> a"), r"lift: expected a function, got int"),  # pyright: ignore
        (lambda: lift("a -> a", "b -> b"), r"lift: expected a function, got a string"),  # pyright: ignore
        (lambda: lift(same), r"which axes\? Pass a spec such as 'i j, i -> j'"),  # pyright: ignore
        (
            lambda: lift(same, "row -> row", rwo="a"),
            r"'rwo' is not among the axes of the spec, 'row'\. Did you mean 'row'",
        ),
        (
            lambda: lift(same, "n -> n")(A, n=3),
            r"'n' is an axis of the spec, so it stands for an Axis or its name, got int",
        ),
        (lambda: solve(A), r"has 2 arguments, but the call has 1 by position"),
        (lambda: solve(A, "B"), r"argument 1, `b`, should be a NamedArray or a scalar, got str"),
        (lambda: solve(A, B.array), r"argument 1, `b`, has no axis names but shape \(8, 4\).*axonym\.named"),
        (
            lambda: lift(same, "row -> row")(A, [{1}]),
            r"argument 1 is passed on unchanged, as part of the program, so it must be hashable, which this set",
        ),
        (lambda: lift(same, "row -> row")(A, w=[{1}]), r"`w` is passed on unchanged.* which this set is not"),
        (
            lambda: solve(A, b=B),
            r"lift\(solve\): got array `b` by keyword.* one for each term of 'row col, row -> col'",
        ),
        (lambda: lift(same, "row -> row")(A, B), r"argument 1 is an array for which 'row -> row' has no term"),
        (lambda: lift(lambda x: (x, x), "row -> row")(A), r"returned 2 results, where the spec has 1 result\."),
        (lambda: lift(same, "row -> row, row")(A), r"returned one array, where the spec has 2 results"),
        (
            lambda: lift(lambda x: {"a": x}, "row -> row")(A),  # pyright: ignore
            r"returned a dict, where it should return raw arrays",
        ),
        (
            lambda: lift(lambda x: axn.named(x, "a"), "row -> row")(A),  # pyright: ignore
            r"returned a NamedArray, where it should return raw",
        ),
    ],
)
def test_refuses_other_types(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_keeps_no_array_alive_that_a_function_closed_over() -> None:
    def call() -> weakref.ref[jax.Array]:
        weight = jnp.full(1000, 2.0)
        lift(lambda v: v * weight.sum(), "row -> row")(draw(Row))
        return weakref.ref(weight)

    kept = [call() for _ in range(3)]
    gc.collect()
    assert sum(r() is not None for r in kept) <= 1
