"""The training example when a host is lost: its messages, the time until it notices, and how it continues."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
import pytest

from tests.processes import ROOT, Ended, counting, free_port, of_another_machine, run, slices, training

_Hosts = training.train_lm.hosts._Hosts

Processes = list[Popen[bytes]]
STEPS = 12
IS_SLOW = re.compile(r"Host \d+ \(.*\) is slow: ")
WENT_ON = re.compile(r"The next step was done \d+\.\d s after the last sign of life of host (.*)\.")
LIMIT = 400
SCRIPT = Path(training.train_lm.__file__)
HOST = socket.gethostname()
PATHS = {"PYTHONPATH": os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), str(ROOT)) if p)}


def flags(folder: Path, devices: int) -> list[str]:
    flags = [*training.SMALL, "--data", str(training.text(folder)), "--out", str(folder / "run"), "--steps", str(STEPS)]
    return [*flags, "--samples", "0", "--evaluate-every", "1000", "--simulated-devices", str(devices)]


def train(
    folder: Path,
    count: int,
    meanwhile: Callable[[Processes], None],
    *more: str,
    prefixes: list[list[str]] | None = None,
) -> Ended:
    """Start the script on several hosts, and do something to them while they train."""
    same = [*flags(folder, 8 // count), "--distributed", "--host-timeout", "5", *more]
    same += ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(count)]
    commands = [[str(SCRIPT), *same, "--process-index", str(i)] for i in range(count)]
    quick = [{"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}] * count
    return run(commands, folder, LIMIT, environments=quick, meanwhile=meanwhile, prefixes=prefixes)


def said(ended: Ended, host: int) -> list[str]:
    """Return the output of a supervisor and its process without progress lines and times; with a traceback, if any.

    Where many processes run at once, any of them may be slow.
    """
    lines = ended.printed[host].splitlines()
    found = [line for line in lines if line.startswith(("train_lm.py: ", "Trace", "Fatal"))]
    return [
        line.removeprefix("train_lm.py: ") for line in found if not IS_SLOW.search(line) and not WENT_ON.search(line)
    ]


def losses(folder: Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def wait_for(found: Callable[[], Any]) -> Any:
    """Wait until a function finds something, and return it."""
    stop = time.monotonic() + LIMIT
    while time.monotonic() < stop:
        if value := found():
            return value
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def process(out: Path, host: int) -> int:
    """Return the process that trains on a host."""
    (path,) = wait_for(lambda: list(out.glob(f"hosts/*/{host}.json")))
    return json.loads(path.read_text())["process"]


def latest(out: Path) -> int:
    """Return the step of the latest complete checkpoint."""
    paths = out.glob("checkpoints/step-??????/checksums.json")  # not unfinished ones
    steps = [int(path.parent.name.removeprefix("step-")) for path in paths]
    return max(steps, default=0)


@pytest.mark.oldest
def test_the_others_go_on(tmp_path: Path) -> None:
    """The host is gone that has the lock and connects the others; what is left has the losses that all would have."""
    out = tmp_path / "run"

    def kill(processes: Processes) -> None:
        unfinished = "checkpoints/*.orbax-checkpoint-tmp*"
        wait_for(lambda: latest(out) >= 4 and (any(out.glob(unfinished)) or latest(out) >= 8))
        processes[0].kill()  # in a save, which is no failure to write a checkpoint

    ended = train(tmp_path, 2, kill, "--elastic")
    assert ended.statuses == [-signal.SIGKILL, 0], ended.printed
    assert said(ended, 1) == [
        f"Host 0 ({HOST}) was lost: it gave no sign of life for 5 seconds.",
        "Training goes on from the latest checkpoint on 1 of 2 hosts.",
    ]
    assert WENT_ON.findall(ended.printed[1]) == [f"0 ({HOST})"]
    assert not any("could not be written" in printed for printed in ended.printed)
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    assert training.train_lm.main(flags(undisturbed, 8)) == 0
    found, expected = losses(tmp_path), losses(undisturbed)
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-3)
    measured = training.train_lm.pace.pace()
    assert 0 < measured["before a step"] < measured["step"]


@pytest.mark.oldest
def test_two_machines_of_which_one_is_lost(tmp_path: Path) -> None:
    """Machines with boot ids of their own: they train, one is lost, the other goes on; and both resume."""
    out, mapping = tmp_path / "run", tmp_path / "mapping.json"
    compute, storage = {"batch": ["replica", "data"]}, {"embed": "data"}
    content = {"mesh": {"replica": -1, "data": 4}, "mapping": compute, "parameter_mapping": storage}
    mapping.write_text(json.dumps(content | {"between": "replica"}))
    prefixes = [[], of_another_machine(tmp_path)]

    def kill(processes: Processes) -> None:
        wait_for(lambda: latest(out) >= 4)
        os.kill(process(out, 1), signal.SIGKILL)

    ended = train(tmp_path, 2, kill, "--elastic", "--mapping", str(mapping), prefixes=prefixes)
    assert ended.statuses == [0, 128 + signal.SIGKILL], ended.printed
    for count in (2, 1):
        assert f"on the mesh replica={count}, data=4: " in ended.printed[0]
    assert list(losses(tmp_path)) == list(range(1, STEPS + 1))
    ended = train(tmp_path, 2, lambda processes: None, "--resume", "--steps", str(STEPS + 2), prefixes=prefixes)
    assert ended.statuses == [0, 0] and "on the mesh replica=2, data=4: " in ended.printed[0], ended.printed
    assert list(losses(tmp_path)) == list(range(1, STEPS + 3))


@pytest.mark.oldest
def test_hosts_that_are_killed_in_a_save_resume_with_the_same_losses(tmp_path: Path) -> None:
    """To the last bit, from the checkpoint before the one that was being written while training went on."""
    out = tmp_path / "run"

    def kill(processes: Processes) -> None:
        pids = [process(out, host) for host in range(2)]

        def are_in_a_save() -> bool:
            assert None in [p.poll() for p in processes], "training has ended before a save was seen"
            if latest(out) == 0 or not any(out.glob("checkpoints/*.orbax-checkpoint-tmp*")):
                return False
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            if any(out.glob("checkpoints/*.orbax-checkpoint-tmp*")) and max(losses(tmp_path)) > latest(out):
                return True
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            return False

        wait_for(are_in_a_save)
        for supervisor in processes:
            supervisor.kill()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    assert train(tmp_path, 2, kill).statuses == [-signal.SIGKILL] * 2
    before, start = losses(tmp_path), latest(out)
    ended = train(tmp_path, 2, lambda processes: None, "--resume")
    assert ended.statuses == [0, 0], ended.printed
    after = losses(tmp_path)
    assert max(before) > start and max(after) == STEPS
    assert {step: after[step] for step in before} == before


def count(
    folder: Path,
    hosts: int,
    meanwhile: Callable[[Processes], None],
    *more: str,
    environments: list[dict[str, str]] | None = None,
) -> Ended:
    """Start the script that counts, which takes a fraction of the time, and do something to its hosts.

    They find each other by flags, or by what a cluster says in their environments.
    """
    out = folder / "run"
    out.mkdir()
    same = [str(Path(counting.__file__)), "--distributed", "--out", str(out), *more]
    commands = [same] * hosts
    if environments is None:
        same += ["--processes", str(hosts), "--coordinator", f"127.0.0.1:{free_port()}"]
        commands = [[*same, "--process-index", str(i)] for i in range(hosts)]
    return run(commands, folder, LIMIT, environments=environments, meanwhile=meanwhile)


def steps(out: Path) -> list[tuple[int, int]]:
    """Return the steps that were counted, each with the number of hosts."""
    path = out / "steps.txt"
    return (
        [(int(a), int(b)) for a, b in (line.split() for line in path.read_text().splitlines())] if path.exists() else []
    )


@pytest.mark.oldest
def test_the_others_end(tmp_path: Path) -> None:
    """Soon, and with one line, also when the process is killed that connects the others; here on slices of a TPU."""
    out, killed = tmp_path / "run", 0.0

    def kill(processes: Processes) -> None:
        nonlocal killed
        wait_for(lambda: steps(out))
        os.kill(process(out, 0), signal.SIGKILL)
        killed = time.monotonic()

    ended = count(tmp_path, 2, kill, "--host-timeout", "5", environments=slices(2))
    assert time.monotonic() < killed + 10
    assert ended.statuses == [128 + signal.SIGKILL, 1], ended.printed
    assert said(ended, 0) == [f"The process of this host, 0 ({HOST}), was ended by signal 9."]
    assert said(ended, 1) == [f"Host 0 ({HOST}) was lost: its process was ended by signal 9."]


LOST: dict[str, tuple[list[list[int]], list[int]]] = {
    # The hosts that are lost together, in turn; and how many continue each time.
    "one, and another": ([[2], [0]], [4, 2, 2]),
    "two at once": ([[0, 3]], [4, 2]),
}


@pytest.mark.oldest
@pytest.mark.parametrize(("lost", "counts"), LOST.values(), ids=list(LOST))
def test_four_hosts_of_which_some_are_lost(lost: list[list[int]], counts: list[int], tmp_path: Path) -> None:
    """Those go on whose number divides the one in the beginning; of steps, none is left out or done twice.

    A healthy host that is one too many waits, and takes the place of the next that is lost.
    """
    out = tmp_path / "run"

    def kill(processes: Processes) -> None:
        for i, together in enumerate(lost):
            wait_for(lambda count=counts[i]: [n for _, n in steps(out)].count(count) >= 3)
            for process_of in [process(out, host) for host in together]:
                os.kill(process_of, signal.SIGKILL)

    ended = count(tmp_path, 4, kill, "--elastic", "--host-timeout", "60")
    gone = [host for together in lost for host in together]
    assert ended.statuses == [128 + signal.SIGKILL if i in gone else 0 for i in range(4)], ended.printed
    counted = steps(out)
    assert [step for step, _ in counted] == list(range(1, counting.STEPS + 1))
    assert list(dict.fromkeys(n for _, n in counted)) == list(dict.fromkeys(counts))
    for host in gone:
        assert f"Host {host} ({HOST}) was lost: its process was ended by signal 9." in said(ended, 1)
    if len(lost) == 2:
        assert said(ended, 3) == [
            f"Host 2 ({HOST}) was lost: its process was ended by signal 9.",
            "Training goes on with 2 of 4 hosts, and this one waits until it is needed, or more can train.",
            f"Host 0 ({HOST}) was lost: its process was ended by signal 9.",
        ]


@pytest.mark.oldest
def test_the_pool_grows_and_a_host_is_known_by_its_new_identity(tmp_path: Path) -> None:
    """One that was one too many trains again when the lost one is back, and a host that is killed and started again
    within the timeout is known to be another process."""
    out = tmp_path / "run"
    again: Processes = []

    def start_again(processes: Processes, host: int) -> None:
        with (tmp_path / f"again-{host}.txt").open("wb") as output:
            again.append(Popen(processes[host].args, stdout=output, stderr=output, env=os.environ | PATHS))  # pyright: ignore

    def grown(times: int) -> bool:
        return [n for n, _ in itertools.groupby(n for _, n in steps(out))].count(4) == times

    def lose_and_start(processes: Processes) -> None:
        wait_for(lambda: steps(out))
        os.kill(process(out, 2), signal.SIGKILL)
        processes[2].wait()
        wait_for(lambda: any(n == 2 for _, n in steps(out)))
        start_again(processes, 2)
        wait_for(lambda: grown(2))
        trains = process(out, 1)
        processes[1].kill()
        os.kill(trains, signal.SIGKILL)
        processes[1].wait()
        start_again(processes, 1)
        at = len(steps(out))
        wait_for(lambda: len(steps(out)) > at + 3)
        out.joinpath("stop").touch()
        wait_for(lambda: None not in [p.poll() for p in again])

    ended = count(tmp_path, 4, lose_and_start, "--elastic", "--host-timeout", "100", "--steps", "10000")
    assert ended.statuses == [0, -signal.SIGKILL, 128 + signal.SIGKILL, 0], ended.printed
    assert [p.wait() for p in again] == [0, 0]
    counted = steps(out)
    assert [step for step, _ in counted] == list(range(1, len(counted) + 1))
    assert [n for n, _ in itertools.groupby(n for _, n in counted)] == [4, 2, 4]
    assert said(ended, 3) == [
        f"Host 2 ({HOST}) was lost: its process was ended by signal 9.",
        "Training goes on with 2 of 4 hosts, and this one waits until it is needed, or more can train.",
        f"Host 1 ({HOST}) was lost: it has been started again.",
    ]
    assert WENT_ON.findall(ended.printed[0]) == [f"2 ({HOST})", f"1 ({HOST})"]


@pytest.mark.oldest
def test_a_process_that_stops_before_it_connects(tmp_path: Path) -> None:
    """Its supervisor says which one it is, and ends."""

    def stop(processes: Processes) -> None:
        children = Path(f"/proc/{processes[1].pid}/task/{processes[1].pid}/children")
        os.kill(int(wait_for(children.read_text).split()[0]), signal.SIGSTOP)

    ended = count(tmp_path, 2, stop, "--start-timeout", "12")
    assert ended.statuses == [1, 1] and ended.seconds < 100, ended.printed
    assert "process 1 of 2 did not start within 12 s." in ended.printed[0]
    first, second = said(ended, 1)
    who = rf"The process of this host, \d+ on {re.escape(HOST)},"
    assert re.fullmatch(rf"{who} gave no sign of life for 1\d seconds, and is not connected\.", first)
    assert re.fullmatch(
        rf"{who} has not connected within 12 seconds: it gave no sign of life for 1\d seconds\.", second
    )


def test_who_goes_on(tmp_path: Path) -> None:
    """As many hosts as divide their number in the beginning; the first one of them decides."""
    hosts = [_Hosts(tmp_path / "1", i, 6, timeout=100) for i in range(6)]
    lock = tmp_path / "lock.json"
    lock.write_text(json.dumps({"host": HOST, "pid": 1}))
    for other in hosts:
        other.tell("lost" if other.index in (0, 4) else "waits", 1 + other.index, "reasons")
    for other in hosts:
        other.listen()
        assert set(other.lost) == {0, 4} - {other.index}
    assert hosts[2].plan("here", lock) is None and lock.exists()
    hosts[5].tell("runs", 6)
    hosts[1].listen()
    assert hosts[1].plan("here", lock) is None
    hosts[5].tell("waits", 6)
    hosts[1].listen()
    plan = hosts[1].plan("here", lock)
    assert plan is not None and plan["hosts"] == [1, 2, 3] and plan["coordinator"].startswith("here:")
    assert all(hosts[i].plan("elsewhere", lock) == plan for i in (1, 2, 3, 5)) and not lock.exists()
    hosts[3].go_on_as(plan["hosts"])
    hosts[3].timeout = -1
    hosts[3].listen()
    assert set(hosts[3].lost) == {0, 1, 2, 4}
    _Hosts(tmp_path / "2", 0, 2, timeout=1).remove_earlier()
    assert not (tmp_path / "1").exists()


def test_who_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Only a host that is not here already, with others that train; a host that sees no other one decides nothing."""
    module = training.train_lm.hosts
    monkeypatch.setattr(module, "_BEAT", 0.2)
    monkeypatch.setattr(module, "_LOOK", 0.01)
    hosts = [_Hosts(tmp_path, i, 4, timeout=100) for i in range(4)]
    hosts[2].members, hosts[2].generation = [2, 3], 5
    states = {1: "waits", 2: "runs", 3: "runs"}  # host 1 comes back, too, and knows nothing yet
    hosts[1].members = [0, 2, 3]

    def live() -> None:
        while not ended.wait(0.01):
            for i, state in states.items():
                hosts[i].tell(state, i)

    ended, lives = threading.Event(), threading.Thread(target=live)
    for i, state in states.items():
        hosts[i].tell(state, i)
    lives.start()
    try:
        again = _Hosts(tmp_path, 0, 4, timeout=100)
        assert again.join() and (again.members, again.generation) == ([2, 3], 5)
        for index, count in ((2, 4), (0, 3)):
            with pytest.raises(SystemExit):
                _Hosts(tmp_path, index, count, timeout=100).join()
    finally:
        ended.set()
        lives.join()
    printed = capsys.readouterr().err
    assert f"Host 2 runs already, on {HOST}; each has" in printed and "comes back with --processes 4." in printed
    assert not _Hosts(tmp_path, 0, 4, timeout=100).join()
    again.lost = dict.fromkeys((2, 3), "it gave no sign of life")
    again.tell("waits", 0)
    assert again.plan("here", tmp_path / "lock.json", comes_back=True) is None
    assert again.plan("here", tmp_path / "lock.json") is not None


def test_who_is_slow() -> None:
    """Only who keeps the others waiting, not who works longer while the devices compute."""
    usual = {"step": 1.0, "before a step": 0.1, "device 0": 0.01, "device 1": 0.011}
    hosts = [usual, usual | {"before a step": 0.29, "device 1": 0.014}, {}, usual]
    slow = training.train_lm.pace.slow
    assert not [*slow(dict(enumerate(hosts)))] and not [*slow({0: usual | {"before a step": 0.9}, 1: {}})]
    hosts[3] = usual | {"before a step": 0.4, "device 0": 0.02}
    assert [*slow(dict(enumerate(hosts)))] == [
        (3, "before a step", "it works 0.4 s before each step, the median of the others 0.2 s"),
        (3, "device 0", "its device 0 takes 0.02 s for a product, the median of the others 0.011 s"),
    ]


@pytest.mark.oldest
def test_a_lost_host_comes_back(tmp_path: Path) -> None:
    """A host that is slow, in three ways, is named; one that is lost, and started again, goes on with the others."""
    out = tmp_path / "run"

    def printed(text: str) -> bool:
        return all(text in (tmp_path / f"printed-{i}.txt").read_text() for i in range(2))

    def stop_and_lose(processes: Processes) -> None:
        wait_for(lambda: printed(" s before each step"))
        slow = process(out, 1)
        while not printed(" s for a product"):  # its processor has little time for it
            os.kill(slow, signal.SIGSTOP)
            time.sleep(0.1)
            os.kill(slow, signal.SIGCONT)
            time.sleep(0.01)
        os.kill(slow, signal.SIGSTOP)
        wait_for(lambda: printed("no sign of life"))
        os.kill(slow, signal.SIGCONT)
        at = len(steps(out))
        wait_for(lambda: len(steps(out)) > at)
        os.kill(process(out, 0), signal.SIGKILL)
        processes[0].wait()
        wait_for(lambda: any(n == 1 for _, n in steps(out)))
        with (tmp_path / "again.txt").open("wb") as output:
            again = Popen(processes[0].args, stdout=output, stderr=output, env=os.environ | PATHS)  # pyright: ignore
        wait_for(lambda: again.poll() is not None)

    ended = count(tmp_path, 2, stop_and_lose, "--elastic", "--host-timeout", "60", "--steps", "100", "--slow", "1")
    assert ended.statuses == [128 + signal.SIGKILL, 0], ended.printed
    for why in (
        r"it works \S+ s before each step, the median of the others \S+ s",
        r"its device \d+ takes \S+ s for a product, the median of the others \S+ s",
        "its process gave no sign of life for 10 seconds",
    ):
        line = rf"train_lm\.py: Host 1 \({re.escape(HOST)}\) is slow: {why}\."
        assert all(re.search(line, printed) for printed in ended.printed), ended.printed
    assert said(ended, 1) == [
        f"Host 0 ({HOST}) was lost: its process was ended by signal 9.",
        "Training goes on from the latest checkpoint on 1 of 2 hosts.",
    ]
    again = (tmp_path / "again.txt").read_text()
    assert "train_lm.py: Training goes on without this host, 0. It comes back after the next checkpoint." in again
    assert "train_lm.py: Training goes on from the latest checkpoint on 2 of 2 hosts." in again
    counted = steps(out)
    assert [step for step, _ in counted] == list(range(1, 101))
    assert [n for n, _ in itertools.groupby(n for _, n in counted)] == [2, 1, 2]
