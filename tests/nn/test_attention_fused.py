"""Fused attention agrees with named operations, or explains why it cannot run.

Pallas' interpreter runs splash attention, instead of the device that it is made for.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import Mesh

import axonym as axn
from axonym.nn.attention import Causal, causal_mask, dot_product_attention
from tests.helpers import assert_named, draw, spec

CLOSE: Any = {"rtol": 1e-5, "atol": 1e-5}
Batch, Pos, KPos, Heads, Group, Size = axn.make_axes(batch=2, pos=4, key_pos=5, heads=2, group=3, head_size=8)
More = axn.Axis("more", 2)


@functools.partial(jax.jit, static_argnames=("implementation", "precision", "attention_dtype", "dropout"))
def attend(q: Any, k: Any, v: Any, mask: Any = None, bias: Any = None, **options: Any) -> axn.NamedArray:
    return dot_product_attention(q, k, v, "key_pos", "head_size", mask, bias, **options)


Q, K, V = draw(Batch, Pos, Heads, Size), draw(Batch, KPos, Heads, Size), draw(Heads, Size, KPos, Batch)
GROUPED = draw(Batch, Heads, Pos, Group, Size)
PADDING = axn.named(np.arange(5) < np.array([[5], [2]]), (Batch, KPos))


@pytest.mark.parametrize(
    ("query", "mask", "bias"),
    [
        (Q, causal_mask(Pos, KPos), draw(Heads, KPos)),
        (GROUPED, Causal("pos", 2, PADDING), draw(KPos, Group)),
        (Q["pos", 0], None, None),
    ],
    ids=["heads", "groups and window", "one query"],
)
def test_xla(query: axn.NamedArray, mask: Any, bias: Any) -> None:
    found = attend(query, K, V, mask, bias, implementation="xla")
    assert_named(found, attend(query, K, V, mask, bias), **CLOSE)


def test_several_batch_axes_no_batch_axis_several_key_axes() -> None:
    q, k, v = (
        draw(More, Pos, Batch, Heads, Size),
        draw(Heads, More, Batch, KPos, Size),
        draw(More, Heads, KPos, Batch, Size),
    )
    bias = draw(Heads, Batch)
    assert_named(attend(q, k, v, None, bias, implementation="xla"), attend(q, k, v, None, bias), **CLOSE)
    q, k, v = draw(Pos, Size), draw(KPos, More, Size), draw(More, KPos, axn.Axis("value_size", 8))
    found, wanted = (
        jax.jit(functools.partial(dot_product_attention, KPos=(KPos, More), Key=Size, implementation=how))(
            q, k, v, scaling_factor=jnp.float32(0.3)
        )
        for how in ("xla", None)
    )
    assert_named(found, wanted, **CLOSE)


def test_xla_on_meshes(mesh: Mesh) -> None:
    with jax.set_mesh(mesh):
        operands = axn.shard((GROUPED, K, V), {"pos": "data", "heads": "model"})
        found = jax.block_until_ready(attend(*operands, Causal("pos"), implementation="fused"))
    assert spec(found) == (None, "model", "data", None, None)
    assert_named(axn.to_host(found), attend(GROUPED, K, V, Causal("pos")), **CLOSE)


# --- splash attention ---

Length = axn.Axis("pos", 128)
KLength = Length.alias("key_pos")
LONG = [
    draw(Batch, Length, Heads, Group.resize(2), Size),
    draw(Batch, KLength, Heads, Size),
    draw(Heads, Batch, KLength, Size),
]
LONG_PADDING = axn.named(np.arange(128) < np.array([[128], [40]]), (Batch, KLength))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    make = functools.partial(splash_attention.make_splash_mha_single_device, interpret=True)
    monkeypatch.setattr(splash_attention, "make_splash_mha_single_device", make)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")


@pytest.mark.usefixtures("interpreted")
def test_splash(auto_mesh: Mesh) -> None:
    """Every device runs the kernel on its part, in the gradient too."""

    def loss(*operands: Any, implementation: Any) -> Any:
        mask = Causal("pos", 40, LONG_PADDING)
        result = attend(*operands, mask, implementation=implementation)
        return axn.sum(axn.sin(result)).scalar(), result

    def gradient(implementation: Any) -> Any:
        return jax.jit(jax.grad(functools.partial(loss, implementation=implementation), has_aux=True))

    with jax.set_mesh(auto_mesh), axn.axis_mapping({"batch": "model"}):
        found = jax.block_until_ready(gradient("fused")(*axn.shard(LONG)))
    for x, wanted in zip(found, gradient(None)(*LONG), strict=True):
        assert spec(x) in [("model",), ("model", None, None, None, None)]
        assert_named(axn.to_host(x), wanted, rtol=1e-4, atol=1e-4)


# --- dtypes on GPUs ---


def test_kernel_of_gpus_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of cuDNN takes two dtypes; arrays of others are computed by XLA, or an error says so."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    expected = dot_product_attention(Q, K, V, "key_pos", "head_size")
    found = dot_product_attention(Q, K, V, "key_pos", "head_size", implementation="fused")
    np.testing.assert_allclose(found.array, expected.rearrange(found.axes).array, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"'cudnn'.* takes float16 and bfloat16, and got float32"):
        dot_product_attention(Q, K, V, "key_pos", "head_size", implementation="cudnn")


# --- errors ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attend(Q, K, V, implementation="cudn"), "no such implementation.* Did you mean 'cudnn'"),
        (
            lambda: attend(Q, K, V, implementation="cudnn"),
            "'cudnn'.*: this kernel needs a GPU, and the devices here are CPUs",
        ),
        (
            lambda: attend(Q, K, V, implementation="splash"),
            "'splash'.*: this kernel needs a TPU, and the devices here are CPUs",
        ),
        (
            lambda: attend(Q, K, V, pdrop=0.1, precision="highest", implementation="xla"),
            "a fused kernel takes no dropout and no precision",
        ),
        (lambda: attend(Q, K, V, attention_dtype=jnp.bfloat16, implementation="xla"), "takes no attention_dtype"),
        (lambda: attend(Q, K, V, Causal("heads"), implementation="xla"), "not an axis of the query alone"),
        (
            lambda: attend(Q["batch", 0], K, V["head_size", 1:], implementation="xla"),
            r"the query lacks \(batch\) of the key; and values should have .* 'head_size'=8, and have \(head_size=7\)",
        ),
        (
            lambda: attend(Q, K, V, draw(KPos), implementation="xla"),
            "a mask must be boolean, true where attention is allowed, got float32",
        ),
        (lambda: attend(Q, K, V, None, draw(More), implementation="xla"), r"`bias` has axes \(more\)"),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.usefixtures("interpreted")
def test_what_splash_attention_cannot_do() -> None:
    with pytest.raises(ValueError, match=r"positions of queries on one device must be a multiple of 128, got 4"):
        attend(Q, K, V, implementation="splash")
    with pytest.raises(ValueError, match=r"the same for all queries of an example; got one with \(pos\)"):
        attend(Q, K, V, causal_mask(Pos, KPos), implementation="splash")
    with pytest.raises(ValueError, match="splash attention takes no bias"):
        attend(Q, K, V, None, draw(Heads, KPos), implementation="splash")
