"""The schedules of pipelines: which microbatch each stage works on in each tick. `_pipeline` runs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from ..axis import AxisSelector


@dataclasses.dataclass(frozen=True)
class GPipe:
    """A pipeline that runs all microbatches forward and then, in the backward pass, all of them backward.

    Arguments:
        microbatches: the number of microbatches that the batch is cut into.
        axis: the axis of the batch. Each device cuts its own shard of it.
        remat: whether a stage is computed again for its derivative, so that only its input is kept in each tick.
        gather: when parameters that are stored sharded (see `axonym.fsdp`) are all-gathered: "before" the ticks, once,
            or "inside" each of them, so that the gathered parameters of a stage do not stay in memory.
        rounds: how often a microbatch passes through all stages. In each round, a stage applies different layers, so
            ticks are shorter, and so is the time in which a stage is idle. The number of microbatches must be a
            multiple of the number of stages, and `remat` must be True: otherwise the layers of a round would be stored
            for each tick.
        keep_sharded: axes that stay sharded inside the layers as the active mapping says, such as experts, or
            positions whose keys go around in a ring. Layers see complete axes, and are run on shards; one that needs
            all of an axis is an error. Other axes are gathered, or left to the partitioner.

    >>> schedule = axn.schedules.GPipe(microbatches=8)
    >>> schedule.ticks(stages=3), schedule.idle(stages=3)
    (10, 0.2)
    """

    microbatches: int
    axis: AxisSelector = "batch"
    remat: bool = True
    gather: Literal["before", "inside"] = "before"
    rounds: int = 1
    keep_sharded: Sequence[AxisSelector] = ()

    def __post_init__(self) -> None:
        _check_schedule(self)

    def ticks(self, stages: int) -> int:
        """Return the number of forward ticks; there are as many backward. Each sends one microbatch between stages.

        >>> axn.schedules.GPipe(microbatches=8).ticks(stages=4)
        11
        """
        check_stages(self, stages)
        return self.microbatches * self.rounds + stages - 1

    def idle(self, stages: int) -> float:
        """Return the share of ticks in which a stage is idle.

        >>> axn.schedules.GPipe(microbatches=3).idle(stages=2)
        0.25
        """
        return (stages - 1) / self.ticks(stages)

    def table(self, stages: int) -> list[list[int | None]]:
        """Return, for each stage, the microbatch that it works on in each forward tick, or None where it is idle.

        >>> axn.schedules.GPipe(microbatches=2).table(stages=2)
        [[0, 1, None], [None, 0, 1]]
        """
        return [[_microbatch_of(work) for (work,) in row] for row in _works_of_stages(self, stages)]

    def draw(self, stages: int) -> str:
        """Return a picture of `table`: a row for each stage, a column for each tick, and dots where it is idle.

        With several rounds, a letter after the microbatch is the round.

        >>> print(axn.schedules.GPipe(microbatches=3).draw(stages=2))
        stage 0  0 1 2 .
        stage 1  . 0 1 2
        >>> print(axn.schedules.GPipe(microbatches=2, rounds=2).draw(stages=2))
        stage 0  0a 1a 0b 1b  .
        stage 1   . 0a 1a 0b 1b
        """
        return _drawn_schedule(self, stages)


@dataclasses.dataclass(frozen=True)
class OneFOneB:
    """A pipeline that runs each microbatch backward as soon as it can, so that few are in flight at a time.

    In a tick, each stage runs one microbatch forward and another one backward, which it computes again from its stored
    input. A stage stores `2 * stages - 1` inputs at most, for any number of microbatches.

    A microbatch can go backward only once its loss is known. So the loss is part of the pipeline: `then` of
    `Stacked.fold` computes it from a microbatch of results. Without `then`, the backward pass runs everything forward
    again.

    Arguments:
        microbatches, axis, gather, rounds, keep_sharded: as in `GPipe`. With several rounds,
            `2 * rounds * stages - 1` inputs are stored.

    >>> schedule = axn.schedules.OneFOneB(microbatches=8)
    >>> schedule.ticks(stages=3), round(schedule.idle(stages=3), 2)
    (12, 0.2)
    """

    microbatches: int
    axis: AxisSelector = "batch"
    gather: Literal["before", "inside"] = "before"
    rounds: int = 1
    keep_sharded: Sequence[AxisSelector] = ()

    def __post_init__(self) -> None:
        _check_schedule(self)

    def ticks(self, stages: int) -> int:
        """Return the number of ticks, in each of which a microbatch goes forward and another one backward.

        >>> axn.schedules.OneFOneB(microbatches=8).ticks(stages=4)
        14
        """
        check_stages(self, stages)
        return self.microbatches * self.rounds + _delay_in_ticks(self, stages)

    def idle(self, stages: int) -> float:
        """Return the share of the time in which a stage is idle: the same as for `GPipe`.

        In the first ticks no stage runs backward, and in the last ones none forward, so these take less time.

        >>> axn.schedules.OneFOneB(microbatches=3).idle(stages=2)
        0.25
        """
        check_stages(self, stages)
        return (stages - 1) / (self.microbatches * self.rounds + stages - 1)

    def table(self, stages: int) -> list[list[tuple[int | None, int | None]]]:
        """Return, for each stage, which microbatch goes forward and which backward in each tick, or None.

        >>> axn.schedules.OneFOneB(microbatches=1).table(stages=2)
        [[(0, None), (None, None), (None, 0)], [(None, None), (0, 0), (None, None)]]
        """
        return [
            [(_microbatch_of(up), _microbatch_of(down)) for up, down in row] for row in _works_of_stages(self, stages)
        ]

    def draw(self, stages: int) -> str:
        """Return a picture of `table`: in each tick the microbatch that goes forward, and the one that goes backward.

        >>> print(axn.schedules.OneFOneB(microbatches=3).draw(stages=2))
        stage 0  0/. 1/. 2/0 ./1 ./2
        stage 1  ./. 0/0 1/1 2/2 ./.
        """
        return _drawn_schedule(self, stages)


Schedule: TypeAlias = GPipe | OneFOneB


def work_of(schedule: Schedule, stages: int, index: Any, backward: bool = False) -> tuple[Any, Any]:
    """Return the microbatch and the round of the `index`-th task of a stage; both may be arrays.

    In rounds, microbatches come in groups of one for each stage, so that the first of a group comes back to the first
    stage when the last one has left it.
    """
    # A group of microbatches goes through all of its rounds before the next group begins.
    group, rest = divmod(index, schedule.rounds * stages)
    turn, member = divmod(rest, stages)
    return group * stages + member, schedule.rounds - 1 - turn if backward else turn


def first_ticks(schedule: Schedule, stages: int, stage: Any) -> tuple[Any, Any]:
    """Return the ticks of `OneFOneB` in which a stage has its first task, forward and backward."""
    return stage, _delay_in_ticks(schedule, stages) - stage


def check_stages(schedule: Schedule, stages: int) -> None:
    """Check that a schedule is possible with a number of stages."""
    if schedule.rounds > 1 and schedule.microbatches % stages:
        raise ValueError(
            f"{type(schedule).__name__}: with several rounds, the number of microbatches must be a multiple of the "
            f"number of stages; {schedule.microbatches} is not a multiple of {stages}."
        )


def _delay_in_ticks(schedule: Schedule, stages: int) -> int:
    """Return the number of ticks between the first forward and the last backward pass of a microbatch on stage 0."""
    return schedule.rounds * stages + stages - 2


def _check_schedule(schedule: Schedule) -> None:
    what = type(schedule).__name__
    for counted, number in (("microbatch", schedule.microbatches), ("round", schedule.rounds)):
        if number < 1:
            raise ValueError(f"{what}: there must be at least one {counted}, got {number}.")
    if schedule.rounds > 1 and isinstance(schedule, GPipe) and not schedule.remat:
        raise ValueError(f"{what}: with several rounds, stages are computed again; `remat` cannot be False.")
    if isinstance(schedule.keep_sharded, str):
        given = schedule.keep_sharded
        raise TypeError(f"{what}: keep_sharded is a sequence of axes; write keep_sharded=[{given!r}].")
    if schedule.gather not in ("before", "inside"):
        raise ValueError(f"{what}: parameters are gathered 'before' or 'inside' the ticks, not {schedule.gather!r}.")


Work: TypeAlias = tuple[int, int] | None
"""A microbatch and a round; None for a stage that is idle."""


def _works_of_stages(schedule: Schedule, stages: int) -> list[list[tuple[Work, ...]]]:
    """Return the work of each stage in each tick: forward and, if the schedule includes it, backward."""

    def work(index: int, backward: bool = False) -> Work:
        known = 0 <= index < schedule.microbatches * schedule.rounds
        return work_of(schedule, stages, index, backward) if known else None

    def at(stage: int, tick: int) -> tuple[Work, ...]:
        up, down = first_ticks(schedule, stages, stage)
        return (work(tick - up),) if isinstance(schedule, GPipe) else (work(tick - up), work(tick - down, True))

    return [[at(stage, tick) for tick in range(schedule.ticks(stages))] for stage in range(stages)]


def _microbatch_of(work: Work) -> int | None:
    return None if work is None else work[0]


def _text_of_work(schedule: Schedule, work: Work) -> str:
    if work is None:
        return "."
    microbatch, turn = work
    return str(microbatch) if schedule.rounds == 1 else f"{microbatch}{chr(ord('a') + turn)}"


def _drawn_schedule(schedule: Schedule, stages: int) -> str:
    rows = [
        ["/".join(_text_of_work(schedule, work) for work in cell) for cell in row]
        for row in _works_of_stages(schedule, stages)
    ]
    width = max(len(cell) for row in rows for cell in row)
    return "\n".join(f"stage {s}  {' '.join(f'{c:>{width}}' for c in row)}" for s, row in enumerate(rows))
