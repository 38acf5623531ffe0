"""The schedules of pipelines: in which tick each stage works on which microbatch. `_pipeline` runs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from ..axis import AxisSelector


@dataclasses.dataclass(frozen=True)
class GPipe:
    """A pipeline that runs all microbatches forward and then, in the derivative, all of them backward.

    Arguments:
        microbatches: the number of microbatches that the batch is cut into.
        axis: the axis of the batch. Each device cuts its own shard of it.
        remat: whether a stage is computed again for its derivative, so that only its input is kept in each tick.
        gather: when parameters that are stored sharded (see `axonym.fsdp`) are all-gathered: "before" the ticks, once,
            or "inside" each of them, so that the parameters of one stage are not in memory all the time.

    >>> schedule = axn.schedules.GPipe(microbatches=8)
    >>> schedule.ticks(stages=3), schedule.idle(stages=3)
    (10, 0.2)
    """

    microbatches: int
    axis: AxisSelector = "batch"
    remat: bool = True
    gather: Literal["before", "inside"] = "before"

    def __post_init__(self) -> None:
        _check(self)

    def ticks(self, stages: int) -> int:
        """Return the number of ticks forward; there are as many backward. Each sends one microbatch between stages.

        >>> axn.schedules.GPipe(microbatches=8).ticks(stages=4)
        11
        """
        return self.microbatches + stages - 1

    def idle(self, stages: int) -> float:
        """Return the share of ticks in which a stage is idle.

        >>> axn.schedules.GPipe(microbatches=3).idle(stages=2)
        0.25
        """
        return (stages - 1) / self.ticks(stages)

    def table(self, stages: int) -> list[list[int | None]]:
        """Return for each stage on which microbatch it works in each tick forward, or None where it is idle.

        >>> axn.schedules.GPipe(microbatches=2).table(stages=2)
        [[0, 1, None], [None, 0, 1]]
        """
        ticks = range(self.ticks(stages))
        return [[t - s if 0 <= t - s < self.microbatches else None for t in ticks] for s in range(stages)]

    def draw(self, stages: int, ax: Any = None) -> Any:
        """Draw `table`: a row for each stage, a column for each tick, and dots where it is idle.

        Arguments:
            stages: the number of stages.
            ax: Matplotlib's axes to draw into, which are returned. Without them, the picture is returned as text.

        >>> print(axn.schedules.GPipe(microbatches=3).draw(stages=2))
        stage 0  0 1 2 .
        stage 1  . 0 1 2
        """
        if ax is not None:
            return _draw_into(ax, self, stages, [[(m,) for m in row] for row in self.table(stages)])
        return _drawn([[_cell(m) for m in row] for row in self.table(stages)])


@dataclasses.dataclass(frozen=True)
class OneFOneB:
    """A pipeline that runs each microbatch backward as soon as it can, so that few are under way at a time.

    In a tick, each stage runs one microbatch forward and another one backward, which it computes again from its stored
    input. A stage stores `2 * stages - 1` inputs at most, for any number of microbatches.

    A microbatch can go backward only if its loss is known. So the loss is part of the pipeline: `then` of
    `Stacked.fold` computes it from a microbatch of results. Without it, the derivative runs everything forward again.

    Arguments:
        microbatches, axis, gather: as in `GPipe`.

    >>> schedule = axn.schedules.OneFOneB(microbatches=8)
    >>> schedule.ticks(stages=3), round(schedule.idle(stages=3), 2)
    (12, 0.33)
    """

    microbatches: int
    axis: AxisSelector = "batch"
    gather: Literal["before", "inside"] = "before"

    def __post_init__(self) -> None:
        _check(self)

    def ticks(self, stages: int) -> int:
        """Return the number of ticks, in each of which a microbatch goes forward and another one backward.

        >>> axn.schedules.OneFOneB(microbatches=8).ticks(stages=4)
        14
        """
        return self.microbatches + 2 * (stages - 1)

    def idle(self, stages: int) -> float:
        """Return the share of work in which a stage is idle.

        >>> axn.schedules.OneFOneB(microbatches=2).idle(stages=2)
        0.5
        """
        return 2 * (stages - 1) / self.ticks(stages)

    def table(self, stages: int) -> list[list[tuple[int | None, int | None]]]:
        """Return for each stage which microbatch goes forward in each tick, and which one backward, or None.

        >>> axn.schedules.OneFOneB(microbatches=1).table(stages=2)
        [[(0, None), (None, None), (None, 0)], [(None, None), (0, 0), (None, None)]]
        """

        def known(microbatch: int) -> int | None:
            return microbatch if 0 <= microbatch < self.microbatches else None

        last = 2 * (stages - 1)
        ticks = range(self.ticks(stages))
        return [[(known(t - s), known(t - last + s)) for t in ticks] for s in range(stages)]

    def draw(self, stages: int, ax: Any = None) -> Any:
        """Draw `table`: in each tick the microbatch that goes forward, and the one that goes backward.

        Arguments:
            stages, ax: as in `GPipe.draw`.

        >>> print(axn.schedules.OneFOneB(microbatches=3).draw(stages=2))
        stage 0  0/. 1/. 2/0 ./1 ./2
        stage 1  ./. 0/0 1/1 2/2 ./.
        """
        if ax is not None:
            return _draw_into(ax, self, stages, self.table(stages))
        return _drawn([[f"{_cell(f)}/{_cell(b)}" for f, b in row] for row in self.table(stages)])


Schedule: TypeAlias = GPipe | OneFOneB


def _check(schedule: Schedule) -> None:
    what = type(schedule).__name__
    if schedule.microbatches < 1:
        raise ValueError(f"{what}: there must be at least one microbatch, got {schedule.microbatches}.")
    if schedule.gather not in ("before", "inside"):
        raise ValueError(f"{what}: parameters are gathered 'before' or 'inside' the ticks, not {schedule.gather!r}.")


def _cell(microbatch: int | None) -> str:
    return "." if microbatch is None else str(microbatch)


def _drawn(rows: list[list[str]]) -> str:
    width = max(len(cell) for row in rows for cell in row)
    return "\n".join(f"stage {s}  {' '.join(f'{c:>{width}}' for c in row)}" for s, row in enumerate(rows))


def _draw_into(ax: Any, schedule: Schedule, stages: int, table: Sequence[Sequence[tuple[int | None, ...]]]) -> Any:
    """Draw a box for each microbatch that is worked on, a lighter one below it for what goes backward."""
    for stage, row in enumerate(table):
        for tick, cell in enumerate(row):
            height = 0.9 / len(cell)
            for way, microbatch in enumerate(cell):
                y = stage + (way + 0.5) * height - 0.45
                color = "0.95" if microbatch is None else f"C{microbatch % 10}"
                ax.barh(y, 0.95, height, tick - 0.475, color=color, alpha=0.5 if way else 0.9)
                if microbatch is not None:
                    ax.text(tick, y, str(microbatch), ha="center", va="center")
    ax.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    ax.invert_yaxis()
    ax.set_xlabel("tick")
    name, idle = type(schedule).__name__, schedule.idle(stages)
    ax.set_title(f"{name}, {schedule.microbatches} microbatches: {idle:.0%} idle")
    return ax
