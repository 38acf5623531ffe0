"""The library changes nothing that belongs to others: settings of the process, and functions of other packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# What belongs to others, as text, by where it is. Functions that others may replace are compared by identity.
STATE = """
import asyncio, gc, logging, os, signal, sys, threading, types, warnings
import equinox, jax, numpy, optax, orbax.checkpoint
import jax.experimental.custom_partitioning

jax.config.update("jax_num_cpu_devices", 8)
jax.devices()


def functions():
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("axonym", "__main__") or module is None:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
                yield f"{name}.{key}", value
            if isinstance(value, type) and value.__module__ == name:
                for inner, part in list(vars(value).items()):
                    if isinstance(part, (types.FunctionType, classmethod, staticmethod, property)):
                        yield f"{name}.{key}.{inner}", part


def state():
    loggers = [logging.root, *(x for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger))]
    found = {f"config {k}": v for k, v in jax.config.values.items()}
    found |= {f"environment {k}": v for k, v in os.environ.items()}
    found |= {f"logging {x.name}": (x.level, [*x.handlers], x.propagate, x.disabled) for x in loggers}
    found |= {f"signal {s}": signal.getsignal(s) for s in signal.valid_signals()}
    found["warnings"] = [*warnings.filters], warnings.showwarning
    found["hooks"] = sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook, [*sys.meta_path]
    found["limits"] = sys.getrecursionlimit(), gc.isenabled(), gc.get_threshold(), logging.root.manager.disable
    found["asyncio"] = asyncio.new_event_loop, asyncio.get_event_loop_policy.__name__
    return found


changed, quiet = [], [False]


def watch(event, arguments):
    if event in ("os.putenv", "os.unsetenv") and not quiet[0]:
        changed.append((event, arguments))


def watched(owner, name):
    real = getattr(owner, name)

    def replaced(*args, **kwargs):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] == "axonym":
            changed.append((name, args, caller))
        return real(*args, **kwargs)

    setattr(owner, name, replaced)


sys.addaudithook(watch)
watched(type(jax.config), "update")
for name in ("filterwarnings", "simplefilter", "catch_warnings"):
    watched(warnings, name)
before, known = state(), dict(functions())
"""

USE = """
import importlib, pkgutil, tempfile

import axonym as axn
from axonym import nn

for module in pkgutil.walk_packages(axn.__path__, "axonym."):
    if not module.name.endswith(("__main__", "pytest_plugin")):
        importlib.import_module(module.name)

jnp = jax.numpy
mesh = axn.make_mesh({"data": 4, "model": 2})
Batch, Embed, Mlp = axn.make_axes(batch=8, embed=8, mlp=12)
model = nn.MLP.init(Embed, Embed, Mlp, 2, key=jax.random.key(0))
storage, compute = {"embed": "data"}, {"batch": "data", "mlp": "model"}
optimizer = optax.adam(1e-3)


def loss(model, x):
    return axn.mean((model(x) - x) ** 2).scalar()


def step(model, optimizer_state, x):
    value, gradient = jax.value_and_grad(loss)(model, x)
    updates, optimizer_state = optimizer.update(gradient, optimizer_state, model)
    return equinox.apply_updates(model, updates), optimizer_state, value


x = axn.random.normal(jax.random.key(1), (Batch, Embed))
with jax.set_mesh(mesh):
    trained = axn.fsdp(step, storage, compute)
    model, optimizer_state, _ = jax.block_until_ready(trained(model, optimizer.init(model), x))
    args = model, optimizer_state, x
    print(axn.insight.explain(step, *args, mapping=(storage, compute), by="names").collectives[:1])
    print(axn.insight.explain(trained, *args, by="partitioner").collectives[:1])
    print(axn.testing.check_shard_invariance(lambda x: axn.top_k(x, "embed", 2), x, draws=1).compared)
with tempfile.TemporaryDirectory() as folder:
    quiet[0] = True  # others may look for their credentials
    axn.state.save_checkpoint(f"{folder}/1", model)
    axn.state.restore_checkpoint(f"{folder}/1", model)
    axn.state.save_state_dict(axn.state.to_state_dict(model), f"{folder}/model.safetensors")
    quiet[0] = False
"""

COMPARE = """
after, now = state(), dict(functions())
for place, value in before.items():
    if place in after and after[place] != value:
        changed.append((place, value, after[place]))
    if place not in after:
        changed.append((place, value, "gone"))
changed += [(place, "new") for place in after if place.startswith("environment") and place not in before]
changed += [(place, "another function") for place, value in known.items() if now.get(place, value) is not value]
assert not changed, changed
"""


@pytest.mark.parametrize("patched", [False, True])
def test_nothing_of_others_changes(tmp_path: Path, patched: bool) -> None:
    script = tmp_path / "use.py"
    patch = "\nimport orbax.checkpoint as of_others\nof_others.PyTreeCheckpointHandler.restore = lambda *args: None\n"
    script.write_text(STATE + (patch if patched else USE) + COMPARE)
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=400, check=False)
    assert (found.returncode == 0) is not patched, found.stdout[-2000:] + found.stderr[-6000:]
    assert not patched or "PyTreeCheckpointHandler.restore" in found.stderr, found.stderr[-2000:]
