"""Place a mesh on linked chips, a `Torus` or `Islands`, and find the links that an exchange uses."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from .chips import Chip, known_chip


@dataclasses.dataclass(frozen=True)
class Level:
    """The part of an exchange that uses one kind of link: within a torus or an island, or between them.

    Seconds are for each byte of the complete array, at published rates.
    """

    count: int
    """The number of groups of devices that exchange over these links."""
    gathers: float
    """Seconds of a gather."""
    passes: float
    """Seconds for each byte that a device passes to its neighbor, over one link in one direction."""
    hops: float
    """Seconds for the hops of one gather."""
    busy: Mapping[str, float]
    """For each resource, the seconds that a gather keeps it busy at least."""
    sums: Mapping[str, float]
    """For each resource, the seconds that an all-reduce keeps it busy at least."""
    trades: Mapping[str, float]
    """For each resource, the seconds that an all-to-all of the groups keeps it busy at least."""
    reached: float
    """The share of the published rates that is reached."""
    hides: float = 1.0
    """The share of an exchange that computing can hide, relative to exchanges over other links."""


Route: TypeAlias = tuple[Level, ...]
"""The levels of an exchange, from the innermost."""

Spans: TypeAlias = tuple[tuple[int, int, int], ...]
"""The parts of a torus that a mesh axis takes: a dimension, a count of chips along it, and their distance."""

_SLICES = -1
"""The number of the dimension of slices."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """The place of each mesh axis on a topology."""

    mesh: Mapping[str, int]
    """In the order of the mesh, the innermost axis last."""
    spans: Mapping[str, Spans] = dataclasses.field(default_factory=dict)
    """On a torus: the parts that each mesh axis takes."""


@dataclasses.dataclass(frozen=True)
class Torus:
    """Slices of TPUs, each of which is a torus or, where it does not wrap around, a grid.

    Arguments:
        chip: the kind of chip: a `Chip`, or the name of one of `CHIPS`.
        shape: the chips along each dimension of a slice.
        slices: the number of slices, which a network links.

    >>> axn.insight.Torus("v5p", (4, 4, 8), slices=2).chips
    256
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    def __init__(self, chip: Chip | str, shape: Sequence[int], slices: int = 1):
        chip, shape = known_chip(chip, "Torus"), tuple(shape)
        if not chip.torus or len(shape) > chip.torus:
            raise ValueError(
                f"Torus: chips of {chip.name} are linked in {chip.torus} dimensions, got the shape {shape}."
            )
        if not _in_pod(shape, chip):
            raise ValueError(
                f"Torus: the largest slice of {chip.name} is {_times(chip.pod)}, got {_times(shape)}. Use several: "
                f'Torus("{chip.name}", shape, slices=2).'
            )
        for name, value in (("chip", chip), ("shape", shape), ("slices", slices)):
            object.__setattr__(self, name, value)

    @property
    def chips(self) -> int:
        """Return the number of chips.

        >>> axn.insight.Torus("v5e", (4, 4)).chips
        16
        """
        return math.prod(self.shape) * self.slices

    def __str__(self) -> str:
        return f"{self.chip.name}:{_times(self.shape)}" + (f"x{self.slices}slices" if self.slices > 1 else "")

    def wraps(self, dim: int) -> bool:
        """Return whether a dimension is a ring.

        >>> axn.insight.Torus("v5e", (8, 16)).wraps(1)
        True
        """
        if self.chip.wraps == 4:
            return not any(n % 4 for n in self.shape)
        return self.shape[dim] == self.chip.wraps

    def placements(self, mesh: Mapping[str, int], most: int = 4) -> list[Placement]:
        """Return the ways to lay a mesh on the torus, those that share the fewest dimensions first, and at most some.

        >>> placed, *_ = axn.insight.Torus("v5e", (4, 8)).placements({"data": 8, "model": 4})
        >>> placed.spans["model"]
        ((0, 4, 1),)
        """
        sizes = tuple(mesh.values())
        return [
            Placement(mesh, dict(zip(mesh, spans, strict=True)))
            for spans in _placed(self.shape, self.slices, sizes, most)
        ]

    def route(self, placed: Placement, axes: Sequence[str]) -> Route:
        """Return the levels of an exchange over some mesh axes.

        >>> torus = axn.insight.Torus("v5p", (8, 8, 8))
        >>> [placed] = torus.placements({"data": 64, "model": 8})
        >>> [name for level in torus.route(placed, ["model"]) for name in level.busy]
        ['links', 'links of dimension 0']
        """
        counts, apart = dict[int, int](), dict[int, int]()
        for dim, count, distance in (span for a in axes for span in placed.spans[a]):
            counts[dim] = counts.get(dim, 1) * count
            apart[dim] = min(apart.get(dim, distance), distance)
        slices = counts.pop(_SLICES, 1)
        levels = [self._inside(counts, apart)] if counts else []
        return (*levels, *_network(self.chip, self.chip.network, slices, math.prod(counts.values())))

    def between(self, placed: Placement) -> list[str]:
        """Return the mesh axes that cross slices, as `make_mesh` takes them.

        >>> torus = axn.insight.Torus("v5e", (4, 4), slices=2)
        >>> torus.between(torus.placements({"data": 8, "model": 4})[0])
        ['data']
        """
        return [a for a in placed.mesh if any(dim == _SLICES and n > 1 for dim, n, _ in placed.spans.get(a, ()))]

    def _inside(self, counts: Mapping[int, int], apart: Mapping[int, int]) -> Level:
        """Return the level within a slice: along each dimension, some chips at a distance from each other."""
        chip, inside = self.chip, math.prod(counts.values())
        received, rate, hops = 1 - 1 / inside, 0.0, 0.0
        busy, sums, trades = ({"links": t * received / chip.link_bandwidth} for t in (1, 2, 1 / inside))
        for d, n in counts.items():
            is_ring = self.wraps(d) and n * apart[d] == self.shape[d]
            own_rate = (2 if is_ring else 1) * chip.link / apart[d]
            rate += own_rate
            hops += (n / 2 if is_ring else n - 1) * apart[d]
            name, of_byte = f"links of dimension {d}", 1 / inside / own_rate
            # If dimensions are gathered one after another, the first has the least to send.
            busy[name] = (n - 1) * of_byte
            # To sum a byte over n positions and to return it crosses n - 1 links twice, of which a ring has n.
            sums[name] = (2 * (n - 1) if is_ring else n) * of_byte
            # Each half sends to each device of the other one, through the middle of a line, or both cuts of a ring.
            trades[name] = (n // 2) * ((n + 1) // 2) / n * of_byte
        passes = max(apart[d] for d in counts) / chip.link
        return Level(
            inside, received / rate, passes, hops * chip.reached.hop, busy, sums, trades, chip.reached.links
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Islands:
    """Islands of chips, each linked to all others of its own, such as of GPUs, and a network between them.

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
        size = size or chip.island or chips
        if size < chips and chips % size:
            raise ValueError(f"Islands: {chips} chips cannot be divided into islands of {size}.")
        network = chip.network if network is None else network
        for name, value in (("chip", chip), ("chips", chips), ("size", size), ("network", network)):
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return f"{self.chip.name}:{self.chips}"

    def placements(self, mesh: Mapping[str, int]) -> list[Placement]:
        """Return the orders of the mesh axes: the last ones are within islands.

        >>> len(axn.insight.Islands("h100", 64).placements({"data": 8, "model": 8}))
        2
        """
        return [Placement(dict(order)) for order in itertools.permutations(mesh.items())]

    def route(self, placed: Placement, axes: Sequence[str]) -> Route:
        """Return the levels of an exchange over some mesh axes.

        >>> islands = axn.insight.Islands("h100", 64)
        >>> placed = islands.placements({"data": 4, "model": 16})[0]
        >>> [level.count for level in islands.route(placed, ["model"])]
        [8, 2]
        """
        chip, within = self.chip, self._within(placed)
        inside, count = (math.prod(sizes[a] for a in axes if a in sizes) for sizes in (within, placed.mesh))
        levels = []
        if inside > 1:
            hops = (inside - 1) * chip.reached.hop
            levels.append(_switched(chip, "links", inside, 1 / chip.link, 1 / chip.link, hops, chip.reached.links))
        return (*levels, *_network(chip, self.network, count // inside, inside))

    def between(self, placed: Placement) -> list[str]:
        """Return the mesh axes that cross islands, as `make_mesh` takes them.

        >>> islands = axn.insight.Islands("h100", 64)
        >>> islands.between(islands.placements({"data": 8, "model": 8})[0])
        ['data']
        """
        within = self._within(placed)
        return [a for a, n in placed.mesh.items() if within[a] < n]

    def _within(self, placed: Placement) -> dict[str, int]:
        """Return how many positions of each mesh axis are in one island, the innermost axis first."""
        found, distance, size = {}, 1, min(self.size, self.chips)
        for a, n in reversed(tuple(placed.mesh.items())):
            found[a] = 1 if size % distance else math.gcd(n, size // distance)
            distance *= n
        return found


Topology: TypeAlias = Torus | Islands


def topologies_of(chips: int | str | Topology, chip: Chip | str) -> list[Topology]:
    """Return the topologies that a user means: all legal ones of a number of chips, or the one of a name."""
    if isinstance(chips, (Torus, Islands)):
        return [chips]
    if isinstance(chips, str):
        name, _, shape = chips.partition(":")
        of = known_chip(name, "plan")
        if not (parts := re.fullmatch(r"(\d+(?:x\d+)*?)(?:x(\d+)slices)?", shape)):
            raise ValueError(
                f"plan: a topology is written as 'v5p:8x8x8', 'v5p:8x8x8x2slices' or 'h100:64', got {chips!r}."
            )
        sizes = tuple(map(int, parts[1].split("x")))
        return [Torus(of, sizes, int(parts[2] or 1)) if of.torus else Islands(of, math.prod(sizes))]
    of = known_chip(chip, "plan")
    if not of.torus:
        return [Islands(of, chips)]
    most = math.prod(of.pod) if of.pod else chips
    slices = next((n for n in range(1, chips + 1) if chips % n == 0 and chips // n <= most), 1)
    shapes = [s for s in _shapes(chips // slices, of.torus) if _in_pod(s, of)]
    usual = [s for s in shapes if all(n <= 4 or n % 4 == 0 for n in s)]
    if not shapes:
        raise ValueError(
            f"plan: {chips} chips of {of.name} are no torus of at most {_times(of.pod)}: say which slices, such as "
            f'chips=axn.insight.Torus("{of.name}", shape, slices=2).'
        )
    return [Torus(of, s, slices) for s in usual or shapes]


def least_passes(kind: str, chip: Chip) -> int:
    """Return how often a device sends an array at least: switches of islands may add up what chips send."""
    return 2 if kind == "all-reduce" and chip.torus else 1


def _network(chip: Chip, rate: float, count: int, inside: int) -> Iterator[Level]:
    """Yield the level between slices or islands, of which each device sends what others inside do not."""
    if count > 1:
        reached = chip.reached
        hides, hops = reached.ahead_network / reached.ahead, (count - 1) * reached.network_hop
        yield _switched(chip, "network", count, 1 / inside / rate, 1 / rate, hops, reached.network, hides)


def _switched(
    chip: Chip, resource: str, count: int, of_byte: float, passes: float, hops: float, reached: float, hides: float = 1
) -> Level:
    """Return a level where each device sends to each other one.

    Arguments:
        of_byte: the seconds in which a device sends its share of each byte of a complete array.
    """
    gathers = (1 - 1 / count) * of_byte
    busy, trades = {resource: gathers}, {resource: gathers / count}
    sums = {resource: gathers * least_passes("all-reduce", chip)}
    return Level(count, gathers, passes, hops, busy, sums, trades, reached, hides)


def _in_pod(shape: Sequence[int], chip: Chip) -> bool:
    """Return whether a slice is within the largest one, if that is known."""
    longest = sorted(chip.pod, reverse=True)
    return all(n <= most for n, most in zip(sorted(shape, reverse=True), longest, strict=False))


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _shapes(chips: int, dims: int) -> list[tuple[int, ...]]:
    """Return the ascending shapes of a number of chips, the nearest to a cube first."""
    if dims == 1:
        return [(chips,)]
    found = [
        tuple(sorted((n, *rest)))
        for n in range(1, chips + 1)
        if chips % n == 0
        for rest in _shapes(chips // n, dims - 1)
    ]
    return sorted(dict.fromkeys(found), key=lambda s: s[-1] / s[0])


@functools.lru_cache(maxsize=4096)
def _placed(shape: tuple[int, ...], slices: int, sizes: tuple[int, ...], most: int) -> list[tuple[Spans, ...]]:
    """Return the spans of mesh axes of some sizes: at most some, those that share the fewest dimensions first.

    Each mesh axis takes its part of the remaining dimensions, in all orders of these, beginning with the last mesh axis
    or with the first.
    """
    dims = (*shape, slices)
    tables: dict[Any, tuple[int, tuple[tuple[int, ...], ...]]] = {}
    for order, first in itertools.product(itertools.permutations(range(len(dims))), (False, True)):
        left, table = [*dims], [[1] * len(dims) for _ in sizes]
        for i in range(len(sizes)) if first else reversed(range(len(sizes))):
            needed = sizes[i]
            for d in order:
                table[i][d] = math.gcd(needed, left[d])
                needed, left[d] = needed // table[i][d], left[d] // table[i][d]
        if any(n > 1 for n in left):
            continue
        alike = tuple(sorted((dims[d], d == len(shape), *(row[d] for row in table)) for d in range(len(dims))))
        parts = sum(n > 1 for row in table for n in row)
        tables.setdefault(alike, (parts, tuple(map(tuple, table))))
    return [_spans(table) for _, table in sorted(tables.values())[:most]]


def _spans(table: Sequence[Sequence[int]]) -> tuple[Spans, ...]:
    """Return what mesh axes take of each dimension; where several share one, later ones are the inner ones."""
    found = []
    for i, row in enumerate(table):
        inner = [math.prod(later[d] for later in table[i + 1 :]) for d in range(len(row))]
        last = len(row) - 1
        found.append(tuple((_SLICES if d == last else d, n, inner[d]) for d, n in enumerate(row) if n > 1))
    return tuple(found)
