"""Train a language model on text, on one device or many: `python examples/train_lm.py`.

By default a small Llama learns from the source text of Python's standard library, on eight simulated devices, in about
two minutes. The script is the same on GPUs, TPUs and several hosts: `--mapping` says how the model is distributed, and
`--help` lists all flags. The model is written with names, in `models/llama.py`; the parts of this script are in
`training/`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from training import at_once, hosts, pace

if __name__ == "__main__":
    at_once.install()  # before the imports that take seconds
    if sys.stderr.isatty():
        print("Loading JAX.", file=sys.stderr, flush=True)
    hosts.supervise_if_distributed(sys.argv[1:])

import jax
import numpy as np
from jax.experimental import multihost_utils
from training import (
    checkpoints,
    config as settings,
    data,
    devices,
    generation,
    lock,
    pictures,
    plans,
    runs,
    steps,
    strategies,
    table,
)
from training.interrupts import Interrupts, in_any_process
from training.metrics import Metrics
from training.probe import Probe
from training.problems import Problem, agree_on, in_a_line, reason_of
from training.progress import Reporter

import axonym as axn
from axonym import insight
from axonym.precision import Policy
from axonym.sharding import fail_together

INTERRUPTED = at_once.STATUS


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says; the exit status."""
    try:
        config = settings.parse(arguments)
        folder = runs.to_resume(config) if config.resume else None
        if folder is not None:
            config = runs.with_settings_of(folder, config, arguments)
        devices.start(config)
        with contextlib.ExitStack() as stack:
            with fail_together("The start") as agree:
                agree_on(agree, settings="\n".join(settings.lines_of(config)))
                prepared = Prepared(config, folder)
                order = data.Texts(prepared.corpus.train, config.batches.length, config.seed).order
                texts = f"with the number {prepared.corpus.fingerprint}, in the order {order}"
                agree_on(agree, mapping=prepared.strategy.as_text(), texts=texts)
                if jax.process_count() > 1:
                    agree_on(agree, **prepared.programs())
                run = runs.new(config) if folder is None else runs.Run(folder, config.saving.keep)
                if jax.process_index() == 0:
                    stack.enter_context(lock.held(run.folder))
            stack.enter_context(jax.set_mesh(prepared.mesh))
            return Training(prepared, run).run()
    except Problem as e:
        print(f"train_lm.py: {in_a_line(e)}", file=sys.stderr)
        return 1
    except OSError as e:
        print(f"train_lm.py: {e.filename or 'A file'} cannot be used: {reason_of(e)}.", file=sys.stderr)
        return 1
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        print(
            "train_lm.py: A device has too little memory; use a smaller --batch or another --mapping.", file=sys.stderr
        )
        return 1
    except KeyboardInterrupt:
        print(f"train_lm.py: {at_once.WORDS}", file=sys.stderr)
        return INTERRUPTED


class Prepared:
    """What follows from the settings, checked before a run leaves anything behind."""

    def __init__(self, config: settings.Config, folder: Path | None):
        """`folder` is that of the run to go on with, if it is not a new one."""
        self.config = config
        self.Batch, self.Pos = axn.make_axes(batch=config.batches.batch, pos=config.batches.length)
        self.tokens = steps.abstract_tokens(self.Batch, self.Pos)
        self.plan: plans.Plan | None = None
        count, microbatches = jax.device_count(), config.batches.microbatches
        if config.mapping == "plan":
            kept = None if folder is None else runs.Run(folder, config.saving.keep).plan
            self.plan = plans.choose(config, self.tokens, kept)
            self.strategy = self.plan.strategy
        else:
            self.strategy = strategies.choose(config.mapping, config.mesh, config.model.kv_heads, count, microbatches)
        self.mesh = strategies.make_mesh(self.strategy)
        if config.hosts.elastic and self.plan is None and -1 not in self.strategy.mesh.values():
            raise Problem("--elastic needs a mesh that fits fewer devices: let --mesh have -1 for one of the sizes.")
        if config.hosts.elastic and isinstance(self.strategy.between, dict):
            axes = ", ".join(self.strategy.between)
            raise Problem(
                f"--elastic needs mesh axes that fit fewer slices: let between be names, {axes}, not numbers."
            )
        policy = Policy.parse(config.precision)
        self.functions = steps.make_functions(config.model, config.optimizer, policy, self.strategy)
        strategies.check(self.strategy, self.mesh, self.functions.abstract.model, self.tokens)
        self.write = generation.make_writer(config.reports, policy, self.strategy, self.mesh)
        self.corpus = data.read(config.data, config.batches.held_out, self.Batch, self.Pos)
        self.axes = steps.model_config(config.model)
        if config.export is not None and (problem := checkpoints.problem_of_export(config.export, self.axes)):
            raise Problem(problem)

    def programs(self) -> dict[str, Any]:
        """What the devices will run, for a comparison with other processes: their code may differ."""
        start, train, abstract = self.functions.start, self.functions.train, self.functions.abstract
        with jax.set_mesh(self.mesh):
            return {"the_first_state": start.lower(jax.random.key(0)), "the_step": train.lower(abstract, self.tokens)}

    def batch(self, texts: data.Texts, first: int) -> axn.NamedArray:
        """Make a batch of texts from the `first` on, each device its own shard."""
        compute = axn.sharding.sharding_for_axis((self.Batch, self.Pos), self.strategy.compute, self.mesh)
        return texts.batch(first, self.Batch, self.Pos, compute)


class Training:
    """A run: the state that changes from step to step, and where it is kept."""

    def __init__(self, prepared: Prepared, run: runs.Run):
        self.prepared, self.config, self.files = prepared, prepared.config, run
        self.functions, length = prepared.functions, prepared.Pos.size
        self.texts = data.Texts(prepared.corpus.train, length, self.config.seed)
        self.held_out = data.Texts(prepared.corpus.held_out, length, self.config.seed)
        self.step = self.seen = 0
        self.failed: set[str] = set()
        """What was tried and could not be done."""
        self.saved: int | None = None
        """The step of the latest checkpoint."""
        self.is_deleted = self.restarts = False
        """Whether the folder was deleted when a checkpoint was due, and whether to end for a host that comes back."""

    def run(self) -> int:
        """Train to the end, or until interrupted; the exit status."""
        self.begin()
        total, tokens = self.config.optimizer.steps, self.prepared.Batch.size * self.prepared.Pos.size
        with Interrupts() as interrupts:
            with Reporter(total, self.step, tokens) as self.reporter:
                self.introduce()
                self.train_until(total, interrupts)
            if self.restarts:
                return hosts.RESTART
            self.save_at_the_end()
        self.keep_pictures()
        if self.step < total:
            self.reporter.say(f"\nStopped at step {self.step}, which is saved. {self.how_to_go_on()}")
            return INTERRUPTED
        self.finish()
        return 0

    def begin(self) -> None:
        """Make the state, or restore it from the latest checkpoint, with its storage sharding."""
        saved, abstract = self.files.checkpoints, self.functions.abstract
        self.state: steps.State
        with fail_together("The start") as agree:
            fingerprint = self.prepared.corpus.fingerprint
            saved.remove_unfinished()
            saved.check_room(abstract)
            name = self.config.accept
            accepted = None if name is None else saved.folder / name
            latest = accepted or (saved.latest() if self.config.resume else None)
            known = self.files.number_of("run") if self.config.resume else None
            agree_on(agree, latest_checkpoints=str(latest), numbers_of_the_run=str(known))
        # Chosen by the first process, for all.
        new = np.uint32(random.SystemRandom().randrange(1, 2**31))
        saved.run = int(np.ravel(multihost_utils.process_allgather(new))[0]) if known is None else known
        if latest is not None:
            storage = self.prepared.strategy.storage
            self.state, self.step, self.seen = saved.restore(latest, abstract, storage, accepts=accepted is not None)
            if accepted is not None:
                saved.set_aside(accepted, self.step)
            self.saved = self.step
            if self.files.number_of("text") != fingerprint:
                warn("The text is another one than when the run was started, so it will not go on as it would have.")
        else:
            self.state = jax.block_until_ready(self.functions.start(jax.random.key(self.config.seed)))
        if (plan := self.prepared.plan) is not None and plan.table is not None:
            self.try_to("keep the table of the plan", self.files.plan_table.write_text, plan.table + "\n", "utf-8")
        self.metrics = Metrics(self.files.metrics)
        self.try_to("read the losses", self.read_losses)
        with fail_together("The start"):
            if jax.process_index() == 0:
                if self.prepared.plan is not None:
                    self.prepared.plan.keep(self.files.plan)
                self.files.keep_settings(self.config, fingerprint)

    def read_losses(self) -> None:
        if odd := self.metrics.go_on_from(self.step):
            path = self.files.metrics
            warn(f"{path} has {odd} line{'s' if odd > 1 else ''} that are no losses; they are in {path.name}.odd now.")

    def introduce(self) -> None:
        """Say what is trained, on what, and show what each device has of it."""
        say, prepared, corpus = self.reporter.say, self.prepared, self.prepared.corpus
        count = sum(x.size for x in jax.tree.leaves(self.state.model))
        experts = f" and {self.config.model.experts} experts" if self.config.model.experts else ""
        say(f"A Llama with {count:,} parameters{experts} on {devices.describe()}.")
        if prepared.plan is not None:
            say(f"\n{prepared.plan.said}\n")
        say(f"Mapping {strategies.describe(prepared.strategy, prepared.mesh)}.")
        sizes = (
            f"{corpus.files:,} file{'s' if corpus.files > 1 else ''}, {table.readable(len(corpus.train))} to train on"
        )
        say(f"The text is {corpus.name}: {sizes}, {table.readable(len(corpus.held_out))} held out.\n")
        say("\n".join(table.table(self.state.model, self.state.optimizer)))
        tokens = prepared.batch(self.texts, self.seen)
        picture = pictures.placement_as_text(self.state.model, tokens)
        say(f"\nThe shards of the batch, and of one parameter for each sharding:\n{picture}")
        self.try_to(
            "draw the placement", pictures.save_placement, self.files.placement_picture, self.state.model, tokens
        )
        if self.config.explain:
            self.explain()
        word = "Going on from step" if self.step else "Training from step"
        say(f"\n{word} {self.step} to {self.reporter.total}; the folder of the run is {self.files.folder}.")

    def explain(self) -> None:
        """Say what a step sends, keeps and computes. It is compiled for that, which training need not do again."""
        tokens = self.prepared.batch(self.texts, self.seen)
        with fail_together("The explanation of a step"):
            report = insight.explain(self.functions.train, self.state, tokens, chip=devices.chip(self.config.chip))
        self.reporter.say(f"\n{report}")
        self.try_to("keep the explanation", self.files.explanation.write_text, f"{report}\n", "utf-8")
        self.try_to("draw the explanation", report.save, self.files.explanation_page)

    def train_until(self, total: int, interrupts: Interrupts) -> None:
        """Take steps; evaluate, write samples and save where it is due."""
        config = self.config
        # On a CPU, programs that wait for each other must not pile up. Elsewhere the next step can be under way.
        look_every = 1 if jax.default_backend() == "cpu" else config.reports.log_every
        pending: list[steps.Metrics] = []
        began: float | None = None  # None until the step is compiled, which is not to be measured
        worked = 0.0
        probe = Probe() if hosts.is_supervised() and jax.process_count() > 1 else None
        while self.step < total:
            start = time.perf_counter()
            tokens = self.prepared.batch(self.texts, self.seen)
            worked += time.perf_counter() - start
            self.state, measured = self.functions.train(self.state, tokens)
            self.step += 1
            self.seen += self.prepared.Batch.size
            pending.append(measured)
            evaluates = self.step % config.reports.evaluate_every == 0 or self.step == total
            saves = self.step % config.saving.save_every == 0 and self.step < total
            if evaluates or saves or self.step % look_every == 0 or interrupts.urgent():
                waits = time.perf_counter()
                jax.block_until_ready(measured)
                hosts.stepped()
                now = time.perf_counter()
                seconds = None if began is None else (now - began) / len(pending)
                if seconds is not None:
                    # If devices still had to do more than a step, they have not waited for this process.
                    pace.took(seconds, worked / len(pending) if now - waits < seconds else 0)
                self.note(pending, seconds)
                pending, worked = [], 0.0
                if interrupts.agreed():
                    return
                if evaluates:
                    self.evaluate()
                if saves:
                    self.save_if_possible()
                if (
                    self.files.checkpoints.is_written()
                    and self.finish_saving()
                    and in_any_process(hosts.restart_is_wanted())
                ):
                    self.restarts = True
                    return
                if probe is not None and self.step % config.reports.log_every == 0:
                    probe.measure_next()
                began = time.perf_counter()

    def note(self, measured: Sequence[steps.Metrics], seconds: float | None) -> None:
        """Write down what the latest steps measured."""
        first = self.step - len(measured) + 1
        rows = [{"step": i} | {name: float(x) for name, x in one.items()} for i, one in enumerate(measured, first)]
        finite = list(itertools.takewhile(lambda row: math.isfinite(row["loss"]), rows))
        self.try_to("write down the losses", self.metrics.add, *finite)
        if len(finite) < len(rows):
            self.finish_saving()
            bad, latest = rows[len(finite)], self.files.checkpoints.latest()
            raise Problem(
                f"The loss is {bad['loss']} at step {bad['step']}, so a lower --learning-rate may help; "
                + (f"{latest} is from before." if latest else "nothing was saved yet.")
            )
        self.reporter.advance(self.step, seconds, [row["loss"] for row in rows])

    def evaluate(self) -> None:
        """The loss on held-out text, and texts by the model."""
        model, count = self.state.model, self.config.reports.evaluate_batches
        firsts = (i * self.prepared.Batch.size for i in range(count))
        losses = [float(self.functions.evaluate(model, self.prepared.batch(self.held_out, first))) for first in firsts]
        mean, speed = sum(losses) / count, self.reporter.tokens_per_second()
        self.reporter.say(f"step {self.step}: loss {mean:.3f} on held-out text, {mean / math.log(2):.2f} bits per byte")
        row = {"step": self.step, "held_out_loss": mean, "tokens_per_second": round(speed)}
        self.try_to("write down the losses", self.metrics.add, row)
        if self.config.reports.samples == 0:
            return
        texts = self.prepared.write(model, self.state.key, self.step)
        for text in texts:
            self.reporter.say("  | " + text.replace("\n", "\n  | "))
        self.try_to("keep the samples", self.keep_samples, texts)

    def keep_samples(self, texts: Sequence[str]) -> None:
        with self.files.samples.open("a", encoding="utf-8") as file:
            file.writelines(f"--- step {self.step} ---\n{text}\n" for text in texts)

    # --- saving ---

    def save_if_possible(self) -> None:
        """On the way, a full disk is no reason to lose what was learned: there may be room again later."""
        self.finish_saving()
        try:
            self.files.checkpoints.begin(self.state, self.step, self.seen)
        except checkpoints.FolderDeleted:
            if self.is_deleted:
                raise
            self.is_deleted = True
            warn(f"The folder {self.files.folder} was deleted. Training stops if it is still missing at the next save.")
        except Problem as e:
            self.warn_of_save(e)

    def finish_saving(self) -> bool:
        """Complete the checkpoint that is being written, if there is one; whether it could be written."""
        try:
            saved = self.files.checkpoints.finish()
        except Problem as e:
            self.is_deleted = isinstance(e.__cause__, FileNotFoundError)
            self.warn_of_save(e)
            return False
        self.complete(saved)
        return saved is not None

    def complete(self, saved: tuple[Path, int] | None) -> None:
        """Note that a checkpoint was saved."""
        if saved is None:
            return
        path, self.saved = saved
        if self.prepared.plan is not None:
            self.try_to("keep the plan with the checkpoint", self.prepared.plan.keep, path / self.files.plan.name)

    def warn_of_save(self, problem: Problem) -> None:
        warn(f"{problem} Training goes on, and the next checkpoint is tried in {self.config.saving.save_every} steps.")

    def save_at_the_end(self) -> None:
        self.finish_saving()
        if self.saved != self.step:
            try:
                self.complete(self.files.checkpoints.save(self.state, self.step, self.seen))
            except Problem as e:
                hint = f" When that is set right, go on from there: {self.command_to_resume()}"
                raise Problem(f"{e}{hint if self.files.can_be_resumed() else ''}") from e

    def keep_pictures(self) -> None:
        curves = self.metrics.column("loss"), self.metrics.column("held_out_loss")
        self.reporter.say("\n" + "\n".join(pictures.curve_as_text(*curves)))
        self.try_to("draw the losses", pictures.save_curve, self.files.loss_picture, *curves)

    def try_to(self, what: str, action: Callable[..., object], *args: object) -> None:
        """Do what is only for looking at: by the first of several processes, and training does not fail with it."""
        with fail_together(what):
            if jax.process_index() == 0:
                try:
                    action(*args)
                except OSError as e:
                    if what not in self.failed:  # each once, and not at each step
                        warn(f"Could not {what}, because {reason_of(e)}.")
                    self.failed.add(what)

    def finish(self) -> None:
        """Export the model, and say where everything is."""
        if self.config.export is not None:
            checkpoints.export(self.state.model, self.config.export, self.prepared.axes)
            if not checkpoints.is_file(self.config.export):  # generate.py takes the folder of the run for it
                where = str(self.config.export.resolve())
                self.try_to("note where the model is", (self.files.folder / "exported.txt").write_text, where)
            self.reporter.say(f"The model is in {self.config.export}.")
        more = " " + self.how_to_go_on(" with more steps", f" --steps {2 * self.step}")
        self.reporter.say(
            f"All {self.step} steps are done. Checkpoints, losses, pictures and samples are in {self.files.folder}."
            f"{more if self.files.can_be_resumed() else ''}"
        )

    def command_to_resume(self) -> str:
        python = Path(sys.executable)
        python = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
        command = [str(python), sys.argv[0], "--resume", "--out", str(self.files.folder)]
        return shlex.join([*command, *settings.flags_of(self.config.hosts)])

    def how_to_go_on(self, more: str = "", flags: str = "") -> str:
        hosts = self.config.hosts
        where = ", on each host" if hosts.distributed else ""
        where += " with its own --process-index" if hosts.process_index is not None else ""
        return f"To go on{more}{where}:\n  {self.command_to_resume()}{flags}"


def warn(text: str) -> None:
    """Say what is not as it should be, on the stream that is for it."""
    if jax.process_index() == 0:
        print(f"train_lm.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
