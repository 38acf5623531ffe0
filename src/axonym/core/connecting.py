"""Connect several processes that have agreed that they run the same.

JAX connects processes whatever they run. If they differ, their first common program computes nonsense, or waits for
ever; and where one is missing, the others wait in silence. So before JAX connects them, they meet at the address where
JAX will: each tells the first one what it runs, and all get the same answer.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import importlib.metadata
import json
import logging
import os
import platform
import queue
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import jax

from .processes import agree_on, difference

_SAY_AFTER, _SAY_AGAIN = 10.0, 60.0
_LOOK = 0.1
_OTHERS = 2.0
"""Seconds that a difference waits for further processes, so that the message shows which one is the odd one."""
_ALIVE, _SILENT = 1.0, 10.0
"""Seconds between signs of life from the first process, and without any until it counts as another program."""
_LINE = 2**24
"""The largest message of a process, in bytes."""


def connect_processes(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    same: Mapping[str, str] | None = None,
    initialization_timeout: int = 300,
    **options: Any,
) -> None:
    """Connect several processes, as `jax.distributed.initialize` does, if they run the same.

    Call it in place of `jax.distributed.initialize`. The processes compare their versions of JAX, Axonym and Python,
    their numbers of devices, and the texts in `same`. If these differ, or if two processes have one number, all of
    them raise the same ValueError, which names the processes and the difference. While a process is missing, the
    others log whom they wait for, and in the end raise a TimeoutError. On a cluster where JAX finds the processes
    itself, they compare after JAX has connected them, so incompatible versions may fail with JAX's own message.

    Arguments:
        coordinator_address: host and port of the first process; by default, and for the next two, what JAX detects.
        num_processes: the number of processes.
        process_id: the number of this one.
        same: texts by their keys, such as settings, that must be the same in every process.
        initialization_timeout: the seconds to wait for missing processes.
        options: further arguments of `jax.distributed.initialize`.

    >>> try:
    ...     axn.sharding.connect_processes("10.0.0.1:1234", num_processes=2, process_id=2, same={"settings": "seed=1"})
    ... except ValueError as e:
    ...     print(e)
    connect_processes: process_id must be from 0 to 1, got 2.
    """
    if jax.distributed.is_initialized():
        raise RuntimeError("connect_processes: the processes are connected already. Call it once, at the start.")
    for key, text in (same or {}).items():
        if not isinstance(text, str):
            raise TypeError(f"connect_processes: same[{key!r}] must be a text, got {type(text).__name__}.")
    installed = "of a source folder"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.version("axonym")
    versions = {
        "JAX": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "Axonym": installed,
        "Python": platform.python_version(),
    }
    facts = {"versions": "\n".join(f"{name} {version}" for name, version in versions.items()), **(same or {})}
    address = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    has_met = False
    if address is not None and num_processes is not None and process_id is not None and num_processes > 1:
        if not 0 <= process_id < num_processes:
            raise ValueError(f"connect_processes: process_id must be from 0 to {num_processes - 1}, got {process_id}.")
        if _jax_has_started():  # which JAX would refuse only after all have met
            raise RuntimeError("connect_processes: JAX has started already. Call this before any other JAX function.")
        _meet_first_process(
            address,
            options.get("coordinator_bind_address") or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"),
            num_processes,
            process_id,
            facts | {"numbers of processes": str(num_processes)},
            initialization_timeout,
        )
        has_met = True
    jax.distributed.initialize(
        coordinator_address, num_processes, process_id, initialization_timeout=initialization_timeout, **options
    )
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:  # which all processes see
        devices = {i: {"numbers of devices": str(n)} for i, n in sorted(counts.items())}
        raise ValueError(difference("connect_processes", devices))
    if not has_met and jax.process_count() > 1:
        agree_on("connect_processes", facts)


_ASKING = threading.Lock()


def _jax_has_started() -> bool:
    with _ASKING:
        before: int = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
        try:  # JAX has no function that says it, but refuses to change this then
            jax.config.update("jax_num_cpu_devices", before + 1)
        except RuntimeError:
            return True
        jax.config.update("jax_num_cpu_devices", before)
        return False


def _host_and_port(what: str, address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ValueError(
            f"connect_processes: {what} {address!r} has no port; it is a host and a port, as in 'node0:1234'."
        )
    return host.strip("[]"), int(port)


def _meet_first_process(
    address: str, bind_address: str | None, count: int, index: int, facts: Mapping[str, str], timeout: float
) -> None:
    """Tell the first process what this one runs; raise an error if the processes differ, or one is missing."""
    host, port = _host_and_port("coordinator_address", address)
    bound = ("", port) if bind_address is None else _host_and_port("coordinator_bind_address", bind_address)
    stop = time.monotonic() + timeout
    meeting = None
    if index == 0:
        with contextlib.suppress(_InUse):  # maybe by another process with this number, which then says so
            meeting = _Reception(*bound, count, stop)
    me = {"process": index, "id": secrets.token_hex(8), "who": f"process {os.getpid()} on {socket.gethostname()}"}
    try:
        answer = _ask_first_process(host, port, json.dumps(me | {"same": dict(facts)}), count, stop)
    finally:
        if meeting is not None:
            meeting.end()
    if answer["missing"]:
        raise TimeoutError(f"connect_processes: {answer['missing']} did not start within {timeout:g} s.")
    if answer["problem"]:
        raise ValueError(answer["problem"])


def _ask_first_process(host: str, port: int, told: str, count: int, stop: float) -> Any:
    """Tell the first process something, and wait for its answer to all."""
    say_at = time.monotonic() + _SAY_AFTER
    while True:
        strange = False
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5) as s:
            s.sendall(told.encode() + b"\n")
            s.settimeout(_SILENT)
            strange = True  # unless it says something
            with s.makefile("rb") as lines:
                while line := lines.readline(_LINE):
                    try:
                        answer = json.loads(line)
                        waiting, _ = answer["waiting"], answer["problem"]
                    except (ValueError, KeyError, TypeError):
                        break
                    strange = False
                    if not waiting:
                        return answer
                    if time.monotonic() > say_at:
                        say_at = time.monotonic() + _SAY_AGAIN
                        _log_warning(f"Waiting for {waiting}.")
                else:
                    strange = False  # it has ended, and may start again
        now = time.monotonic()
        if now > say_at:
            if strange:
                raise ValueError(
                    f"connect_processes: {host}:{port} is in use by another program, or by processes that have started "
                    "already. Choose another port, or end them."
                )
            say_at = now + _SAY_AGAIN
            _log_warning(f"Waiting for process 0 of {count}, which the others reach at {host}:{port}.")
        if now > stop:
            return {"missing": f"process 0 of {count}, which the others reach at {host}:{port},", "problem": ""}
        time.sleep(_LOOK)


def _log_warning(text: str) -> None:
    logging.getLogger("axonym").warning(text)  # without any setting of logging, this prints the text alone


class _InUse(Exception):
    """The port has a listener already."""


class _Reception:
    """The place where the first process listens to all, in threads, and answers them."""

    def __init__(self, host: str, port: int, count: int, stop: float):
        self.count, self.stop = count, stop
        self.said: queue.Queue[tuple[socket.socket, Any]] = queue.Queue()
        """The message from each process; None after it has closed its connection."""
        self.present: dict[socket.socket, Any] = {}
        """The processes that wait for an answer, and what they told."""
        try:
            if host in ("", "::") and socket.has_dualstack_ipv6():
                self.listener = socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=count
                )
            else:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                self.listener = socket.create_server((host, port), family=family, backlog=count)
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                raise _InUse from None
            raise
        self.accepter = threading.Thread(target=self._accept, daemon=True)
        self.decider = threading.Thread(target=self._decide, daemon=True)
        self.accepter.start()
        self.decider.start()

    def end(self) -> None:
        """Wait until all have the answer, so that JAX finds the port free."""
        self.decider.join(10)
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # or a thread that accepts would keep it open
        self.listener.close()
        self.accepter.join(10)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        with (
            contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError),
            connection.makefile("rb") as lines,
        ):
            told = json.loads(lines.readline(_LINE))
            same = {str(key): str(text) for key, text in told["same"].items()}
            hello = {"process": int(told["process"]), "id": str(told["id"]), "who": str(told["who"]), "same": same}
            self.said.put((connection, hello))
            lines.read(1)
        self.said.put((connection, None))

    def _decide(self) -> None:
        """Answer all processes. If there is a problem, answer latecomers for a while too, until all have closed."""
        try:
            answer, missing = self._compare()
        except Exception as e:  # nobody would hear of it in this thread
            problem = f"connect_processes failed in process 0: {e!r}"
            answer, missing = {"waiting": "", "problem": problem, "missing": ""}, []
        _send_answer(self.present, answer)
        known = list(self.present.values())
        late = set(missing) if answer["problem"] else set()
        stop = time.monotonic() + 5
        while (self.present or late) and time.monotonic() < stop:
            if (hello := self._listen()) is not None:
                late.discard(str(hello["process"]))
                known.append(hello)
                problem = answer["problem"] or self._twice(known)  # also with one that has its answer
                _send_answer({c: h for c, h in self.present.items() if h is hello}, {**answer, "problem": problem})

    def _compare(self) -> tuple[dict[str, str], list[str]]:
        """Wait for all processes; return the answer to them, and which are missing."""
        say_at, stop = 0.0, self.stop
        while True:
            self._listen()
            by_index = {hello["process"]: hello for hello in self.present.values()}
            missing = [str(i) for i in range(self.count) if i not in by_index]
            names = f"process{'es' if len(missing) > 1 else ''} {', '.join(missing)} of {self.count}" if missing else ""
            now, problem = time.monotonic(), self._twice(list(self.present.values()))
            told = {i: hello["same"] for i, hello in sorted(by_index.items())}
            if not problem and (text := difference("connect_processes", told)):
                stop = min(stop, now + _OTHERS)
                problem = text if now >= stop or not missing else ""
            if problem or not missing or now >= stop:
                break
            if now > say_at:
                say_at = now + _ALIVE
                _send_answer(self.present, {"waiting": names, "problem": "", "missing": ""})
        return {"waiting": "", "problem": problem, "missing": "" if problem else names}, missing

    def _listen(self) -> Any:
        """Take what came from a process, if something did, and return it."""
        with contextlib.suppress(queue.Empty):
            connection, hello = self.said.get(timeout=_LOOK)
            self.present.pop(connection, None)
            if hello is None:
                connection.close()
            else:
                self.present[connection] = hello
            return hello

    def _twice(self, present: list[Any]) -> str:
        for index in sorted({hello["process"] for hello in present}):
            n = len({hello["id"] for hello in present if hello["process"] == index})  # one may have connected again
            if n > 1:
                users = sorted({hello["who"] for hello in present if hello["process"] == index})
                return (
                    f"connect_processes: {n} processes have the number {index}: {' and '.join(users)}. Each of "
                    f"{self.count} needs a number of its own."
                )
        return ""


def _send_answer(connections: Mapping[socket.socket, Any], answer: Mapping[str, str]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps(answer).encode() + b"\n")
