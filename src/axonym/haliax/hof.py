"""Haliax's `hof`: transforms over an axis, with its parameters."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeAlias

from .. import ScanCheckpointPolicy as _ScanCheckpointPolicy, fold as fold, map as map, scan as _scan, vmap as _vmap
from ._signatures import with_parameters

ScanCheckpointSpec: TypeAlias = bool | str | _ScanCheckpointPolicy
"""A policy, or a word for one."""

scan = with_parameters(_scan, fn="f")


@functools.wraps(_vmap, assigned=("__name__", "__qualname__", "__doc__"))
def vmap(fn: Any, axis: Any, *, default: Any = lambda x: 0, **options: Any) -> Any:
    # Maps the raw arrays of every module over their first axis; without axes, `fn` is called as it is.
    return fn if not isinstance(axis, str) and axis == () else _vmap(fn, axis, default=default, **options)


class ScanCheckpointPolicy(_ScanCheckpointPolicy):
    """The values that a scan saves for its backward pass; fields are used as given, even if they contradict each other.

    >>> hax.ScanCheckpointPolicy(save_carries=False, save_block_internals=True).save_carries
    False
    """

    checkpoint = with_parameters(_ScanCheckpointPolicy.checkpoint, fn="callable")

    def __post_init__(self) -> None:
        # Does not check the fields; sequences become tuples, which can be part of a cache key.
        for field in ("save_block_internals", "offload_block_internals"):
            if not isinstance(given := getattr(self, field), (bool, str)):
                object.__setattr__(self, field, tuple(given))

    @staticmethod
    def from_bool_or_str(remat_policy: bool | str) -> ScanCheckpointPolicy:
        """Return the policy that a short word stands for.

        >>> hax.ScanCheckpointPolicy.from_bool_or_str("nested").nested
        True
        """
        policy = _ScanCheckpointPolicy.from_bool_or_str(remat_policy)
        return ScanCheckpointPolicy(**{f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)})

    @staticmethod
    def _mk(remat_policy: ScanCheckpointSpec) -> _ScanCheckpointPolicy:
        # Levanter calls this.
        given = isinstance(remat_policy, _ScanCheckpointPolicy)
        return remat_policy if given else ScanCheckpointPolicy.from_bool_or_str(remat_policy)
