"""Supervise training on several hosts: end or restart it when another host is lost.

JAX cannot continue without one of its processes, and may abort the others. So the first process on a host does not
train: it starts one that does, and watches it. These supervisors communicate by files in the folder of the run, which
all hosts share: each writes its own once a second. A host is lost when its process is killed, or when it has not
written for a while. Then the others end their processes, and with `--elastic` they agree on who is left, and start new
ones. A host that was lost comes back with the same command: it waits until the others have saved a checkpoint, and all
go on from there. So does a healthy host that is one too many for the others.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

from . import pace

_CHANNEL = "TRAIN_LM_SUPERVISOR"
"""The environment variable with the file descriptor by which a process reaches its supervisor."""
_LOOK, _BEAT = 0.25, 1.0
"""Seconds from one look at the process and the other hosts to the next, and from one sign of life to the next."""
_SLOW = 10.0
"""After so many seconds without a sign of life of its process, a host is named."""
_OWN_WORDS = 100.0
"""So many seconds more a process has that lives and waits: it says itself who is missing, or JAX ends it."""
RESTART = 75
"""The exit status of a process that has saved a checkpoint, so that a host can come back."""


# --- in the process that trains ---


def is_supervised() -> bool:
    return _CHANNEL in os.environ


_WANTED = threading.Event()


def restart_is_wanted() -> bool:
    """Whether the supervisor wants this process to end after its next checkpoint."""
    return _WANTED.is_set()


def connected(index: int, count: int, token: int) -> None:
    """Tell the supervisor, if there is one, which process this is."""
    if is_supervised():
        _tell([index, count, token])


@functools.cache  # once
def stepped() -> None:
    """Tell the supervisor that the first step is done."""
    if is_supervised():
        _tell("stepped")


def _tell(what: Any) -> None:
    with contextlib.suppress(OSError):
        _to_supervisor().sendall(json.dumps(what).encode() + b"\n")


@functools.cache
def _to_supervisor() -> socket.socket:
    """Return the way to the supervisor. From the first call on, it gets signs of life, and this ends when it does."""
    channel = socket.socket(fileno=int(os.environ[_CHANNEL]))
    for work in (_end_with_supervisor, _give_signs_of_life):
        threading.Thread(target=work, args=(channel,), daemon=True).start()
    return channel


def _end_with_supervisor(channel: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while channel.recv(1):
            _WANTED.set()
    os._exit(1)


def _give_signs_of_life(channel: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            channel.sendall(json.dumps(pace.pace()).encode() + b"\n")
            time.sleep(_BEAT)


# --- in the supervisor ---


def supervise_if_distributed(arguments: Sequence[str]) -> None:
    """Become the supervisor of a process with these arguments, if there are several hosts and it has none yet.

    This comes before imports that take seconds, so it looks for a few flags by itself.
    """
    if is_supervised():
        _to_supervisor()
    if is_supervised() or os.name != "posix":
        return
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process-index", type=int)
    parser.add_argument("--host-timeout", type=float, default=30.0)
    parser.add_argument("--start-timeout", type=int, default=300)
    flags = [re.sub("^--[a-z_]+", lambda found: found[0].replace("_", "-"), argument) for argument in arguments]
    try:
        options, _ = parser.parse_known_args(flags)
    except argparse.ArgumentError:
        return  # the parser of all settings says what is wrong
    if options.distributed and options.out is not None:
        sys.exit(_Supervisor(arguments, options).run())


class _Hosts:
    """What the supervisors tell each other, each in a file of its own. Hosts keep the numbers of the first start."""

    def __init__(self, folder: Path, index: int, count: int, timeout: float):
        self.folder, self.index, self.count, self.timeout = folder, index, count, timeout
        self.members = list(range(count))
        self.generation = 0
        self.lost: dict[int, str] = {}
        """Why a host is lost. It stays so until it is started again, with another id."""
        self.told: dict[int, dict[str, Any]] = {}
        self.last_signs: dict[int, float] = {}
        """When the latest sign of life came from each member that was lost since the latest step."""
        self._id = secrets.token_hex(8)
        self._heard = dict.fromkeys(self.members, time.monotonic())
        self._beat, self._written = 0, 0.0
        folder.mkdir(parents=True, exist_ok=True)

    def remove_earlier(self) -> None:
        """Delete what earlier starts have left."""
        if self.index == 0:
            for other in self.folder.parent.iterdir():
                if other != self.folder:
                    shutil.rmtree(other, ignore_errors=True)

    def tell(self, state: str, process: int, why: str = "", silent: int = 0, measured: pace.Pace | None = None) -> None:
        """Write how this host is: it `runs`, `waits` for a plan, has `failed`, `ended`, or is `lost`.

        `silent` is for how many seconds its process gave no sign of life, and `measured` what that said of itself.
        """
        mine = {"host": socket.gethostname(), "process": process, "generation": self.generation, "state": state}
        mine |= {"id": self._id, "count": self.count, "members": self.members, "silent": silent, "why": why}
        mine["pace"] = measured or {}
        mine["lost"] = {str(i): [text, self.id_of(i)] for i, text in self.lost.items()}
        before, now = self.told.get(self.index, {}), time.monotonic()
        if before != mine | {"beat": self._beat} or now > self._written + _BEAT:
            self._beat, self._written = self._beat + 1, now
            self.told[self.index] = mine | {"beat": self._beat}
            _write(self.folder / f"{self.index}.json", self.told[self.index])

    def listen(self) -> None:
        """Read how the others are, and which hosts are lost."""
        now = time.monotonic()
        for i in range(self.count):
            found = None if i == self.index else _read(self.folder / f"{i}.json")
            if found is not None and found != self.told.get(i):
                if i in self.told and found["id"] != self.id_of(i):  # it was started again
                    self.lost.pop(i, None)
                    self._note_last_sign(i)
                self.told[i], self._heard[i] = found, now
        for i in self.others():
            told = self.told.get(i, {})
            lost = {int(j): why for j, (why, of) in told.get("lost", {}).items() if of == self.id_of(int(j))}
            self.lost = lost | self.lost
            if self.state(i) == "lost":
                self.lost.setdefault(i, told["why"])
            elif self.state(i) != "ended" and now > self._heard[i] + self.timeout:
                self.lost.setdefault(i, f"it gave no sign of life for {self.timeout:g} seconds")
            if i in self.lost:
                self._note_last_sign(i)

    def _note_last_sign(self, i: int) -> None:
        if i in self.members:
            self.last_signs.setdefault(i, self._heard[i])

    def started_again(self) -> list[int]:
        """Return the members whose processes were started again while this one trains: the earlier ones are dead."""
        told = [(i, self.told[i]) for i in self.others() if i in self.told]
        return [i for i, one in told if one["process"] == 0 and one["generation"] > self.generation]

    def others(self) -> list[int]:
        return [i for i in self.members if i != self.index]

    def id_of(self, i: int) -> str:
        return self._id if i == self.index else self.told.get(i, {}).get("id", "")

    def state(self, i: int) -> str:
        return self.told[i]["state"] if i in self.told else "runs"

    def name(self, i: int) -> str:
        return f"{i} ({self.told[i]['host']})" if i in self.told else str(i)

    def plan(self, address: str, lock: Path, comes_back: bool = False) -> dict[str, Any] | None:
        """Return which hosts go on, and where they meet, once all that are left wait for it: the first one decides.

        One that comes back decides nothing while it sees no other member: to it, all seem lost if it is cut off.
        """
        path = self.folder / f"plan-{self.generation}.json"
        waiting = self.waiting(self.generation)
        left = [i for i in self.members if i not in self.lost and self.state(i) != "ended"]
        decides = set(left) <= set(waiting) and waiting[0] == self.index and not path.exists()
        if decides and not (comes_back and set(waiting).isdisjoint(self.others())):
            _remove_lock(lock, [(told["host"], told["process"]) for told in self.told.values()])
            hosts = waiting[: self.most(len(waiting))]
            _write(path, {"hosts": hosts, "coordinator": f"{address}:{_free_port()}"})
        return _read(path)

    def waiting(self, generation: int) -> list[int]:
        """Return the hosts that wait for the plan of a generation, also those that come back or were too many."""
        now = time.monotonic()
        alive = [i for i in range(self.count) if i == self.index or now < self._heard[i] + self.timeout]
        alive = [i for i in alive if i not in self.lost and self.state(i) == "waits"]
        return [i for i in alive if self.told[i]["generation"] == generation]

    def most(self, n: int) -> int:
        """Return how many of `n` hosts can go on: what their number in the beginning divides, theirs must divide."""
        return max(m for m in range(1, n + 1) if self.count % m == 0)

    def more_could_run(self) -> bool:
        """Return whether so many hosts wait that more can train."""
        return self.most(len({*self.members, *self.waiting(self.generation + 1)})) > len(self.members)

    def go_on_as(self, members: Sequence[int]) -> None:
        self.members = list(members)
        self._heard = dict.fromkeys(range(self.count), time.monotonic())

    def join(self) -> bool:
        """Go on as a host that is started again, if others train: then a run goes on without it.

        While those wait for a plan, it is not known yet who will train. Others that come back do not count: they know
        no more than this one.
        """
        path = self.folder / f"{self.index}.json"
        mine = _read(path)
        self.listen()
        while self.told:
            before, stop = dict(self.told), time.monotonic() + 3 * _BEAT
            while time.monotonic() < stop:
                time.sleep(_LOOK)
                self.listen()
                if (found := _read(path)) is not None and found != mine:
                    _say(f"Host {self.index} runs already, on {found['host']}; each has its own --process-index.")
                    sys.exit(1)
            alive = [told for i, told in self.told.items() if told != before.get(i) and i in told["members"]]
            train = [told for told in alive if told["state"] == "runs"]
            if train:
                if (count := train[0].get("count", self.count)) != self.count:
                    _say(f"This run began with {count} hosts, so a host comes back with --processes {count}.")
                    sys.exit(1)
                self.members, self.generation = train[0]["members"], train[0]["generation"]
                return True
            if all(told["state"] != "waits" for told in alive):
                return False
        return False


class _Supervisor:
    """Starts the process of this host, and another one when a host is lost."""

    def __init__(self, arguments: Sequence[str], options: argparse.Namespace):
        self.arguments, self.options = list(arguments), options
        self.hosts: _Hosts | None = None
        """Unknown until the process is connected."""
        self.announced: dict[int, str] = {}
        self.slow: set[tuple[int, str]] = set()
        """The hosts that were named as slow, and what is slow there."""
        self.pid = 0
        """The number of the latest process of this host; 0 if it has none that trains, or trained a moment ago."""

    def run(self) -> int:
        """Run processes until training ends; the exit status."""
        more: list[str] = []
        self.hosts = self.run_that_goes_on()
        while True:
            if self.hosts is not None:  # another start than the first one of all
                self.announce(self.hosts)
                plan = self.agree(self.hosts) if self.options.elastic else 1
                if isinstance(plan, int):
                    return plan
                hosts: list[int] = plan["hosts"]
                self.hosts.go_on_as(hosts)
                if self.hosts.index not in hosts:
                    how_many = f"{len(hosts)} of {self.hosts.count} hosts"
                    _say(f"Training goes on with {how_many}, and this one waits until it is needed, or more can train.")
                    self.hosts.last_signs.clear()
                    self.pid = 0
                    continue
                if self.hosts.index == hosts[0]:
                    _say(f"Training goes on from the latest checkpoint on {len(hosts)} of {self.hosts.count} hosts.")
                more = ["--coordinator", plan["coordinator"], "--processes", str(len(hosts))]
                more += ["--process-index", str(hosts.index(self.hosts.index))]
                if (self.options.out / "config.json").is_file():
                    more.append("--resume")
            self.start(more)
            status = self.watch()
            self.end()
            if status is not None or self.hosts is None:
                sys.stderr.buffer.write(b"".join(self.held))
                sys.stderr.flush()
                return 128 - status if status is not None and status < 0 else status or 0

    def run_that_goes_on(self) -> _Hosts | None:
        """Return the hosts of a run that goes on without this one, which has been started again."""
        options = self.options
        if not options.elastic or options.process_index is None or options.processes is None:
            return None
        for folder in filter(Path.is_dir, (options.out / "hosts").glob("*")):
            hosts = _Hosts(folder, options.process_index, options.processes, options.host_timeout)
            if hosts.join():
                _say(f"Training goes on without this host, {hosts.index}. It comes back after the next checkpoint.")
                return hosts
        return None

    def start(self, more: Sequence[str]) -> None:
        self.channel, its = socket.socketpair()
        self.channel.setblocking(False)
        with its:
            self.worker = subprocess.Popen(
                [sys.executable, sys.argv[0], *self.arguments, *more],
                env=os.environ | {_CHANNEL: str(its.fileno())},
                pass_fds=[its.fileno()],
                stderr=subprocess.PIPE,
                process_group=0,  # Ctrl-C comes from here, and once
            )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._pass_on)
        self.held: list[bytes] = []
        self.pid, self.is_asked, self.is_connected = self.worker.pid, False, False
        self.began = self.heard = time.monotonic()
        self.unread = b""
        self.pace: pace.Pace = {}
        self.slow = set()
        self.printer = threading.Thread(target=_print, args=(self.worker.stderr, self.held), daemon=True)
        self.printer.start()

    def end(self) -> None:
        self.worker.kill()
        self.worker.wait()
        self.printer.join(5)
        self.channel.close()

    def watch(self) -> int | None:
        """Wait until the process ends; its exit status, or None if another host is lost."""
        stuck: float | None = None
        while True:
            status = self.worker.poll()
            self.hear()
            if status is None and self.never_connects():
                if self.hosts is not None:
                    self.hosts.tell("lost", self.pid, "its process has not connected")
                return 1
            if self.hosts is None:
                if status is not None:
                    return status
                time.sleep(_LOOK)
                continue
            if status == RESTART:
                return None
            hosts, state = self.hosts, _state(status)
            why = "" if status is None else f"its process was ended by signal {-status}"
            hosts.tell(state, self.worker.pid, why, self.silent_for(), self.pace)
            hosts.listen()
            self.name_slow(hosts)
            if self.options.elastic and not self.is_asked and hosts.more_could_run():
                self.is_asked = True
                with contextlib.suppress(OSError):
                    self.channel.send(b"r")
            if state == "lost":
                _say(f"The process of this host, {hosts.name(hosts.index)}, was ended by signal {-(status or 0)}.")
            if state in ("lost", "ended"):
                return status
            for i in (again := hosts.started_again()):
                _say(f"Host {hosts.name(i)} was lost: it has been started again.")
            if again or any(i in hosts.lost for i in hosts.members):
                return None
            failed = [i for i in hosts.members if hosts.state(i) == "failed"]
            if failed:  # the others end as well, or one of them will be found to be lost
                stuck = stuck or time.monotonic()
                late = time.monotonic() > stuck + hosts.timeout + 2 * _BEAT
                if late and status is None:
                    _say(f"Host {', '.join(map(hosts.name, failed))} has failed; its output says why.")
                if late or (status is not None and all(hosts.state(i) != "runs" for i in hosts.members)):
                    return status or 1
            time.sleep(_LOOK)

    def hear(self) -> None:
        """Take what the process says: who it is, how fast, and that its first step is done."""
        with contextlib.suppress(OSError):
            while said := self.channel.recv(2**16):
                self.unread += said
        *lines, self.unread = self.unread.split(b"\n")
        for said in map(json.loads, lines):
            self.heard = time.monotonic()
            if isinstance(said, dict):
                self.pace = said
            elif isinstance(said, list):
                self.is_connected = True
                if self.hosts is None:
                    index, count, token = said
                    folder = self.options.out / "hosts" / str(token)
                    self.hosts = _Hosts(folder, index, count, self.options.host_timeout)
                    self.hosts.remove_earlier()
            elif self.hosts is not None and (signs := self.hosts.last_signs):
                passed, names = self.heard - min(signs.values()), ", ".join(map(self.hosts.name, signs))
                _say(f"The next step was done {passed:.1f} s after the last sign of life of host {names}.")
                signs.clear()

    def silent_for(self) -> int:
        """For how many seconds the process gave no sign of life; 0 if these are few."""
        silent = time.monotonic() - self.heard
        return 0 if silent < _SLOW else int(silent)

    def never_connects(self) -> bool:
        """Whether to wait no longer until the process is connected; this says which one it is."""
        if self.is_connected:
            return False
        silent, limit = self.silent_for(), self.options.start_timeout
        who = f"The process of this host, {self.pid} on {socket.gethostname()},"
        if silent and self.hosts is None and not self.slow:
            self.slow.add((0, ""))
            _say(f"{who} gave no sign of life for {silent} seconds, and is not connected.")
        late = time.monotonic() > self.began + (limit if silent else 2 * limit + _OWN_WORDS)
        if late:
            why = f"it gave no sign of life for {silent} seconds" if silent else "it waits"
            _say(f"{who} has not connected within {limit} seconds: {why}.")
        return late

    def name_slow(self, hosts: _Hosts) -> None:
        told = {i: hosts.told[i] for i in hosts.members if i in hosts.told}
        silent = [(i, "", f"its process gave no sign of life for {_SLOW:g} seconds") for i in told if told[i]["silent"]]
        slow = [*silent, *pace.slow({i: told[i]["pace"] for i in told})]
        for i, what, why in slow:
            if (i, what) not in self.slow:
                _say(f"Host {hosts.name(i)} is slow: {why}.")
        # What takes long is named once, and silence each time.
        self.slow = {key for key in self.slow if key[1]} | {(i, what) for i, what, _ in slow}

    def announce(self, hosts: _Hosts) -> None:
        for i, why in sorted(hosts.lost.items()):
            if self.announced.get(i) != hosts.id_of(i):
                _say(f"Host {hosts.name(i)} was lost: {why}.")
                self.announced[i] = hosts.id_of(i)

    def agree(self, hosts: _Hosts) -> dict[str, Any] | int:
        """Wait for the plan of those that go on; an exit status if they count this one as lost, or end without it."""
        hosts.generation += 1
        comes_back = self.pid == 0
        while True:
            hosts.tell("waits", self.pid)
            hosts.listen()
            self.announce(hosts)
            if hosts.index in hosts.lost:
                return 1
            states = [hosts.state(i) for i in hosts.others() if i not in hosts.lost]
            if comes_back and not states:
                _say("This host sees none that trains. Start it again when one does, or start all of them.")
                return 1
            if comes_back and all(state in ("ended", "failed") for state in states):
                _say("Training has ended without this host.")
                return int("failed" in states)
            address, lock = _address(self.options.coordinator), self.options.out / "lock.json"
            if (plan := hosts.plan(address, lock, comes_back)) is not None:
                return plan
            time.sleep(_LOOK)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self.worker.poll() is None:
            self.worker.send_signal(number)
        else:
            os._exit(128 + number)


def _state(status: int | None) -> str:
    if status is None:
        return "runs"
    if status in (1, -signal.SIGABRT):  # so it ends when another one is lost, too
        return "failed"
    return "ended" if status >= 0 else "lost"


_FATAL = re.compile(rb"Traceback \(most recent call last\)|Fatal Python error|F\d{4} |[WE]\d{4} .*coordination")


def _print(stream: IO[bytes], held: list[bytes]) -> None:
    """Pass on what a process prints, but not how it ends: nobody wants to see that if a host was lost."""
    for line in stream:
        if held or _FATAL.match(line):
            held.append(line)
        else:
            sys.stderr.buffer.write(line)
            sys.stderr.flush()


def _say(text: str) -> None:
    print(f"train_lm.py: {text}", file=sys.stderr, flush=True)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _write(path: Path, content: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # training says so itself, if files cannot be written
        unfinished = path.with_suffix(".new")
        unfinished.write_text(json.dumps(content))
        os.replace(unfinished, path)


def _remove_lock(path: Path, ended: Sequence[tuple[str, int]]) -> None:
    """Remove the lock of a process that has ended: from another host, nobody else could see that it has."""
    holder = _read(path)
    if holder is not None and (holder.get("host"), holder.get("pid")) in ended:
        path.unlink(missing_ok=True)


def _address(coordinator: str) -> str:
    """How other hosts reach this one: by the address from which it reaches them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s, contextlib.suppress(OSError):
        s.connect((coordinator.rpartition(":")[0] or "192.0.2.1", 9))  # this sends nothing
        return s.getsockname()[0]
    return socket.gethostname()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]
