"""Figures of chips: peak flops, memory and links, from their makers' public pages."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Chip:
    """The peak rates and the memory of a chip, as published by its maker.

    >>> axn.insight.CHIPS["v5e"].memory_bandwidth
    819000000000.0
    """

    name: str
    flops: float
    """Floating-point operations in a second, in products of bfloat16."""
    memory: int
    """Bytes of memory."""
    memory_bandwidth: float
    """Bytes that it reads and writes in a second."""
    link_bandwidth: float
    """Bytes that it sends to other chips in a second, over all its links: half of the bandwidth of both directions."""
    source: str
    """The page that the figures are from."""


CHIPS = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            Chip("v5e", 197e12, 16 * 10**9, 819e9, 200e9, "https://cloud.google.com/tpu/docs/v5e"),
            Chip("v5p", 459e12, 95 * 2**30, 2765e9, 600e9, "https://cloud.google.com/tpu/docs/v5p"),
            Chip("v6e", 918e12, 32 * 10**9, 1600e9, 400e9, "https://cloud.google.com/tpu/docs/v6e"),
            Chip("h100", 989e12, 80 * 10**9, 3350e9, 450e9, "https://www.nvidia.com/en-us/data-center/h100/"),
        )
    }
)
"""Chips by name."""


def known_chip(chip: Chip | str, what: str = "explain") -> Chip:
    """Return a chip by its name."""
    if isinstance(chip, Chip):
        return chip
    if chip not in CHIPS:
        raise ValueError(f"{what}: the chips with figures are {', '.join(CHIPS)}, got {chip!r}. Make a Chip of it.")
    return CHIPS[chip]
