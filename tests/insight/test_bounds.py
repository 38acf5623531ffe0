"""What names say of random steps agrees with the partitioned program, within the error that they give.

More of them are tried by `python -m tests.insight.fuzzed_bounds`.
"""

from __future__ import annotations

import pytest

from axonym.insight._flops import least, mean
from tests.insight.fuzzed_bounds import PARTS, drawn, wrong

SEEDS = range(8)


@pytest.mark.parametrize("seed", [s if s < 3 else pytest.param(s, marks=pytest.mark.oldest) for s in SEEDS])
def test_a_random_step(seed: int) -> None:
    assert wrong(seed) is None


def test_random_steps_have_all_parts() -> None:
    """Also in few of them: otherwise a part would hardly be tried."""
    seen = {word for seed in range(40) for word in drawn(seed)[3].partition(" under ")[0].split(", ")}
    assert seen >= {part.__name__ for part in PARTS} | {"bfloat16", "bias", "vmapped loss"}


def test_amounts_in_branches() -> None:
    first, second = (((1, 2, i),) for i in range(2))
    inner = (*second, (2, 2, 0))
    amounts = [((), "sent", 5), (first, "sent", 10), (second, "sent", 4), (inner, "sent", 8), (first, "flops", 3)]
    assert dict(least(amounts)) == {"sent": 9}  # the inner conditional may do nothing, and so may the flops
    assert [mean(n, branches) for branches, _, n in amounts] == [5, 5, 2, 2, 1]
