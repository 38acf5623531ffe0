"""Programs with unusual shapes and primitives, which `infer` must follow without a failure or a wrong name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import hijax

import axonym as axn
from tests.names.models import abstract, tokens


def scanned(combine: Any) -> Callable[[Any], Any]:
    return lambda x: lax.associative_scan(combine, x, axis=1)


def called_back(x: jax.Array) -> jax.Array:
    jax.debug.callback(lambda x: None, x)
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@jax.custom_jvp
def custom(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


custom.defjvp(lambda primals, tangents: (custom(*primals), tangents[0] * jnp.cos(primals[0])))

ARRAYS: list[tuple[Callable[..., Any], Any]] = [
    (scanned(jnp.add), ("a", "b")),
    (scanned(lambda x, y: jnp.maximum(x, y) * 2), ("a", "b")),
    (lambda x: x[:, :0], ("a", None)),
    (lambda x: x[:0].sum(0), ("b",)),
    (lambda x: x[:, 1:1].reshape(-1), (None,)),
    (lambda x: jnp.concatenate([x[:, :0], x, x[:, :0]], 1), ("a", "b")),
    (lambda x: jnp.pad(x[:, :0], ((0, 0), (0, 3))), ("a", None)),
    (lambda x: jnp.split(x, [0, x.shape[1]], 1)[1], ("a", "b")),
    (lambda x: x[None, :, None, :], (None, "a", None, "b")),
    (lambda x: jnp.squeeze(x[:, None], 1), ("a", "b")),
    (lambda x: x.sum(), ()),
    (lambda x: x[0, 0] + jnp.float32(1), ()),
    (lambda x: x[::-1, ::2], ("a", "b")),
    (lambda x: x.T.ravel().reshape(x.T.shape).T, ("a", "b")),
    (lambda x: x[jnp.zeros((0,), int)], (None, "b")),
    (lambda x: x.at[jnp.zeros((0,), int)].set(0), ("a", "b")),
    (lambda x: lax.scan(lambda c, y: (c, y), (), x, length=x.shape[0])[1], ("a", "b")),
    (lambda x: lax.scan(lambda c, _: (c * 2, c), x, None, length=0), (("a", "b"), (None, "a", "b"))),
    (lambda x: lax.scan(lambda c, y: (c + y.sum(), y), 0.0, x, reverse=True, unroll=2)[1], ("a", "b")),
    (lambda x: (lax.while_loop(lambda c: False, lambda c: c, ()), x)[1], ("a", "b")),
    (lambda x: lax.fori_loop(0, 0, lambda i, c: c + i, x), ("a", "b")),
    (lambda x: lax.fori_loop(0, 3, lambda i, c: lax.dynamic_update_index_in_dim(c, x[0], i, 0), x), ("a", "b")),
    (lambda x: lax.switch(1, [lambda x: x, lambda x: x * 2, jnp.sin], x), ("a", "b")),
    (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "SAME"), ("a", "b")),
    (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")[:, :0], ("a", None)),
    (lambda x: lax.reduce_window((x, x), (0.0, 0.0), lambda a, b: (a[0], b[1]), (1, 2), (1, 1), "SAME")[0], ("a", "b")),
    (lambda x: lax.reduce((x, x), (0.0, 0.0), lambda a, b: (a[0] + b[0], b[1]), (1,)), (("a",), ("a",))),
    (lambda x: lax.sort((x, x, -x), dimension=1, num_keys=2), (("a", "b"),) * 3),
    (lambda x: lax.top_k(x, 2), (("a", "b"), ("a", "b"))),
    (lambda x: lax.cummax(x, axis=1, reverse=True), ("a", "b")),
    (lambda x: jnp.fft.ifft(jnp.fft.fft(x)).real, ("a", "b")),
    (lambda x: jnp.fft.irfft(jnp.fft.rfft(x), x.shape[1]), ("a", "b")),
    (lambda x: lax.complex(x, x).conj().imag, ("a", "b")),
    (lambda x: (x + 1j) @ (x.T - 1j), ("a", "a'")),
    (lambda x: jax.grad(lambda z: jnp.abs(z).sum())(x + 0j), ("a", "b")),
    (lambda x: x.view(jnp.uint8), ("a", None)),
    (lambda x: jax.random.normal(jax.random.key(0), x.shape) + x, ("a", "b")),
    (lambda x: jax.random.permutation(jax.random.key(0), x), ("a", "b")),
    (lambda x: jax.random.categorical(jax.random.key(0), x), ("a",)),
    (called_back, ("a", "b")),
    (jax.jacfwd(lambda x: custom(x).sum(1)), ("a", "a'", "b")),
    (jax.checkpoint(custom), ("a", "b")),
    (lambda x: jax.linearize(jnp.tanh, x)[1](x), ("a", "b")),
    (lambda x: jax.vmap(lambda x: jnp.nonzero(x, size=2)[0])(x), ("a", None)),
    (lambda x: jnp.unique(x, size=3), (None,)),
    (lambda x: jnp.searchsorted(x[0], x[:, 0]), ("a",)),
    (lambda x: jnp.interp(x, x[0], x[0]), ("a", "b")),
    (lambda x: jnp.histogram(x, 4)[0], (None,)),
    (lambda x: jnp.einsum("ab,cb->ac", x, x), ("a", "a'")),
    (lambda x: jnp.einsum("ab,ab->", x, x), ()),
    (lambda x: jnp.convolve(x[0], x[0], "same"), ("b",)),
    (lambda x: jax.image.resize(x, (2, 7), "linear"), ("a", "b")),
    (lambda x: jnp.linalg.norm(x, axis=1), ("a",)),
    (lambda x: jnp.linalg.qr(x), (("a", None), (None, "b"))),
    (lambda x: jnp.linalg.svd(x), (("a", None), (None,), (None, "b"))),
    (lambda x: jnp.linalg.svd(x, full_matrices=False, compute_uv=False), (None,)),
    (lambda x: jnp.linalg.pinv(x), ("b", "a")),
    (lambda x: jnp.linalg.lstsq(x, x[:, 0])[0], ("b",)),
]  # fmt: skip


def square(x: jax.Array) -> jax.Array:
    return x @ x.T + jnp.eye(x.shape[0])


MATRICES: list[tuple[Callable[..., Any], Any]] = [
    (lambda x: jnp.linalg.solve(square(x), x), ("a", "b")),
    (lambda x: jnp.linalg.solve(square(x), x[:, 0]), ("a",)),
    (lambda x: jnp.linalg.inv(square(x)) @ x, ("a", "b")),
    (lambda x: jnp.linalg.det(square(x)), ()),
    (lambda x: jnp.linalg.slogdet(square(x)), ((), ())),
    (lambda x: jnp.linalg.eigh(square(x)), ((None,), ("a", None))),
    (lambda x: jnp.linalg.eig(square(x)), ((None,), ("a", None))),
    (lambda x: jnp.linalg.matrix_power(square(x), 3), ("a", "a'")),
    (lambda x: jax.scipy.linalg.expm(square(x)), ("a", "a'")),
    (lambda x: jax.scipy.linalg.lu(square(x)), None),
    (lambda x: jax.scipy.linalg.schur(square(x)), None),
    (lambda x: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(square(x)), True), x), ("a", "b")),
    (lambda x: jax.scipy.linalg.solve_triangular(square(x), x[:, 0], trans=1), ("a",)),
    (lambda x: jax.scipy.sparse.linalg.cg(square(x), x[:, 0])[0], ("a",)),
    (lambda x: lax.linalg.tridiagonal_solve(x, x, x, jnp.stack([x, x], -1)), None),
    (lambda x: jax.jacrev(lambda x: jnp.tanh(x).sum(0))(x), ("b", "a", "b'")),
    (jax.hessian(lambda x: jnp.sin(x[:, 0]).sum()), None),
]  # fmt: skip


def agrees(found: Any, right: Any, shape: tuple[int, ...]) -> bool:
    """Return whether the names of an array are right; parts of an axis and axes without a name may have any."""
    bare = [None if n is None or not n.rstrip("'").isidentifier() else n.rstrip("'") for n in found]
    return all(a in (None, b and b.rstrip("'")) or n < 2 for a, b, n in zip(bare, right, shape, strict=True))


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (1, 4), (4, 1), (8, 6)], ids=str)
def test_arrays(shape: tuple[int, int]) -> None:
    for i, (fn, right) in enumerate(ARRAYS + MATRICES):
        try:
            results = jax.eval_shape(fn, abstract(*shape))
        except (TypeError, ValueError):  # JAX has no such operation for this shape
            continue
        program = axn.names.infer(fn, abstract(*shape), names=("a b",))
        assert not program.mix_ups, (i, shape, program)
        names = jax.tree.structure(results).flatten_up_to(program.results)
        if right is not None:
            wanted = right if isinstance(results, (tuple, list)) else (right,)
            for x, found, own in zip(jax.tree.leaves(results), names, wanted, strict=True):
                assert agrees(found, own, x.shape), (i, shape, found, own)
        str(program)


def test_arrays_without_elements() -> None:
    for shape in ((0, 4), (4, 0), (0, 0)):
        count = 0
        for fn, _ in ARRAYS:
            try:
                jax.eval_shape(fn, abstract(*shape))
            except (TypeError, ValueError, ZeroDivisionError, IndexError):
                continue
            count += 1
            str(axn.names.infer(fn, abstract(*shape), names=("a b",)))
        assert count > 30


def test_scalars_and_integers() -> None:
    assert axn.names.infer(lambda x: x + 1, jnp.float32(2)).results == ()
    assert axn.names.infer(lambda: jnp.ones(3)).results == (None,)
    assert axn.names.infer(lambda x, i: lax.dynamic_slice(x, (i, i), (2, 4)), abstract(3, 4), jnp.int32(1),
                           names=("a b", None)).results == ("a", "b")  # fmt: skip
    found = axn.names.infer(lambda i, t: t[i], tokens(0), abstract(3, 4), names=("n", "a b")).results
    assert agrees(found, ("n", "b"), (0, 4))


def test_names_of_named_arrays_inside() -> None:
    """Axes without names get those that named operations have for them; an axis with a name keeps it."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        named = axn.named(x, ("batch", "embed"))
        hidden = axn.dot(named, axn.named(w, ("embed", "mlp")), axis="embed")
        return axn.sum(axn.tanh(axn.rename(hidden, {"mlp": "other"}))).array

    program = axn.names.infer(jax.value_and_grad(loss), abstract(4, 4), abstract(3, 4))
    assert program.arguments == ((("embed", "mlp"), ("batch", "embed")), {})
    assert program.results == ((), ("embed", "mlp"))
    assert not program.mix_ups

    def update(w: axn.NamedArray, x: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda w: axn.sum(axn.rename(w, {"mlp": "out"}) ** 2).array)(w)
        return w.array - 0.1 * gradient.array

    program = axn.names.infer(update, axn.named(jnp.ones((4, 4)), ("embed", "mlp")), abstract(4))
    assert program.results == ("embed", "mlp")
    assert not program.mix_ups


@pytest.mark.skipif(not hasattr(hijax, "HiPrim"), reason="JAX has no such operations before 0.12")
def test_operations_of_hijax() -> None:
    class Scaled(hijax.HiPrim):  # pyright: ignore
        def __init__(self, of: Any, by: float):
            self.in_avals, self.out_aval, self.params = (of,), of, {"by": by}
            super().__init__()

        def expand(self, x: jax.Array) -> jax.Array:
            return x * self.params["by"]

    program = axn.names.infer(lambda x: Scaled(jax.typeof(x), 2.0)(x), abstract(3, 4), names=("a b",))
    assert program.results == ("a", "b")
    assert "no rule" not in str(program)
