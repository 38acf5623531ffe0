"""Several processes on this machine: their results, and the failure of one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonym.state import save_checkpoint
from tests.processes import checks, faults, loading, machines, names, of_another_machine, outcomes, schedules, training

FILES_OF_THE_EXAMPLE = ("bytes_of_the_text", "files_of_the_example")
"""The checks of the training example that read and write, which four processes run, too."""
VALUES = ("named_jit", "fsdp", "collectives", "remap", "draws", "vocabulary", "schedules", "reports")
"""The checks of programs on eight devices, which are the same for two processes and for four: two run them."""


@pytest.mark.parametrize(
    "count", [pytest.param(2, marks=pytest.mark.newest), pytest.param(4, marks=pytest.mark.oldest)]
)
def test_checks(count: int, tmp_path: Path) -> None:
    """One start for all checks: most of the time goes into starting processes, and into what each compiles."""
    of_one = tmp_path / "check_checkpoint_of_one_process"
    of_one.mkdir()
    save_checkpoint(of_one / "of-one", checks.state())
    chosen, examples = names(checks, faults, loading), names(training)
    if count == 4:
        training.text(tmp_path)
        chosen = [name for name in chosen if name.rpartition(".check_")[2] not in VALUES]
        chosen += [name for name in examples if name.rpartition(".check_")[2] in FILES_OF_THE_EXAMPLE]
    else:
        training.train_in_one_process(tmp_path)
        chosen += [*examples, *names(schedules)]
    found = outcomes(*chosen, count=count, folder=tmp_path, limit=900)
    assert not any(found.values()), "\n".join(f"{name}{wrong}" for name, wrong in found.items() if wrong)
    checks.restored(tmp_path / "check_checkpoint_for_other_processes" / "of-several")


MOVED = ("shard", "local_data", "uneven_local_data", "remap", "transfer", "pictures", "state_dicts", "bytes_read",
         "checkpoint_for_other_processes", "data_that_differ", "rows_that_are_misread")  # fmt: skip
"""The checks of what the page *On several hosts* says of moving, reading and saving arrays."""


def test_two_machines(tmp_path: Path) -> None:
    chosen = [*names(machines), *(f"{checks.__name__}.check_{name}" for name in MOVED)]
    found = outcomes(*chosen, count=2, folder=tmp_path, prefixes=[(), of_another_machine(tmp_path)])
    assert not any(found.values()), "\n".join(f"{name}{wrong}" for name, wrong in found.items() if wrong)


def test_every_mapping_is_checked() -> None:
    """`fsdp+tensor` is both of its parts."""
    checked = {name.rpartition(".check_")[2] for name in names(training)} | {"fsdp", "tensor"}
    assert {name.replace("+", "_and_") for name in ("plan", *training.train_lm.strategies.BUILT_IN)} <= checked
