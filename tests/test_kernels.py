"""Kernels: built once, found again, bounded in number, and without values in messages."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym.ops import _kernels
from axonym.ops.updating import updated_slice
from tests.helpers import compilations


def _array(*names: str, size: int = 3) -> axn.NamedArray:
    return axn.named(jnp.ones((size,) * len(names)), names)


# Calls of every kind of operation, on arrays whose axes are given.
CALLS: dict[str, Callable[..., Any]] = {
    "unary": lambda a, b: axn.exp(axn.zeros(a)),
    "binary": lambda a, b: axn.zeros((a, b)) + axn.zeros((b, a)),
    "number": lambda a, b: 2.0 * axn.zeros((a, b)),
    "reduction": lambda a, b: axn.sum(axn.zeros((a, b)), a),
    "masked": lambda a, b: axn.mean(axn.zeros((a, b)), a, where=axn.zeros(b, bool)),
    "options": lambda a, b: axn.var(axn.zeros((a, b)), (a, b), ddof=1, dtype=jnp.float32),
    "index of": lambda a, b: axn.argmax(axn.zeros((a, b)), b),
    "running": lambda a, b: axn.cumsum(axn.zeros((a, b)), a.name),
    "dot": lambda a, b: axn.dot(axn.zeros((a, b)), axn.zeros(b), axis=b),
    "integer": lambda a, b: axn.zeros((a, b))[a.name, 0],
    "look-up": lambda a, b: axn.take(axn.zeros((a, b)), a, axn.zeros(axn.Axis("i", 2), jnp.int32)),
    "layout": lambda a, b: axn.rearrange(axn.zeros((a, b)), (b, a)),
    "method": lambda a, b: axn.zeros((a, b)).max(b),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_second_call_compiles_nothing(name: str) -> None:
    """Axes made anew, numbers of another value, arrays of other contents: the same kernel."""
    CALLS[name](axn.Axis("a", 3), axn.Axis("b", 4))
    with compilations() as compiled:
        CALLS[name](axn.Axis("a", 3), axn.Axis("b", 4))
    assert compiled == []


def test_compilations_are_seen() -> None:
    """The check above can fail."""
    with compilations() as compiled:
        jax.jit(lambda x: x + 12345)(jnp.ones(3))
    assert any("backend_compile" in event for event in compiled)


WITH_NUMBERS: dict[str, Callable[[axn.NamedArray], axn.NamedArray]] = {
    "arange": lambda x: axn.arange(x.resolve_axis("a"), start=1, step=2) * x,
    "update": lambda x: x.at["a", 1].set(5.0),
    "update of integers": lambda x: x.astype(int).at["a", axn.named([0, 1], "i")].add(2),
    "updated_slice": lambda x: updated_slice(x, {"a": 1}, axn.zeros({"a": 2})),
    "quantile": lambda x: axn.quantile(x, 0.25, "a"),
    "draw": lambda x: axn.random.truncated_normal(jax.random.key(0), x.axes, -1, 1),
}


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_numbers_without_jit(name: str) -> None:
    """They come as they are, and take part as they do in jit."""
    x = _array("a")
    expected = WITH_NUMBERS[name](x)
    with jax.disable_jit():
        found = WITH_NUMBERS[name](x)
    np.testing.assert_allclose(found.array, expected.array, rtol=1e-6)  # draws are rounded otherwise
    assert found.dtype == expected.dtype


def test_triangles_need_no_promotion() -> None:
    x = _array("a", "b")
    with jax.numpy_dtype_promotion("strict"):
        assert axn.tril(x, "a", "b").sum().item() == 6 and axn.trace(x, "a", "b", dtype=jnp.int32).item() == 3


def test_values_are_no_part_of_a_kernel() -> None:
    x = _array("a")
    x * 2.0, x["a", 0]
    with compilations() as compiled:
        x * 3.0, x["a", 2]
    assert compiled == []


# --- how often kernels are built and traced ---


def _counting_kernel() -> tuple[Callable[[axn.NamedArray], Any], list[Any], list[tuple[int, ...]]]:
    """Make an operation that records the names its kernel was built for, and the shapes it was traced for."""
    built: list[Any] = []
    traced: list[tuple[int, ...]] = []

    @_kernels.cached
    def kernel(names: tuple[str, ...]) -> _kernels.Kernel:
        built.append(names)

        def fn(x: jax.Array) -> jax.Array:
            traced.append(x.shape)
            return x + 1

        return _kernels.make_kernel("counting", fn, (names,), names, {})

    return lambda a: kernel(a.names).call(a.array), built, traced


def test_a_kernel_is_built_for_names_and_traced_for_sizes() -> None:
    run, built, traced = _counting_kernel()
    run(_array("a", "b"))
    run(_array("a", "b") * 5)
    assert (built, traced) == ([("a", "b")], [(3, 3)])
    run(_array("a", "b", size=4))
    run(_array("a", "b", size=4))
    assert (built, traced) == ([("a", "b")], [(3, 3), (4, 4)])
    run(_array("b", "a"))
    assert (built, len(traced)) == ([("a", "b"), ("b", "a")], 3)
    run(axn.astype(_array("a", "b"), jnp.int32))
    assert (len(built), len(traced)) == (2, 4)


def test_a_kernel_leaves_no_trace_in_a_program() -> None:
    """It is inlined: a program made of named operations is that of the positional ones."""
    named = jax.make_jaxpr(lambda a: axn.sum(axn.exp(axn.named(a, ("a", "b"))), "b").array)(jnp.ones((2, 3)))
    positional = jax.make_jaxpr(lambda a: jnp.sum(jnp.exp(a), axis=1))(jnp.ones((2, 3)))
    assert str(named) == str(positional)


def test_kernels_are_named_after_the_operation() -> None:
    """That is how they show up in profiles and compiler logs."""
    text = jax.jit(lambda a: axn.cumsum(a, "a")).lower(_array("a")).as_text(debug_info=True)
    assert "cumsum" in text


def test_the_cache_is_bounded() -> None:
    """The kernels unused for longest go, and what they hold with them."""
    kept: list[weakref.ref[Any]] = []

    @_kernels.cached
    def kernel(number: int) -> _kernels.Kernel:
        def fn(x: jax.Array) -> jax.Array:
            return x

        kept.append(weakref.ref(fn))
        return _kernels.Kernel(fn, number)

    lookups: Any = kernel
    assert lookups.cache_info().maxsize == _kernels.CACHE_SIZE
    for number in range(_kernels.CACHE_SIZE + 10):
        kernel(number)
    gc.collect()
    assert lookups.cache_info().currsize == _kernels.CACHE_SIZE
    assert [ref() is None for ref in kept[:10]] == [True] * 10
    assert kept[-1]() is not None


def test_every_cache_of_kernels_is_bounded() -> None:
    """A cache of another kind than `_kernels.cached` must be bounded too."""
    gc.unfreeze()
    gc.collect()  # a plan has caches of its own, which end with it
    caches = [x for x in gc.get_objects() if hasattr(type(x), "cache_info") and _module(x).startswith("axonym")]
    assert len(caches) > 20
    assert [f"{_module(c)}.{c.__qualname__}" for c in caches if c.cache_info().maxsize is None] == []


def _module(x: Any) -> str:
    return getattr(x, "__module__", None) or ""


# --- errors ---

SECRET = 73219.5  # shows up in a message only if values do
x = axn.named(jnp.full((2, 3), SECRET), ("batch", "embed"))
y = axn.named(jnp.full((2, 4), SECRET), ("batch", "embed"))
z = axn.named(jnp.full((5,), SECRET), "heads")
raw: Any = x.array  # a type checker would refuse some of the calls below, too

ERRORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: x + y, "add: axis 'embed' has conflicting sizes: 3 in operand 0, 4 in operand 1"),
    (lambda: x + z, "add: cannot broadcast (batch, embed) and (heads)"),
    (lambda: axn.maximum(x, y), "maximum: axis 'embed' has conflicting sizes"),
    (lambda: axn.divmod(x, y), "divmod: axis 'embed' has conflicting sizes"),
    (lambda: axn.power(x, z), "power: cannot broadcast (batch, embed) and (heads)"),
    (
        lambda: axn.power(x, cast(Any, [2])),
        "power: expected a named array or a number, got list. Name the axes of a list",
    ),
    (lambda: x == (1, 2), "equal: expected a named array or a number, got tuple. Name the axes of a list"),
    (lambda: x + x.array, "add: an operand has no axis names but shape (2, 3)"),
    (lambda: axn.sum(x, "embde"), "sum: no axis 'embde' in (batch=2, embed=3). Did you mean 'embed'?"),
    (lambda: axn.sum(x, ("pos", "heads")), "sum: no axes 'pos', 'heads' in (batch=2, embed=3)"),
    (
        lambda: axn.sum(x, axn.Axis("embed", 4)),
        "sum: axis 'embed' has conflicting sizes: 3 in the array, 4 in the argument",
    ),
    (lambda: axn.sum(x, ("embed", "embed")), "sum: 'embed' would name more than one axis"),
    (lambda: axn.sum(x, raw), "An axis is selected by an Axis or its name, got ArrayImpl"),
    (lambda: axn.sum(x.array, "embed"), "sum: expected a NamedArray, got ArrayImpl; only its axes have names"),
    (lambda: axn.mean(x, where=z > 0), "mean: `where` has axes (heads) that the array (batch, embed) lacks"),
    (lambda: axn.mean(x, where=y > 0), "mean: axis 'embed' has conflicting sizes: 3 in operand 0, 4 in operand 1"),
    (lambda: axn.max(x, where=raw > 0), "max: an operand has no axis names but shape (2, 3)"),
    (lambda: axn.argmax(x, "pos"), "argmax: no axis 'pos' in (batch=2, embed=3)"),
    (lambda: axn.argmax(x, cast(Any, ("batch", "embed"))), "argmax: expected one axis, got (batch, embed)"),
    (lambda: axn.cumsum(x, "pos"), "cumsum: no axis 'pos' in (batch=2, embed=3)"),
    (lambda: axn.cumsum(x, axn.Axis("embed", 4)), "cumsum: axis 'embed' has conflicting sizes: 3 in the array, 4"),
    (lambda: axn.dot(x, y, axis="embed"), "embed"),
    (lambda: axn.dot(x, z, axis="pos"), "pos"),
    (lambda: axn.rearrange(x, ("embed", "pos")), "pos"),
    (lambda: x["pos", 0], "pos"),
    (lambda: axn.take(x, "pos", 0), "pos"),
    (lambda: x.scalar(), "float32[batch=2, embed=3]"),
    (lambda: x.item(), "float32[batch=2, embed=3]"),
    (lambda: bool(x), "float32[batch=2, embed=3]"),
    (lambda: list(x), "unbind"),
    (lambda: cast(Any, x) @ y, "dot"),
    (lambda: axn.named(x, "a"), "already has names"),
    (lambda: axn.named(x.array, "a"), "1 axis (a) for an array of rank 2"),
    (lambda: axn.sum(x, [x.array]), "got ArrayImpl"),  # pyright: ignore[reportCallIssue,reportArgumentType]
    (lambda: jnp.sum(cast(Any, x)), "JAX's sum works by position and does not take a NamedArray: use `axonym.sum`"),
    (lambda: jnp.zeros_like(cast(Any, x)), "JAX's zeros_like works by position and does not take a NamedArray: use"),
    (lambda: jax.nn.relu(cast(Any, x)), "take a NamedArray. It is `axonym.nn.relu`. Or pass the raw array"),
    (lambda: np.matmul(cast(Any, x), cast(Any, y)), "`axonym.dot(x, y, axis="),
    (lambda: np.sin(x), "works by position"),  # pyright: ignore
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[message[:40] for _, message in ERRORS])
def test_errors_speak_of_axes_and_never_of_values(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)) as raised:
        call()
    assert "73219" not in str(raised.value)
    assert not re.search(r"\(0, 1\)|axis 0|axis 1|dimension", str(raised.value)), "positions are not the user's words"


@pytest.mark.parametrize(("call", "message"), ERRORS[:20], ids=[message[:40] for _, message in ERRORS[:20]])
def test_a_call_that_failed_fails_again(call: Callable[[], Any], message: str) -> None:
    """What is remembered about a call that failed does not make the next one pass, or fail otherwise."""
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            call()


def test_unknown_axes_show_the_sizes_of_the_call() -> None:
    """The message is made for the array at hand, though the kernel knows only names."""
    for size in (3, 7):
        with pytest.raises(ValueError, match=re.escape(f"no axis 'pos' in (a={size})")):
            axn.sum(_array("a", size=size), "pos")
