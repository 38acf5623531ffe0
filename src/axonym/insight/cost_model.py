"""The cost model: the time of exchanges on linked chips, and of a step: a bound, and an estimate in terms.

Everything here is arithmetic over data, without arrays or traces. Amounts may be numbers or NumPy arrays, with an
element for each of several meshes.

No step is faster than its *bound*: all rates as published, everything at once, and for each resource the sum of all
that uses it. An *estimate* is the time that a step may take: rates as they are reached, launches and hops, and
exchanges of which only a share is hidden behind computing. Bounds prune, estimates order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from ._flops import Branches, least, ways
from ._text import described_axes, described_seconds
from .chips import Amount, Chip, Rate, Resource, least_passes

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
    """The work of one turn of a loop in one phase of a step: its products and exchanges overlap."""

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


Rates: TypeAlias = Callable[[str, tuple[str, ...]], Rate]
"""Returns the time of a kind of exchange over a set of mesh axes."""


def least_rates(chip: Chip) -> Rates:
    """Return the least that exchanges take on a topology that is not known: each set of mesh axes may have all links.

    These are rates of the bytes that a device sends, of an all-reduce in one of its two passes.
    """

    def rate(kind: str, axes: tuple[str, ...]) -> Rate:
        per_byte = least_passes(kind, chip) / chip.link_bandwidth
        return Rate(per_byte, 0.0, 1.0, {axes: per_byte})

    return rate


TOUCHED = 2.7
"""The bytes that steps read and write beside products, for each byte of the results of these. A guess, for layers of
transformers, where compilers fuse the operations between products."""

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
    reached, peak = chip.reached, chip.flops * chip.reached.products
    products: Amount = 0.0
    attention: Amount = 0.0
    for p in part.products:
        flops = p.flops / ways(p.branches)
        if p.core:
            attention = attention + flops / (peak * reached.cores)
        else:
            products = products + flops / peak * (p.least + HALF) / p.least
    terms = {"products": products, "attention": attention, "reading and writing": part.touched / chip.memory_bandwidth}
    computing = sum(terms.values(), start=0.0)
    for ahead, share in ((False, reached.waited), (True, reached.ahead)):
        # Computing hides at most a share of these exchanges.
        found: list[tuple[str, Amount]] = []
        hidden: Amount = 0.0
        for x in part.sent:
            if x.ahead == ahead:
                rate = rates(x.kind, x.axes)
                seconds = x.size / ways(x.branches) * rate.per_byte + x.count * rate.launch * (np.asarray(x.size) > 0)
                found.append((f"{x.what} over {' and '.join(x.axes)}", seconds))
                hidden = hidden + seconds * share * (rate.hides if ahead else 1.0)
        left = 1 - np.minimum(hidden, computing) / np.maximum(sum((t for _, t in found), start=0.0), 1e-30)
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
            for resource, per_byte in rates(x.kind, x.axes).busy.items():
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
