"""Rotary embeddings: complex numbers rotated by angles, and the frequencies of published models."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym.nn.attention import LinearRotary, Llama3Rotary, Rotary, YarnRotary, apply_rotary
from tests.helpers import assert_named

Batch, Pos, Heads, Size = axn.make_axes(batch=2, pos=3, heads=2, head_size=8)
X = axn.named(np.random.default_rng(0).normal(size=(2, 3, 2, 8)).astype(np.float32), (Batch, Pos, Heads, Size))
POSITIONS = np.array([[0, 1, 2], [7, 100, 3]])


def turned(x: Any, positions: Any, frequencies: Any, interleaved: bool = False, magnitude: float = 1.0) -> Any:
    """Multiply each pair of features, as a complex number, by one with the angle of its position."""
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    angles = positions[..., None, None] * np.asarray(frequencies)
    z = (first + 1j * second) * np.exp(1j * angles) * magnitude
    return np.stack([z.real, z.imag], -1).reshape(x.shape) if interleaved else np.concatenate([z.real, z.imag], -1)


@pytest.mark.parametrize(
    "config",
    [Rotary(theta=500.0), Rotary(interleaved=True), YarnRotary(factor=4.0), YarnRotary(interleaved=True, factor=4.0)],
)
def test_values(config: Rotary) -> None:
    positions = axn.named(POSITIONS, (Batch, Pos))
    wanted = turned(np.asarray(X.array), POSITIONS, config.frequencies(8), config.interleaved, config.magnitude)
    found = apply_rotary(X, "head_size", positions, config)
    assert_named(found, axn.named(jnp.asarray(wanted, jnp.float32), X.axes), rtol=1e-4, atol=1e-4)
    last = apply_rotary(X.rearrange(("head_size", ...)), Size, positions, config)
    assert last.names == ("head_size", "batch", "pos", "heads")
    np.testing.assert_array_equal(last.rearrange(X.axes).array, found.array)


def test_positions_counted_along_an_axis() -> None:
    wanted = turned(np.asarray(X.array), np.arange(3), 10000.0 ** -(np.arange(4) / 4))
    for positions in ("pos", Pos, axn.arange(Pos)):
        found = apply_rotary(X, Size, positions)
        assert_named(found, axn.named(jnp.asarray(wanted, jnp.float32), X.axes), rtol=1e-5, atol=1e-5)


def test_part_of_a_head() -> None:
    config = Rotary(partial_rotary_factor=0.5)
    found = apply_rotary(X, Size, Pos, config)
    assert_named(found["head_size", 4:], X["head_size", 4:])
    assert_named(found["head_size", :4], apply_rotary(X["head_size", :4], "head_size", Pos))


def test_scores_depend_on_distance_alone() -> None:
    q, k = X["batch", 0], X["batch", 1]

    def scores(shift: int) -> Any:
        at = axn.arange(Pos) + shift
        key = apply_rotary(k, Size, at, YarnRotary(factor=2.0)).rename({"pos": "key_pos"})
        return axn.dot(apply_rotary(q, Size, at, YarnRotary(factor=2.0)), key, axis=Size).array

    np.testing.assert_allclose(scores(0), scores(50), rtol=1e-3, atol=1e-3)


def test_half_precision_is_rounded_once() -> None:
    x = X.astype(jnp.bfloat16)
    found = apply_rotary(x, Size, Pos)
    assert_named(found, apply_rotary(x.astype(jnp.float32), Size, Pos).astype(jnp.bfloat16))


# --- the frequencies of published models, as transformers 5.23 has them for heads of 16 ---

PUBLISHED = {
    "default": ({"rope_type": "default", "rope_theta": 1e4}, 10000.0 ** -(np.arange(8) / 8), 1.0),
    "linear": ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 10000.0 ** -(np.arange(8) / 8) / 4, 1.0),
    "Llama 3.1": (
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        [1.0, 0.19392276, 0.037606031, 0.0072926651, 0.00052484602, 3.4281024e-05, 6.6478697e-06, 1.2891732e-06],
        1.0,
    ),
    "YaRN": (
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096},
        [1.0, 0.31622776, 0.1, 0.025693506, 0.0062499996, 0.0013834966, 0.00025, 7.9056947e-05],
        1.138629436111989,
    ),
    "YaRN with a ramp between whole pairs": (
        {
            "rope_type": "yarn",
            "rope_theta": 1.5e5,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        [1.0, 0.225418, 0.050813273, 0.0067949593, 0.00045648392, 1.8188337e-05, 4.0999785e-06, 9.2420896e-07],
        1.3465735902799727,
    ),
    "YaRN with scales": (
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
        },
        [1.0, 0.31622776, 0.1, 0.023914725, 0.0051249997, 0.00084986218, 2.5e-05, 7.9056945e-06],
        1.0857263992561355,
    ),
}


@pytest.mark.parametrize("what", PUBLISHED)
def test_published_frequencies(what: str) -> None:
    entry, frequencies, magnitude = PUBLISHED[what]
    config = Rotary.from_config(entry)
    np.testing.assert_allclose(config.frequencies(16), frequencies, rtol=1e-6)
    assert math.isclose(config.magnitude, magnitude)
    assert Rotary.from_config(config.to_config()) == config
    assert entry.items() <= config.to_config().items()


def test_older_configurations() -> None:
    """The base stands outside of the entry, which has another word for its kind and may be missing."""
    assert Rotary.from_config(None, theta=5e5) == Rotary(theta=5e5)
    assert Rotary.from_config({"type": "linear", "factor": 2.0}, theta=5e5) == LinearRotary(theta=5e5, factor=2.0)
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    both = {"rope_type": "llama3", "type": "llama3", **llama3}
    assert Rotary.from_config(both, interleaved=True) == Llama3Rotary(interleaved=True)


def test_the_training_context_of_yarn() -> None:
    """It is that of the whole configuration unless the entry has its own; other kinds have no such default."""
    yarn = {"type": "yarn", "factor": 4.0, "finetuned": True}
    own = {"original_max_position_embeddings": 32}
    for entry, expected in ((yarn, 128), (yarn | own, 32), (yarn | dict.fromkeys(own), 128)):
        found = Rotary.from_config(entry, max_position_embeddings=128)
        assert found == YarnRotary(factor=4.0, original_max_position_embeddings=expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Rotary.from_config({"rope_type": "lama3"}),
            "unknown kind 'lama3', not one of default, linear, llama3, yarn.* 'llama3'",
        ),
        (lambda: Rotary.from_config({"rope_type": "yarn", "facto": 2.0}), "'yarn' has no 'facto'.* 'factor'"),
        (lambda: Rotary.from_config({"rope_type": "linear"}), "of kind 'linear' must have 'factor'"),
        (
            lambda: Rotary.from_config({"rope_type": "yarn", "factor": 2.0}),
            "of kind 'yarn' must have 'original_max_position_embeddings'",
        ),
        (
            lambda: Rotary.from_config(
                {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
                max_position_embeddings=128,
            ),
            "of kind 'llama3' must have 'original_max_position_embeddings'",
        ),
        (lambda: apply_rotary(X["head_size", :5], Size.resize(5), Pos), "an odd number"),
        (lambda: apply_rotary(X, "size", Pos), "apply_rotary: no axis 'size' in "),
        (lambda: apply_rotary(X, Size, "time"), "apply_rotary: no axis 'time' in "),
        (lambda: apply_rotary(X, Size, axn.arange(axn.Axis("time", 3))), r"`positions` has axes \(time\)"),
        (lambda: apply_rotary(X, Size, axn.arange(Pos.resize(2))), "'pos' has conflicting sizes"),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
