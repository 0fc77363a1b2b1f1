"""Metrics without a device sync each step, and the progress file that the agent reads.

Values of a step are fetched while later steps already run; only process 0 writes. Names:
``train/loss`` (nats per token), ``train/grad_norm``, ``train/learning_rate``, ``eval/loss``,
``perf/step_time_s``, ``perf/tokens_per_s``, ``perf/tokens_per_s_per_chip``, ``perf/mfu``; and once an
attempt ``data/eval_unigram_entropy_nats``, what ``eval/loss`` is to be compared with.
"""

from __future__ import annotations

import collections
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import jax

from recipes.contract import METRICS_DIR, PROGRESS_FILE, ExitCode, HostContext, Phase, Progress
from recipes.errors import UserError
from recipes.flops import peak_flops_per_s, step_flops
from recipes.hardware import slice_shape
from recipes.schema import Recipe

_STEPS_IN_FLIGHT = 2
"""Steps that the host may run ahead of the devices."""

_PROGRESS_INTERVAL_S = 0.25


class Reporter:
    """Records metrics and progress of one process in its scratch directory."""

    def __init__(self, recipe: Recipe, context: HostContext, *, now: Callable[[], float] = time.time) -> None:
        self._recipe, self._context, self._now = recipe, context, now
        self._directory = Path(context.scratch_dir)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._pending: collections.deque[tuple[int, Mapping[str, jax.Array]]] = collections.deque()
        self._writer = _Writer(self._directory / METRICS_DIR, context) if context.process_id == 0 else None
        self._phase, self._step, self._committed_step = Phase.STARTING, 0, -1
        self._newest: dict[str, float] = {}
        self._about_data: dict[str, float] = {}
        self._window: tuple[int, float] | None = None
        self._written_s = -math.inf

    def __enter__(self) -> Reporter:
        self._write_progress()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    def phase(self, phase: Phase) -> None:
        """Says what comes next; written at once."""
        self._phase = phase
        self._write_progress()

    def describe_data(self, *, eval_unigram_entropy_nats: float | None) -> None:
        """What is known of the data; written with the first metrics of this attempt."""
        if eval_unigram_entropy_nats is not None:
            self._about_data = {"data/eval_unigram_entropy_nats": eval_unigram_entropy_nats}

    def resumed(self, step: int, committed_step: int) -> None:
        """``step`` optimizer steps are already done, ``committed_step`` (-1: none) of them saved."""
        self._step, self._committed_step = step, committed_step
        self.phase(Phase.TRAINING)
        self._window = (step, self._now())

    def record(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Takes the metrics of a step that was just dispatched, and fetches those of an older one."""
        self._pending.append((step, metrics))
        if len(self._pending) > _STEPS_IN_FLIGHT:
            self._fetch_oldest()

    def flush(self) -> None:
        """Fetches everything outstanding.

        Raises:
          UserError: a loss or gradient was not finite (EXPERIMENT_FAILED).
        """
        while self._pending:
            self._fetch_oldest()

    def record_eval(self, step: int, loss: float) -> None:
        """Writes the held-out loss (nats per token) after ``step`` optimizer steps."""
        self._write(step, {"eval/loss": loss})
        self._window = (step, self._now())
        self.phase(Phase.TRAINING)

    def committed(self, step: int) -> None:
        """The newest committed checkpoint, for the progress file."""
        self._committed_step = step

    def finish(self) -> None:
        """Everything is written; the run is complete."""
        self.flush()
        self.phase(Phase.DONE)

    def _fetch_oldest(self) -> None:
        step, on_device = self._pending.popleft()
        values = {name: float(value) for name, value in jax.device_get(dict(on_device)).items()}
        self._check_finite(step, values)
        self._step = step
        interval = self._recipe.train.log_interval_steps
        if step % interval == 0 or step == self._recipe.train.num_steps:
            self._write(step, {**values, **self._speed(step)})
        elif self._now() - self._written_s >= _PROGRESS_INTERVAL_S:
            self._write_progress()

    def _check_finite(self, step: int, values: Mapping[str, float]) -> None:
        bad = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
        if bad:
            raise UserError(
                f"step {step}: {', '.join(bad)}",
                hint="the newest checkpoint is from before; lower optimizer.learning_rate or raise "
                "optimizer.warmup_steps in a new run, or look at the data of this step",
                exit_code=ExitCode.EXPERIMENT_FAILED,
            )

    def _speed(self, step: int) -> dict[str, float]:
        now = self._now()
        start_step, start_s = self._window or (step - 1, now)
        self._window = (step, now)
        step_time_s = (now - start_s) / max(step - start_step, 1)
        if step_time_s <= 0:
            return {}
        tokens_per_s = self._recipe.train.global_batch_size * self._recipe.train.sequence_length / step_time_s
        num_chips = _num_chips(self._recipe)
        speed = {
            "perf/step_time_s": step_time_s,
            "perf/tokens_per_s": tokens_per_s,
            "perf/tokens_per_s_per_chip": tokens_per_s / num_chips,
        }
        peak = peak_flops_per_s(self._recipe)
        if peak is not None:
            speed["perf/mfu"] = step_flops(self._recipe) / step_time_s / (peak * num_chips)
        return speed

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        values = {**self._about_data, **values}
        self._about_data = {}
        self._newest.update(values)
        if self._writer is not None:
            self._writer.write(step, self._now(), values)
        if self._now() - self._written_s >= _PROGRESS_INTERVAL_S:
            self._write_progress()

    def _write_progress(self) -> None:
        self._written_s = self._now()
        progress = Progress(
            phase=self._phase,
            step=self._step,
            num_steps=self._recipe.train.num_steps,
            committed_step=self._committed_step,
            time_s=self._written_s,
            metrics=dict(self._newest),
        )
        target = self._directory / PROGRESS_FILE
        temporary = target.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(progress)))
        os.replace(temporary, target)


class _Writer:
    """JSONL and TensorBoard events of one attempt."""

    def __init__(self, directory: Path, context: HostContext) -> None:
        # Costs over a second to import, and only process 0 writes events.
        from tensorboardX import SummaryWriter

        directory.mkdir(parents=True, exist_ok=True)
        self._attempt = context.attempt
        self._lines = (directory / f"{context.attempt:04d}.jsonl").open("a", buffering=1)
        self._events = SummaryWriter(str(directory), filename_suffix=f".{context.attempt:04d}", flush_secs=10)

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        record = {"step": step, "time_s": time_s, "launch/attempt": self._attempt, **values}
        self._lines.write(json.dumps(record) + "\n")
        for name, value in values.items():
            self._events.add_scalar(name, value, step, walltime=time_s)

    def close(self) -> None:
        self._lines.close()
        self._events.close()


def _num_chips(recipe: Recipe) -> int:
    return slice_shape(recipe.hardware).num_chips * recipe.multislice.num_slices
