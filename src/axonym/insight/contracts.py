"""`contract` and `snapshot`: hold a step to limits on what it sends and keeps, or to a text kept with the tests."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..core import errors
from ..core.errors import describe_bytes
from ..distribution.mesh_axes import AnyMesh
from ..sharding.meshes import Between
from ._text import aligned, described_mesh, parsed_bytes
from .comparing import counted
from .explaining import Mappings, explain, quickest_exact
from .records import Collective
from .report import Report


class BrokenContract(AssertionError):
    """Raised if a step breaks its contract. Its message lists every violation.

    >>> issubclass(axn.insight.BrokenContract, AssertionError)
    True
    """


def contract(
    *,
    max_sent: Mapping[str, int | str] | None = None,
    never_gathers: Collection[str] = (),
    scatters_gradients: bool = False,
    max_memory: int | str | None = None,
    snapshot: str | None = None,
    phase: str | None = None,
    mapping: Mappings = None,
    mesh: AnyMesh | None = None,
    between: Between = None,
) -> Contract:
    """Make a contract: limits on a step's communication between devices, and on its memory.

    `contract(...).check(step, *args)` checks a step.

    Arguments:
        max_sent: by mesh axis, the bytes that each device may send over it in a call: a number, or `"1.5 MiB"`.
            `"slices"` is for the bytes that go to other slices.
        never_gathers: axes that no all-gather may complete on a device, except indices of a look-up. An all-gather that
            may do so, because axes of equal size make it ambiguous, breaks the contract too.
        scatters_gradients: whether gradients of parameters that `fsdp` stores sharded over a mesh axis must be summed
            over it by reduce-scatters.
        max_memory: the bytes that a device may hold: arguments, results and temporaries.
        snapshot: the text of `snapshot` that the step must keep.
        phase: `"forward"`, `"backward"`, `"recomputed"` or `"optimizer"`, if `max_sent` is only about this one.
        mapping, mesh, between: as in `explain`.

    >>> at_most = axn.insight.contract(never_gathers=["vocab"], max_memory="1 MiB")
    >>> report = at_most.check(lambda x: x * 2, axn.ones({"vocab": 8}))
    >>> report.total_sent()
    0
    """
    if isinstance(never_gathers, str):
        raise TypeError(f"contract: `never_gathers` is a list of names, got the string {never_gathers!r}.")
    if snapshot is not None and max_memory is not None:
        raise ValueError(
            "contract: `snapshot` is of the program as it is partitioned, and `max_memory` of the compiled one. Make "
            "two contracts."
        )
    return Contract(
        max_sent={axis: parsed_bytes(limit) for axis, limit in (max_sent or {}).items()},
        never_gathers=tuple(never_gathers),
        scatters_gradients=scatters_gradients,
        max_memory=None if max_memory is None else parsed_bytes(max_memory),
        snapshot=snapshot,
        phase=phase,
        mapping=mapping,
        mesh=mesh,
        between=between,
    )


@dataclasses.dataclass(frozen=True)
class Contract:
    """Limits on a step, made by `contract`.

    >>> isinstance(axn.insight.contract(max_memory=1024), axn.insight.Contract)
    True
    """

    max_sent: Mapping[str, int]
    never_gathers: tuple[str, ...]
    scatters_gradients: bool
    max_memory: int | None
    snapshot: str | None = None
    """The text of `snapshot` that the step must keep."""
    phase: str | None = None
    """The phase that `max_sent` is about; None for all."""
    mapping: Mappings = None
    mesh: AnyMesh | None = None
    between: Between = None

    def check(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
        """Explain a step, and raise an error if it breaks the contract.

        >>> axn.insight.contract(max_sent={}).check(lambda x: x * 2, axn.ones({"x": 8})).total_sent()
        0
        """
        __tracebackhide__ = True  # pytest shows the line of the test
        by = quickest_exact() if self.max_memory is None else "compiled"
        where: dict[str, Any] = {"mapping": self.mapping, "mesh": self.mesh, "between": self.between}
        report = explain(fn, *args, by=by, **where, **kwargs)
        if broken := self.broken(report):
            raise BrokenContract("\n".join(broken))
        return report

    def broken(self, report: Report) -> tuple[str, ...]:
        """Return the parts of a report that break the contract, one message for each.

        >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"x": 8}))
        >>> (line,) = axn.insight.contract(max_memory=8).broken(report)
        >>> print(line.partition(" Either")[0])
        <lambda>: a device holds 64 B, but may hold 8 B: 32 B of arguments, 32 B of results and 0 B of temporaries.
        """
        found, m = list[str](), report.memory
        for axis in self.max_sent:
            if axis != "slices" and axis not in report.mesh:
                raise ValueError(
                    f"contract: the mesh has no axis {axis!r}, but {errors.describe_shape(report.mesh)}."
                    f"{errors.suggestion(axis, report.mesh)}"
                )
        for axis, limit in self.max_sent.items():
            over = report.chosen(axis, phase=self.phase)
            where = axis if axis in report.mesh else f"slices ({', '.join(report.between)})"
            where += f" in the {self.phase} pass" if self.phase else ""
            names = {a: None for c in over for a in c.axes or (axis,)} if axis == "slices" else [axis]
            sent, unknown = sum(c.total_sent or 0 for c in over), [c for c in over if c.total_sent is None]
            if sent > limit or unknown:
                most = sorted(over, key=lambda c: -(c.total_sent or c.sent or 0))[:3]
                often = " at least, and more in a loop of unknown length," if unknown else ""
                found.append(
                    f"each device sends {describe_bytes(sent)}{often} over {where}, but may send "
                    f"{describe_bytes(limit)}. The most is sent by: {'; '.join(map(str, most))}. "
                    f"{_remedies_for_sending(most[0], ' and '.join(names))}"
                )
        for c in report.collectives:
            for axis in self.never_gathers if c.kind == "all-gather" and not c.of_indices else ():
                if axis in c.gathered:
                    found.append(f"gathers {axis}: {c}. {_remedies(axis)}")
                elif not c.gathered and axis in c.named_axes:
                    found.append(f"may gather {axis}, or another axis of the same size: {c}. {_remedies(axis)}")
        for c in report.collectives if self.scatters_gradients else ():
            if c.kind == "all-reduce" and c.phase == "backward" and c.stored:
                found.append(
                    f"sums the gradient of a parameter, although {' and '.join(c.stored)} is stored sharded: {c}. Use "
                    "the parameter in an operation with names, such as axn.dot, which scatters its gradient; or store "
                    "it replicated."
                )
        if self.max_memory is not None:
            if m is None:
                raise ValueError("contract: the report has no memory figures; a report with by='compiled' has them.")
            results, remedy = m.results - m.aliased, "store parameters sharded over more mesh axes, by `fsdp`; or in a "
            remedy += "smaller dtype"
            if m.temporaries >= max(m.arguments, results):
                remedy = "keep less for the backward pass, by jax.checkpoint or `gradient_checkpointing` of "
                remedy += "nn.Stacked; or shard the batch over more devices"
            elif results >= m.arguments:
                remedy = "donate the arguments that results replace, by `donate_args`; or shard the results further"
            if m.total > self.max_memory:
                found.append(
                    f"a device holds {describe_bytes(m.total)}, but may hold {describe_bytes(self.max_memory)}: "
                    f"{describe_bytes(m.arguments)} of arguments, {describe_bytes(results)} of results "
                    f"and {describe_bytes(m.temporaries)} of temporaries. Either {remedy}."
                )
        kept, now = (self.snapshot or "").splitlines(), described_distribution(report).splitlines()
        if self.snapshot is not None and now != kept:
            lines = difflib.ndiff(kept, now)
            found.append("\n".join(["differs from its snapshot:", *(line for line in lines if line[0] in "+-")]))
        return tuple(f"{report.step}: {line}" for line in found)


def _remedies(axis: str) -> str:
    return (
        f"Either keep {axis} sharded in the operands of this operation, by axn.shard or another operation; or map "
        f"{axis} to None."
    )


def _remedies_for_sending(c: Collective, mesh_axis: str) -> str:
    """Return the two most direct ways to reduce the bytes that a collective sends."""
    stored = " and ".join(c.stored)
    if c.kind == "all-gather" and stored:
        return (
            f"Either map {stored} to None in the parameter mapping, so that the parameter is stored replicated; or map "
            f"it to {mesh_axis} in the compute mapping too, so that the operation computes with shards."
        )
    if c.kind == "all-gather" and c.gathered:
        return _remedies(" and ".join(c.gathered))
    if c.kind == "all-reduce" and c.phase == "backward":
        return (
            f"Either store the parameter sharded over {mesh_axis}, by `fsdp`, which reduce-scatters its gradient; or "
            f"map the axes that the gradient sums over to another mesh axis than {mesh_axis}."
        )
    if c.kind == "all-reduce":
        return (
            f"Either map the axes that it sums over to another mesh axis than {mesh_axis}; or sum fewer elements, or a "
            "smaller dtype."
        )
    moved = " and ".join(c.moved or c.named_axes) or "the axis that it moves"
    return (
        f"Either keep {moved} sharded alike before and after, by axn.shard; or map it to another mesh axis than "
        f"{mesh_axis}."
    )


def snapshot(
    fn: Callable[..., Any], /, *args: Any, mapping: Mappings = None, mesh: AnyMesh | None = None, **kwargs: Any
) -> str:
    """Describe how a step's arguments are sharded, and what it sends between devices, in a text for tests.

    The text has no line numbers, times or addresses, so it changes when the distribution of the step does. The fixture
    `mapping_snapshot` of `axonym.insight.pytest_plugin` keeps such texts in files.

    Arguments:
        fn, *args, mapping, mesh, **kwargs: as in `axonym.insight.explain`.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> print(axn.insight.snapshot(lambda x: x * 2, axn.ones({"batch": 4}), mapping={"batch": "data"}, mesh=mesh))
    on the mesh data=1
    <BLANKLINE>
    arguments: 16 B on each device
      x  float32[batch=4 over data]  16 B
    <BLANKLINE>
    nothing is sent between devices
    """
    return described_distribution(explain(fn, *args, mapping=mapping, mesh=mesh, by=quickest_exact(), **kwargs))


def described_distribution(report: Report) -> str:
    """Describe how the arguments of a step are sharded, and what it sends, in the text of `snapshot`."""
    rows = list[tuple[str, str, str]]()
    for x in report.placed:
        names = [n or "_" for n in x.axes] if any(x.axes) else None
        over = x.over or ((),) * len(x.sizes)
        rows.append((x.path, errors.describe_sharded(x.dtype, names, x.sizes, over), describe_bytes(x.bytes)))
    total = describe_bytes(sum(x.bytes for x in report.placed))
    parts = [f"on {described_mesh(report.mesh, report.devices)}"]
    parts.append("\n  ".join([f"arguments: {total} on each device", *aligned(rows)]))
    sent = {what + (why and f": {why}"): found for (what, why), found in counted(report.collectives).items()}
    ordered = sorted(sent.items(), key=lambda pair: (-math.prod(pair[1]), pair[0]))
    lines = [f"{times} x {describe_bytes(n)}  {text}" for text, (times, n) in ordered]
    parts.append("\n  ".join(["sent by each device:", *lines]) if lines else "nothing is sent between devices")
    return "\n\n".join(parts)
