"""Measure how fast the devices of this process are."""

from __future__ import annotations

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from . import pace


class Probe:
    """Times the same product on one device after another, between two steps, when they have nothing else to do.

    It needs a few megabytes, and takes milliseconds on a GPU or TPU. Simulated devices share the cores of a CPU.
    """

    def __init__(self, size: int = 1024):
        def product(x: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, times, lambda _, y: (y @ x).astype(x.dtype), x)

        is_cpu = jax.default_backend() == "cpu"
        times, dtype = (1, jnp.float32) if is_cpu else (200, jnp.bfloat16)
        self._product, self._x = jax.jit(product), np.eye(size, dtype=dtype)
        self._devices, self._compiled = itertools.cycle(jax.local_devices()), set[int]()

    def measure_next(self) -> None:
        """Note how long the next device takes."""
        device = next(self._devices)
        with jax.set_mesh(Mesh([device], ("device",))):  # not that of the run, which has all devices
            x = jax.block_until_ready(jax.device_put(self._x, device))
            start = time.perf_counter()
            jax.block_until_ready(self._product(x))
        if device.id in self._compiled:
            pace.took_on_device(device.id, time.perf_counter() - start)
        self._compiled.add(device.id)
