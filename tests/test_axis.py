"""Axes and the algebra on them."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
import axonym.haliax as hax
from axonym import Axis
from axonym.axis import (
    axis_spec_to_shape_dict,
    intersect_axes,
    is_axis_compatible,
    rearrange_for_partial_order,
    union_axes,
    unsize_axes,
    without_axes,
)

A, B, C = axn.make_axes(a=2, b=3, c=4)
A9, B9, C9 = axn.make_axes(a=9, b=9, c=9)


# --- the axis itself ---


def test_an_axis_has_a_name_and_a_size() -> None:
    assert (A.name, A.size) == ("a", 2)
    assert repr(A) == "Axis(name='a', size=2)"
    assert str(A) == "a(2)"
    assert A.alias("b") == Axis("b", 2)
    assert A.resize(5) == Axis("a", 5)
    assert A != B and A != A9 and A != "a"
    assert len({A, Axis("a", 2), B}) == 2


def test_axes_of_one_name_and_size_are_one_object() -> None:
    assert Axis("a", 2) is A
    assert Axis(name="a", size=2) is A
    for size in (np.int64(2), np.uint8(2), jnp.int32(2)):
        made = Axis("a", cast(Any, size))
        assert made is A and type(made.size) is int
    assert Axis("".join(["a"]), 2) is A
    assert copy.copy(A) is A and copy.deepcopy([A])[0] is A
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(A, protocol)) is A


def test_an_axis_works_with_dataclasses() -> None:
    assert dataclasses.replace(A, size=9) is A9
    assert dataclasses.asdict(A) == {"name": "a", "size": 2}
    assert [field.name for field in dataclasses.fields(Axis)] == ["name", "size"]


def test_an_axis_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        A.size = 3  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
        A.other = 3  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del cast(Any, A).name


def test_an_axis_matches_patterns() -> None:
    match A:
        case Axis(name=name, size=size):
            assert (name, size) == ("a", 2)
        case _:
            pytest.fail("no match")


def test_size_zero_is_a_size() -> None:
    assert Axis("a", 0).size == 0
    assert axn.axis.axis_size(Axis("a", 0)) == 0


@pytest.mark.parametrize(
    ("name", "size", "error", "message"),
    [
        ("a", -1, ValueError, "Axis 'a': a size cannot be negative, got -1."),
        ("a", 2.0, TypeError, "Axis 'a': a size is an integer, got float."),
        ("a", None, TypeError, "Axis 'a': a size is an integer, got NoneType."),
        (3, 2, TypeError, "Axis: a name is a string, got 3 of type int."),
        (A, 2, TypeError, "Axis: a name is a string, got Axis(name='a', size=2) of type Axis."),
    ],
)
def test_wrong_axes(name: Any, size: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        Axis(name, size)


def test_the_table_of_axes_does_not_keep_them() -> None:
    kept = weakref.ref(Axis("collected", 12345))
    gc.collect()
    assert kept() is None
    again = Axis("collected", 12345)
    assert again is Axis("collected", 12345)


def test_threads_get_the_same_axis() -> None:
    """Whichever thread makes an axis first, the others get that one."""
    count, rounds = 8, 200
    barrier = threading.Barrier(count)
    found: list[list[Axis]] = [[] for _ in range(count)]

    def make(mine: list[Axis]) -> None:
        for i in range(rounds):
            barrier.wait()
            mine.append(Axis("threaded", 100_000 + i))

    threads = [threading.Thread(target=make, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(rounds):
        assert len({id(mine[i]) for mine in found}) == 1


def test_symbolic_sizes() -> None:
    n, m = cast(Any, jax.export.symbolic_shape("n, m"))
    axis = Axis("batch", n)
    assert axis is Axis("batch", n)
    assert axis.size == n
    assert axis != Axis("batch", m)
    assert axn.axis.axis_size((axis, A)) == 2 * n
    assert axn.axis.resolve_axis((axis, A), "batch") is axis
    assert axn.axis.concat_axes(axis, A) == (axis, A)


def test_symbolic_sizes_reach_an_exported_function() -> None:
    (n,) = jax.export.symbolic_shape("n")
    seen = []

    def double(x: axn.NamedArray) -> jax.Array:
        seen.append(x.resolve_axis("batch").size)
        return (x + x).array

    abstract = jax.ShapeDtypeStruct((n, 2), np.float32)
    exported = jax.export.export(jax.jit(lambda x: double(axn.named(x, ("batch", "a")))))(abstract)
    assert seen == [n]
    np.testing.assert_array_equal(exported.call(np.ones((5, 2), np.float32)), np.full((5, 2), 2.0))


# --- the algebra: function, arguments, result ---

ALGEBRA: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = [
    (axn.axis.axis_name, (A,), "a"),
    (axn.axis.axis_name, ("a",), "a"),
    (axn.axis.axis_name, ((A, "b"),), ("a", "b")),
    (axn.axis.axis_name, ([A],), ("a",)),
    (axn.axis.axis_name, ({"a": 2, "b": None},), ("a", "b")),
    (axn.axis.axis_name, ((),), ()),
    (axn.axis.axis_size, (A,), 2),
    (axn.axis.axis_size, ((A, B, C),), 24),
    (axn.axis.axis_size, ([B, C],), 12),
    (axn.axis.axis_size, ({"a": 2, "b": 3},), 6),
    (axn.axis.axis_size, ((),), 1),
    (axis_spec_to_shape_dict, (A,), {"a": 2}),
    (axis_spec_to_shape_dict, ("a",), {"a": None}),
    (axis_spec_to_shape_dict, ((A, "b"),), {"a": 2, "b": None}),
    (axis_spec_to_shape_dict, ({"a": 2, "b": None},), {"a": 2, "b": None}),
    (axn.axis.concat_axes, (A, B), (A, B)),
    (axn.axis.concat_axes, ((A, B), C), (A, B, C)),
    (axn.axis.concat_axes, ("a", (B, C)), ("a", B, C)),
    (axn.axis.concat_axes, ((), B), (B,)),
    (axn.axis.concat_axes, ({"a": 2}, {"b": 3}), {"a": 2, "b": 3}),
    (axn.axis.concat_axes, ({"a": None}, B), {"a": None, "b": 3}),
    (axn.axis.concat_axes, (A, {"b": 3}), (A, B)),
    (union_axes, ((A, B), (B, C)), (A, B, C)),
    (union_axes, (A, A), (A,)),
    (union_axes, ("a", A), ("a",)),
    (union_axes, (A, "a"), (A,)),
    (union_axes, (("b", "a"), (A, C)), ("b", "a", C)),
    (union_axes, ({"a": 2}, {"a": 2, "b": 3}), {"a": 2, "b": 3}),
    (union_axes, ((), (A, B)), (A, B)),
    (intersect_axes, ((A, B, C), (C, A)), (A, C)),
    (intersect_axes, ((A, B), "b"), (B,)),
    (intersect_axes, (("b", "a"), (A, B)), (B, A)),
    (intersect_axes, (A, B), ()),
    (intersect_axes, ({"a": 2, "b": None}, B), {"b": 3}),
    (without_axes, ((A, B, C), B), (A, C)),
    (without_axes, ((A, B, C), ("c", "a")), (B,)),
    (without_axes, ((A, B), "zz"), (A, B)),
    (without_axes, (A, "a"), ()),
    (without_axes, ({"a": 2, "b": 3}, "a"), {"b": 3}),
    (hax.axis.eliminate_axes, ((A, B, C), B), (A, C)),
    (hax.axis.eliminate_axes, ((A, B, C), ("c", "a")), (B,)),
    (hax.axis.eliminate_axes, (A, A), ()),
    (hax.axis.eliminate_axes, ({"a": 2, "b": 3}, {"b": None}), {"a": 2}),
    (axn.axis.replace_axis, ((A, B), A, C), (C, B)),
    (axn.axis.replace_axis, ((A, B), "b", C), (A, C)),
    (axn.axis.replace_axis, ((A, B), "a", (C, Axis("d", 5))), (C, Axis("d", 5), B)),
    (axn.axis.replace_axis, ((A, B), "a", ()), (B,)),
    (axn.axis.replace_axis, ((A, B), "a", A9), (A9, B)),
    (axn.axis.replace_axis, ((A, "b"), "b", "c"), (A, "c")),
    (axn.axis.replace_axis, ({"a": 2, "b": 3}, "a", C), {"c": 4, "b": 3}),
    (axn.axis.resolve_axis, ((A, B), "b"), B),
    (axn.axis.resolve_axis, ((A, B), B), B),
    (axn.axis.resolve_axis, ((A, B), ("b", A)), (B, A)),
    (axn.axis.resolve_axis, ((A, B), ["b"]), (B,)),
    (axn.axis.resolve_axis, ((A, B), {"b": None}), {"b": 3}),
    (axn.axis.resolve_axis, ((A, B), {"b": 3}), {"b": 3}),
    (axn.axis.resolve_axis, ({"a": 2, "b": 3}, "b"), B),
    (axn.axis.resolve_axis, (A, "a"), A),
    (axn.axis.selects_axis, ("a", A), True),
    (axn.axis.selects_axis, (A, "a"), True),
    (axn.axis.selects_axis, (A, A9), False),
    (axn.axis.selects_axis, (("a", "b"), (B, A)), True),
    (axn.axis.selects_axis, ("a", (A, B)), False),
    (axn.axis.selects_axis, ((A, B), ()), True),
    (axn.axis.selects_axis, ({"a": None}, A), True),
    (is_axis_compatible, ("a", A), True),
    (is_axis_compatible, (A, A9), True),
    (is_axis_compatible, (A, "b"), False),
    (unsize_axes, (A,), "a"),
    (unsize_axes, ((A, B),), ("a", "b")),
    (unsize_axes, ((A, B), "b"), (A, "b")),
    (unsize_axes, ((A, B), (B, A)), ("a", "b")),
    (unsize_axes, ({"a": 2, "b": 3}, "a"), {"a": None, "b": 3}),
    (unsize_axes, ({"a": 2},), {"a": None}),
    (rearrange_for_partial_order, (("b", "a"), (A, B)), (B, A)),
    (rearrange_for_partial_order, ((...,), (A, B, C)), (A, B, C)),
    (rearrange_for_partial_order, (("c", ...), (A, B, C)), (C, A, B)),
    (rearrange_for_partial_order, ((..., "a"), (A, B, C)), (B, C, A)),
    (rearrange_for_partial_order, (("c", ..., "a"), (A, B, C)), (C, B, A)),
    (rearrange_for_partial_order, ((..., C, ..., A), (A, B, C)), (B, C, A)),
    (rearrange_for_partial_order, ((..., "b", ...), ("a", "b", "c")), ("a", "b", "c")),
    (rearrange_for_partial_order, (("b", ..., "c", ...), ("a", "b", "c", "d")), ("b", "a", "c", "d")),
    (rearrange_for_partial_order, (("a", ..., "b"), ("a", "b")), ("a", "b")),
    (rearrange_for_partial_order, ((), ()), ()),
]


@pytest.mark.parametrize(("function", "arguments", "expected"), ALGEBRA)
def test_algebra(function: Callable[..., Any], arguments: tuple[Any, ...], expected: Any) -> None:
    found = function(*arguments)
    assert found == expected
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)


ERRORS: list[tuple[Callable[..., Any], tuple[Any, ...], type[Exception], str]] = [
    (
        axn.axis.axis_size,
        ("a",),
        ValueError,
        "axis_size needs axes with sizes, got only the name 'a': pass Axis(name, size).",
    ),
    (axn.axis.axis_size, ((A, "b", "c"),), ValueError, "got only the name 'b', 'c'"),
    (axn.axis.axis_size, ({"a": None},), ValueError, "got only the name 'a'"),
    (axn.axis.axis_name, (3,), TypeError, "An axis is selected by an Axis or its name, got int."),
    (axn.axis.axis_name, ((A, 3),), TypeError, "An axis is selected by an Axis or its name, got int."),
    (axn.axis.concat_axes, (A, A), ValueError, "concat_axes: 'a' would name more than one axis in (a, a)."),
    (axn.axis.concat_axes, ((A, B), ("b", "a")), ValueError, "'a', 'b' would name more than one axis in (a, b, b, a)"),
    (axn.axis.concat_axes, ({"a": 2}, {"a": 2}), ValueError, "'a' would name more than one axis"),
    (union_axes, (A, A9), ValueError, "union_axes: axis 'a' has conflicting sizes: 2 in the first, 9 in the second."),
    (intersect_axes, (A, A9), ValueError, "intersect_axes: axis 'a' has conflicting sizes"),
    (without_axes, (A, A9), ValueError, "without_axes: axis 'a' has conflicting sizes"),
    (hax.axis.eliminate_axes, ((A, B), "zz"), ValueError, "eliminate_axes: no axis 'zz' in (a=2, b=3)."),
    (hax.axis.eliminate_axes, ((A, B), A9), ValueError, "conflicting sizes: 2 in the first, 9 in the second"),
    (
        hax.axis.eliminate_axes,
        (Axis("embed", 2), "embde"),
        ValueError,
        "no axis 'embde' in (embed=2). Did you mean 'embed'?",
    ),
    (hax.axis.eliminate_axes, (A, ("x", "y")), ValueError, "no axes 'x', 'y' in (a=2)."),
    (axn.axis.replace_axis, ((A, B), "zz", C), ValueError, "replace_axis: no axis 'zz' in (a=2, b=3)."),
    (axn.axis.replace_axis, ((A, B), A9, C), ValueError, "replace_axis: axis 'a' has conflicting sizes"),
    (axn.axis.replace_axis, ((A, B), "a", B), ValueError, "replace_axis: 'b' would name more than one axis in (b, b)."),
    (axn.axis.resolve_axis, ((A, B), "zz"), ValueError, "resolve_axis: no axis 'zz' in (a=2, b=3)."),
    (axn.axis.resolve_axis, ((A, "b"), "zz"), ValueError, "resolve_axis: no axis 'zz' in (a, b)."),
    (axn.axis.resolve_axis, ((A, B), ("x", "b", "y")), ValueError, "resolve_axis: no axes 'x', 'y' in (a=2, b=3)."),
    (
        axn.axis.resolve_axis,
        ((A, B), A9),
        ValueError,
        "resolve_axis: axis 'a' has conflicting sizes: 2 in the first, 9",
    ),
    (unsize_axes, ((A, B), "zz"), ValueError, "unsize_axes: no axis 'zz' in (a=2, b=3)."),
    (rearrange_for_partial_order, (("zz", ...), (A, B)), ValueError, "rearrange: no axis 'zz' in (a=2, b=3)."),
    (rearrange_for_partial_order, (("a", "a", ...), (A, B)), ValueError, "'a' would name more than one axis"),
    (rearrange_for_partial_order, (("b",), (A, B, C)), ValueError, "'a', 'c' of (a=2, b=3, c=4) are missing"),
    (rearrange_for_partial_order, ((A9, ...), (A, B)), ValueError, "axis 'a' has conflicting sizes: 2 in the first, 9"),
]


@pytest.mark.parametrize(("function", "arguments", "error", "message"), ERRORS)
def test_algebra_errors(
    function: Callable[..., Any], arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        function(*arguments)


def test_make_axes() -> None:
    assert axn.make_axes() == ()
    assert axn.make_axes(x=1, y=2) == (Axis("x", 1), Axis("y", 2))
    with pytest.raises(ValueError, match="Axis 'x': a size cannot be negative, got -2"):
        axn.make_axes(x=-2)
