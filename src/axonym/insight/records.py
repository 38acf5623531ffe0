"""The records of a step: what devices exchange, what they compute again, and what they hold."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ..core.errors import counted, describe_bytes
from ..core.source_lines import Source
from ._flops import Branches, mean
from ._text import Said, described_axes

SMALL = 0.01
"""The share of a total below which rows are folded, and work that is repeated is not said."""
MUCH = 0.05
"""The share of the compute, of arguments or of the bytes sent from which a cause of them is worth a remark."""
WIDE = 0.2
"""The share of the memory or of the forward pass from which larger arrays or dtypes are worth a remark."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """An array that is exchanged between devices, by one instruction of a compiled program.

    >>> f = lambda x: jax.lax.with_sharding_constraint(x.sum(), jax.sharding.PartitionSpec())
    >>> x = jax.ShapeDtypeStruct((8,), "float32")
    >>> mesh = axn.make_mesh({"data": -1})
    >>> collectives = axn.insight.explain(f, x, mesh=mesh, by="partitioner").collectives
    >>> all(isinstance(c, axn.insight.Collective) for c in collectives)
    True
    """

    kind: str
    """As XLA calls it: `all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all`, `collective-permute`, ..."""
    axes: tuple[str, ...] | None
    """The mesh axes along which the devices of a group differ; None if the mesh is not known."""
    devices: int
    """The number of devices that exchange data with each other."""
    along_all: bool
    """True if a group has all devices along these mesh axes, rather than some."""
    times: int | None
    """The number of times that the collective runs in a call; None if that depends on values."""
    branches: Branches
    """The branches of conditionals around it, each by the number of its conditional, of how many it is one, and which
    one."""
    array: str
    """The array as it is on each device: the result of an `all-gather` or `all-to-all`, the operand of the others. With
    the names of its axes if they are known."""
    place: tuple[int, int]
    """The index of the array among the arrays that the instruction carries, from 0, and their number."""
    size: int
    """The bytes of its result on each device, each time."""
    sent: int | None
    """The bytes that each device sends at least, each time; None if that depends on values."""
    phase: str
    """`forward`, `backward` or `recomputed`; empty for everything else, such as an optimizer's update."""
    operation: str | None
    """The named operation that it belongs to, with the axes of its operands and results; None if there is none."""
    named_axes: tuple[str, ...]
    """The axes of the operands and results of that operation."""
    gathered: tuple[str, ...]
    """The named axes that an `all-gather` makes complete on each device, as far as known."""
    moved: tuple[str, ...]
    """The named axis along which an `all-to-all` trades shards for shards along another axis, as far as known."""
    stored: tuple[str, ...]
    """The named axes of the array that the parameter mapping shards over these mesh axes, if it is a parameter."""
    of_indices: bool
    """True for the indices of a look-up, which are small beside the values."""
    reason: str | None
    """The reason for it, in names; None if it is not known."""
    source: Source | None
    """The line of the user's code that it comes from."""
    scope: str
    """The scopes around it, as JAX writes them."""
    parameters: tuple[str, ...] = ()
    """The paths of the arguments of which it carries one, or the gradient of one; empty if it is none, or not known."""
    slices: int | None = None
    """The number of slices that have devices of a group, if the program says it."""
    converted: str | None = None
    """The smaller dtype to which the step converts the array after a placement gathers it, if it does."""
    made: str | None = None
    """The kind that the compiler for TPUs makes of it, if another: over a whole torus, it makes an all-reduce of a
    reduce-scatter or an all-gather. `sent` has the bytes of that kind."""
    beside: int | None = None
    """For TPUs: the cycles of computing, by the compiler's estimate, that run between its start and its end, each time.
    0 if nothing does, as for a synchronous one; None if that is not known."""
    cause: str = ""
    """`placement`, `look-up` (of rows without names) or `code without names`, if one of these asks for it."""
    waits: float | None = None
    """For TPUs: about how many seconds a device waits for it, each time: its bytes at the rates of the links that it
    uses, less what is computed beside it."""

    @property
    def total_sent(self) -> int | None:
        """Return the bytes that each device sends in a call that takes its branch; None if values decide.

        >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
        >>> [c.total_sent for c in report.collectives]
        []
        """
        return None if self.sent is None or self.times is None else self.sent * self.times

    @property
    def mean_sent(self) -> int | None:
        """Return the bytes that each device sends in a call if each branch of a conditional runs equally often.

        >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
        >>> [c.mean_sent for c in report.collectives]
        []
        """
        return None if self.total_sent is None else mean(self.total_sent, self.branches)

    def __str__(self) -> str:
        times = "some" if self.times is None else str(self.times)
        sent = "some bytes" if self.sent is None else describe_bytes(self.sent)
        text = f"{self.kind} over {described_axes(self.axes)} of {self.array}, {times} x {sent}"
        text += f", {self.phase}" if self.phase else ""
        text += f", at {self.source}" if self.source else ""
        text += f", in {self.operation}" if self.operation else ""
        return f"{text}: {self.reason or 'why is not known'}"


def sent_by(kind: str, given: int, count: int) -> int | None:
    """Return the least bytes that a device sends to the others of its group, for operands of `given` bytes."""
    if kind == "all-gather":
        return given * (count - 1)
    if kind == "all-reduce":
        return 2 * given * (count - 1) // count
    if kind in ("reduce-scatter", "all-to-all"):
        return given * (count - 1) // count
    return given if kind in ("collective-permute", "collective-broadcast") else None


@dataclasses.dataclass(frozen=True)
class RepeatedWork:
    """Products of which several devices compute the same part.

    >>> step = lambda w, x: axn.dot(x, w, axis="embed")
    >>> w, x = axn.ones({"embed": 8, "mlp": 8}), axn.ones({"batch": 8, "embed": 8})
    >>> mesh = axn.make_mesh({"data": 2})
    >>> report = axn.insight.explain(step, w, x, mapping={}, mesh=mesh, by="partitioner")
    >>> [(work.copies, work.axes, work.operation) for work in report.repeated]
    [(2, ('data',), 'dot[batch, embed; embed, mlp -> batch, mlp]')]
    """

    operation: str | None
    """The named operation, with the axes of its operands and results; None if there is none."""
    phase: str
    """`forward`, `backward` or `recomputed`; empty if it is not differentiated."""
    source: Source | None
    flops: int
    """The flops of each device in them, with the mean of the branches of conditionals."""
    copies: int
    """The number of devices that compute the same part."""
    axes: tuple[str, ...]
    """The mesh axes along which they do; empty if it is not known which."""

    @property
    def needless(self) -> int:
        """Return the flops that each device could leave to others.

        >>> axn.insight.RepeatedWork(None, "", None, flops=80, copies=8, axes=("data",)).needless
        70
        """
        return self.flops - self.flops // self.copies


@dataclasses.dataclass(frozen=True)
class AvoidableWork:
    """Work of a step that could be left out.

    >>> work = axn.insight.AvoidableWork("one-hot", "dot[tokens, vocab; vocab, embed -> tokens, embed]", None, 0.2)
    >>> work.why, work.share
    ('one-hot', 0.2)
    """

    why: str
    """`one-hot` for products with a one-hot array, which look rows up; `empty` for rows of which most are empty, as of
    experts with more slots than rows; `again` for a forward pass that is computed a second time; `padding`, `equal`
    and `unused` for rows of these kinds; `experts` for all experts of which each row takes a few; `replicated` for what
    a placement makes all devices compute; `turns` for what is the same in turns of a loop, `apart` for what does not
    need what it carries, `cache` for all positions where a turn changes one; `stacked` for arrays of a loop of which
    only sums are used; `frozen` for gradients of parameters that stay, `gathered` for ones that a placement gathers;
    `joined` for parameters in one vector; `checkpointed` for what is computed again twice; `wide` for products in a
    larger dtype than what they come from; `repeated` for operands that are; `sum of products` for what is a product."""
    operation: str | None
    """The first named operation, or for `unused` the line that picks some rows; None if there is none."""
    source: Source | None
    """The line that makes it so; for a forward pass, the line that calls it."""
    share: float
    """The share of the compute, or else of the bytes of the arguments."""
    sizes: tuple[int, int] = (0, 0)
    """Two numbers that tell how much: of rows, values and turns, bytes and copies."""
    of: str = ""
    """The axis, the parameters or the dtypes that it is about."""


@dataclasses.dataclass(frozen=True)
class HeldArray:
    """Arrays that a device holds at the peak, grouped if everything known about them is the same.

    >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
    >>> [(held.kind, held.array) for held in report.timeline.at_peak]
    [('argument', 'f32[4]'), ('result', 'f32[batch=4]')]
    """

    kind: str
    """`argument`, `result` or `temporary`."""
    array: str
    """The array as it is on each device, with the names of its axes if they are known."""
    count: int
    bytes: int
    """The bytes of all of them together."""
    phase: str
    """When they are made: `forward`, `backward` or `recomputed`; empty if they are not differentiated."""
    operation: str
    """The named operation that makes them, or else the name that JAX or the compiler has for it."""
    source: Source | None


@dataclasses.dataclass(frozen=True)
class MemoryTimeline:
    """The memory of each device over the course of a step, from when each array is made and last used.

    The compiler puts arrays into one block, which can have gaps, and may let some share memory in ways that this does
    not know. In the tests, the peak differs from the compiler's own figure by less than a tenth of the temporaries.

    >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
    >>> report.timeline.peak
    32
    """

    held: tuple[int, ...]
    """The bytes that each device holds at each instruction, in the order in which they run. Loops run once."""
    phases: tuple[str, ...]
    """The phase of each instruction."""
    at_peak: tuple[HeldArray, ...]
    """The arrays that are held at the peak, the largest first."""
    kept_for_backward: tuple[HeldArray, ...] = ()
    """The arrays that the forward pass makes and the backward pass uses, when they take most memory, the largest first.
    Arguments and results are not among them."""

    @property
    def peak(self) -> int:
        """Return the most bytes that each device holds at any time.

        >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
        >>> report.timeline.peak == max(report.timeline.held)
        True
        """
        return max(self.held)


def held_beside_arguments(timeline: MemoryTimeline) -> list[HeldArray]:
    """Return the arrays at the peak, apart from arguments."""
    return [h for h in timeline.at_peak if h.kind != "argument"]


def together(arrays: Iterable[HeldArray]) -> tuple[HeldArray, ...]:
    """Count identical arrays, and return the largest first."""
    counts = Counter(arrays).items()
    rows = (dataclasses.replace(one, count=count, bytes=count * one.bytes) for one, count in counts)
    return tuple(sorted(rows, key=lambda h: -h.bytes))


def described_held(held: Sequence[HeldArray]) -> str:
    """Describe some arrays: the bytes of all, and the largest."""
    rows = [f"{f'{h.count} x ' if h.count > 1 else ''}{h.array}" for h in held]
    rest = sum(h.count for h in held[3:])
    more = f", and {rest} smaller" if rest else ""
    return f"{describe_bytes(sum(h.bytes for h in held))}: {', '.join(rows[:3])}{more}"


# --- transfers that a reader takes for one ---


def path_of(c: Collective) -> str:
    """Write the parameter that a collective carries, or that it carries the gradient of; empty if there is none."""
    return " or ".join(dict.fromkeys(map(without_numbers, c.parameters)))


def grouped(collectives: Sequence[Collective]) -> list[list[Collective]]:
    """Put transfers together that a reader takes for one, the largest first.

    These are parameters that are gathered, gradients of parameters that are summed, and sums of arrays with the same
    axes. Other transfers of activations have causes of their own.
    """
    found: dict[Any, list[Collective]] = {}
    for c in collectives:
        sums = "reduce" in c.kind and "held array" not in c.array
        key = (c.array.partition("[")[0],) if c.parameters else (c.array,) if sums else (c.array, c.source, c.reason)
        found.setdefault((c.kind, c.axes, bool(c.parameters), key), []).append(c)
    return sorted((sorted(g, key=lambda c: -(c.mean_sent or 0)) for g in found.values()), key=lambda g: -known_sent(g))


def alike(found: Sequence[Collective], total: int) -> tuple[list[list[Collective]], list[list[Collective]]]:
    """Put transfers together that differ only in how often they run, as in repeated layers, the largest first.

    Those of less than 1% of a total are returned apart.
    """
    groups: dict[Any, list[Collective]] = {}
    for c in found:
        sent = None if c.sent is None else describe_bytes(c.sent)
        how = c.axes, c.devices, c.along_all, c.times is None, bool(c.branches)
        of = c.array, c.phase, c.operation, str(c.source), c.reason, path_of(c)
        groups.setdefault((c.kind, sent, how, of), []).append(c)
    # In a loop of unknown length, the bytes of one iteration decide the order.
    ordered = sorted(groups.values(), key=lambda same: -sum(c.total_sent or c.sent or 0 for c in same))
    large, small = list[list[Collective]](), list[list[Collective]]()
    for g in ordered:
        (small if all(c.total_sent is not None for c in g) and known_sent(g) < SMALL * total else large).append(g)
    return large, small


def carried(group: Sequence[Collective]) -> str:
    """Describe the arrays that a group of transfers carries."""
    first, paths = group[0], list(dict.fromkeys(map(path_of, group)))
    gradient = "reduce" in first.kind
    if not first.parameters:
        operations = {c.operation.partition("[")[0] for c in group if c.operation}
        return first.array + (f" in {operations.pop()}" if len(operations) == 1 else "")
    if len(paths) == 1:
        return f"{first.array} ({'the gradient of ' * gradient}{paths[0]})"
    dtype = first.array.partition("[")[0]
    return f"{dtype} {'gradients of ' * gradient}parameters ({some(paths)})"


_WIDE = 60
"""The number of characters that a list may have."""


def some(words: Sequence[str], most: int = 4) -> str:
    """List the first words, as many as fit into part of a line, and count the others."""
    while most > 1 and len(", ".join(words[:most])) > _WIDE:
        most -= 1
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def from_lines(group: Sequence[Collective]) -> str:
    """Write where a group of transfers comes from."""
    lines = list(dict.fromkeys(str(c.source) for c in group if c.source))
    return (f", {lines[0]}" if lines else "") + (f" and {counted(len(lines) - 1, 'more line')}" if lines[1:] else "")


def why(group: Sequence[Collective]) -> str:
    """Write the reason for most of the bytes in a group of transfers."""
    sent: dict[str, int] = {}
    for c in group:
        reason = c.reason or "why is not known"
        if len(group) > 1:
            reason = re.sub(r"^the gradient of (\[[^\]]*\] |.+ is (?=summed over))", "", reason)
        sent[reason] = sent.get(reason, 0) + (c.mean_sent or 0)
    more = f"; and {counted(len(sent) - 1, 'other reason')}" if len(sent) > 1 else ""
    return f"{max(sent, key=lambda reason: sent[reason])}{more}"


def known_sent(found: Sequence[Collective]) -> int:
    """Return the bytes that a device sends, apart from exchanges of which values decide how often they run."""
    return sum(c.mean_sent or 0 for c in found)


def waited(c: Collective) -> float:
    """Return about how many seconds a call waits for a collective, as far as known."""
    return (c.waits or 0.0) * (c.times or 0)


def carried_axes(c: Collective) -> tuple[str, ...]:
    """Return the names of the axes of the array that a collective carries, as far as known."""
    return c.array.of[0] if isinstance(c.array, Said) else ()


def without_numbers(path: str) -> str:
    """Write a path for all layers of a kind: `layers/*/weight`."""
    return re.sub(r"(?<=/)\d+(?=/|$)", "*", path)
