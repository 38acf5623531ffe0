"""Exchange of arrays with other libraries by DLPack."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn


def test_numpy_and_back() -> None:
    a = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    x = axn.from_dlpack(a, ("batch", axn.Axis("embed", 3)))
    assert x.shape == {"batch": 2, "embed": 3} and isinstance(x.array, jax.Array)
    np.testing.assert_array_equal(np.from_dlpack(x), a)
    np.testing.assert_array_equal(np.from_dlpack(x.rearrange(("embed", "batch"))), a.T)
    array: Any = x.array
    assert x.__dlpack_device__() == array.__dlpack_device__()


def test_memory_is_shared() -> None:
    x = axn.from_dlpack(jnp.ones((2, 3)), ("batch", "embed"))
    assert np.from_dlpack(x).ctypes.data == x.array.unsafe_buffer_pointer()


def test_names_are_checked() -> None:
    with pytest.raises(ValueError, match=r"1 axis \(batch\) for an array of rank 2"):
        axn.from_dlpack(np.ones((2, 3)), "batch")
    with pytest.raises(ValueError, match=r"axis 'embed' has size 4, but the array has 3"):
        axn.from_dlpack(np.ones((2, 3)), ("batch", axn.Axis("embed", 4)))


def test_several_devices_have_no_single_memory(auto_mesh: jax.sharding.Mesh) -> None:
    x = axn.shard(axn.ones({"batch": 8}), {"batch": "data"}, auto_mesh)
    with pytest.raises(BufferError):
        np.from_dlpack(x)
    assert np.from_dlpack(axn.to_host(x)).sum() == 8


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs the extra: pip install -e '.[interop]'")
def test_pytorch() -> None:
    """In a process of its own, so that PyTorch and JAX do not meet elsewhere."""
    code = """
import axonym as axn, jax.numpy as jnp, torch
x = axn.named(jnp.arange(6.0).reshape(2, 3), ("batch", "embed"))
t = torch.from_dlpack(x.rearrange(("embed", "batch")))
y = axn.from_dlpack(t * 2, ("embed", "batch"))
print(tuple(t.shape), axn.array_equal(y, 2 * x), torch.from_dlpack(x.astype("bfloat16")).dtype)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(3, 2) True torch.bfloat16"
