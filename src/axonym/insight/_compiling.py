"""Compile a step, completely or until it is partitioned and scheduled, and return the text of its program."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import jax

_LOCK = threading.Lock()


@contextlib.contextmanager
def own_lines() -> Iterator[None]:
    """Prevent the compiler from taking a program with different names and lines from the persistent cache."""
    name = "jax_compilation_cache_include_metadata_in_key"
    if jax.config.jax_compilation_cache_dir is None or getattr(jax.config, name):  # pyright: ignore
        yield
        return
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, False)


def compiled(lowered: Any, options: dict[str, Any] | None = None) -> Any:
    """Compile a lowered function with its own options and further ones."""
    with own_lines():
        try:
            return lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as e:
            if "CustomSPMDPartitioning not found" not in str(e):
                raise
            raise ValueError(
                "explain: an operation with its own partitioning, such as `top_k` or `random.categorical` along a "
                "sharded axis, can be compiled for a topology only on a mesh whose axes are Explicit: "
                "axonym.make_mesh(..., explicit=True)."
            ) from e


class _Enough(Exception):
    """Raised to end a compilation once the rest is not needed."""


def partitioned(lowered: Any, options: dict[str, Any] | None = None) -> str:
    """Return the text of the program once it is partitioned, optimized and scheduled, without generating code.

    This is the compiler's own pipeline for CPUs, ended by a hook before its last and longest step. If JAX has no such
    hook, the function is compiled completely. `options` are further options of the compiler.
    """
    try:
        from jax.extend.xla import PipelineStage, clear_hlo_module_transformation, register_hlo_module_transformation
        from jaxlib import _hlo  # pyright: ignore[reportAttributeAccessIssue]

        read = _hlo.HloModule.from_serialized_hlo_module_proto
    except (ImportError, AttributeError):
        return compiled(lowered, options).as_text()

    # The hook is global to the process: compilations of all threads pass through it meanwhile. It ends this thread's.
    with _LOCK:
        register_hlo_module_transformation(
            _end_if_wanted, name=_HOOK, stage=PipelineStage.POST_SCHEDULER, platforms="cpu"
        )
        _HERE.wanted, _HERE.read, _HERE.text = str(_attributes(lowered)["sym_name"]).strip('"'), read, ""
        try:
            with own_lines():
                done = lowered.compile(compiler_options=options)
        except Exception:  # whatever jaxlib makes of `_Enough`, which ended the compilation
            if not _HERE.text:
                raise
            return _HERE.text
        finally:
            _HERE.wanted = ""
            clear_hlo_module_transformation(_HOOK, PipelineStage.POST_SCHEDULER, platforms="cpu")
    return done.as_text()  # it was compiled before, and came from JAX's cache


class _Here(threading.local):
    """What one thread compiles: the name of the program to end, how to read programs, and the text of that program."""

    wanted, text = "", ""
    read: Any = None


_HERE, _HOOK = _Here(), "axonym_insight"


def _end_if_wanted(module: bytes) -> None:
    """Keep the text of a program and end its compilation, if it is the one that this thread wants.

    A hook must not be collected: jaxlib may be about to call it in another thread when it is cleared.
    """
    if _HERE.wanted:
        text = _HERE.read(module).to_string()
        if text.split(maxsplit=2)[1].rstrip(",") == _HERE.wanted:
            _HERE.text = text
            raise _Enough


def device_count(lowered: Any) -> int:
    """Return the number of devices that a lowered function runs on."""
    attributes = _attributes(lowered)
    counts = [str(attributes[f"mhlo.num_{what}"]) for what in ("partitions", "replicas")]
    return math.prod(int(count.partition(" ")[0]) for count in counts)


def _attributes(lowered: Any) -> Any:
    return lowered.compiler_ir("stablehlo").operation.attributes
