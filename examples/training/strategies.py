"""Strategies: a mesh, and mappings from the axes of the model to mesh axes.

The compute mapping is active while a step runs. The parameter mapping places parameters, gradients and optimizer state
between steps. If the two differ, a step is compiled by `axn.fsdp`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from models import llama

import axonym as axn
from axonym import NamedArray

from .config import flag, without_duplicates
from .problems import Problem, reason_of

Mesh = Mapping[str, int]
ResourceMapping = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A mesh by its sizes, of which one may be -1, and the two mappings."""

    name: str
    mesh: Mesh
    compute: ResourceMapping
    storage: ResourceMapping
    microbatches: int = 1
    """Where layers are sharded over stages: how many microbatches the batch of a device is cut into."""
    remat: str = "full"
    """What the backward pass computes again, one of `llama.REMAT`."""
    accumulate: int = 1
    """How many microbatches follow one another, where there are no stages."""
    between: str | list[str] | dict[str, int] | None = None
    """Which mesh axes cross slices, as in `axn.make_mesh`."""

    def as_text(self) -> str:
        """What must be the same in every process."""
        return "\n".join(f"{name} {json.dumps(x, sort_keys=True)}" for name, x in dataclasses.asdict(self).items())

    def schedule(self) -> axn.schedules.OneFOneB | None:
        """The schedule of the stages; None if there are none."""
        return axn.schedules.OneFOneB(self.microbatches, axis="batch") if self.compute.get("layers") else None


# Axes along which devices compute independently: heads of attention, hidden features, tokens to predict.
TENSOR = dict.fromkeys(("kv_heads", "mlp", "vocab"), "model")

# Layers in stages of a pipeline. What comes before and after them, the vocabulary, is sharded over the stages.
PIPELINE = dict.fromkeys(("layers", "vocab"), "stage")

# Positions of queries and of keys.
SEQUENCE = dict.fromkeys(("pos", "key_pos"), "data")

BUILT_IN: dict[str, tuple[ResourceMapping, ResourceMapping]] = {
    # Each device has its own texts, and all parameters.
    "data": ({"batch": "data"}, {"batch": "data"}),
    # The same, but parameters are stored sharded, and all-gathered where they are used.
    "fsdp": ({"batch": "data"}, {"embed": "data"}),
    # Tensor parallelism: the devices along `model` share texts, and each computes with its own shard of the parameters.
    "tensor": ({"batch": "data"} | TENSOR, {"batch": "data"} | TENSOR),
    # The same, but parameters are stored sharded over `data` too.
    "fsdp+tensor": ({"batch": "data"} | TENSOR, {"embed": "data"} | TENSOR),
    # Each device has its own stretch of every text, and attends along all of it.
    "sequence": (SEQUENCE, SEQUENCE),
    # The devices along `model` share texts, of which each has a stretch; parameters are stored sharded over `data`.
    "context": ({"batch": "data"} | dict.fromkeys(SEQUENCE, "model"), {"embed": "data"}),
    # Each device along `stage` has some of the layers, and passes on one microbatch of texts after another.
    "pipeline": ({"batch": "data"} | PIPELINE, {"batch": "data"} | PIPELINE),
    # The same, but parameters are stored sharded over `data` too.
    "pipeline+fsdp": ({"batch": "data"} | PIPELINE, {"embed": "data"} | PIPELINE),
    # Each device has its own texts; those along `expert` have some of the experts each, and exchange tokens.
    "expert": ({"batch": ("data", "expert"), "experts": "expert"}, {"embed": "data", "experts": "expert"}),
}

_FLAGS = {"pos": "length", "batch": "batch"}


def choose(mapping: str, mesh: str, kv_heads: int, devices: int, microbatches: int = 1) -> Strategy:
    """The strategy of a name, or of a file; `mesh` is what the command line says about it."""
    if mapping in BUILT_IN:
        compute, storage = BUILT_IN[mapping]
        split = math.gcd(devices, kv_heads if mapping == "tensor" else 2)
        sizes = {"data": -1} | {a: split for a in ("model", "stage", "expert") if a in compute.values()}
        found = Strategy(mapping, sizes, compute, storage)
    elif Path(mapping).suffix in (".json", ".toml"):
        found = read(Path(mapping))
    else:
        names = ", ".join([*BUILT_IN, "plan"])
        raise Problem(f"There is no mapping {mapping!r}; choose one of {names}, or give a .json or .toml file.")
    sizes = found.mesh if mesh == "auto" else _parsed_mesh(mesh)
    return dataclasses.replace(found, mesh=sizes, microbatches=microbatches)


def describe(strategy: Strategy, mesh: jax.sharding.Mesh) -> str:
    """A strategy in words."""
    text = f"{strategy.name} on the mesh {_sizes(mesh.shape)}: {_mapped(strategy.compute)}"
    text += "" if strategy.storage == strategy.compute else f"; parameters stored by {_mapped(strategy.storage)}"
    text += "" if strategy.remat == "full" else f"; the backward pass computes again: {strategy.remat}"
    return text if strategy.accumulate == 1 else f"{text}; {strategy.accumulate} microbatches a step"


def make_mesh(strategy: Strategy) -> jax.sharding.Mesh:
    """The mesh over all devices."""
    try:
        mesh = axn.make_mesh(dict(strategy.mesh), between=strategy.between)
    except ValueError as e:
        raise Problem(f"The mesh of mapping {strategy.name!r} does not fit the devices: {_without_name(e)}") from None
    if mesh.size != jax.device_count():
        raise Problem(
            f"The mesh {_sizes(mesh.shape)} has {mesh.size} of the {jax.device_count()} devices; let --mesh have all, "
            "with -1 for one of the sizes, or use fewer devices."
        )
    return mesh


def check(strategy: Strategy, mesh: jax.sharding.Mesh, model: Any, tokens: NamedArray) -> None:
    """Raise a problem if the mappings do not fit the mesh and the model, which may be abstract."""
    known = {"model": model, "tokens": tokens}
    is_named = axn.is_named_array
    sizes = {n: s for x in jax.tree.leaves(known, is_leaf=is_named) if is_named(x) for n, s in x.shape.items()}
    for mapping in (strategy.compute, strategy.storage):
        for axis, entry in mapping.items():
            over = [entry] if isinstance(entry, str) else list(entry or ())
            if unknown := [a for a in over if a not in mesh.shape]:
                raise Problem(
                    f"Mapping {strategy.name!r} shards axis {axis!r} over mesh axis {unknown[0]!r}, but the mesh has "
                    f"{_sizes(mesh.shape)}."
                )
            parts = math.prod(mesh.shape[a] for a in over)
            if axis in sizes and sizes[axis] % parts:
                raise Problem(
                    f"Mapping {strategy.name!r} does not fit the mesh: {axis}={sizes[axis]} cannot be sharded over "
                    f"{_sizes({a: mesh.shape[a] for a in over})}, since it is not a multiple of {parts}; change "
                    f"{flag(_FLAGS.get(axis, axis))}, --mesh or --mapping."
                )
        if "experts" in mapping and "experts" not in sizes:
            raise Problem(
                f"Mapping {strategy.name!r} shards experts, and the model has none; give it some by --experts."
            )
        for finding in axn.lint_mapping(known, mapping, mesh):
            if finding.kind == "problem" or (finding.kind == "unused" and strategy.name not in BUILT_IN):
                raise Problem(f"Mapping {strategy.name!r} does not fit the model: {finding.message}")
    own = axn.sharding.sharding_for_axis(tokens.axes, strategy.compute, mesh).shard_shape(tokens.array.shape)[0]
    stages = axn.sharding.physical_axis_size("layers", strategy.compute, mesh) or 1
    if stages > 1 and own % strategy.microbatches:
        raise Problem(
            f"The {own} texts of a device cannot be cut into {strategy.microbatches} microbatches of one size; change "
            "--batch, --microbatches or --mesh."
        )
    if stages > 1 and strategy.accumulate > 1:
        raise Problem("A pipeline cuts the batch into --microbatches: leave accumulate out of the file of the mapping.")
    if own % strategy.accumulate:
        raise Problem(
            f"The {own} texts of a device cannot be cut into accumulate={strategy.accumulate} microbatches of one "
            "size; change --batch or the file of the mapping."
        )


# --- reading ---


def read(path: Path) -> Strategy:
    """The strategy in a file."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe might wait for ever
            raise Problem(f"The mapping cannot be read from {path}: it is not a file.")
        content = path.read_bytes()
    except OSError as e:
        raise Problem(f"The mapping cannot be read from {path}: {reason_of(e)}.") from None
    try:
        text = content.decode()
        found = (
            json.loads(text, object_pairs_hook=without_duplicates) if path.suffix == ".json" else tomllib.loads(text)
        )
    except (ValueError, RecursionError) as e:
        raise Problem(f"The mapping in {path} is not valid {path.suffix[1:].upper()}: {e}.") from None
    parts, more = ("mesh", "mapping", "parameter_mapping"), ("remat", "accumulate", "between")
    if not isinstance(found, dict) or not {"mesh", "mapping"} <= set(found) <= {*parts, *more}:
        has = ", ".join(found) if isinstance(found, dict) else type(found).__name__
        raise Problem(
            "A file with a mapping has mesh, mapping and maybe parameter_mapping, remat, accumulate or between; "
            f"{path} has {has or 'none'}."
        )
    remat, accumulate, between = (found.pop(part, x) for part, x in zip(more, ("full", 1, None), strict=True))
    if not isinstance(remat, str) or remat not in llama.REMAT:
        raise Problem(f"In {path}, remat must be one of {', '.join(llama.REMAT)}, got {remat!r}.")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise Problem(f"In {path}, accumulate must be a number from 1, got {accumulate!r}.")
    if not _is_between(between):
        raise Problem(
            f"In {path}, between must be a mesh axis, a list of them, or how many slices lie along each, such as "
            f'{{"data": 2}}, got {between!r:.40}.'
        )
    for part in found:
        if not isinstance(found[part], dict) or not found[part]:
            raise Problem(f"In {path}, {part} must be a table, such as {_EXAMPLES[part]}.")
    for name, size in found["mesh"].items():
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise Problem(f"In {path}, the size of mesh axis {name!r} must be a number from 1, or -1, got {size!r}.")
    for part in parts[1:]:
        for axis, entry in found.get(part, {}).items():
            over = entry if isinstance(entry, list) else [entry]
            if entry is not None and not all(isinstance(a, str) for a in over):
                raise Problem(f"In {path}, {part} sends axis {axis!r} to {entry!r}, which is no name of a mesh axis.")
            if len(set(over)) < len(over):
                raise Problem(f"In {path}, {part} sends axis {axis!r} to a mesh axis twice, {entry!r}.")
    storage = found.get("parameter_mapping", found["mapping"])
    return Strategy(
        str(path), found["mesh"], found["mapping"], storage, remat=remat, accumulate=accumulate, between=between
    )


def _is_between(x: Any) -> bool:
    counts = isinstance(x, dict) and all(type(n) is int for n in x.values())
    return x is None or isinstance(x, str) or counts or (isinstance(x, list) and all(isinstance(a, str) for a in x))


_EXAMPLES = {"mesh": '{"data": -1}', "mapping": '{"batch": "data"}', "parameter_mapping": '{"embed": "data"}'}


def _parsed_mesh(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (s.strip() for s in part.partition("="))
        if name in sizes:
            raise Problem(f"--mesh has the mesh axis {name!r} twice, got {text!r}.")
        try:
            sizes[name] = int(size)
        except ValueError:
            sizes[name] = 0
        if not name or (sizes[name] < 1 and sizes[name] != -1):
            raise Problem(f"--mesh gives each mesh axis a size, such as data=4,model=2, got {text!r}.")
    return sizes


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _mapped(mapping: ResourceMapping) -> str:
    entries = {axis: entry if isinstance(entry, str) else "+".join(entry or ()) for axis, entry in mapping.items()}
    return ", ".join(f"{axis}→{over}" for axis, over in entries.items() if over)


def _without_name(error: Exception) -> str:
    return str(error).partition(": ")[2] or str(error)
