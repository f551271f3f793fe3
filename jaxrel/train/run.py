"""`jaxrel train`: a configuration becomes a run.

Everything that can be refused is refused before anything is compiled or written.
"""

import os
import sys
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrel.checkpoint import Checkpointer, local_files
from jaxrel.checkpoint.shared import check_shared
from jaxrel.checkpoint.together import agreed, from_everyone, together
from jaxrel.config import BatchConfig, ChaosConfig, Config, check, fingerprint
from jaxrel.data.corpus import standard_library_corpus
from jaxrel.data.held_out import HeldOut
from jaxrel.data.pipeline import Feed, open_feed
from jaxrel.exit_codes import ExitCode, UsageError
from jaxrel.ledger.reader import segments
from jaxrel.ledger.summary import report
from jaxrel.mesh.build import build_mesh, degrees, refit
from jaxrel.mesh.compile_cache import use_compile_cache
from jaxrel.mesh.join import fix_cpu_threads, joined, use_cpu_devices
from jaxrel.plan import peaks
from jaxrel.plan.peaks import Peak
from jaxrel.provenance import (
    changes,
    check_run,
    provenance,
    write_run_files,
)
from jaxrel.run_lock import claim
from jaxrel.throughput.meter import ThroughputMeter
from jaxrel.throughput.peak import device_peak
from jaxrel.train.evaluation import Evaluation, make_row_losses
from jaxrel.train.loop import Trainer
from jaxrel.train.progress import ProgressLine
from jaxrel.train.recorder import SUPERVISED, Recorder, begin_together, dump_on_request
from jaxrel.train.step import TrainStep, make_train_step
from jaxrel.train.stop import StopSignal
from jaxrel.train.task import MakeTask, Task, reference_task


def train(config: Config, make_task: MakeTask = reference_task) -> int:
    """Train as configured, from the newest checkpoint if there is one; returns an exit code.

    `make_task` says what is trained; it is called once the devices are known. Raises
    JaxrelError with the code of its kind.
    """
    with Recorder() as recorder:
        recorder.phase("start")
        check_run(config.run.dir, config)
        dump_on_request(config.run.dir, recorder.heartbeat)
        fix_cpu_threads()
        if config.mesh.cpu_devices is not None:
            use_cpu_devices(config.mesh.cpu_devices)
        recorder.phase("join")
        with joined(config.job), StopSignal() as stop:
            _train(config, make_task, stop, recorder)
            recorder.done()
    return ExitCode.OK


def _train(config: Config, make_task: MakeTask, stop: StopSignal, recorder: Recorder) -> None:
    task, step, feed = prepare(config, make_task)
    try:
        _check_vocabulary(config, feed)
        local = agreed(lambda: local_files.run_name(config.run.dir))
        checkpointer = Checkpointer(
            config.checkpoint_dir(),
            keep=config.checkpoint.keep,
            deadline_s=config.checkpoint.deadline_s,
            keep_every=config.checkpoint.keep_every,
            keep_best=config.checkpoint.keep_best,
            verify_mb_s=config.checkpoint.verify_mb_s,
            trust_after=config.checkpoint.trust_after,
            local_dir=_local_dir(config, local),
        )
        trainer = make_trainer(config, step, feed, checkpointer, stop, recorder)
        trainer.evaluation = make_evaluation(config, task, step)
        latest = trainer.check_resume()
        complete = latest is not None and latest >= config.run.steps
        if complete and checkpointer.is_durable(latest or 0):
            trainer.progress.note(
                f"already complete: step {latest} is saved, run.steps is {config.run.steps}"
            )
            return
        if latest is not None and (changed := changes(config.run.dir, config)):
            trainer.progress.note(f"changed since the last start: {'; '.join(changed)}")
        together(lambda: _begin_run(config, dict(step.layout.mesh.shape), local))
        check_shared(config.checkpoint_dir())
        begin_together(recorder, config.run.dir)
        use_compile_cache(config.run.compiled or f"{config.run.dir}/compiled")
        if config.chaos != ChaosConfig():
            from jaxrel.chaos import install

            attempt = int(os.environ.get("JAXREL_ATTEMPT", "0"))
            process = jax.process_index()
            install(trainer, **asdict(config.chaos), process=process, attempt=attempt)
        trainer.meter = make_meter(config)
        trainer.sample_every = config.throughput.sample_every
        if task.schedule is not None:
            rates = jax.jit(jax.vmap(task.schedule))(np.arange(config.run.steps))
            trainer.learning_rates = np.asarray(rates)
        digest = trainer.run()
        trainer.progress.note(f"finished: step {config.run.steps}, state digest {digest}")
    finally:
        feed.close()


def prepare(config: Config, make_task: MakeTask) -> tuple[Task, TrainStep, Feed]:
    """What is trained, its step and its batches, for the devices that there are.

    Under a supervisor the batch axes of the mesh are fitted to them. The step is traced here and
    compiled at its first use; the feed has yet to be started, and must be closed.
    """
    wanted = degrees(config.mesh)
    if SUPERVISED in os.environ:  # an attempt may have fewer devices, or more, than the last
        wanted = refit(wanted, jax.device_count())
    mesh = build_mesh(wanted)
    known = {name: mesh.shape[name] for name in ("data", "fsdp", "tensor")}
    check(replace(config, mesh=replace(config.mesh, **known)))
    task = make_task(config)
    step = make_step(config, task, mesh)
    groups = step.layout.process_groups()
    feed = open_feed(config.data, config.batch, seed=config.run.seed, groups=groups)
    return task, step, feed


def _local_dir(config: Config, name: str) -> Path | None:
    directory = config.checkpoint.local_dir
    return None if directory is None else local_files.run_folder(directory, name)


def _begin_run(config: Config, degrees: dict[str, int], local: str) -> None:
    """Process 0's part: hold the run directory, and say what this start is made of."""
    if jax.process_index() == 0:
        claim(config.run.dir)
        record = provenance(config, sys.argv, jax.devices(), degrees)
        write_run_files(config.run.dir, config, record)
        if config.checkpoint.local_dir is not None:
            local_files.keep_name(config.run.dir, local)


def make_step(config: Config, task: Task, mesh: Any) -> TrainStep:
    """The step of `task` as configured."""
    return make_train_step(
        task.init_fn,
        task.loss_fn,
        task.optimizer,
        mesh,
        groups=config.batch.groups,
        reduction=config.batch.reduction,
        clip_norm=config.optimizer.clip_norm,
        axes=task.axes,
        rules=config.mesh.rules,
    )


def make_trainer(
    config: Config,
    step: TrainStep,
    feed: Feed,
    checkpointer: Checkpointer,
    stop: StopSignal,
    recorder: Recorder,
) -> Trainer:
    """The loop over these parts; only process 0 shows progress."""
    batch = config.batch
    tokens = batch.global_size * batch.sequence
    progress = ProgressLine(config.run.steps, tokens, config.run.print_every)
    progress.console.quiet = jax.process_index() != 0
    return Trainer(
        step=step,
        feed=feed,
        checkpointer=checkpointer,
        progress=progress,
        steps=config.run.steps,
        interval=config.checkpoint.interval,
        local_interval=config.checkpoint.local_interval,
        history=_history(config),
        seed=config.run.seed,
        facts={"seed": config.run.seed, **_batch_facts(batch)},
        about={"config": fingerprint(config)},
        cast=config.checkpoint.cast,
        partial=config.checkpoint.partial,
        stop=stop,
        recorder=recorder,
        tokens=tokens,
    )


def make_meter(config: Config) -> ThroughputMeter:
    """What measures the steps. Collective: process 0's peak holds for all."""
    wanted, dtype = config.throughput.peak_flops, config.model.compute_dtype
    if wanted is None:
        peak = peaks.peak(jax.devices()[0].device_kind, dtype)
    else:  # where it is measured, on every host at the same time
        peak = device_peak(dtype, wanted, jax.local_devices())
    peak = Peak(*from_everyone(astuple(peak))[0])
    tokens = config.batch.global_size * config.batch.sequence
    return ThroughputMeter(tokens, jax.device_count(), peak)


def _history(config: Config) -> tuple[int, float]:
    """Failures so far and the job time in which they came, where the interval follows from them."""
    local = config.checkpoint.local_dir and config.checkpoint.local_interval
    if "auto" not in (config.checkpoint.interval, local):
        return 0, 0.0

    def ask() -> tuple[int, float]:
        if not segments(config.run.dir):
            return 0, 0.0
        told = report(config.run.dir)
        return len(told["failures"]), told["wall_s"] - told["badput_s"]["idle"]

    failures, observed_s = agreed(ask)
    return failures, observed_s


def make_evaluation(config: Config, task: Task, step: TrainStep) -> Evaluation | None:
    """The held-out loss, if it is asked for."""
    if not config.evaluation.every:
        return None
    if task.evaluation_loss_fn is None:
        raise UsageError(
            f"evaluation.every: got {config.evaluation.every}: expected 0, this model has no"
            " evaluation_loss_fn"
        )
    corpus = Path(config.data.corpus) if config.data.corpus else standard_library_corpus()
    groups, limit = step.layout.process_groups(), config.evaluation.batches
    batches = HeldOut(corpus, config.batch, groups=groups, limit=limit)
    row_losses = make_row_losses(step, task.evaluation_loss_fn)
    return Evaluation(config.evaluation.every, row_losses, batches)


def _batch_facts(batch: BatchConfig) -> dict[str, Any]:
    return {
        "groups": batch.groups,
        "reduction": batch.reduction,
        "global_batch": batch.global_size,
        "sequence": batch.sequence,
    }


def _check_vocabulary(config: Config, feed: Feed) -> None:
    tokens = feed.fingerprint.get("vocabulary")
    if isinstance(tokens, int) and tokens > config.model.vocabulary:
        raise UsageError(
            f"model.vocabulary: got {config.model.vocabulary}: the corpus has {tokens} token ids"
        )
