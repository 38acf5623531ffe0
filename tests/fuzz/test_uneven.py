"""Operations on uneven shards: a sample, in a process that may die. `python -m tests.fuzz --uneven` is all.

Every operation of which XLA partitions something wrongly is in the sample.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fuzz.uneven import BY_ID, Uneven, all_placements, check_uneven, placements
from tests.fuzz.worker import Worker

# The cases that failed, with a mapping under which they did: XLA ended the process, failed, or gave wrong values.
# They are slices, unless it is said otherwise.
FAILED: list[tuple[Any, ...]] = [
    ("sort-last", {"a": 3}, {"pos": ("a",)}),
    ("sort-first", {"a": 3, "b": 2}, {"batch": ("a",), "embed": ("b",)}),
    ("median-one", {"a": 3}, {"embed": ("a",)}),
    ("quantile-one", {"a": 3}, {"batch": ("a",)}),
    ("NamedArray.at-gathered", {"a": 3, "b": 2}, {"heads": ("a",), "pos": ("b",)}),
    ("repeat-array", {"a": 3, "b": 2}, {"pos": ("a",), "batch": ("b",)}),
    ("segment_max-several axes", {"a": 3, "b": 2}, {"pos": ("a",), "embed": ("b",)}),
    ("convolve-full", {"a": 4, "b": 2}, {"batch": ("a",), "pos": ("b",)}),
    ("convolve-same", {"a": 4, "b": 2}, {"pos": ("a",), "heads": ("b",)}),
    ("fft.fft-last", {"a": 3, "b": 2}, {"pos": ("a",), "batch": ("b",)}),
    ("vmap of convolutions", {"a": 4, "b": 2}, {"batch": ("a",)}),
    ("fft.fft-several", {"a": 4, "b": 2}, {"batch": ("a", "b")}),
    ("sort-last", {"a": 3}, {"pos": ("a",)}, "by hand"),
    ("median-one", {"a": 4, "b": 2}, {"pos": ("a",), "embed": ("b",)}, "by hand"),
    ("quantile-several", {"a": 3}, {"pos": ("a",)}, "by hand"),
    ("permutation", {"a": 3}, {"pos": ("a",)}, "by hand"),
    ("segment_min-batches", {"a": 3, "b": 2}, {"pos": ("a",)}, "renamed"),
    ("segment_max-several axes", {"a": 3, "b": 2}, {"batch": ("a",)}, "renamed"),
    ("segment_mean-batches", {"a": 3, "b": 2}, {"pos": ("a",)}, "remat"),
    ("NamedArray.at-gathered and indexed", {"a": 3, "b": 2}, {"heads": ("a",)}, "renamed"),
    ("repeat-array", {"a": 3, "b": 2}, {"pos": ("a",)}, "remat"),
]
SAMPLE = random.Random(0).sample(all_placements(), 8)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.stop()


@pytest.mark.parametrize(
    "of",
    [
        *(Uneven(case, tuple(mesh.items()), tuple(mapping.items()), *how) for case, mesh, mapping, *how in FAILED),
        *(pytest.param(of, marks=pytest.mark.oldest) for of in SAMPLE),
    ],
    ids=str,
)
def test_uneven_shards(of: Uneven, worker: Worker) -> None:
    found = worker.attempt(check_uneven, of)
    assert found is None, f"{of}: {found}"


def test_every_operation_with_axes_has_placements() -> None:
    assert all(any(placements(case)) for case in BY_ID.values() if any(o.names for o in case.operands))
