"""The trainer's steady step time over that of the bare loop of the same model.

Both train the same recipe as a process of their own, in the order ABBA. The trainer's loop is whole:
data pipeline, feed, metrics, progress, the look for checkpoints and notices; saves are off. Its step
times are those that it reports itself.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from benchmarks.figures import Figure, abba, round_ratios, summary
from benchmarks.machine import environment, run_module
from launcher.compose import compose
from recipes.load import recipe_to_dict
from recipes.schema import Recipe

AIM = 1.03
NUM_WARMUP_STEPS = 5
OVERRIDES = (
    "multislice=one-slice",
    "checkpoint=by-minutes",
    "checkpoint.save_interval_minutes=1440",
    "model.num_layers=2",
    "model.embed_dim=256",
    "model.mlp_dim=768",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "train.global_batch_size=8",
    "train.sequence_length=128",
    "optimizer.warmup_steps=5",
    "train.eval_num_batches=0",
)
"""Changes to quickstart: a model that is large enough for steps of some hundred milliseconds."""


def steady_recipe(num_devices: int, num_steps: int) -> Recipe:
    """What both sides train: one process, its devices as one fsdp axis."""
    more = (f"hardware.topology=1x{num_devices}", f"train.num_steps={num_steps}")
    return compose("quickstart", (*OVERRIDES, *more)).recipe


def compare(num_devices: int, *, num_rounds: int, num_steps: int, work: Path) -> Sequence[Figure]:
    """The ratio, and the medians that it is made of."""
    path = work / f"steady-{num_devices}.yaml"
    recipe = steady_recipe(num_devices, num_steps + NUM_WARMUP_STEPS)
    path.write_text(yaml.safe_dump(recipe_to_dict(recipe)))
    order = abba(num_rounds)
    measure = {"A": _trainer_times, "B": _bare_times}
    medians = [statistics.median(measure[who](path, num_devices, work)) for who in order]
    devices = f"{num_devices} CPU device{'s' if num_devices > 1 else ''}"
    a, b = ([value for who, value in zip(order, medians, strict=True) if who == which] for which in "AB")
    return [
        summary(f"step time over the bare loop, {devices}", "x", round_ratios(order, medians), aim=AIM),
        summary(f"step time of the trainer, {devices}", "s", a),
        summary(f"step time of the bare loop, {devices}", "s", b),
    ]


def _trainer_times(recipe: Path, num_devices: int, work: Path) -> Sequence[float]:
    run_dir = work / "steady"
    shutil.rmtree(run_dir, ignore_errors=True)
    _run(["trainer", str(recipe), "--run-dir", str(run_dir)], num_devices, work)
    lines = map(json.loads, (run_dir / "metrics" / "0001.jsonl").read_text().splitlines())
    return [line["perf/step_time_s"] for line in lines if line["step"] > NUM_WARMUP_STEPS]


def _bare_times(recipe: Path, num_devices: int, work: Path) -> Sequence[float]:
    times_s: list[float] = json.loads(_run(["benchmarks.bare_jax", str(recipe)], num_devices, work))
    return times_s[NUM_WARMUP_STEPS:]


def _run(words: Sequence[str], num_devices: int, work: Path) -> str:
    """Once more where XLA's collectives of CPU devices gave up on each other, an XLA fault."""
    env = environment(work / "cache", JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(num_devices))
    try:
        return run_module(words, env)
    except RuntimeError as error:
        if "rendezvous" not in str(error):
            raise
        print(f"  {words[0]}: a rendezvous of CPU devices timed out; run again", file=sys.stderr)
    return run_module(words, env)
