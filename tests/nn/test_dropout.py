"""`Dropout`: dropped and scaled elements, and when it does nothing."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym.nn.dropout import Dropout, dropout
from tests.helpers import assert_named, spec

Batch, Pos, Embed = axn.make_axes(batch=4, pos=2, embed=6)
KEY = jax.random.key(0)
X = axn.named(np.arange(1, 49, dtype=np.float32).reshape(4, 2, 6), (Batch, Pos, Embed))
KEPT = np.asarray(jax.random.bernoulli(KEY, 0.75, (4, 2, 6)))


def test_values_on_a_mesh(mesh: Mesh) -> None:
    """What is dropped depends on the key alone, and every device decides about its own part."""
    expected = axn.named(np.where(KEPT, X.array / np.float32(0.75), 0), X.axes)
    layer = Dropout(0.25)
    assert_named(layer(X, key=KEY), expected, rtol=1e-6)

    def loss(x, key):
        y = layer(x, key=key)
        return y.sum().array, y

    with jax.set_mesh(mesh):
        x = axn.shard(X, {"batch": "data", "embed": "model"})
        program = jax.jit(jax.grad(loss, has_aux=True)).lower(x, KEY).compile()
        gradient, y = program(x, KEY)
        old_style = dropout(x, 0.25, inference=False, key=jax.random.PRNGKey(0))
    assert_named(y, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient.array, KEPT / 0.75, rtol=1e-6)
    assert spec(y) == spec(gradient) == spec(old_style) == ("data", None, "model")
    assert "all-gather" not in (program.as_text() or "")
    np.testing.assert_array_equal(
        old_style.array != 0, jax.random.bernoulli(jax.random.PRNGKey(0), 0.75, X.array.shape)
    )


def test_dropped_together() -> None:
    kept = np.asarray(jax.random.bernoulli(KEY, 0.5, (1, 2, 1)))
    np.testing.assert_array_equal(Dropout(0.5, [Batch, "embed"])(X, key=KEY).array, np.where(kept, X.array * 2, 0))
    assert len(np.unique(Dropout(0.5, "embed")(X / X, key=KEY).array.sum(-1))) == 2  # all of an embedding or nothing


def test_nothing_is_dropped() -> None:
    assert Dropout(0.0)(X) is X
    assert Dropout(0.5, inference=True)(X) is X
    assert Dropout(0.5)(X, inference=True) is X
    assert eqx.nn.inference_mode(Dropout(0.5))(X) is X
    assert [Dropout(p, None, i).is_active for p, i in ((0.5, False), (0.5, True), (0.0, False))] == [True, False, False]


def test_everything_is_dropped() -> None:
    value, gradient = jax.jit(jax.value_and_grad(lambda x: Dropout(1.0)(x, key=KEY).sum().array))(X)
    assert value == 0 and not gradient.array.any()


def test_traced() -> None:
    """`inference` decides in the program where it is traced, and so does the probability."""
    layer = Dropout(0.25)
    dropped = layer(X, key=KEY)
    run = jax.jit(lambda layer, x, key: layer(x, key=key))
    assert_named(run(layer, X, KEY), dropped, rtol=1e-6)
    assert_named(run(eqx.nn.inference_mode(layer), X, KEY), X)
    assert_named(jax.jit(lambda p: dropout(X, p, inference=False, key=KEY))(0.25), dropped, rtol=1e-6)
    seen = []
    axn.named_jit(lambda layer, x, key: seen.append(layer.is_active) or layer(x, key=key))(layer, X, KEY)
    assert seen == [True]


def test_half_precision() -> None:
    found = Dropout(0.25)(X.astype(jnp.bfloat16), key=KEY)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.array != 0, KEPT)


def test_errors() -> None:
    with pytest.raises(RuntimeError, match="dropout: a random key is needed"):
        Dropout(0.5)(X)
    with pytest.raises(ValueError, match="`pdrop` is a probability, between 0 and 1"):
        Dropout(1.5)(X, key=KEY)
    with pytest.raises(ValueError, match=r"dropout: no axis 'embde' in \(batch=4, pos=2, embed=6\)"):
        Dropout(0.5, "embde")(X, key=KEY)
    with pytest.raises(ValueError, match="dropout: expected one random key, got an array of shape"):
        Dropout(0.5)(X, key=jax.random.split(KEY))


def test_a_traced_probability_of_one_has_a_gradient() -> None:
    slopes = jax.jit(jax.grad(lambda x, p: dropout(x, p, inference=False, key=KEY).sum().array))(X, 1.0)
    assert not slopes.array.any()
