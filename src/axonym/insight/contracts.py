"""`contract`: limit the communication and the memory of a step, by checks of its compiled program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any

import jax

from ..core import errors
from ..core.errors import describe_bytes
from ..core.function_cache import FunctionCache
from ..core.tree_spec import flatten_arrays
from ..distribution import active_settings
from ..distribution.mesh_axes import AnyMesh
from ..sharding.meshes import Between, current_mesh
from ._figures import Memory
from ._text import parsed_bytes
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
    mapping: Mappings = None,
    mesh: AnyMesh | None = None,
) -> Contract:
    """Make a contract: limits on a step's communication between devices, and on its memory.

    There are three ways to use it. `contract(...).check(step, *args)` checks a step. `with contract(...) as c:` raises
    everything that `c.check` finds together at the end; a block that checks nothing is an error. As a decorator of a
    step, above `named_jit` or `jax.jit`, it checks each program before its first run.

    Arguments:
        max_sent: by mesh axis, the bytes that each device may send over it in a call: a number, or `"1.5 MiB"`.
        never_gathers: axes that no all-gather may complete on a device, except indices of a look-up. An all-gather that
            may do so, because axes of equal size make it ambiguous, breaks the contract too.
        scatters_gradients: whether gradients of parameters that `fsdp` stores sharded over a mesh axis must be summed
            over it by reduce-scatters.
        max_memory: the bytes that a device may hold: arguments, results and temporaries.
        mapping, mesh: as in `explain`.

    >>> at_most = axn.insight.contract(never_gathers=["vocab"], max_memory="1 MiB")
    >>> report = at_most.check(lambda x: x * 2, axn.ones({"vocab": 8}))
    >>> report.total_sent()
    0
    """
    if isinstance(never_gathers, str):
        raise TypeError(f"contract: `never_gathers` is a list of names, got the string {never_gathers!r}.")
    return Contract(
        max_sent={axis: parsed_bytes(limit) for axis, limit in (max_sent or {}).items()},
        never_gathers=tuple(never_gathers),
        scatters_gradients=scatters_gradients,
        max_memory=None if max_memory is None else parsed_bytes(max_memory),
        mapping=mapping,
        mesh=mesh,
    )


def never(
    over: str,
    phase: str | None = None,
    *,
    mapping: Mappings = None,
    mesh: AnyMesh | None = None,
    between: Between = None,
) -> Contract:
    """Make a contract that nothing is sent over a mesh axis, or to other slices.

    Arguments:
        over: a mesh axis, or `"slices"`.
        phase: `"forward"`, `"backward"`, `"recomputed"` or `"optimizer"`, if it is only about this one.
        mapping, mesh, between: as in `explain`.

    >>> rule = axn.insight.never(over="slices", phase="forward")
    >>> rule.check(lambda x: x * 2, axn.ones({"batch": 8})).total_sent("slices")
    0
    """
    return Contract({}, (), False, None, mapping, mesh, between, (over, phase))


@dataclasses.dataclass
class Contract:
    """Limits on a step, made by `contract`.

    >>> isinstance(axn.insight.contract(max_memory=1024), axn.insight.Contract)
    True
    """

    max_sent: Mapping[str, int]
    never_gathers: tuple[str, ...]
    scatters_gradients: bool
    max_memory: int | None
    mapping: Mappings = None
    mesh: AnyMesh | None = None
    between: Between = None
    never: tuple[str, str | None] | None = None
    """Over what nothing may be sent, and in which phase."""
    _found: list[str] | None = dataclasses.field(default=None, init=False, repr=False)
    """In a with-block, the violations found so far."""
    _checked: int = dataclasses.field(default=0, init=False, repr=False)

    @property
    def has_checked(self) -> bool:
        """Return whether any step was checked; in a with-block, whether any was checked inside it.

        >>> axn.insight.contract(max_sent={}).has_checked
        False
        """
        return self._checked > 0

    def check(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
        """Explain a step, and raise an error if it breaks the contract; in a with-block, at its end.

        >>> axn.insight.contract(max_sent={}).check(lambda x: x * 2, axn.ones({"x": 8})).total_sent()
        0
        """
        __tracebackhide__ = True  # pytest shows the line of the test
        by = quickest_exact() if self.max_memory is None else "compiled"
        where: dict[str, Any] = {"mapping": self.mapping, "mesh": self.mesh, "between": self.between}
        report = explain(fn, *args, by=by, **where, **kwargs)
        broken = self.broken(report)
        self._checked += 1
        if self._found is not None:
            self._found += broken
        elif broken:
            raise BrokenContract("\n".join(broken))
        return report

    def broken(self, report: Report) -> tuple[str, ...]:
        """Return the parts of a report that break the contract, one message for each.

        >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"x": 8}))
        >>> (line,) = axn.insight.contract(max_memory=8).broken(report)
        >>> print(line.partition(" Either")[0])
        <lambda>: a device holds 64 B, but may hold 8 B: 32 B of arguments, 32 B of results and 0 B of temporaries.
        """
        found = [*self._too_much_sent(report), *self._gathers(report), *self._unscattered(report)]
        found += [] if self.never is None else self._sent_nevertheless(report, *self.never)
        if self.max_memory is not None:
            if report.memory is None:
                raise ValueError("contract: the report has no memory figures; a report with by='compiled' has them.")
            m = report.memory
            if m.total > self.max_memory:
                found.append(
                    f"a device holds {describe_bytes(m.total)}, but may hold {describe_bytes(self.max_memory)}: "
                    f"{describe_bytes(m.arguments)} of arguments, {describe_bytes(m.results - m.aliased)} of results "
                    f"and {describe_bytes(m.temporaries)} of temporaries. {_remedies_for_memory(m)}"
                )
        return tuple(f"{report.step}: {line}" for line in found)

    def __enter__(self) -> Contract:
        self._found, self._checked = [], 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        found, self._found = self._found or [], None
        if kind is not None:
            return
        if not self.has_checked:
            raise BrokenContract("contract: nothing was checked; call `check(step, *args)` in the with-block.")
        if found:
            raise BrokenContract("\n".join(found))

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a step, so that each of its programs is checked before it runs for the first time."""
        checked = FunctionCache()

        @functools.wraps(fn, updated=())
        def guarded(*args: Any, **kwargs: Any) -> Any:
            # The key has everything that may lead to another program, as in jit's own cache.
            arrays, spec = flatten_arrays((args, kwargs))
            spec = spec.weak()
            types = tuple((jax.typeof(x), getattr(x, "sharding", None)) for x in arrays)
            key = spec, types, active_settings.active_settings(), current_mesh()
            checked.find(key, (spec,), lambda: self.check(fn, *args, **kwargs).step)
            return fn(*args, **kwargs)

        return guarded

    # --- rules ---

    def _too_much_sent(self, report: Report) -> list[str]:
        found = []
        for axis, limit in self.max_sent.items():
            if axis not in report.mesh:
                raise ValueError(
                    f"contract: the mesh has no axis {axis!r}, but {errors.describe_shape(report.mesh)}."
                    f"{errors.suggestion(axis, report.mesh)}"
                )
            over = [c for c in report.collectives if axis in (c.axes or ())]
            sent = sum(c.total_sent or 0 for c in over)
            unknown = [c for c in over if c.total_sent is None]
            if sent > limit or unknown:
                largest = sorted(over, key=lambda c: -(c.total_sent or c.sent or 0))[:3]
                often = " at least, and more in a loop of unknown length," if unknown else ""
                found.append(
                    f"each device sends {describe_bytes(sent)}{often} over {axis}, but may send "
                    f"{describe_bytes(limit)}. The most is sent by: {'; '.join(map(str, largest))}. "
                    f"{_remedies_for_sending(largest[0], axis)}"
                )
        return found

    def _sent_nevertheless(self, report: Report, over: str, phase: str | None) -> list[str]:
        """Return one message for each collective that the contract excludes."""
        if over not in report.mesh and over != "slices":
            raise ValueError(
                f"contract: the mesh has no axis {over!r}, but {errors.describe_shape(report.mesh)}."
                f"{errors.suggestion(over, report.mesh)}"
            )
        where = f"slices ({', '.join(report.between)})" if over == "slices" else over
        in_phase = f" in the {phase} pass" if phase else ""
        return [
            f"sends over {where}{in_phase}: {c}. {_remedies_for_sending(c, ' and '.join(c.axes or (over,)))}"
            for c in report.chosen(over, phase=phase)
        ]

    def _gathers(self, report: Report) -> list[str]:
        found = []
        for c in report.collectives:
            if c.kind != "all-gather" or c.of_indices:
                continue
            for axis in self.never_gathers:
                if axis in c.gathered:
                    found.append(f"gathers {axis}: {c}. {_remedies(axis)}")
                elif not c.gathered and axis in c.named_axes:
                    found.append(f"may gather {axis}, or another axis of the same size: {c}. {_remedies(axis)}")
        return found

    def _unscattered(self, report: Report) -> list[str]:
        if not self.scatters_gradients:
            return []
        remedy = (
            "Use the parameter in an operation with names, such as axn.dot, which scatters its gradient; or store it "
            "replicated."
        )
        return [
            f"sums the gradient of a parameter, although {' and '.join(c.stored)} is stored sharded: {c}. {remedy}"
            for c in report.collectives
            if c.kind == "all-reduce" and c.phase == "backward" and c.stored
        ]


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


def _remedies_for_memory(memory: Memory) -> str:
    """Return the two most direct ways to use less memory."""
    if memory.temporaries >= max(memory.arguments, memory.results - memory.aliased):
        return (
            "Either keep less for the backward pass, by jax.checkpoint or `gradient_checkpointing` of nn.Stacked; or "
            "shard the batch over more devices."
        )
    if memory.results - memory.aliased >= memory.arguments:
        return "Either donate the arguments that results replace, by `donate_args`; or shard the results further."
    return "Either store parameters sharded over more mesh axes, by `fsdp`; or in a smaller dtype."
