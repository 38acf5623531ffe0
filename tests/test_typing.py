"""Annotations of the axes of arrays."""

from __future__ import annotations

import pickle
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import PyTree, TypeCheckError, jaxtyped

import axonym as axn
from axonym import Axis, NamedArray
from axonym.typing import (
    Bool,
    Float,
    Int,
    Key,
    Named,
    NamedArrayAxes,
    Num,
    Shaped,
    bf16,
    bool_,
    check_axes,
    complex64,
    f32,
    i8,
    i32,
    u8,
)

X = axn.ones({"batch": 2, "embed": 3})


def is_a(x: Any, annotation: Any) -> bool:
    """Call `isinstance`, which type checkers reject for annotations that are more than a type."""
    return isinstance(x, annotation)


# --- which axes ---

MATCHES: list[tuple[Any, bool]] = [
    ("batch embed", True),
    ("batch, embed", True),
    ("embed batch", False),
    ("batch", False),
    ("batch embed pos", False),
    ("", False),
    ("...", True),
    ("batch ...", True),
    ("... batch", False),
    ("... embed", True),
    ("batch ... embed", True),
    ("embed ... batch", False),
    ("batch embed ...", True),
    ("batch pos ...", False),
    ("{batch embed}", True),
    ("{embed batch}", True),
    ("{embed}", False),
    ("{embed ...}", True),
    ("{...}", True),
    ("{pos ...}", False),
    ("batch=2 embed", True),
    ("batch embed=4", False),
    ("{embed=3 ...}", True),
    (("batch", "embed"), True),
    (["batch", "embed"], True),
    (("embed", "batch"), False),
    (("batch", ...), True),
    ((..., "batch"), False),
    (..., True),
    ({"embed", "batch"}, True),
    (frozenset({"embed", "batch"}), True),
    ({"embed"}, False),
    ({"embed", ...}, True),
    ((Axis("batch", 2), "embed"), True),
    ((Axis("batch", 3), "embed"), False),
    ({Axis("embed", 3), ...}, True),
    (Axis("batch", 2), False),
    ({"batch": 2, "embed": None}, True),
    ({"embed": 3, "batch": 2}, False),
    (NamedArrayAxes(("batch",), subset=True), True),
    (NamedArrayAxes(("batch", "embed"), dtype=jnp.float32), True),
    (NamedArrayAxes(("batch", "embed"), dtype="int32"), False),
    (NamedArrayAxes(("batch", "embed"), dtype=jaxtyping.Float), True),
    (Named["batch embed"], True),
    (Named["embed batch"], False),
    (Float[NamedArray, "batch ..."], True),
    (Int[NamedArray, "batch ..."], False),
    (Named, True),
]


def _id(value: Any) -> str:
    """The order of a set, which differs between processes, is not part of it."""
    return f"{{{', '.join(sorted(map(str, value)))}}}" if isinstance(value, (set, frozenset)) else repr(value)


@pytest.mark.parametrize(("spec", "expected"), MATCHES, ids=_id)
def test_matches_axes(spec: Any, expected: bool) -> None:
    assert X.matches_axes(spec) is expected
    if expected:
        assert check_axes(X, spec) is X
    else:
        with pytest.raises(ValueError, match=r"^check_axes: .*\n    .*\n +\^"):
            check_axes(X, spec)


@pytest.mark.parametrize(("spec", "expected"), [m for m in MATCHES if m[0] is not Named], ids=_id)
def test_is_a(spec: Any, expected: bool) -> None:
    if not isinstance(spec, type):
        assert is_a(X, Shaped[NamedArray, spec]) is expected or spec.dtype is not None
        spec = NamedArray[spec]
    assert is_a(X, spec) is expected


def test_forms_of_one_annotation_are_one_class() -> None:
    assert Named["batch embed ..."] is Named["batch", "embed", ...] is NamedArray["batch embed ..."]
    assert Named["batch embed=3"] is Named["batch", Axis("embed", 3)]
    assert Named[{"a", "b", ...}] is Named["{a b ...}"]
    assert f32[NamedArray, "a b"] is f32[NamedArray, "a", "b"]
    assert f32["a b"] is f32[NamedArray, "a b"]  # pyright: ignore  # works, but type checkers know it not
    assert Named[NamedArray, "a b"] is Named["a b"]
    assert Float[NamedArray, "a"] is not f32[NamedArray, "a"]


def test_representation() -> None:
    assert repr(Named["batch", ..., Axis("embed", 3)]) == 'axonym.typing.Named["batch ... embed=3"]'
    assert repr(f32[NamedArray, {"b", "a"}]) == 'axonym.typing.f32[NamedArray, "{a b}"]'
    assert repr(bf16) == "axonym.typing.bf16"


@pytest.mark.parametrize("annotation", [Named["batch embed ..."], f32[NamedArray, "batch embed ..."]], ids=repr)
def test_annotations_can_be_read(annotation: Any) -> None:
    """As those of `typing`, and what `typing.get_type_hints` leaves of them still checks."""
    assert typing.get_origin(annotation) is typing.Annotated
    checking, axes = typing.get_args(annotation)
    assert (axes.before, axes.after, axes.ordered, axes.subset) == (("batch", "embed"), (), True, True)
    assert is_a(X.astype(jnp.float32), checking) and not is_a(X["batch", 0], checking)
    assert pickle.loads(pickle.dumps(checking)) is checking
    assert typing.get_type_hints(mean)["x"] is typing.get_args(Named["batch embed ..."])[0]
    assert typing.get_type_hints(mean, include_extras=True)["x"] is Named["batch embed ..."]


def test_what_is_not_a_named_array() -> None:
    assert not is_a(X.array, Named["batch embed"])
    assert not is_a(3, Named["..."])
    with pytest.raises(TypeError, match="is an annotation"):
        Named["batch"](X.array, "batch")


def test_names_that_are_no_identifiers() -> None:
    x = axn.ones({"a.b": 2, "c d": 3})
    assert is_a(x, Named["a.b", "c d"]) and not is_a(x, Named["c d", "a.b"])


def test_pickle() -> None:
    for annotation in (Named["batch embed ..."], Float[NamedArray, {"a", "b"}]):
        assert pickle.loads(pickle.dumps(annotation)) is annotation


# --- dtypes ---


@pytest.mark.parametrize(
    ("annotation", "dtype"),
    [(f32, "float32"), (i32, "int32"), (bf16, "bfloat16"), (u8, "uint8"), (i8, "int8"), (bool_, "bool")]
    + [(complex64, "complex64"), (Float, "bfloat16"), (Int, "int8"), (Num, "uint8"), (Bool, "bool")],
)
def test_dtypes(annotation: Any, dtype: str) -> None:
    x = axn.zeros(Axis("x", 2), dtype=dtype)
    assert is_a(x, annotation[NamedArray, "x"]) and is_a(x, annotation["x"])
    assert not is_a(x, annotation[NamedArray, "y"])
    other = axn.zeros(Axis("x", 2), dtype="uint16" if dtype != "uint8" else "float32")
    assert is_a(other, annotation[NamedArray, "x"]) is (annotation is Num)


def test_keys() -> None:
    keys = axn.named(jax.random.split(jax.random.key(0), 2), "layer")
    assert is_a(keys, Key[NamedArray, "layer"]) and not is_a(X, Key[NamedArray, "..."])


def test_other_array_types_are_those_of_jaxtyping() -> None:
    assert repr(Float[jax.Array, "batch embed"]) == repr(jaxtyping.Float[jax.Array, "batch embed"])
    either: Any = Float[NamedArray | jax.Array, "batch embed"]
    assert is_a(X, either) and is_a(X.array, either)
    assert not is_a(X.astype(int), either) and not is_a(X.array[0], either)


def test_abstract_and_missing_arrays() -> None:
    abstract = jax.eval_shape(lambda: X)
    assert is_a(abstract, Float[NamedArray, "batch embed"]) and not is_a(abstract, Named["batch"])
    missing = jax.tree.map(lambda _: None, X)
    assert is_a(missing, Named["batch embed"]) and not is_a(missing, Named["batch"])
    assert is_a(missing, Named["batch embed=5"])
    assert not is_a(missing, Float[NamedArray, "batch embed"])


def test_names_and_rank_that_disagree() -> None:
    seen = []
    jax.vmap(lambda x: seen.append(is_a(x, Named["..."])))(X)
    assert seen == [False]


# --- messages ---


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "batch ... embde",
            "check_axes: no axis 'embde' in (batch=2, embed=3). Did you mean 'embed'?\n"
            '    Named["batch ... embde"]\n'
            "                     ^^^^^",
        ),
        (
            "{batch}",
            "check_axes: 'embed' of (batch=2, embed=3) is not in the annotation. `...` allows more axes.\n"
            '    Named["{batch}"]\n'
            "                 ^",
        ),
        (
            "embed batch",
            "check_axes: (batch=2, embed=3) has 'batch' in the place of 'embed'. "
            "Braces, `{a b}`, allow any order.\n"
            '    Named["embed batch"]\n'
            "           ^^^^^",
        ),
        (
            Float[NamedArray, ("batch", Axis("embed", 4))],
            "check_axes: axis 'embed' has conflicting sizes: 4 in the annotation, 3 in the array. "
            "Axes of one name must have one size; rename one of them.\n"
            '    Float[NamedArray, "batch embed=4"]\n'
            "                             ^^^^^",
        ),
        (
            i32[NamedArray, "batch embed"],
            'check_axes: float32[batch=2, embed=3] has another dtype.\n    i32[NamedArray, "batch embed"]\n    ^^^',
        ),
    ],
)
def test_messages(spec: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        check_axes(X, spec)
    assert str(raised.value) == message


def test_no_named_array() -> None:
    with pytest.raises(ValueError, match=r'check_axes: expected Named\["batch"\], got int\.'):
        check_axes(3, "batch")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: Named["batch (embed)"],
            ValueError,
            r"cannot contain parentheses.*\n    batch \(embed\)\n          \^{7}$",
        ),
        (lambda: Named["batch ... embed ..."], ValueError, r"a second `...`.*\n.*\n                    \^\^\^$"),
        (lambda: Named["{batch"], ValueError, r"this brace is not closed.\n    {batch\n    \^$"),
        (lambda: Named["batch batch"], ValueError, r"'batch' occurs a second time here"),
        (lambda: Named["batch 4"], ValueError, r"unexpected '4'.*\n    batch 4\n          \^$"),
        (lambda: Named["batch", "batch"], ValueError, "'batch' would name more than one axis"),
        (lambda: Named[..., "batch", ...], ValueError, r"a second `\.\.\.`"),
        (lambda: Named["batch", 4], TypeError, r"Named\[\.\.\.\]: expected an axis, its name or `\.\.\.`, got int"),
        (
            lambda: f32[NamedArray, 4],
            TypeError,
            r"f32\[\.\.\.\]: axes are given as a .*, got int",
        ),
        (lambda: X.matches_axes(4), TypeError, "matches_axes: axes are given as"),  # pyright: ignore
        (lambda: NamedArrayAxes(("a",), ("b",)), ValueError, "axes come after an ellipsis"),
    ],
)
def test_annotations_that_are_wrong(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_sizes_have_no_place_in_other_languages() -> None:
    for expression in ("batch=2 embed -> embed batch", "(batch=2: a b) embed -> a b embed"):
        with pytest.raises(ValueError, match=r"rearrange: .* sizes are given by keyword\.\n.*\n +\^{7}$"):
            axn.rearrange(X, expression)


# --- checkers ---


def mean(x: Named["batch embed ..."], w: Float[NamedArray, "{embed ...}"] | None = None) -> Named["batch ..."]:
    return x.mean("embed") if w is None else axn.dot(x, w, axis="embed")


def test_beartype() -> None:
    checked = beartype(mean)
    assert checked(X).names == ("batch",)
    assert checked(X, axn.ones({"out": 2, "embed": 3})).names == ("batch", "out")
    assert jax.jit(checked)(X).names == ("batch",)
    message = r"parameter x=.*Named\[\.\.\.\]: no axis 'embed' in \(batch=2, embde=3\).*\n    Named\[.*\n +\^{5}"
    with pytest.raises(BeartypeCallHintViolation, match=message):
        checked(X.rename({"embed": "embde"}))
    with pytest.raises(BeartypeCallHintViolation, match="parameter w="):
        checked(X, X.astype(int))


def test_what_a_function_returns() -> None:
    @beartype
    def forgetful(x: Named["batch embed"]) -> Named[" batch"]:
        return x

    with pytest.raises(BeartypeCallHintViolation, match="return"):
        forgetful(X)


def project(x: Named["batch embed"], y: Named["batch ..."], w: Float[jax.Array, "embed out"]) -> Named["batch out"]:
    return axn.named(x.array @ w, ("batch", "out"))


def test_jaxtyped_gives_every_name_one_size() -> None:
    checked = jaxtyped(typechecker=beartype)(project)
    w = jnp.ones((3, 4))
    assert checked(X, X, w).names == ("batch", "out")
    assert checked(X, axn.ones({"batch": 2, "embed": 7}), w).names == ("batch", "out"), "the dots are free"
    assert checked(axn.ones({"batch": 5, "embed": 3}), axn.ones({"batch": 5}), w).shape == {"batch": 5, "out": 4}
    assert jax.jit(checked)(X, X, w).names == ("batch", "out")
    with pytest.raises(TypeCheckError, match=r"parameter 'y'(.|\n)*batch=2"):
        checked(X, axn.ones({"batch": 3}), w)
    with pytest.raises(TypeCheckError, match="parameter 'w'"):
        checked(X, X, jnp.ones((2, 4)))


def test_a_conflict_of_sizes_is_explained() -> None:
    seen: list[str] = []

    @jaxtyped(typechecker=None)
    def check() -> None:
        assert is_a(X, Named["batch ..."])
        other: Any = Named["{embed batch}"]
        y = axn.ones({"embed": 3, "batch": 4})
        assert not is_a(y, other)
        seen.append(type(other).__instancecheck_str__(other, y))
        assert y.matches_axes(other), "a question by hand is about this array alone"

    check()
    assert seen == [
        "Named[...]: axis 'batch' of float32[embed=3, batch=4] has another size than before in this call.\n"
        '    Named["{embed batch}"]\n'
        "                  ^^^^^"
    ]


def test_trees() -> None:
    tree = {"w": X, "layers": [X, X]}
    assert is_a(tree, PyTree[Named["batch embed"]])
    assert is_a(tree, PyTree[Float[NamedArray, "batch ..."]])
    assert not is_a({"w": X, "b": X["batch", 0]}, PyTree[Named["batch embed"]])
