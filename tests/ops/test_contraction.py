"""`dot` and `einsum`: errors and their texts, dtypes, and a custom `dot_general`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax.tree_util import Partial

import axonym as axn
from tests.helpers import assert_named, compilations, spec

X = axn.arange(axn.make_axes(batch=2, embed=3)).astype(jnp.float32)
W = axn.arange(axn.make_axes(embed=3, mlp=4)).astype(jnp.float32)
PRODUCT = axn.named(X.array @ W.array, ("batch", "mlp"))

# --- what is refused ---

DOTS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: axn.dot(X, W),
        TypeError,
        "dot of (batch=2, embed=3) and (embed=3, mlp=4): say which axes to sum over, `axis=...`; None means all",
    ),
    (lambda: axn.dot(axis="embed"), TypeError, "dot: expected at least one NamedArray."),
    (
        lambda: axn.dot(X, W.array, axis="embed"),
        TypeError,
        "dot: expected NamedArrays, got ArrayImpl. Name its axes with",
    ),
    (lambda: axn.dot(X, 2.0, axis="embed"), TypeError, "dot: expected NamedArrays, got float."),
    (lambda: axn.dot("embed", X, W, axis="embed"), TypeError, "dot: expected NamedArrays, got str."),
    (
        lambda: axn.dot(X, W, axis=("embd", "zz")),
        ValueError,
        "dot: no operand has axis 'embd', 'zz'; the operands are (batch, embed) and (embed, mlp). Did you mean",
    ),
    (
        lambda: axn.dot(X, W.rename({"embed": "embd"}), axis="embed"),
        ValueError,
        "dot: only operand 0 has axis 'embed'; the operands are (batch, embed) and (embd, mlp). Did you mean 'embd'?",
    ),
    (
        lambda: axn.dot(X, W, X, axis=("embed", "mlp")),
        ValueError,
        "dot: only operand 1 has axis 'mlp'; the operands are (batch, embed) and (embed, mlp) and (batch, embed). To",
    ),
    (
        lambda: axn.einsum("{a mlp} -> mlp", X, W.rename({"embed": "embd"}), a="embed"),
        ValueError,
        "only operand 0 has axis 'embed'; the operands are (batch, embed) and (embd, mlp). Did you mean 'embd'?",
    ),
    (lambda: axn.dot(X, W, axis=0), TypeError, "An axis is selected by an Axis or its name"),  # pyright: ignore
    (
        lambda: axn.dot(X, W, axis=axn.Axis("embed", 4)),
        ValueError,
        "dot: axis 'embed' has conflicting sizes: 3 in the array",
    ),
    (lambda: axn.dot(X, axn.ones({"embed": 4}), axis="embed"), ValueError, "3 in operand 0, 4 in operand 1"),
    (
        lambda: axn.dot(X, W, axis="embed", out_axes=("mlp", "embed")),
        ValueError,
        "dot: out_axes names 'embed', which the result does not have: summing leaves (batch, mlp).",
    ),
    (
        lambda: axn.dot(X, W, axis="embed", out_axes="mlp"),
        ValueError,
        "dot: out_axes leaves out 'batch' of the result; name every axis, or add `...`.",
    ),
    (
        lambda: axn.dot(X, W, axis="embed", out_axes=("mlp", "batch", "mlp")),
        ValueError,
        "dot: out_axes names an axis twice: (mlp, batch, mlp).",
    ),
    (
        lambda: axn.dot(X, W, axis="embed", out_axes=(axn.Axis("mlp", 5), ...)),
        ValueError,
        "dot: axis 'mlp' has conflicting sizes: 4 in the array, 5 in the argument",
    ),
    (lambda: jax.vmap(lambda x: axn.dot(x, W, axis="embed"))(X), ValueError, "dot: This named array has 2 names"),
]


@pytest.mark.parametrize(("attempt", "error", "message"), DOTS, ids=[m[:40] for _, _, m in DOTS])
def test_dot_refuses(attempt: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        attempt()


EQUATIONS = [
    # equation, number of arrays, aliases, the message, and the text above its caret
    ("b e", 1, {}, "einsum: expected `->` between the axes of the input and the axes of the output.", None),
    ("b e -> b -> e", 1, {}, "einsum: expected one `->`, this is the second.", (9, 11)),
    ("b e - b", 1, {}, "einsum: unexpected '-'. The arrow is written `->`.", (4, 5)),
    ("b e -> b", 2, {}, "einsum: number of terms: 1, of arrays: 2.", (0, 3)),
    ("b e, e m -> b", 1, {}, "einsum: number of terms: 2, of arrays: 1.", (0, 8)),
    ("b, e m -> b", 2, {}, "einsum: number of axes: 1, for an array with (batch, embed). Words are sep", (0, 1)),
    (
        "be,em->bm",
        2,
        {},
        "einsum: number of axes: 1, for an array with (batch, embed). Words are separated by spaces: "
        "write `b e, e m -> b m`.",
        (0, 2),
    ),
    (
        "be,emx->bm",
        2,
        {},
        "einsum: number of axes: 1, for an array with (batch, embed). Words are separated by spaces.",
        (0, 2),
    ),
    ("b e, e m x -> b", 2, {}, "einsum: number of axes: 3, for an array with (embed, mlp).", (5, 10)),
    ("b e x ... -> b", 1, {}, "einsum: number of axes: 3, for an array with (batch, embed).", (0, 9)),
    ("b e, b m -> e", 2, {}, "einsum: 'b' stands for axis 'batch' elsewhere, but for 'embed' here.", (5, 6)),
    ("b e, k m -> e", 2, {}, "einsum: axis 'embed' is already called 'e'; one axis has one word.", (5, 6)),
    (
        "row col -> rwo",
        1,
        {},
        "einsum: 'rwo' is not among the axes of the input (row, col). Did you mean 'row'?",
        (11, 14),
    ),
    ("(b e) -> b", 1, {}, "einsum: axes are not split or merged here; use rearrange before or after.", (0, 5)),
    ("b e -> (b e)", 1, {}, "einsum: axes are not split or merged here", (7, 12)),
    ("b e -> {b}", 1, {}, "einsum: the output has an order, so its axes are written without braces.", (7, 10)),
    ("b e -> b, e", 1, {}, "einsum: there is one result.", (10, 11)),
    ("b e -> b b", 1, {}, "einsum: 'b' occurs a second time here.", (9, 10)),
    ("b b -> b", 1, {}, "einsum: 'b' occurs a second time here.", (2, 3)),
    ("... b ... -> b", 1, {}, "einsum: a second `...`; one takes all the axes that are not named.", (6, 9)),
    (
        "{batch}, {embed} -> batch",
        2,
        {},
        "einsum: one term in braces is for all arrays; there can be no other",
        (0, 7),
    ),
    ("b e, {embed} -> b", 2, {}, "einsum: one term in braces is for all arrays", (5, 12)),
    (
        "{embd} ->",
        2,
        {},
        "einsum: no array has axis 'embd'; the arrays are (batch, embed) and (embed, mlp). Did you mean 'embed'?",
        (1, 5),
    ),
    ("{embed} -> mlp", 2, {}, "einsum: 'mlp' is not among the axes of the input (embed).", (11, 14)),
    ("-> vocab", 2, {}, "einsum: no array has axis 'vocab'", (3, 8)),
    ("{E F} -> E", 2, {"E": "embed", "F": "embed"}, "einsum: axis 'embed' is already called 'E'", (3, 4)),
    ("b e -> b", 1, {"b": "embed"}, "einsum: 'b' stands for axis 'embed' elsewhere, but for 'batch' here.", (0, 1)),
    ("", 1, {}, "einsum: expected `->`", None),
]


@pytest.mark.parametrize(("equation", "count", "aliases", "message", "span"), EQUATIONS, ids=[e[0] for e in EQUATIONS])
def test_einsum_refuses(
    equation: str, count: int, aliases: dict[str, str], message: str, span: tuple[int, int] | None
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        axn.einsum(equation, *[X, W][:count], **aliases)  # pyright: ignore[reportArgumentType]
    if span is not None:
        _, text, carets = str(caught.value).split("\n")
        assert text[4:] == equation
        assert (carets.index("^") - 4, len(carets) - 4) == span


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        (lambda: axn.einsum("->"), TypeError, "einsum: expected at least one NamedArray."),
        (lambda: axn.einsum("b e -> b", X.array), TypeError, "einsum: expected NamedArrays, got ArrayImpl."),  # pyright: ignore[reportArgumentType]
        (
            lambda: axn.einsum(X, "b e -> b"),  # pyright: ignore[reportArgumentType]
            TypeError,
            "einsum: the equation comes first, as a string, got NamedArray.",
        ),
        (
            lambda: axn.einsum("b e -> b", X, bb="batch", zz="embed"),
            TypeError,
            "einsum: 'bb', 'zz' is given by keyword but does not appear in 'b e -> b'.",
        ),
        (
            lambda: axn.einsum("b e -> b", X, e=axn.Axis("embed", 4)),
            ValueError,
            "einsum: axis 'embed' has conflicting sizes: 3 in the array, 4 in the argument.",
        ),
        (
            lambda: axn.einsum("b e, e -> b", X, axn.ones({"embed": 5})),
            ValueError,
            "einsum: axis 'embed' has conflicting sizes: 3 in operand 0, 5 in operand 1.",
        ),
    ],
)
def test_einsum_refuses_arguments(attempt: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        attempt()


# --- dtypes ---


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "bfloat16", "float16", "float32", "complex64"])
def test_result_dtype_does_not_depend_on_which_operands_have_the_axis(dtype: str) -> None:
    x, w = X.astype(dtype), W.astype(dtype)
    for result in (
        axn.dot(x, axis="embed"),
        axn.dot(x, w, axis="embed"),
        axn.dot(x, w, x, axis="batch"),
        axn.dot(x, w, axis=()),
    ):
        assert result.dtype == dtype
    wide = axn.dot(x, w, axis="embed", preferred_element_type="complex64")
    assert wide.dtype == "complex64"


def test_what_is_accumulated_does_not_overflow() -> None:
    x = axn.full({"batch": 3}, 100, jnp.int8)
    for other, axis, expected in ((x, "batch", 30_000), (axn.full({"y": 1}, 100, jnp.int8), None, 30_000)):
        result = axn.dot(x, other, axis=axis, preferred_element_type=jnp.int32)
        assert result.dtype == "int32" and np.all(np.asarray(result.array) == expected)
    assert axn.dot(x, x, axis=(), preferred_element_type="int32").tolist() == [10_000] * 3
    assert axn.dot(x, axis="batch", preferred_element_type="int32").item() == 300
    assert axn.dot(x, axis=(), preferred_element_type="int32").dtype == "int32"


def test_preferred_type_through_three_operands() -> None:
    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    result = axn.dot(x, w, axn.ones({"mlp": 4}, jnp.bfloat16), axis=("embed", "mlp"), preferred_element_type="float32")
    assert_named(result, axn.sum(PRODUCT, "mlp"))


def test_precision_reaches_the_program() -> None:
    text = jax.jit(lambda x, w: axn.dot(x, w, axis="embed", precision="highest")).lower(X, W).as_text()
    assert "precision = [HIGHEST, HIGHEST]" in text
    assert "HIGHEST" not in jax.jit(lambda x, w: axn.dot(x, w, axis="embed")).lower(X, W).as_text()


def test_one_call_for_many_operands_takes_the_cheap_order() -> None:
    """A long chain of matrices against a vector: only in the right order are all products matrix times vector."""
    n = 40
    chain = [axn.ones({f"a{i}": n, f"a{i + 1}": n}) for i in range(9)] + [axn.ones({"a9": n})]
    axes = [f"a{i}" for i in range(1, 10)]
    costs: Any = jax.jit(lambda *xs: axn.dot(*xs, axis=axes)).lower(*chain).compile().cost_analysis()
    assert costs["flops"] < 3 * 9 * n * n


def test_more_axes_than_letters() -> None:
    names = [f"n{i}" for i in range(30)]
    arrays = [axn.full({n: 1, "x": 2}, 2.0) for n in names[:28]] + [axn.ones({names[28]: 1, names[29]: 1})]
    result = axn.dot(*arrays, axis=None)
    assert result.item() == 2 * 2.0**28


# --- another dot_general ---


def doubled(lhs: Any, rhs: Any, dimension_numbers: Any, precision: Any, preferred_element_type: Any) -> Any:
    """Double the product, so that the call is visible."""
    options = {"precision": precision, "preferred_element_type": preferred_element_type}
    return 2 * jax.lax.dot_general(lhs, rhs, dimension_numbers, **options)


def times(factor: Any, lhs: Any, rhs: Any, dimension_numbers: Any, **options: Any) -> Any:
    return factor * jax.lax.dot_general(lhs, rhs, dimension_numbers, **options)


def test_dot_general_is_used() -> None:
    assert_named(axn.dot(X, W, axis="embed", dot_general=doubled), 2 * PRODUCT)
    assert_named(axn.einsum("b e, e m -> m b", X, W, dot_general=doubled), 2 * PRODUCT.rearrange(("mlp", "batch")))
    assert_named(jax.jit(lambda x, w: axn.dot(x, w, axis="embed", dot_general=doubled))(X, W), 2 * PRODUCT)
    three = axn.dot(X, W, axn.ones({"mlp": 4}), axis=("embed", "mlp"), dot_general=doubled)
    assert_named(three, 4 * axn.sum(PRODUCT, "mlp"))


def test_dot_general_gets_the_options() -> None:
    seen = []

    def spy(*arrays, **options):
        seen.append(options)
        return jax.lax.dot_general(*arrays, **options)

    result = axn.dot(X, W, axis="embed", dot_general=spy, precision="highest", preferred_element_type=jnp.bfloat16)
    assert seen == [{"precision": "highest", "preferred_element_type": jnp.bfloat16}]
    assert result.dtype == jnp.bfloat16


def test_dot_general_refusals_are_the_same() -> None:
    with pytest.raises(ValueError, match="dot: axis 'embed' has conflicting sizes: 3 in operand 0, 4 in operand 1"):
        axn.dot(X, axn.ones({"embed": 4}), axis="embed", dot_general=doubled)
    with pytest.raises(ValueError, match="dot: axis 'embed' has conflicting sizes: 3 in the array, 4 in the argument"):
        axn.dot(X, W, axis=axn.Axis("embed", 4), dot_general=doubled)


@pytest.mark.parametrize(
    "make", [lambda c: Partial(times, c), lambda c: lambda *a, **k: times(c, *a, **k)], ids=["held", "closed over"]
)
def test_dot_general_with_arrays_of_its_own(make: Callable[[Any], Any]) -> None:
    """They are seen by jit and grad, and nothing of them is kept between calls."""

    def loss(c, x, w):
        return axn.dot(x, w, axis="embed", dot_general=make(c)).sum().scalar()

    for factor in (3.0, 5.0):
        c = jnp.float32(factor)
        assert_named(axn.dot(X, W, axis="embed", dot_general=make(c)), factor * PRODUCT)
        assert jax.jit(loss)(c, X, W) == factor * PRODUCT.array.sum()
        by_factor, by_weight = jax.jit(jax.grad(loss, (0, 2)))(c, X, W)
        assert by_factor == PRODUCT.array.sum()
        assert_named(by_weight, factor * jax.grad(loss, 2)(jnp.float32(1.0), X, W))


def _on(mesh: Mesh, x: axn.NamedArray, *spec: str | None) -> axn.NamedArray:
    return axn.named(jax.device_put(x.array, NamedSharding(mesh, P(*spec))), x.names)


def _sharded(mesh: Mesh) -> tuple[axn.NamedArray, axn.NamedArray, axn.NamedArray]:
    x, w = axn.ones({"batch": 4, "embed": 8}), axn.ones({"embed": 8, "mlp": 4})
    return _on(mesh, x, "data", None), _on(mesh, w, "data", "model"), _on(mesh, axn.full({"mlp": 4}, 3.0), "model")


def test_held_arrays_on_explicit_axes(explicit_mesh: Mesh) -> None:
    x, w, scale = _sharded(explicit_mesh)

    def call(x, w, scale):
        return axn.dot(x, w, axis="embed", dot_general=Partial(times, jnp.expand_dims(scale.array, 0)))

    with jax.set_mesh(explicit_mesh):
        for run in (call, jax.jit(call)):
            result = run(x, w, scale)
            assert spec(result) == ("data", "model")
            assert_named(result, axn.full({"batch": 4, "mlp": 4}, 24.0))
        gradient = jax.jit(jax.grad(lambda scale: call(x, w, scale).sum().scalar()))(scale)
    assert gradient.array.sharding.spec == P("model")
    assert gradient.tolist() == [32.0] * 4


def test_closed_over_arrays_on_explicit_axes_say_what_to_do(explicit_mesh: Mesh) -> None:
    x, w, scale = _sharded(explicit_mesh)
    closed_over = jnp.expand_dims(scale.array, 0)
    with jax.set_mesh(explicit_mesh), pytest.raises(ValueError) as caught:
        axn.dot(x, w, axis="embed", dot_general=lambda *a, **k: times(closed_over, *a, **k))
    said = (
        "dot: on Explicit mesh axes, a dot_general cannot close over arrays. If yours does, make it a pytree that holds"
    )
    assert any(note.startswith(said) for note in caught.value.__notes__)


# --- what is compiled ---


def test_a_second_call_compiles_nothing() -> None:
    def calls():
        axn.dot(X, W, axis="embed")
        axn.dot(X, W, axis=axn.Axis("embed", 3), out_axes=["mlp", ...])
        axn.einsum("{E mlp} -> ... mlp", X, W, E="embed")

    calls()
    with compilations() as compiled:
        calls()
    assert compiled == []


def test_weak_types_stay() -> None:
    """As in `jnp.einsum`: the product with an array of a smaller dtype has that dtype."""
    weak = axn.full({"a": 2, "b": 3}, 2.0)
    assert axn.dot(weak, weak, axis="a").array.weak_type
    assert axn.dot(weak, weak.astype(jnp.float32), axis="a").dtype == jnp.float32
    assert not axn.dot(weak, weak.astype(jnp.float32), axis="a").array.weak_type


def test_dots_in_braces_stand_for_axes_that_the_output_may_name() -> None:
    x = axn.ones({"a": 2, "b": 3, "c": 4})
    assert axn.einsum("{a ...} -> c a", x).shape == {"c": 4, "a": 2}
    assert axn.einsum("{...} -> b", x).tolist() == [8, 8, 8]
    assert axn.einsum("{a ...} -> Other ...", x, Other="b").shape == {"b": 3, "c": 4}
    with pytest.raises(ValueError, match="'c' is not among the axes of the input"):
        axn.einsum("{a b} -> c", x)
