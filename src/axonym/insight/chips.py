"""Figures of chips, from their makers' public pages, and `Islands` of linked chips, on which a mesh is laid."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias


@dataclasses.dataclass(frozen=True)
class Reached:
    """The shares of a chip's published rates that training steps reach, and the latencies of exchanges.

    What links, networks and launches do is known of TPUs and of GPUs. The other shares are guesses, the same for all
    chips: own ones of a kind of chip do not put published runs in a better order, as `python -m benchmarks published`
    prints for families of runs that the shares were not fitted to.

    >>> axn.insight.CHIPS["v5p"].reached.links
    0.9
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
_TPU = Reached(network=0.33, ahead_network=0.25, launch=13e-6, hop=1e-6)
_GPU = Reached(links=0.8)


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


# --- linked chips ---

Amount: TypeAlias = Any
"""A number, or an array of one for each mesh."""

Resource: TypeAlias = str | tuple[str, ...]
"""The kind of connection of an exchange: links, the network, or the links of some mesh axes of an unknown topology."""


@dataclasses.dataclass(frozen=True)
class Rate:
    """The time that an exchange of a kind takes over some mesh axes."""

    per_byte: Amount
    """Seconds for each byte of the complete array."""
    launch: Amount
    """Seconds for each exchange."""
    hides: Amount
    """The share that computing hides, beside the share of the chip."""
    busy: Mapping[Resource, Amount]
    """For each resource, the seconds for each byte that it is busy at least."""


@dataclasses.dataclass(frozen=True)
class Islands:
    """Islands of chips that links join, such as nodes of GPUs and slices of TPUs, and a network between them.

    Arguments:
        chip: the kind of chip: a `Chip`, or the name of one of `CHIPS`.
        chips: the number of chips.
        size: the chips in an island; as many as is usual by default.
        network: the bytes that each chip sends over the network in a second, which a cluster decides.

    >>> axn.insight.Islands("h100", 64, network=25e9).size
    8
    """

    chip: Chip
    chips: int
    size: int
    network: float

    def __init__(self, chip: Chip | str, chips: int, size: int | None = None, network: float | None = None):
        chip = known_chip(chip, "Islands")
        most = chip.island or chips
        if size is None:  # slices of TPUs have many sizes
            size = next(n for n in range(most, 0, -1) if chips % n == 0) if chip.torus else most
        if (size < chips and chips % size) or (chip.torus and size > most):
            raise ValueError(
                f"Islands: {chips} chips of {chip.name} cannot be divided into islands of {size}, of which the usual "
                f"have {'at most ' if chip.torus else ''}{most}."
            )
        network = chip.network if network is None else network
        for name, value in (("chip", chip), ("chips", chips), ("size", size), ("network", network)):
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        islands = self.chips // self.size
        return f"{self.chip.name}:{self.chips}" + (f" in {islands} slices" if self.chip.torus and islands > 1 else "")

    def placements(self, mesh: Mapping[str, int]) -> list[dict[str, int]]:
        """Return the mesh with its axes in each order that matters: the last ones are within islands.

        >>> len(axn.insight.Islands("h100", 64).placements({"data": 8, "model": 8}))
        2
        """
        orders = itertools.permutations(mesh.items()) if self.size < self.chips else [mesh.items()]
        return [dict(order) for order in orders]

    def rate(self, mesh: Mapping[str, int], kind: str, axes: Sequence[str]) -> Rate:
        """Return what an exchange takes over some axes of a mesh. Links and network work at the same time.

        On a torus, gathers and scatters are rings, on the links of one dimension, but where the compiler makes sums of
        them; bounds take all links of a chip.

        >>> islands = axn.insight.Islands("h100", 64)
        >>> sorted(islands.rate({"data": 4, "model": 16}, "all-gather", ["model"]).busy)
        ['links', 'network']
        """
        chip, reached, within = self.chip, self.chip.reached, self._within(mesh)
        inside, count = (math.prod(sizes[a] for a in axes) for sizes in (within, mesh))
        made = made_on_torus(kind, chip.torus, inside) if inside == self.size == self.chips else kind
        links, hops = 1.0, inside - 1.0
        if chip.torus:
            side = max(2.0, self.size ** (1 / chip.torus))
            hops = inside ** (1 / chip.torus)
            dimensions = 1 if made in ("all-gather", "reduce-scatter") else math.ceil(math.log(inside, side) - 1e-9)
            links = min(1.0, max(1, dimensions) / chip.torus)
        passes, longest, hides, launch = 2 if made == "all-reduce" else 1, 0.0, 1.0, reached.launch
        busy: dict[Resource, float] = {}
        for resource, n, before, bandwidth, link, used, share, hop, hidden in (
            ("links", inside, 1, chip.link_bandwidth, chip.link, links, reached.links, reached.hop * hops, 1.0),
            ("network", count // inside, inside, self.network, self.network, 1.0, reached.network,
             reached.network_hop * (count // inside - 1), reached.ahead_network / reached.ahead),
        ):  # fmt: skip
            if n == 1:
                continue
            # A device sends to each other one in the group what the ones before it do not.
            gathers = (1 - 1 / n) / before / bandwidth
            if kind == "all-to-all":
                # A device sends the same to each other one, so less to the few that are near.
                busy[resource] = gathers / n * (n * before / count) ** 2
                seconds = busy[resource] / used
            elif kind.startswith("collective"):  # it goes to a neighbor
                busy[resource], seconds = 1 / before / bandwidth, 1 / link
            else:
                busy[resource], seconds = gathers * least_passes(kind, chip), gathers * passes / used
            if seconds / share > longest:
                longest, hides = seconds / share, hidden
            launch += hop * passes
        return Rate(longest, launch if count > 1 else 0.0, hides, busy)

    def between(self, mesh: Mapping[str, int]) -> list[str]:
        """Return the axes of a mesh that cross slices or islands, as `make_mesh` takes them.

        >>> axn.insight.Islands("h100", 64).between({"data": 8, "model": 8})
        ['data']
        """
        within = self._within(mesh)
        return [a for a, n in mesh.items() if within[a] < n]

    def _within(self, mesh: Mapping[str, int]) -> dict[str, int]:
        """Return how many positions of each mesh axis are in one island, the innermost axis first."""
        found, distance, size = {}, 1, min(self.size, self.chips)
        for a, n in reversed(tuple(mesh.items())):
            found[a] = 1 if size % distance else math.gcd(n, size // distance)
            distance *= n
        return found


def islands_of(chips: int | str | Islands, chip: Chip | str) -> Islands:
    """Return the chips of a number and a kind, or of a name such as `v5e:16x16x2slices`."""
    if isinstance(chips, Islands):
        return chips
    if isinstance(chips, int):
        return Islands(known_chip(chip, "plan"), chips)
    name, _, shape = chips.partition(":")
    of = known_chip(name, "plan")
    if not (parts := re.fullmatch(r"(\d+(?:x\d+)*?)(?:x(\d+)slices)?", shape)):
        raise ValueError(
            f"plan: a topology is written as 'v5p:8x8x8', 'v5p:8x8x8x2slices' or 'h100:64', got {chips!r}."
        )
    size, slices = math.prod(map(int, parts[1].split("x"))), int(parts[2] or 1)
    return Islands(of, size * slices, size if of.torus else None)


def least_passes(kind: str, chip: Chip) -> int:
    """Return how often a device sends an array at least: switches of islands may add up what chips send."""
    return 2 if kind == "all-reduce" and chip.torus else 1


def made_on_torus(kind: str, torus: int, chips: int) -> str:
    """Return what the compiler for TPUs makes of a collective over all chips of a torus, and of no other slice.

    It may be an all-reduce, which sends more over the links of all dimensions. Dimensions of a square have 4 or more.
    """
    filled = chips >= 8 if torus == 3 else torus == 2 and chips >= 16 and math.isqrt(chips) ** 2 == chips
    summed = (kind == "reduce-scatter" and filled) or (kind == "all-gather" and torus == 3 and chips >= 64)
    return "all-reduce" if summed else kind
