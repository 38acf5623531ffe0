"""What releases of JAX accept on Explicit mesh axes, as docs/explicit_sharding.md says, and the same by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P

import axonym as axn

RELEASE = tuple(int(part) for part in jax.__version__.split(".")[:3])
Batch, Embed, Heads, Pos = axn.make_axes(batch=8, embed=16, heads=4, pos=3)

# The mesh, the arguments with their specs, the program in plain JAX and by name, and whether this release accepts it.
PROGRAMS: dict[str, tuple[dict[str, int], list[Any], Callable[..., Any], Callable[..., Any], bool]] = {
    "a running sum": (
        {"data": 4, "model": 2},
        [((Batch, Embed), P("data"))],
        lambda x: jnp.cumsum(x, 0),
        lambda x: axn.cumsum(x, "batch"),
        RELEASE < (0, 10),
    ),
    "a batch of products": (
        {"data": 4, "model": 2},
        [((Batch, Heads, Pos, Embed), P("data", "model")), ((Batch, Heads, Embed), P("data"))],
        lambda q, k: jnp.einsum("bhqd,bhd->bhq", q, k),
        lambda q, k: axn.dot(q, k, axis="embed"),
        RELEASE < (0, 11, 1),
    ),
    "a mesh axis of one device": (
        {"data": 1, "model": 8},
        [((axn.Axis("batch", 1), Embed), P("data", "model"))],
        lambda x: jnp.concatenate([jax.sharding.reshard(x.reshape(-1, 8, 2), P("data", "model")), x.reshape(-1, 8, 2)]),
        lambda x: axn.concatenate([x.unflatten_axis("embed", {"outer": 8, "inner": 2})] * 2, "batch"),
        RELEASE not in {(0, 9, 0), (0, 11, 0)},
    ),
    "sorted positions": (
        {"data": 4, "model": 2},
        [((Batch, Embed), P("data"))],
        lambda x: jnp.argsort(x, 1),
        lambda x: axn.argsort(x, "embed"),
        RELEASE > (0, 9, 0),
    ),
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_what_a_release_accepts_and_the_same_by_name(what: str) -> None:
    sizes, arguments, plain, by_name, accepted = PROGRAMS[what]
    mesh = axn.make_mesh(sizes, explicit=True)
    whole = [axn.random.normal(jax.random.key(i), axes) for i, (axes, _) in enumerate(arguments)]
    expected = by_name(*whole)
    named = [
        axn.named(jax.device_put(x.array, NamedSharding(mesh, spec)), axes)
        for x, (axes, spec) in zip(whole, arguments, strict=True)
    ]
    with axn.set_mesh(mesh):
        try:
            found = jax.jit(plain)(*(x.array for x in named))
        except Exception as error:  # of a type that JAX does not publish
            assert not accepted, error
        else:
            assert accepted
            np.testing.assert_allclose(found, expected.array, rtol=1e-5)
        result = jax.jit(by_name)(*named)
    assert result.array.sharding.mesh.shape == mesh.shape
    np.testing.assert_allclose(result.array, expected.array, rtol=1e-5)


def test_the_keyword_of_make_mesh() -> None:
    keyword = "axis_shapes" if RELEASE < (0, 11, 1) else "axis_sizes"
    assert next(iter(inspect.signature(jax.make_mesh).parameters)) == keyword
