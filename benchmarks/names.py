"""Measure the cost of new names outside of jit: first operations of a notebook, and memory for each set of names."""

from __future__ import annotations

import contextlib
import gc
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import axonym as axn
from axonym import nn

from .harness import Row

SETS = 8
"""How many sets of names each kind of operation is called with."""
MANY = 10_000


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Collects what is compiled inside a with-block."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


# Operations on x[a, b] and w[b, c], with names and without.
Operation = tuple[Callable[..., Any], Callable[..., Any]]
OPERATIONS: list[Operation] = [
    (lambda x, w, a, b, c: axn.exp(x), lambda x, w: jnp.exp(x)),
    (lambda x, w, a, b, c: axn.tanh(x), lambda x, w: jnp.tanh(x)),
    (lambda x, w, a, b, c: axn.sqrt(x), lambda x, w: jnp.sqrt(x)),
    (lambda x, w, a, b, c: -x, lambda x, w: -x),
    (lambda x, w, a, b, c: x + x, lambda x, w: x + x),
    (lambda x, w, a, b, c: x * 2.0, lambda x, w: x * 2.0),
    (lambda x, w, a, b, c: x > 0.5, lambda x, w: x > 0.5),
    (lambda x, w, a, b, c: axn.maximum(x, x), lambda x, w: jnp.maximum(x, x)),
    (lambda x, w, a, b, c: axn.sum(x, b), lambda x, w: jnp.sum(x, 1)),
    (lambda x, w, a, b, c: axn.mean(x, a), lambda x, w: jnp.mean(x, 0)),
    (lambda x, w, a, b, c: axn.max(x, b), lambda x, w: jnp.max(x, 1)),
    (lambda x, w, a, b, c: axn.std(x, b), lambda x, w: jnp.std(x, 1)),
    (lambda x, w, a, b, c: axn.argmax(x, b), lambda x, w: jnp.argmax(x, 1)),
    (lambda x, w, a, b, c: axn.cumsum(x, b), lambda x, w: jnp.cumsum(x, 1)),
    (lambda x, w, a, b, c: axn.sort(x, b), lambda x, w: jnp.sort(x, 1)),
    (lambda x, w, a, b, c: axn.dot(x, w, axis=b), lambda x, w: x @ w),
    (lambda x, w, a, b, c: x.rearrange((b, a)), lambda x, w: x.T),
    (lambda x, w, a, b, c: axn.flatten(x, c), lambda x, w: x.reshape(-1)),
    (lambda x, w, a, b, c: x[a, 3], lambda x, w: x[3]),
    (lambda x, w, a, b, c: x[b, 2:6], lambda x, w: x[:, 2:6]),
    (lambda x, w, a, b, c: x.at[a, 3].set(0.0), lambda x, w: x.at[3].set(0.0)),
    (lambda x, w, a, b, c: axn.where(x > 0, x, 0.0), lambda x, w: jnp.where(x > 0, x, 0.0)),
    (lambda x, w, a, b, c: axn.clip(x, 0.0, 1.0), lambda x, w: jnp.clip(x, 0.0, 1.0)),
    (lambda x, w, a, b, c: axn.concatenate([x, x], a), lambda x, w: jnp.concatenate([x, x], 0)),
    (lambda x, w, a, b, c: nn.softmax(x, b), lambda x, w: jax.nn.softmax(x, 1)),
]


def _loss(w: axn.NamedArray, x: axn.NamedArray, a: str, b: str, c: str) -> jax.Array:
    h = axn.tanh(axn.dot(x, w, axis=b))
    return axn.sum(axn.mean((nn.softmax(h, c) - h) ** 2, a)).array


def _plain_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ w)
    return jnp.sum(jnp.mean((jax.nn.softmax(h, 1) - h) ** 2, 0))


# Derivatives of a loss of seven operations, the operations being eager.
DERIVATIVES: list[Operation] = [
    (lambda x, w, a, b, c: jax.grad(_loss)(w, x, a, b, c), lambda x, w: jax.grad(_plain_loss)(w, x)),
    (
        lambda x, w, a, b, c: jax.jvp(lambda w: _loss(w, x, a, b, c), (w,), (w,)),
        lambda x, w: jax.jvp(lambda w: _plain_loss(w, x), (w,), (w,)),
    ),
    (
        lambda x, w, a, b, c: jax.vmap(lambda by: jax.grad(_loss)(w * by, x, a, b, c))(jnp.ones(3)),
        lambda x, w: jax.vmap(lambda by: jax.grad(_plain_loss)(w * by, x))(jnp.ones(3)),
    ),
]


def rows() -> list[Row]:
    """The first operations of a notebook, compiled anew, its derivatives, and the memory after many sets of names."""
    kept = _kept()
    return [
        *_first_calls("operations", OPERATIONS),
        *_first_calls("derivatives", DERIVATIVES),
        Row("names", f"KiB kept for each of {MANY} sets of names", f"{kept:.1f}", "", kept, 4.0),
    ]


def _first_calls(what: str, operations: Sequence[Operation]) -> list[Row]:
    X, W = jnp.linspace(0.1, 1.0, 37 * 53).reshape(37, 53), jnp.ones((53, 29))
    jax.clear_caches()
    jax.block_until_ready((X + 0, W + 0))
    seconds, compiled = [0.0, 0.0], [0, 0]
    for i in range(SETS):
        a, b, c = (f"{name}_{i}" for name in ("batch", "embed", "mlp"))
        named, raw = (axn.named(X, (a, b)), axn.named(W, (b, c)), a, b, c), (X, W)
        for k, (ours, theirs) in enumerate(operations):
            calls = [(0, ours, named), (1, theirs, raw)]
            for side, call, arguments in calls if k % 2 else reversed(calls):
                with compilations() as seen:
                    start = time.perf_counter()
                    jax.block_until_ready(call(*arguments))
                    seconds[side] += time.perf_counter() - start
                compiled[side] += len(seen)
    first = f"first {SETS * len(operations)} {what}, by {SETS} sets of names"
    (mine, others), (ours_took, theirs_took) = compiled, seconds
    return [
        Row("names", f"{first}: programs compiled", f"{mine}", f"{others}", mine / others, 1.0),
        Row("names", f"{first}: time", f"{ours_took:.2f} s", f"{theirs_took:.2f} s", ours_took / theirs_took, 1.1),
    ]


def _kept() -> float:
    """How many KiB of memory a set of names takes, in two operations."""
    X = jnp.ones((37, 53))

    def call(i: int) -> None:
        x = axn.named(X, (f"a{i}", f"b{i}"))
        jax.block_until_ready((axn.sum(x + x, f"b{i}")).array)

    for i in range(100):
        call(-1 - i)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(MANY):
        call(i)
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, 0) / MANY
