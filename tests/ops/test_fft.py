"""Fourier transforms: the forms of the axis argument, and errors for impossible ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym import fft

untyped: Any = fft  # for calls that a type checker would refuse
T, F = axn.make_axes(time=5, freq=7)
A = axn.arange(axn.make_axes(batch=2, time=5), dtype=jnp.float32)
SCALAR = axn.sum(A)


@pytest.mark.parametrize(
    ("axis", "names", "length"),
    [
        (None, ("batch", "time"), 5),
        ("time", ("batch", "time"), 5),
        (["time"], ("batch", "time"), 5),
        (T.resize(7), ("batch", "time"), 7),
        (T.resize(3), ("batch", "time"), 3),
        ({"time": None}, ("batch", "time"), 5),
        ({"time": 7}, ("batch", "time"), 7),
        ({"time": np.int64(7)}, ("batch", "time"), 7),
        ({"time": "freq"}, ("batch", "freq"), 5),
        ({T: F}, ("batch", "freq"), 7),
    ],
)
def test_axis_argument(axis: Any, names: tuple[str, ...], length: int) -> None:
    found = fft.fft(A, axis)
    assert found.names == names
    np.testing.assert_allclose(found.array, np.fft.fft(A.array, n=length), rtol=1e-5, atol=1e-5)


def test_lengths_of_results() -> None:
    half = fft.rfft(A, "time")
    assert half.shape == {"batch": 2, "time": 3}
    assert fft.irfft(half, "time").shape == {"batch": 2, "time": 4}
    assert fft.irfft(half, T).shape == {"batch": 2, "time": 5}
    assert fft.hfft(half, T).shape == {"batch": 2, "time": 5}
    assert fft.ihfft(A, {"time": axn.Axis("freq", 8)}).shape == {"batch": 2, "freq": 5}
    np.testing.assert_allclose(fft.irfft(half, T).array, A.array, atol=1e-5)


def test_the_last_named_of_several_axes_is_halved() -> None:
    found = fft.rfft(A, ("time", "batch"))
    assert found.shape == {"batch": 2, "time": 5}
    np.testing.assert_allclose(found.array, np.fft.rfftn(A.array, axes=(1, 0)), rtol=1e-5, atol=1e-5)
    assert fft.rfft(A, ("batch", "time")).shape == {"batch": 2, "time": 3}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: fft.fft(A, "tim"),
            ValueError,
            r"^fft: no axis 'tim' in \(batch=2, time=5\)\. Did you mean 'time'\?",
        ),
        (lambda: fft.fft(A, {"t": F, "x": None}), ValueError, r"^fft: no axes 't', 'x' in \(batch=2, time=5\)"),
        (
            lambda: fft.fft(A, {T.resize(4): "freq"}),
            ValueError,
            r"^fft: axis 'time' .*: 5 in the array, 4 in the argu",
        ),
        (lambda: fft.ifft(A, {"time": "batch"}), ValueError, r"^ifft: 'batch' would name more than one axis"),
        (lambda: fft.fft(A, ("time", "time")), ValueError, r"^fft: 'time' would name more than one axis"),
        (lambda: fft.fft(A, ()), ValueError, r"^fft: there is no axis to transform in \(batch, time\)"),
        (lambda: fft.fft(SCALAR), ValueError, r"^fft: there is no axis to transform in \(\)"),
        (lambda: fft.hfft(A, ("batch", "time")), ValueError, r"^hfft: it runs along one axis, got \(batch, time\)"),
        (
            lambda: fft.rfft(A, T.resize(0)),
            ValueError,
            r"^rfft: .*\(batch=2, time=5\) would have no elements on 'time'",
        ),
        (
            lambda: fft.irfft(axn.ones({"x": 1}), "x"),
            ValueError,
            r"^irfft: .* no elements on 'x'\. Ask for a length",
        ),
        (lambda: untyped.fft(A, {"time": 7.0}), TypeError, r"^fft: axis 'time' can become an Axis, .*, got float"),
        (lambda: untyped.fft(jnp.ones(3)), TypeError, r"^fft: expected a NamedArray, got ArrayImpl"),
        (lambda: fft.fftshift(A, "w"), ValueError, r"^fftshift: no axis 'w' in \(batch=2, time=5\)"),
        (lambda: fft.ifftshift(A, F), ValueError, r"^ifftshift: no axis 'freq' in \(batch=2, time=5\)"),
        (lambda: untyped.ifftshift(np.ones(3)), TypeError, r"^ifftshift: expected a NamedArray, got ndarray"),
        (lambda: untyped.fftfreq("time"), ValueError, r"^fftfreq needs axes with sizes, got only the name 'time'"),
        (lambda: untyped.rfftfreq((T, F)), ValueError, r"^rfftfreq: `axis` must be one axis, got \(time=5, freq=7\)"),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_batches_stay_where_they_are(explicit_mesh: jax.sharding.Mesh) -> None:
    """Devices exchange their shard of the axis that is transformed for shards of the batch."""
    sharding = jax.sharding.NamedSharding(explicit_mesh, jax.sharding.PartitionSpec("data", "model"))

    def program(axis: str) -> str:
        def fn(raw):
            return fft.fft(axn.named(raw, ("batch", "time")), axis).array

        shape = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
        return jax.jit(fn).lower(shape).compile().as_text() or ""

    along_time = program("time")
    assert "c64[1,8]" in along_time  # each device has half of its part of the batch, and all of time
    assert "c64[8,8]" not in along_time


def test_half_precision_is_transformed_in_float32() -> None:
    x = axn.named(jnp.array([1, 2, 0, 2], jnp.bfloat16), "t")
    for transform in (fft.rfft, fft.ihfft, fft.fft):
        np.testing.assert_allclose(transform(x).array, transform(x.astype(jnp.float32)).array)
