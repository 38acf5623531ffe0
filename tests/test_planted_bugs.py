"""`check_shard_invariance` finds planted bugs, and refuses no correct program.

Each program is tried without a bug and with one, at one of two dtypes. `python -m tests.planted_bugs` tries all.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from tests.planted_bugs import PROGRAMS, find

# One bug of each program, and what the message says of it.
SENTENCES = {
    "mlp": ("missing", "\nadd at .* takes a partial sum over model, from dot_general at planted_bugs.py"),
    "masked_loss": ("mean of means", "\ndiv at .* takes a partial sum over data, from reduce_sum"),
    "training_step": (
        "factor hidden by clipping",
        r", at 1/16 times the arguments\n(div|reduce_scatter over data) at .* gives 2 times \(the size of data\)",
    ),
    "ring_attention": ("one step too few", "\nscan at .* is the first to give a value that .*, from `q`, `k`, `v`"),
    "logsumexp": ("sum of logarithms", "\nlog at .* takes a partial sum over model, from reduce_sum at"),
    "vocabulary_loss": ("double", r"\npsum over model at .* gives 3 times \(the size of model\)"),
    "head_exchange": ("no exchange", "\ndot_general at .* is the first to give .*, from `q`"),
    "rms_norm": ("eps counted three times", "\nadd at .* takes a partial sum over model, from div at"),
    "layer_norm": ("mean of variances", "the result differs"),
    "experts": ("gate applied twice", "\nmul at .* is the first to give .*, from psum at"),
    "dropout": ("the same on every device", "the result differs"),
    "pipeline": ("one tick early", "\nscan at .* is the first to give .*, from `x`, `w`"),
    "halo": ("off by one", "\nslice at .* is the first to give .*, from `x`"),
    "prefix_sum": ("missing", "\ncumsum at .* is the first to give .*, from `x`"),
    "embedding": ("no mask", "the result differs"),
    "largest": ("local positions", r"the result\[1\] has other values"),
}


def test_all_programs_are_here() -> None:
    assert [p.__name__ for p in PROGRAMS] == list(SENTENCES)
    assert (len(PROGRAMS), sum(map(len, PROGRAMS.values()))) == (16, 39)


@pytest.mark.parametrize(
    ("i", "program"),
    [pytest.param(i, p, marks=[] if i % 3 == 0 else pytest.mark.oldest) for i, p in enumerate(PROGRAMS)],
    ids=SENTENCES,
)
def test_programs(i: int, program: Any) -> None:
    (bug, sentence), dtypes = list(SENTENCES.values())[i], (jnp.bfloat16, jnp.float32)
    assert find(program, "", dtypes[i % 2]) is None
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(find(program, bug, dtypes[1 - i % 2], gradients=False))
