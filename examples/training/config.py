"""The settings of a run: what `--help` shows, what is kept beside the checkpoints, and what they must be."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.conf import arg

from axonym import precision

from .problems import Problem

T = TypeVar("T")

Folder = Annotated[Path | None, arg(metavar="FOLDER")]
File = Annotated[Path | None, arg(metavar="FILE")]


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """The sizes of the model's axes."""

    layers: int = 4
    """Blocks."""
    embed: int = 96
    """Features of the residual stream."""
    mlp: int = 256
    """Hidden features of the multilayer perceptrons."""
    kv_heads: int = 4
    """Heads of keys and values."""
    group: int = 2
    """Heads of queries for each head of keys and values."""
    head_size: int = 12
    """Features of a head."""
    tied: bool = False
    """Predict tokens with the table that embeds them."""


@dataclasses.dataclass(frozen=True)
class Batches:
    """What a step of training sees. Tokens are bytes."""

    batch: int = 16
    """Texts in a batch, over all devices and hosts."""
    length: int = 128
    """Tokens of a text."""
    held_out: float = 0.05
    """The share of the text that is kept for evaluation."""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW, with a learning rate that rises, and then falls as a cosine to a tenth."""

    steps: int = 300
    """Steps of training."""
    learning_rate: float = 5e-3
    """The highest learning rate."""
    warmup: int = 30
    """Steps in which the learning rate rises."""
    weight_decay: float = 0.1
    """How fast weights shrink; those of norms do not."""
    clip: float = 1.0
    """The largest norm of a gradient."""


@dataclasses.dataclass(frozen=True)
class Reports:
    """What is shown on the way."""

    log_every: int = 10
    """Steps from one look at the losses to the next, on devices that need not wait for each step."""
    evaluate_every: int = 100
    """Steps from one evaluation on held-out text to the next."""
    evaluate_batches: int = 4
    """Batches of an evaluation."""
    samples: int = 2
    """Texts that are written after each evaluation."""
    sample_length: int = 160
    """Tokens of such a text, after the prompt."""
    prompt: str = "def "
    """How such a text begins."""
    temperature: float = 0.7
    """How even the choice of tokens is; 0 takes the likeliest."""
    top_k: int = 40
    """Among how many tokens to choose."""


@dataclasses.dataclass(frozen=True)
class Saving:
    """Checkpoints."""

    save_every: int = 100
    """Steps from one checkpoint to the next."""
    keep: int = 2
    """How many checkpoints are kept, the latest ones."""


@dataclasses.dataclass(frozen=True)
class Hosts:
    """What runs where. On one host with GPUs or TPUs there is nothing to say."""

    simulated_devices: int = 8
    """How many devices a CPU counts as, where there is nothing faster."""
    distributed: bool = False
    """Train on several hosts: start the same command on each. On Slurm, MPI and TPU pods the rest is found out."""
    coordinator: Annotated[str | None, arg(metavar="ADDRESS:PORT")] = None
    """With --distributed: where the first process is reached."""
    processes: Annotated[int | None, arg(metavar="INT")] = None
    """With --distributed: how many processes there are."""
    process_index: Annotated[int | None, arg(metavar="INT")] = None
    """With --distributed: which one this is."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a language model on text.

    By default a small Llama learns from the source text of Python's standard library, in about two minutes on two
    cores. What a run leaves is in a folder of its own: checkpoints, the loss of each step, pictures and samples.
    """

    data: Annotated[str, arg(metavar="PATH")] = "stdlib"
    """A file or a folder of text; "stdlib" is the source text of Python's standard library."""
    mapping: Annotated[str, arg(metavar="MAPPING")] = "fsdp+tensor"
    """How devices share the work: data, fsdp, tensor, fsdp+tensor, sequence, or a JSON or TOML file that has `mesh`,
    `mapping` and, if parameters are stored otherwise, `parameter_mapping`."""
    mesh: Annotated[str, arg(metavar="SIZES")] = "auto"
    """The sizes of the mesh axes, such as data=4,model=2; -1 is what the others leave."""
    precision: str = "float32"
    """What parameters are kept in and what is computed in, such as params=float32,compute=bfloat16."""
    seed: int = 0
    """What all random numbers come from."""
    out: Folder = None
    """The folder of the run; by default the next free one of runs/1, runs/2, ..."""
    resume: bool = False
    """Go on with the run in --out, or with the latest one in runs/: with its settings, but for those given here."""
    export: File = None
    """Write the model to this safetensors file in the end."""
    model: ModelSizes = dataclasses.field(default_factory=ModelSizes)
    batches: Batches = dataclasses.field(default_factory=Batches)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    reports: Reports = dataclasses.field(default_factory=Reports)
    saving: Saving = dataclasses.field(default_factory=Saving)
    hosts: Hosts = dataclasses.field(default_factory=Hosts)


_OF_THE_CALL = ("out", "resume", "export", "hosts")
"""Settings that say what is done now, and so are not those of the run."""


def parse(arguments: Sequence[str] | None, default: Config | None = None) -> Config:
    """The settings that the command line gives; the default has the others."""
    options = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    config = tyro.cli(Config, args=arguments, default=default or Config(), config=options, prog="train_lm.py")
    _check(config)
    return config


def as_json(config: Config) -> dict[str, Any]:
    """The settings of a run, without those of a call."""
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in _OF_THE_CALL}


def load(path: Path) -> Config:
    """The settings that a run was started with."""
    try:
        return _filled(Config(), json.loads(path.read_text()))
    except (OSError, ValueError) as e:
        raise Problem(f"The settings of the run cannot be read from {path}: {e}.") from None


def _filled(default: T, values: dict[str, Any]) -> T:
    """A dataclass with the values there are; settings that were added later keep their defaults."""
    changes = {}
    for field in dataclasses.fields(default):  # pyright: ignore[reportArgumentType]
        if field.name in values:
            mine, value = getattr(default, field.name), values[field.name]
            changes[field.name] = _filled(mine, value) if dataclasses.is_dataclass(mine) else value
    return dataclasses.replace(default, **changes)  # pyright: ignore[reportArgumentType]


def flag(name: str) -> str:
    """How a setting is called on the command line."""
    return f"--{name.replace('_', '-')}"


def _check(config: Config) -> None:
    model, batches, optimizer, reports = config.model, config.batches, config.optimizer, config.reports
    positive: dict[str, float] = {
        **{name: value for name, value in dataclasses.asdict(model).items() if name != "tied"},
        "batch": batches.batch,
        "steps": optimizer.steps,
        "clip": optimizer.clip,
        "learning_rate": optimizer.learning_rate,
        "log_every": reports.log_every,
        "evaluate_every": reports.evaluate_every,
        "evaluate_batches": reports.evaluate_batches,
        "sample_length": reports.sample_length,
        "top_k": reports.top_k,
        "save_every": config.saving.save_every,
        "keep": config.saving.keep,
        "simulated_devices": config.hosts.simulated_devices,
    }
    for name, value in positive.items():
        if value <= 0:
            raise Problem(f"{flag(name)} must be more than 0, got {value}.")
    not_negative = {
        "seed": config.seed,
        "warmup": optimizer.warmup,
        "weight_decay": optimizer.weight_decay,
        "samples": reports.samples,
        "temperature": reports.temperature,
    }
    for name, value in not_negative.items():
        if value < 0:
            raise Problem(f"{flag(name)} must not be negative, got {value}.")
    if batches.length < 2:
        raise Problem(f"--length must be at least 2, so that there is a next token, got {batches.length}.")
    if model.head_size % 2:
        raise Problem(f"--head-size must be even, since rotary embeddings turn pairs, got {model.head_size}.")
    if not 0 < batches.held_out < 1:
        raise Problem(f"--held-out must be between 0 and 1, got {batches.held_out}.")
    if optimizer.warmup >= optimizer.steps:
        raise Problem(f"--warmup must be less than --steps, got {optimizer.warmup} and {optimizer.steps}.")
    if not reports.prompt:
        raise Problem("--prompt must have at least one character.")
    try:
        precision.Policy.parse(config.precision)
    except ValueError as e:
        raise Problem(f"--precision {config.precision!r} is not understood: {e}") from None
    hosts = config.hosts
    given = [name for name in ("coordinator", "processes", "process_index") if getattr(hosts, name) is not None]
    if given and not hosts.distributed:
        raise Problem(f"{flag(given[0])} needs --distributed.")
    if hosts.distributed and config.out is None:
        raise Problem("--distributed needs --out, a folder that all hosts share.")
