"""The fused kernel is the default where it applies: the choice, its values, and its derivatives.

No GPU is needed: the kind of the device is mocked, and XLA's implementation runs in place of cuDNN's kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym.insight import explain
from axonym.nn.attention import Causal, causal_mask, dot_product, dot_product_attention, fused
from tests.helpers import draw, spec

Batch, Pos, KPos, Heads, Group, Size = axn.make_axes(batch=4, pos=8, key_pos=8, heads=4, group=2, head_size=16)
GIVEN = draw(Batch, Heads, Pos, Group, Size), draw(Batch, KPos, Heads, Size), draw(Heads, Size, KPos, Batch)
HALF: Any = tuple(x.astype("bfloat16") for x in GIVEN)
CAUSAL = Causal("pos")


@pytest.fixture(autouse=True)
def on_h100(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Mock an H100, and return the kernels that run."""
    ran: list[str] = []
    by_jax = fused._by_jax

    def noted(implementation: Any, *args: Any) -> Any:
        ran.append(implementation)
        return by_jax("xla", *args)

    monkeypatch.setattr(fused, "_by_jax", noted)
    monkeypatch.setattr(fused, "active_device_kind", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(dot_product, "active_platform", lambda: "gpu")
    fused._default_operation.cache_clear()
    return ran


def attend(*operands: Any, mask: Any = CAUSAL, **options: Any) -> axn.NamedArray:
    q, k, v = operands
    return dot_product_attention(q, k, v, "key_pos", "head_size", mask, **options)


def loss(operands: Any, mask: Any = CAUSAL, **options: Any) -> Any:
    return axn.sum(axn.sin(attend(*operands, mask=mask, **options).astype("float32"))).scalar()


def assert_close(found: Any, wanted: Any, tolerance: float = 0.02) -> None:
    """Compare arrays relative to the largest value: bfloat16 has 8 bits."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, atol=tolerance * np.abs(y).max())


@pytest.mark.parametrize("mask", [None, Causal("pos"), Causal("pos", 3)], ids=["all", "causal", "window"])
def test_values_and_derivatives(mask: Any, on_h100: list[str]) -> None:
    """The gradient can be differentiated again, in both modes, though the kernel cannot."""
    found = attend(*HALF, mask=mask)
    assert {*on_h100} == {"cudnn"}
    assert_close(
        found, attend(*HALF, mask=mask, implementation="named", attention_dtype="float32").rearrange(found.axes)
    )
    of = {how: functools.partial(loss, mask=mask, implementation=how) for how in (None, "named")}
    assert_close(jax.grad(of[None])(HALF), jax.grad(of["named"])(HALF))
    along = tuple(x * 0.5 for x in HALF)

    def curved(how: Any) -> Any:
        return jax.jvp(jax.grad(of[how]), (HALF,), (along,))[1]

    def twice(how: Any) -> Any:
        return jax.grad(lambda xs: sum(jnp.sum(x.array.astype("float32") ** 2) for x in jax.grad(of[how])(xs)))(HALF)

    assert_close(curved(None), curved("named"), 0.05)
    assert_close(twice(None), twice("named"), 0.05)


def test_named_operations_where_they_are_asked_for(on_h100: list[str]) -> None:
    attend(*HALF, implementation="named")
    assert not on_h100


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: attend(*GIVEN), "the dtype is float32"),
        (lambda: attend(GIVEN[0], *HALF[1:]), "the dtype is float32 and bfloat16"),
        (lambda: attend(*HALF, mask=causal_mask(Pos, KPos)), "the mask is an array"),
        (lambda: attend(*HALF, mask=Causal("pos", also=axn.ones(KPos, bool))), "the mask is an array"),
        (lambda: attend(*HALF, precision="highest"), "a kernel takes no precision"),
        (lambda: attend(*HALF, bias=axn.zeros(KPos)), "a kernel takes no bias"),
        (
            lambda: attend(*(x["head_size", :12] for x in HALF)),
            "the size of a head, 12, is no multiple of 8 up to 128",
        ),
        (
            lambda: attend(*(axn.concatenate([x] * 9, "head_size") for x in HALF)),
            "the size of a head, 144, is no multiple of 8 up to 128",
        ),
        (
            lambda: attend(*HALF[:2], HALF[2]["head_size", :8]),
            "values have other features than keys",
        ),
    ],
)
def test_the_report_says_why_named_operations_run(call: Any, why: str, on_h100: list[str]) -> None:
    report = explain(lambda: call().array)
    assert f"attention by named operations: {why}" in report.notes and not on_h100


def test_the_report_says_that_the_kernel_runs() -> None:
    assert "attention by cudnn" in explain(jax.grad(loss), HALF).notes


def test_each_device_runs_it_on_its_shards(mesh: Mesh, on_h100: list[str]) -> None:
    """Nothing is gathered, on Auto and Explicit mesh axes, with and without a gradient."""
    with axn.set_mesh(mesh), axn.axis_mapping({"batch": "data", "heads": "model"}):
        operands = axn.shard(HALF)
        for fn in (lambda xs: attend(*xs).array, jax.grad(loss)):
            text = jax.jit(fn).lower(operands).compile().as_text() or ""
            assert "all-gather" not in text and "all-to-all" not in text
        found = jax.jit(jax.grad(loss))(operands)
        assert {*on_h100} == {"cudnn"} and "data" in spec(found[0])
    assert_close(axn.to_host(found), jax.grad(functools.partial(loss, implementation="named"))(HALF))


def test_without_a_mapping_a_mesh_does_not_say_what_is_sharded(auto_mesh: Mesh, on_h100: list[str]) -> None:
    with axn.set_mesh(auto_mesh):
        found = jax.jit(jax.grad(loss))(HALF)
    assert not on_h100
    assert_close(axn.to_host(found), jax.grad(functools.partial(loss, implementation="named"))(HALF))


def test_another_device(monkeypatch: pytest.MonkeyPatch, on_h100: list[str]) -> None:
    monkeypatch.setattr(fused, "active_device_kind", lambda: "Tesla T4")
    attend(*HALF)
    assert not on_h100
