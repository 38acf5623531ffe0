"""Errors of samplers, in the caller's terms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym import random
from tests.random.samplers import AXES, KEY, Batch, Embed, Pos, Vocab


@pytest.mark.parametrize(
    ("key", "error", "match"),
    [
        (None, TypeError, r"random.normal: the first argument is a random key, got NoneType. .*jax.random.key"),
        (0, TypeError, "got int"),
        (Batch, TypeError, "got Axis"),
        (jnp.zeros(2), TypeError, "got an array of float32"),
        (jax.random.split(KEY, 3), ValueError, r"expected one random key, got an array of shape \(3,\)"),
        (jax.random.split(jax.random.PRNGKey(0), 3), ValueError, r"got an array of shape \(3, 2\)"),
        (
            axn.named(jax.random.split(KEY, 8), "batch"),
            ValueError,
            r"got the named array key<fry>\[batch=8\]. Map .*axonym.vmap",
        ),
    ],
)
def test_wrong_keys(key: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        random.normal(key, Batch)


def test_wrong_shapes() -> None:
    with pytest.raises(ValueError, match=r"random.normal needs axes with sizes, got only the name 'batch'"):
        random.normal(KEY, "batch")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"random.normal: 'batch' would name more than one axis"):
        random.normal(KEY, (Batch, Batch))
    with pytest.raises(ValueError, match=r"random.ball: 'batch' would name more than one axis"):
        random.ball(KEY, Batch, Batch)
    with pytest.raises(ValueError, match=r"random.ball: `D` must be one axis, got \(batch=8, pos=3, embed=4\)"):
        random.ball(KEY, (), AXES)  # pyright: ignore[reportArgumentType]


def test_wrong_parameters() -> None:
    """Every one of them is listed."""
    a, b = axn.ones({"embd": 4, "batch": 2}), jnp.ones(3)
    with pytest.raises(ValueError, match=r"random.beta: `a` \(embd=4, batch=2\) has \(embd\), which") as error:
        random.beta(KEY, AXES, a, b)
    message = str(error.value)
    assert "(batch=8, pos=3, embed=4) lacks" in message and "Did you mean 'embed'?" in message
    assert "has 2 for axis 'batch', the result has 8" in message
    assert "`b` has no axis names but shape (3,); name its axes with axonym.named" in message
    with pytest.raises(ValueError, match=r"random.ball: `p` must be a scalar, got an array with axes \(batch=8\)"):
        random.ball(KEY, Batch, Embed, p=axn.ones(Batch))  # pyright: ignore[reportArgumentType]
    lost = jax.tree.map(lambda x: x[0], axn.ones((Batch, Pos)))
    with pytest.raises(ValueError, match=r"random.poisson: `lam`: This named array has 2 names"):
        random.poisson(KEY, AXES, lost)


def test_wrong_selections() -> None:
    logits = axn.ones((Batch, Vocab))
    with pytest.raises(ValueError, match=r"random.categorical: the shape \(pos=3\) lacks \(batch\) of the logits"):
        random.categorical(KEY, logits, "vocab", Pos)
    with pytest.raises(ValueError, match=r"random.categorical: 'vocab' would name more than one axis"):
        random.categorical(KEY, logits, "vocab", (Batch, Vocab))
    with pytest.raises(ValueError, match=r"random.categorical: `logits` .* has 8 for axis 'batch', the result has 4"):
        random.categorical(KEY, logits, "vocab", Batch.resize(4))
    with pytest.raises(ValueError, match=r"random.choice: no axis 'x' in \(batch=8, vocab=16\)"):
        random.choice(KEY, Pos, logits, "x")
    with pytest.raises(ValueError, match=r"random.choice: 'vocab' would name more than one axis"):
        random.choice(KEY, Vocab, logits, "batch")
    with pytest.raises(ValueError, match=r"random.choice: there are more draws \(draw=9\) than axis batch\(8\)"):
        random.choice(KEY, {"draw": 9}, logits, "batch", replace=False)
    with pytest.raises(
        ValueError, match=r"of `a`, got \(vocab=16\). Write `p=axonym.named\(probabilities, 'batch'\)`, or"
    ):
        random.choice(KEY, Pos, logits, "batch", p=axn.ones(Vocab))
    with pytest.raises(TypeError, match=r"random.permutation: expected a NamedArray, got ArrayImpl"):
        random.permutation(KEY, jnp.ones(3), "x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"random.permutation: axis 'batch' has conflicting sizes"):
        random.permutation(KEY, logits, Batch.resize(3))
    with pytest.raises(ValueError, match=r"random.permutation: `axis` must be one axis.* Write `'batch'` or another"):
        random.permutation(KEY, logits, ("batch", "vocab"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match=r"got the named array float32\[.*\]. The key is the first argument: make"
    ) as error:
        random.permutation(logits, KEY, "batch")  # pyright: ignore[reportArgumentType]
    assert "1." not in str(error.value).split("float32[", 1)[1]  # no contents of the array
    with pytest.raises(TypeError, match=r"got int32\[.*\]. Write `logits.astype\(float\)`"):
        random.categorical(KEY, logits.astype(int), "vocab")
    with pytest.raises(ValueError, match=r"`top_k` cannot be 0. Leave it out to choose from all"):
        random.categorical(KEY, logits, "vocab", top_k=0)


def test_wrong_mappings(mesh: Mesh) -> None:
    with jax.set_mesh(mesh), axn.axis_mapping({"pos": "model", "batch": "modle"}):
        with pytest.raises(ValueError, match=r"random.normal on mesh .* 2 problems:") as error:
            random.normal(KEY, AXES)
    assert "axis 'pos' of size 3 cannot be sharded over model=2" in str(error.value)
    assert "Did you mean 'model'?" in str(error.value)
