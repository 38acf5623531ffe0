"""The settings of a run: shown by `--help`, stored with the checkpoints, and checked here."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.conf import arg

from axonym import insight, precision

from .problems import Problem, listed

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
    experts: int = 0
    """Multilayer perceptrons of which each token uses two, in place of one for all; 0 for none. With `--mapping expert`
    there are 8 by default."""


@dataclasses.dataclass(frozen=True)
class Batches:
    """What a step of training sees. Tokens are bytes."""

    batch: int = 16
    """Texts in a batch, over all devices and hosts."""
    length: int = 128
    """Tokens of a text."""
    microbatches: int = 4
    """With layers in stages of a pipeline: how many microbatches the texts of a device are cut into."""
    held_out: float = 0.05
    """The share of the text that is kept for evaluation."""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The optimizer, with a learning rate that rises, and then falls as a cosine to a tenth."""

    optimizer: str = "adamw"
    """adamw, or muon, which orthogonalizes the updates of matrices and leaves other parameters to adamw.
    --mapping plan is as for adamw."""
    steps: int = 300
    """Steps of training."""
    learning_rate: float = 5e-3
    """The highest learning rate."""
    warmup: Annotated[int | None, arg(metavar="INT")] = None
    """Steps in which the learning rate rises; by default a tenth of the steps, and 30 at most."""
    weight_decay: float = 0.1
    """How fast weights shrink; those of norms do not."""
    clip: float = 1.0
    """The largest norm of a gradient."""

    @property
    def warmup_steps(self) -> int:
        return min(30, self.steps // 10) if self.warmup is None else self.warmup


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
    elastic: bool = False
    """With --distributed: when a host is lost, go on with the others from the latest checkpoint."""
    host_timeout: float = 30.0
    """With --distributed: after so many seconds without a sign of life a host is lost."""
    start_timeout: int = 300
    """With --distributed: how many seconds the hosts wait for each other at the start."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a language model on text.

    By default a small Llama learns from the source text of Python's standard library, in about two minutes on two
    cores. What a run leaves is in a folder of its own: checkpoints, the loss of each step, pictures and samples.
    """

    data: Annotated[str, arg(metavar="PATH")] = "stdlib"
    """A file or a folder of text; "stdlib" is the source text of Python's standard library."""
    mapping: Annotated[str, arg(metavar="MAPPING")] = "fsdp+tensor"
    """How devices share the work: data, fsdp, tensor, fsdp+tensor, sequence, context, pipeline, pipeline+fsdp, expert,
    or a JSON or TOML file that has `mesh`, `mapping` and, if parameters are stored otherwise, `parameter_mapping`, and
    maybe `remat`, full, mlp, none or offload, `accumulate`, a number of microbatches, and `between`, the mesh axes that
    cross machines; or plan, for those with which a step takes least time, as far as names tell."""
    mesh: Annotated[str, arg(metavar="SIZES")] = "auto"
    """The sizes of the mesh axes, such as data=4,model=2; -1 is what the others leave."""
    chip: Annotated[str, arg(metavar="CHIP")] = "auto"
    """The chip to plan and explain for, such as v5p or h100. By default the one that is here, and v5e on a CPU."""
    explain: bool = False
    """Before training, print what a step sends, keeps and computes, and keep that in the folder of the run."""
    precision: str = "float32"
    """What parameters are kept in and what is computed in, such as params=float32,compute=bfloat16."""
    seed: int = 0
    """What all random numbers come from."""
    out: Folder = None
    """The folder of the run; by default the next free one of runs/1, runs/2, ..."""
    resume: bool = False
    """Go on with the run in --out, or with the latest one in runs/: with its settings, but for those given here."""
    accept: str | None = None
    """Go on from the checkpoint of this name, such as step-000100, whatever run or step it is of, and set later ones
    aside."""
    export: File = None
    """Write the model in the end: to a new folder, which generate.py reads, or to a file that ends with
    .safetensors."""
    model: ModelSizes = dataclasses.field(default_factory=ModelSizes)
    batches: Batches = dataclasses.field(default_factory=Batches)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    reports: Reports = dataclasses.field(default_factory=Reports)
    saving: Saving = dataclasses.field(default_factory=Saving)
    hosts: Hosts = dataclasses.field(default_factory=Hosts)


_OF_THE_CALL = ("explain", "out", "resume", "accept", "export", "hosts")
"""Settings that say what is done now, and so are not those of the run."""


def parse(arguments: Sequence[str] | None, default: Config | None = None) -> Config:
    """The settings that the command line gives; the default has the others."""
    options = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    config = tyro.cli(Config, args=arguments, default=default or Config(), config=options, prog="train_lm.py")
    if config.accept is not None:
        if re.fullmatch(r"step-[0-9]+", config.accept) is None:
            raise Problem(f"--accept needs the name of a checkpoint, such as step-000100, and {config.accept} is none.")
        if not config.resume:
            raise Problem("--accept is for a run that goes on: add --resume.")
    if default is None and config.mapping == "expert":  # with another default, which --experts 0 is not to become
        experts = Config(model=ModelSizes(experts=8))
        config = tyro.cli(Config, args=arguments, default=experts, config=options, prog="train_lm.py")
    if default is not None or not config.resume:  # or the settings of the run are yet to be read
        _check(config)
    return config


def as_json(config: Config) -> dict[str, Any]:
    """The settings of a run, without those of a call."""
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in _OF_THE_CALL}


def lines_of(config: Config) -> list[str]:
    """The settings that all processes must have, each as on the command line."""
    here = {field.name for field in dataclasses.fields(Hosts)} - {"elastic", "host_timeout"} | {"out", "export"}
    return [f"{flag(name)} {value}" for name, value in _values(config).items() if name not in here]


def load(path: Path) -> Config:
    """The settings that a run was started with."""
    try:
        content = json.loads(path.read_bytes().decode(), object_pairs_hook=without_duplicates)
    except (OSError, ValueError, RecursionError) as e:
        raise Problem(f"The settings of the run cannot be read from {path}: {e}.") from None
    problems: list[str] = []
    config = _filled(Config(), content, problems, "the whole")
    if problems:
        raise Problem(f"The settings of the run in {path} are damaged: {listed(problems)}.")
    return config


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table of a JSON file; a ValueError if it has a key twice, of which one would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (key, _), *_ = collections.Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has {key!r} twice")
    return found


def _filled(default: T, values: Any, problems: list[str], name: str) -> T:
    """A dataclass with the values there are; settings that were added later keep their defaults."""
    if not isinstance(values, dict):
        problems.append(f"{name} must be a table of settings, got {values!r:.40}")
        return default
    changes = {}
    for field in dataclasses.fields(default):  # pyright: ignore[reportArgumentType]
        if field.name not in values or field.name in _OF_THE_CALL:
            continue
        mine, value = getattr(default, field.name), values[field.name]
        if dataclasses.is_dataclass(mine):
            changes[field.name] = _filled(mine, value, problems, field.name)
        elif type(value) is type(mine) or (type(mine), type(value)) in ((float, int), (type(None), int)):
            changes[field.name] = value
        else:
            problems.append(f"{field.name} must be {_KINDS[type(mine)]}, got {value!r:.40}")
    return dataclasses.replace(default, **changes)  # pyright: ignore[reportArgumentType]


_KINDS = {int: "a whole number", type(None): "a whole number", float: "a number", str: "a text", bool: "true or false"}


def flag(name: str) -> str:
    """How a setting is called on the command line."""
    return f"--{name.replace('_', '-')}"


def flags_of(hosts: Hosts) -> Iterator[str]:
    """What the command line has to say for these settings."""
    for field in dataclasses.fields(hosts):
        value = getattr(hosts, field.name)
        if value != field.default:
            yield flag(field.name)
            if value is not True:
                yield str(value)


def _check(config: Config) -> None:
    if problems := list(_problems(config)):
        raise Problem(f"{listed(problems)}.")


def _problems(config: Config) -> Iterator[str]:
    """What cannot be trained with: everything that is wrong, so that it can be set right at once."""
    model, batches, optimizer, reports = config.model, config.batches, config.optimizer, config.reports
    values = _values(config)
    for name, value in values.items():
        if isinstance(value, (str, Path)) and not _is_text(str(value)):
            yield f"{flag(name)} must be text, got {str(value)!r:.40}"
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{flag(name)} must be a finite number, got {value}"
        elif isinstance(value, int) and value > _LARGEST:
            yield f"{flag(name)} must be at most {_LARGEST:,}, got one of {len(str(value))} digits"
        elif name in _POSITIVE and value <= 0:
            yield f"{flag(name)} must be more than 0, got {value}"
        elif name in _NOT_NEGATIVE and value is not None and value < 0:
            yield f"{flag(name)} must not be negative, got {value}"
    if batches.length < 2:
        yield f"--length must be at least 2, so that there is a next token, got {batches.length}"
    if model.head_size % 2:
        yield f"--head-size must be even, since rotary embeddings turn pairs, got {model.head_size}"
    if model.experts == 1:
        yield "--experts must be 0 for none or at least 2, since each token uses two, got 1"
    if config.chip != "auto" and config.chip not in insight.CHIPS:
        yield f"--chip must be one of {', '.join(insight.CHIPS)}, got {config.chip!r:.40}"
    if config.mapping == "plan" and config.mesh != "auto":
        yield f"--mesh cannot be given with --mapping plan, which chooses one, got {config.mesh!r:.40}"
    if not 0 < batches.held_out < 1:
        yield f"--held-out must be between 0 and 1, got {batches.held_out}"
    if optimizer.optimizer not in ("adamw", "muon"):
        yield f"--optimizer must be one of adamw, muon, got {optimizer.optimizer!r:.40}"
    if optimizer.warmup_steps >= optimizer.steps > 0:
        yield f"--warmup must be less than --steps, got {optimizer.warmup} and {optimizer.steps}"
    if not reports.prompt:
        yield "--prompt must have at least one character"
    try:
        precision.Policy.parse(config.precision)
    except ValueError as e:
        yield f"--precision {config.precision!r:.40} is not understood: {str(e).removesuffix('.')}"
    hosts = config.hosts
    given = [name for name in ("coordinator", "processes", "process_index") if getattr(hosts, name) is not None]
    given += ["elastic"] if hosts.elastic else []
    if given and not hosts.distributed:
        yield f"{flag(given[0])} needs --distributed"
    if hosts.distributed and config.out is None:
        yield "--distributed needs --out, a folder that all hosts share"


_POSITIVE = {
    *(field.name for field in dataclasses.fields(ModelSizes) if field.name not in ("tied", "experts")),
    *(
        "batch",
        "microbatches",
        "steps",
        "clip",
        "learning_rate",
        "log_every",
        "evaluate_every",
        "evaluate_batches",
        "sample_length",
    ),
    *("top_k", "save_every", "keep", "simulated_devices", "host_timeout", "start_timeout"),
}
_NOT_NEGATIVE = {"experts", "seed", "warmup", "weight_decay", "samples", "temperature"}
_LARGEST = 2**31 - 1


def _values(config: Any) -> dict[str, Any]:
    """All settings by their names, those of the groups too."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        found |= _values(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return found


def _is_text(value: str) -> bool:
    """Whether a text can be the name of a file, and be printed: Python's can have halves of characters."""
    return "\0" not in value and value.encode(errors="replace").decode() == value
