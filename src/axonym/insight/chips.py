"""Figures of chips: peak flops, memory and links, from their makers' public pages."""

from __future__ import annotations

import dataclasses
import math
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Reached:
    """The shares of a chip's published rates that training steps reach, and the latencies of exchanges.

    The shares are guesses, one set for TPUs and one for GPUs: own ones of a chip do not put published runs in a better
    order, and `python -m benchmarks published` prints how far estimates are from these.

    >>> axn.insight.CHIPS["v5p"].reached.products
    0.8
    """

    products: float = 0.75
    """Of the peak flops, in large products."""
    cores: float = 0.55
    """Of that, in products of activations with each other, as in the core of attention."""
    links: float = 0.9
    """Of the bandwidth of links within a torus or an island."""
    network: float = 0.8
    """Of the bandwidth of the network between islands or slices."""
    ahead: float = 0.8
    """Of the time of exchanges that computing need not wait for, such as of parameters: how much computing hides."""
    ahead_network: float = 0.8
    """The same, of exchanges over the network between slices."""
    waited: float = 0.6
    """Of the time of exchanges whose results the next product needs: how much computing hides."""
    launch: float = 8.4e-6
    """Seconds to start an exchange."""
    hop: float = 3.4e-6
    """Seconds from a chip to the next one within a torus or an island."""
    network_hop: float = 14e-6
    """Seconds from a chip to one in another island or slice."""


# Of links: https://jax-ml.github.io/scaling-book/tpus ("we can achieve about 90%") and, for NVLink, /gpus (370 of 450
# GB/s). Hops of a torus: https://jax-ml.github.io/scaling-book/sharding. The launch is the constant of all-gathers on
# Ironwood: https://github.com/AI-Hypercomputer/tpu-recipes, microbenchmarks/ironwood/collectives; the network between
# slices reaches a third there, microbenchmarks/trillium/collectives. The latencies of GPUs are from NCCL's protocol
# "Simple": https://github.com/NVIDIA/nccl, src/graph/tuning.cc. All other shares are guesses.
_TPU = Reached(
    products=0.8, cores=0.6, links=0.9, network=0.33, ahead=0.9, ahead_network=0.25, waited=0.5, launch=13e-6, hop=1e-6,
    network_hop=14e-6,
)  # fmt: skip
_GPU = Reached(products=0.72, cores=0.5, links=0.8)


@dataclasses.dataclass(frozen=True)
class Chip:
    """The peak rates and the memory of a chip, as published by its maker, and how chips are linked.

    >>> axn.insight.CHIPS["v5e"].memory_bandwidth
    819000000000.0
    """

    name: str
    flops: float
    """Floating-point operations in a second, in products of bfloat16. Bounds leave out products of 8 bits."""
    memory: int
    """Bytes of memory."""
    memory_bandwidth: float
    """Bytes that it reads and writes in a second."""
    link_bandwidth: float
    """Bytes that it sends to other chips in a second, over all its links: half of the bandwidth of both directions."""
    source: str
    """The page that the figures are from."""
    torus: int = 0
    """The number of dimensions of the torus of its links; 0 if each chip of an island is linked to all others."""
    island: int = 0
    """The number of chips in an island, or at most in a slice; 0 if all are in one."""
    network: float = 6.25e9
    """Bytes that it sends in a second over the network to other islands or slices."""
    host: float = 16e9
    """Bytes that it sends in a second to the memory of its host, or gets from there."""
    reached: Reached = dataclasses.field(default_factory=Reached)
    """The shares of these rates that steps reach."""

    clock: float = 0.0
    """Cycles of its matrix units in a second: of TPUs, its peak over what they compute in a cycle."""

    @property
    def link(self) -> float:
        """Return the bytes that one link sends in one direction in a second.

        >>> axn.insight.CHIPS["v5p"].link
        100000000000.0
        """
        return self.link_bandwidth / (2 * self.torus) if self.torus else self.link_bandwidth


def _tpu(name: str, clock: float, flops: float, memory: int, bandwidth: float, links: float, pod: tuple[int, ...],
         network: float, host: float = 16e9) -> Chip:  # fmt: skip
    """Return a TPU. The network's share of a chip is from its page, where that says it, or from the scaling book.

    The bandwidth to the host is from https://jax-ml.github.io/scaling-book/tpus, "PCIe".
    """
    source = f"https://cloud.google.com/tpu/docs/{name}"
    return Chip(name, flops, memory, bandwidth, links, source, len(pod), math.prod(pod), network, host, _TPU, clock)


def _gpu(name: str, flops: float, memory: int, bandwidth: float, links: float, network: float, host: float) -> Chip:
    """Return a GPU. The bandwidth to the host is half of what its page says of PCIe, for both directions."""
    source = f"https://www.nvidia.com/en-us/data-center/{name}/"
    return Chip(name, flops, memory, bandwidth, links, source, 0, 8, network, host, _GPU)


CHIPS = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            # v4's links: 45 GB/s usable each, https://jax-ml.github.io/scaling-book/tpus.
            _tpu("v4", 1.05e9, 275e12, 32 * 2**30, 1200e9, 300e9, (16, 16, 16), 6.25e9),
            _tpu("v5e", 1.5e9, 197e12, 16 * 10**9, 819e9, 200e9, (16, 16), 3.125e9),
            _tpu("v5p", 1.75e9, 459e12, 95 * 2**30, 2765e9, 600e9, (16, 20, 28), 6.25e9),
            _tpu("v6e", 1.75e9, 918e12, 32 * 10**9, 1638e9, 400e9, (16, 16), 12.5e9, 32e9),
            # https://www.nvidia.com/en-us/data-center/dgx-h100 and dgx-a100: one network card for each GPU.
            _gpu("a100", 312e12, 80 * 10**9, 2039e9, 300e9, 25e9, 32e9),
            _gpu("h100", 989e12, 80 * 10**9, 3350e9, 450e9, 50e9, 64e9),
            _gpu("h200", 989e12, 141 * 10**9, 4800e9, 450e9, 50e9, 64e9),
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
