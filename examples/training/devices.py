"""The devices of a run: those of this host, simulated ones, or those of several hosts."""

from __future__ import annotations

import logging
import secrets

import jax
import numpy as np
from jax.experimental import multihost_utils

from axonym.sharding import connect_processes

from .config import Config, lines_of
from .hosts import connected
from .problems import Problem, difference_in_a_line


def start(config: Config) -> None:
    """Make devices ready, of hosts that have agreed. This comes before anything else that JAX does."""
    hosts = config.hosts
    # The number of CPU devices is for machines that have nothing faster, and says nothing elsewhere.
    if jax.config.jax_num_cpu_devices != hosts.simulated_devices:  # pyright: ignore[reportAttributeAccessIssue]
        try:
            jax.config.update("jax_num_cpu_devices", hosts.simulated_devices)
        except RuntimeError:
            raise Problem(
                f"JAX has started already, and not with {hosts.simulated_devices} simulated devices."
            ) from None
    if hosts.distributed:
        _show_whom_hosts_wait_for()
        try:
            connect_processes(
                hosts.coordinator,
                hosts.processes,
                hosts.process_index,
                same={"settings": "\n".join(lines_of(config))},
                initialization_timeout=hosts.start_timeout,
            )
        except (RuntimeError, ValueError, OSError) as e:
            if str(e).startswith("connect_processes: "):
                raise Problem(difference_in_a_line(e)) from None
            raise Problem(
                f"The hosts could not be connected: {e}; --coordinator, --processes and --process-index say how, where "
                "it cannot be found out."
            ) from None
        token = multihost_utils.broadcast_one_to_all(np.int32(secrets.randbits(31)))
        connected(jax.process_index(), jax.process_count(), int(token))


def _show_whom_hosts_wait_for() -> None:
    logging.getLogger("axonym").addHandler(_WAITING)  # once, also if this runs again


_WAITING = logging.StreamHandler()
_WAITING.setFormatter(logging.Formatter("train_lm.py: %(message)s"))


def describe() -> str:
    """How many devices there are, of which kind."""
    device, count = jax.devices()[0], jax.device_count()
    simulated = "simulated " if device.platform == "cpu" and count > 1 else ""
    kind = "CPU" if device.platform == "cpu" else device.device_kind
    hosts = f" on {jax.process_count()} hosts" if jax.process_count() > 1 else ""
    return f"{count} {simulated}{kind} device{'s' if count > 1 else ''}{hosts}"


_CHIPS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "NVIDIA H100 80GB HBM3": "h100"}
"""The names of chips whose figures `axonym.insight` has, by what JAX calls them."""


def chip(name: str) -> str | None:
    """The chip of a name; for "auto" the one that is here, if its figures are known. A CPU simulates a v5e."""
    device = jax.devices()[0]
    return name if name != "auto" else "v5e" if device.platform == "cpu" else _CHIPS.get(device.device_kind)
