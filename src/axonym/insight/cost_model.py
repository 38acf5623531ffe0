"""The cost model: topologies, what exchanges take on them, and what a step takes: a bound, and an estimate in terms.

Everything here is arithmetic over data, without arrays or traces. Amounts may be numbers or NumPy arrays, with an
element for each of several meshes.

A *bound* is what a step cannot be faster than: all rates as published, everything at once, and for each resource the
sum of all that uses it. An *estimate* is what a step may take: rates as they are reached, launches and hops, and
exchanges of which only a share is hidden behind computing. Bounds prune, estimates order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from ._branches import Branches, least, ways
from ._text import described_axes, described_seconds
from .chips import Chip, known_chip

Amount: TypeAlias = Any
"""A number, or an array of one for each mesh."""

Resource: TypeAlias = str | tuple[str, ...]
"""A resource that exchanges use: links of a topology or, if that is unknown, the links for a set of mesh axes."""


# --- topologies ---


@dataclasses.dataclass(frozen=True)
class Level:
    """The part of an exchange that uses one kind of link: within a torus or an island, or between them.

    Seconds are for each byte of the complete array, at published rates.
    """

    count: int
    """How many groups of devices exchange over it."""
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
    """How much of an exchange computing hides, beside what it hides of others."""


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
    """On a torus: for each mesh axis, what it takes of it."""


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
        chip, counts = self.chip, dict[int, tuple[int, int]]()
        for dim, count, distance in (span for a in axes for span in placed.spans[a]):
            before, near = counts.get(dim, (1, distance))
            counts[dim] = before * count, min(near, distance)
        slices, inside = counts.pop(_SLICES, (1, 1))[0], math.prod(count for count, _ in counts.values())
        levels = []
        if counts:
            rings = {d: self.wraps(d) and n * distance == self.shape[d] for d, (n, distance) in counts.items()}
            rates = {d: (2 if rings[d] else 1) * chip.link / distance for d, (_, distance) in counts.items()}
            hops = sum((n / 2 if rings[d] else n - 1) * distance for d, (n, distance) in counts.items())
            received = 1 - 1 / inside
            busy, sums, trades = ({"links": t * received / chip.link_bandwidth} for t in (1, 2, 1 / inside))
            for d, (n, _) in counts.items():
                name, of_byte = f"links of dimension {d}", 1 / inside / rates[d]
                # If dimensions are gathered one after another, the first has the least to send.
                busy[name] = (n - 1) * of_byte
                # To sum a byte over n positions and to return it crosses n - 1 links twice, of which a ring has n.
                sums[name] = (2 * (n - 1) if rings[d] else n) * of_byte
                # Each half sends to each device of the other one, through the middle of a line, or both cuts of a ring.
                trades[name] = (n // 2) * ((n + 1) // 2) / n * of_byte
            farthest = max(distance for _, distance in counts.values())
            levels.append(
                Level(
                    inside, received / sum(rates.values()), farthest / chip.link, hops * chip.reached.hop, busy, sums,
                    trades, chip.reached.links,
                )
            )  # fmt: skip
        return (*levels, *_network(chip, chip.network, slices, inside))


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
        chip, inside, distance, count = self.chip, 1, 1, 1
        size = min(self.size, self.chips)
        for a, n in reversed(tuple(placed.mesh.items())):
            if a in axes:
                inside, count = inside * (1 if size % distance else math.gcd(n, size // distance)), count * n
            distance *= n
        levels = []
        if inside > 1:
            hops = (inside - 1) * chip.reached.hop
            levels.append(_switched(chip, "links", inside, 1 / chip.link, 1 / chip.link, hops, chip.reached.links))
        return (*levels, *_network(chip, self.network, count // inside, inside))


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

    Mesh axes take what is left of the dimensions, in all orders of these, from the last mesh axis or from the first.
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


# --- exchanges ---


@dataclasses.dataclass(frozen=True)
class Rate:
    """What an exchange of a kind takes on a route."""

    per_byte: Amount
    """Seconds for each byte of the complete array."""
    launch: Amount
    """Seconds for each exchange."""
    hides: Amount
    """The share that computing hides, beside the share of the chip."""
    busy: Mapping[Resource, Amount]
    """For each resource, the seconds for each byte that it is busy at least."""


def least_passes(kind: str, chip: Chip) -> int:
    """Return how often a device sends an array at least: switches of islands may add up what chips send."""
    return 2 if kind == "all-reduce" and chip.torus else 1


def rate_of(kind: str, route: Route, chip: Chip) -> Rate:
    """Return what an exchange takes on a route. Levels work at the same time on parts of an array."""
    passes = 2 if kind == "all-reduce" else 1
    inside, longest, hides, hops = 1, 0.0, 1.0, 0.0
    busy: dict[Resource, float] = {}
    count = math.prod(level.count for level in route)
    for level in route:
        inside *= level.count
        if kind == "all-to-all":
            # A device sends the same to each other one, so less to the few that are near.
            found = {resource: t * (inside / count) ** 2 for resource, t in level.trades.items()}
            seconds = max(found.values())
        elif kind.startswith("collective"):  # it goes to a neighbor
            found = {resource: t / (1 - 1 / level.count) for resource, t in level.busy.items()}
            seconds = level.passes
        else:
            found, seconds = level.sums if passes == 2 else level.busy, level.gathers * passes
        if seconds / level.reached > longest:
            longest, hides = seconds / level.reached, level.hides
        busy.update(found)
        hops += level.hops * passes
    return Rate(longest, hops + chip.reached.launch if route else 0.0, hides, busy)


# --- steps ---


@dataclasses.dataclass(frozen=True)
class Multiplication:
    """A product of arrays on one device."""

    flops: Amount
    least: Amount
    """The least of the sizes of its rows, columns and summed axes: small ones do not fill the units of a chip."""
    core: bool = False
    """Whether no operand is a parameter, as in the core of attention."""
    narrow: bool = False
    """True if its operands have at most 8 bits, which chips multiply faster."""
    branches: Branches = ()


@dataclasses.dataclass(frozen=True)
class Sent:
    """An exchange in a step."""

    kind: str
    axes: tuple[str, ...]
    size: Amount
    """The bytes of the complete array: after a gather, before a scatter."""
    what: str
    """The name of its term, such as `gathering parameters`."""
    ahead: bool = False
    """Whether computing need not wait for it: parameters are gathered a layer ahead, gradients needed at the end."""
    count: Amount = 1
    """How many exchanges these are: each is launched."""
    branches: Branches = ()


@dataclasses.dataclass(frozen=True)
class Part:
    """What one turn of a loop does in one phase of a step: its products and exchanges overlap."""

    times: Amount
    products: tuple[Multiplication, ...] = ()
    sent: tuple[Sent, ...] = ()
    touched: Amount = 0.0
    """The bytes that it reads and writes, beside products."""
    offloaded: Amount = 0.0
    """The bytes that go to the memory of the host in the forward pass, or come from there in the backward pass."""
    forward: bool = True
    """Whether it is not in the backward pass, nor recomputed for it."""
    waits: bool = False
    """Whether a device waits for this part of another one, as stages of a pipeline do at the beginning and the end."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """An estimate of the time of a step, as a sum of terms in seconds.

    >>> estimate = axn.insight.Estimate({"products": 2.0, "gathering parameters over data": 0.5})
    >>> estimate.seconds
    2.5
    """

    terms: Mapping[str, Amount]

    @property
    def seconds(self) -> Amount:
        """Return the sum.

        >>> axn.insight.Estimate({"products": 2.0}).seconds
        2.0
        """
        return sum(self.terms.values(), start=0.0)

    def at(self, row: int) -> Estimate:
        """Return the estimate of one of several meshes.

        >>> import numpy as np
        >>> axn.insight.Estimate({"products": np.array([2.0, 3.0])}).at(1).seconds
        3.0
        """
        return Estimate({name: float(t[row] if np.ndim(t) else t) for name, t in self.terms.items()})


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Lower bounds on the time of a call on a chip, in seconds. A step takes at least the longest of them.

    >>> axn.insight.Bounds("v5e", compute=1e-3, memory=2e-3, links={("data",): 5e-4}).bottleneck
    'memory'
    """

    chip: str
    compute: Amount | None
    memory: Amount | None
    """If each argument is read once and each result written once."""
    links: Mapping[tuple[str, ...], Amount]
    """For each set of mesh axes, sending over it: with all links of a chip, or if the topology is known, over the links
    that are busy longest with what only these axes send."""
    capacity: int | None = None
    """The bytes of memory of the chip."""
    host: Amount | None = None
    """Moving what layers keep to the memory of the host, and back."""

    @property
    def bottleneck(self) -> str:
        """Return which of the bounds is the longest; `not known` if there is none.

        >>> axn.insight.Bounds("v5e", compute=None, memory=None, links={("data",): 5e-4}).bottleneck
        'sending over data'
        """
        return max(self.named(), key=lambda pair: pair[1], default=("not known", 0.0))[0]

    @property
    def longest(self) -> float:
        """Return the longest of the bounds; 0 if there is none.

        >>> axn.insight.Bounds("v5e", compute=1e-3, memory=2e-3, links={}).longest
        0.002
        """
        return max((t for _, t in self.named()), default=0.0)

    def named(self) -> list[tuple[str, Amount]]:
        """Return each bound with its name.

        >>> axn.insight.Bounds("v5e", compute=1e-3, memory=None, links={("data",): 5e-4}).named()
        [('compute', 0.001), ('sending over data', 0.0005)]
        """
        pairs = [("compute", self.compute), ("memory", self.memory)]
        links = [(f"sending over {described_axes(axes)}", t) for axes, t in self.links.items()]
        host = [] if self.host is None else [("moving to the host", self.host)]
        return [(name, t) for name, t in pairs if t is not None] + links + host


class Rates(Protocol):
    """What each kind of exchange takes over each set of mesh axes."""

    def __getitem__(self, key: tuple[str, tuple[str, ...]], /) -> Rate: ...


class AllLinks:
    """The least that exchanges take on a topology that is not known: each set of mesh axes may have all links."""

    def __init__(self, chip: Chip):
        self._chip = chip

    def __getitem__(self, key: tuple[str, tuple[str, ...]]) -> Rate:
        """Return the rate of the bytes that a device sends, of an all-reduce in one of its two passes."""
        kind, axes = key
        per_byte = least_passes(kind, self._chip) / self._chip.link_bandwidth
        return Rate(per_byte, 0.0, 1.0, {axes: per_byte})


TOUCHED = 2.7
"""The bytes that steps read and write beside products, for each byte of the results of these. A guess, for layers of
transformers, of which compilers fuse what is between products."""

HALF = 120
"""The least size of a product at which it reaches half of what large ones do. From products on Ironwood, fitted:
https://github.com/AI-Hypercomputer/tpu-recipes, microbenchmarks/ironwood/matmul."""


def estimate(parts: Sequence[Part], rates: Rates, chip: Chip) -> Estimate:
    """Estimate the time of a step: parts follow one another."""
    terms: dict[str, Amount] = {}
    for part in parts:
        for name, seconds in _terms(part, rates, chip).items():
            name = "waiting of stages" if part.waits else name
            terms[name] = terms.get(name, 0.0) + seconds * part.times
    found = Estimate(terms)
    if np.any((more := bound(parts, rates, chip) - found.seconds) > 0):
        terms["waiting for links"] = np.maximum(0.0, more)  # several exchanges hide behind the same computing
    return found


def _terms(part: Part, rates: Rates, chip: Chip) -> dict[str, Amount]:
    """Return the seconds of one turn of a part, in terms."""
    reached = chip.reached
    peak = chip.flops * reached.products
    terms: dict[str, Amount] = {
        "products": 0.0,
        "attention": 0.0,
        "reading and writing": part.touched / chip.memory_bandwidth,
    }
    for p in part.products:
        flops = p.flops / ways(p.branches)
        if p.core:
            terms["attention"] = terms["attention"] + flops / (peak * reached.cores)
        else:
            terms["products"] = terms["products"] + flops / peak * (p.least + HALF) / p.least
    computing = terms["products"] + terms["attention"] + terms["reading and writing"]
    for ahead, share in ((False, reached.waited), (True, reached.ahead)):
        found: list[tuple[str, Amount]] = []
        hidden: Amount = 0.0
        for x in part.sent:
            if x.ahead == ahead:
                rate = rates[x.kind, x.axes]
                seconds = x.size / ways(x.branches) * rate.per_byte + x.count * rate.launch * (np.asarray(x.size) > 0)
                found.append((f"{x.what} over {' and '.join(x.axes)}", seconds))
                hidden = hidden + seconds * share * (rate.hides if ahead else 1.0)
        total = sum((t for _, t in found), start=0.0)
        if found:
            left = 1 - np.minimum(hidden, computing) / np.maximum(total, 1e-30)
            for name, seconds in found:
                terms[name] = terms.get(name, 0.0) + seconds * left
    spent = sum(terms.values(), start=0.0)
    if np.any(np.asarray(part.offloaded) > 0):
        terms["offloading"] = np.maximum(0.0, part.offloaded / chip.host - spent)
    return terms


def bounds(parts: Iterable[Part], rates: Rates, chip: Chip, touched: Amount = 0.0) -> Bounds:
    """Return how long each resource is busy at least; of a conditional, the branch that takes least counts.

    Arguments:
        touched: the bytes of arguments and results of the step, each of which is read or written once.
    """
    computed: list[tuple[Branches, str, Amount]] = []
    sent: list[tuple[Branches, Resource, Amount]] = []
    moved = {True: 0.0, False: 0.0}
    users: dict[Resource, dict[str, None]] = {}
    for part in (p for p in parts if not p.waits):
        # Bounds leave out products of 8 bits, which chips compute at other rates.
        computed += [(p.branches, "flops", p.flops * part.times) for p in part.products if not p.narrow]
        for x in part.sent:
            for resource, per_byte in rates[x.kind, x.axes].busy.items():
                sent.append((x.branches, resource, x.size * per_byte * part.times))
                if np.any(per_byte):
                    users.setdefault(resource, {}).update(dict.fromkeys(x.axes))
        moved[part.forward] = moved[part.forward] + part.offloaded / chip.host * part.times
    links: dict[tuple[str, ...], Amount] = {}
    for resource, seconds in least(sent).items():
        axes = resource if isinstance(resource, tuple) else tuple(sorted(users.get(resource, ())))
        links[axes] = np.maximum(links[axes], seconds) if axes in links else seconds
    host = np.maximum(moved[True], moved[False])
    compute, memory = least(computed)["flops"] / chip.flops, touched / chip.memory_bandwidth
    links = {axes: _plain(t) for axes, t in links.items()}
    return Bounds(
        chip.name, _plain(compute), _plain(memory), links, chip.memory, _plain(host) if np.any(host) else None
    )


def _plain(x: Amount) -> Amount:
    return x if np.ndim(x) else float(x)


def bound(parts: Sequence[Part], rates: Rates, chip: Chip, touched: Amount = 0.0) -> Amount:
    """Return the seconds that a step takes at least: the seconds of its busiest resource."""
    return functools.reduce(np.maximum, (t for _, t in bounds(parts, rates, chip, touched).named()))


def stacked(rates: Sequence[Rate]) -> Rate:
    """Join what an exchange takes on several meshes into arrays, with an element for each."""
    resources = {name for r in rates for name in r.busy}
    per_byte, launch, hides = (np.array([getattr(r, of) for r in rates]) for of in ("per_byte", "launch", "hides"))
    return Rate(per_byte, launch, hides, {name: np.array([r.busy.get(name, 0.0) for r in rates]) for name in resources})


def why_first(first: Estimate, second: Estimate) -> str:
    """Say by which terms an estimate is shorter than another one: the largest differences, and those against it."""
    names = dict.fromkeys((*first.terms, *second.terms))
    differences = {n: float(second.terms.get(n, 0.0)) - float(first.terms.get(n, 0.0)) for n in names}
    scale = max((abs(d) for d in differences.values()), default=0.0)
    ordered = sorted(differences.items(), key=lambda pair: -abs(pair[1]))
    shown = [(n, d) for n, d in ordered[:3] if scale and abs(d) >= 0.05 * scale]

    def said(pairs: Sequence[tuple[str, float]]) -> str:
        return " and ".join(f"{described_seconds(abs(d))} of {n}" for n, d in pairs)

    more, less = [p for p in shown if p[1] > 0], [p for p in shown if p[1] < 0]
    if not shown or not more:
        return "by these estimates, it takes as long as the first."
    text = f"it takes {said(more)} more than the first"
    return f"{text}, and {said(less)} less." if less else f"{text}."
