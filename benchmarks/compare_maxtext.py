"""Muster's train step and MaxText's, on the same work: ``python -m benchmarks maxtext-cpu maxtext-tpu``.

On CPU devices both train, as processes by turns, and seconds are compared. For TPUs both are compiled ahead
of time by the same libtpu with the same flags, and what the compiler says of them is compared: memory of a
device, and estimated cycles of the schedule. Neither needs a TPU. docs/compare-maxtext.md says how to read
it.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.figures import Figure, abba, round_ratios, summary
from benchmarks.machine import environment, run_module
from benchmarks.maxtext_pairs import CPU_RECIPE, CPU_STEPS, PAIRS, Pair, cpu_overrides, cpu_settings
from benchmarks.maxtext_runs import compiled, compiler_environment, interpreter, trained
from launcher.compose import compose
from launcher.preflight.compiled import analyze, read_compiled
from recipes.load import recipe_to_dict

CPU_AIM, TPU_AIM = 0.9, 1.0
NUM_CPU_DEVICES = (1, 4)
NUM_WARMUP_STEPS = 4
GB = 1e9

Run = Callable[[Path, int], tuple[float, Sequence[float]]]
"""In a work folder, for so many steps: seconds to the first step, and those of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What the compiler says of one train step, for one device."""

    hbm_bytes: int
    """The most in use at once: :attr:`launcher.preflight.compiled.Analysis.hbm_bytes`."""
    host_bytes: int
    cycles: int
    num_kernel_calls: int
    """Of kernels the compiler estimates nothing."""
    waiting_bytes: Mapping[str, int]
    """Moved by collectives that nothing runs beside, by kind: they have no cycles either."""


def tpu(work: Path, pairs: Sequence[Pair] = PAIRS) -> Iterator[Figure]:
    """Memory and cycles of each pair, ours over theirs."""
    python = interpreter()
    for pair in pairs:
        theirs = read(compiled(python, pair))
        ours = read(_own_compiled(pair, work))
        yield from compared(pair.name, ours, theirs)


def compared(name: str, ours: Compiled, theirs: Compiled) -> Iterator[Figure]:
    """The figures of one pair."""
    memory = f"{_gb(ours.hbm_bytes)} and {_gb(theirs.hbm_bytes)}"
    if ours.host_bytes or theirs.host_bytes:
        memory += f"; of the host {_gb(ours.host_bytes)} and {_gb(theirs.host_bytes)}"
    yield _ratio(f"{name}: memory", ours.hbm_bytes, theirs.hbm_bytes, memory)
    cycles = f"{ours.cycles / GB:.2f} and {theirs.cycles / GB:.2f} G"
    apart = f"not in them: {_apart(ours)}; {_apart(theirs)}"
    yield _ratio(f"{name}: cycles", ours.cycles, theirs.cycles, f"{cycles}; {apart}")


def read(folder: Path) -> Compiled:
    """Reads ``compiled.txt`` and ``compiled.json``, which both sides write alike."""
    step = read_compiled(folder)
    analysis = analyze(step)
    waiting: dict[str, int] = {}
    for each in analysis.collectives:
        if not each.is_async:
            waiting[each.kind] = waiting.get(each.kind, 0) + each.total_bytes
    return Compiled(
        hbm_bytes=analysis.hbm_bytes,
        host_bytes=step.memory.host_bytes,
        cycles=analysis.cost.estimated_cycles,
        num_kernel_calls=sum(call.count for call in analysis.cost.kernels),
        waiting_bytes=waiting,
    )


def cpu(work: Path, *, num_rounds: int) -> Iterator[Figure]:
    """Start-up and step time, ours over theirs, with 1 and 4 CPU devices."""
    python = interpreter()
    for num_devices in NUM_CPU_DEVICES:
        devices = f"{num_devices} CPU device{'s' if num_devices > 1 else ''}"

        def theirs(
            place: Path, num_steps: int, num_devices: int = num_devices
        ) -> tuple[float, Sequence[float]]:
            return trained(python, cpu_settings(num_devices, num_steps), num_devices, place)

        def ours(
            place: Path, num_steps: int, num_devices: int = num_devices
        ) -> tuple[float, Sequence[float]]:
            return _own_trained(num_devices, num_steps, place)

        yield from _by_turns({"A": ours, "B": theirs}, devices, num_rounds, work / str(num_devices))


def _by_turns(runs: Mapping[str, Run], devices: str, num_rounds: int, work: Path) -> Iterator[Figure]:
    order = abba(num_rounds)
    cold: list[float] = []
    warm: list[float] = []
    steps: list[float] = []
    for who in order:
        place = work / who
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        cold.append(runs[who](place, 1)[0])
        warm.append(runs[who](place, 1)[0])
        steps.append(statistics.median(runs[who](place, CPU_STEPS)[1][NUM_WARMUP_STEPS:]))
    parts = {"step time": steps, "start-up, nothing cached": cold, "start-up, compiled before": warm}
    for part, values in parts.items():
        yield from ratio_of_turns(f"{part}, {devices}", order, values)


def ratio_of_turns(name: str, order: str, values: Sequence[float]) -> Iterator[Figure]:
    """The median ratio of the rounds, and the seconds that it is made of."""
    yield summary(f"{name}: over MaxText", "x", round_ratios(order, values), aim=CPU_AIM)
    for who, side in (("A", "Muster"), ("B", "MaxText")):
        own = [value for each, value in zip(order, values, strict=True) if each == who]
        yield summary(f"{name}: {side}", "s", own)


def _own_trained(num_devices: int, num_steps: int, work: Path) -> tuple[float, Sequence[float]]:
    recipe = work / "recipe.yaml"
    composed = compose(CPU_RECIPE, cpu_overrides(num_devices, num_steps)).recipe
    recipe.write_text(yaml.safe_dump(recipe_to_dict(composed)))
    run_dir = work / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    env = environment(work / "cache", JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(num_devices))
    start_s = time.time()
    run_module(["trainer", str(recipe), "--run-dir", str(run_dir)], env)
    text = (run_dir / "metrics" / "0001.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return lines[0]["time_s"] - start_s, [line["perf/step_time_s"] for line in lines]


def _own_compiled(pair: Pair, work: Path) -> Path:
    out = work / pair.name.replace(" ", "-").replace(",", "")
    recipe = work / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_to_dict(compose(pair.recipe, pair.overrides).recipe)))
    env = environment(work / "cache", **compiler_environment(pair.flags))
    run_module(["trainer.aot", str(recipe), "--out", str(out)], env)
    return out


def _ratio(name: str, ours: float, theirs: float, note: str) -> Figure:
    return summary(f"{name}, over MaxText", "x", [ours / theirs], aim=TPU_AIM, note=note)


def _apart(side: Compiled) -> str:
    waiting = [f"{kind} {_gb(size)}" for kind, size in sorted(side.waiting_bytes.items()) if size >= GB / 20]
    return ", ".join((f"{side.num_kernel_calls} kernel calls", *waiting))


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / GB:.1f} GB"
