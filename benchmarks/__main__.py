"""Measures Muster on this machine and prints a table: ``python -m benchmarks [step|restart|cli|gke ...]``.

Everything comes from one run on one machine; docs/benchmarks.md says what each figure is.
``python -m benchmarks compiled`` compiles for TPUs instead (docs/compiled.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks import compare_maxtext, compiled
from benchmarks.command_line import command_line
from benchmarks.figures import Figure, table
from benchmarks.gke import submissions
from benchmarks.machine import Machine, this_machine
from benchmarks.preemption import preemptions
from benchmarks.restarts import restarts, saves
from benchmarks.step_time import compare

NUM_DEVICES = (1, 4)
COMPILED = "compiled"
"""A command of its own: nothing is timed, and its tables are others."""


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if list(argv[:1]) == [COMPILED]:
        return compiled.main(argv[1:])
    options = parse(argv)
    machine = this_machine()
    print(machine.describe(), file=sys.stderr)
    if machine.is_busy:
        print("warning: others use this machine now; the figures say little", file=sys.stderr)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as work:
        for part in options.parts or (part for part in PARTS if part not in BY_NAME_ONLY):
            print(f"measuring: {part}", file=sys.stderr)
            for figure in PARTS[part](options, Path(work)):
                figures.append(figure)
                print(f"  {figure.name}: {figure.shown}", file=sys.stderr)
    print(as_json(machine, figures) if options.json else table(figures))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; by default all but maxtext"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each comparison (3)")
    parser.add_argument("--steps", type=int, default=40, help="steady steps of one run (40)")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    options = parser.parse_args(argv)
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps are at least 1")
    return options


def as_json(machine: Machine, figures: Sequence[Figure]) -> str:
    facts = {"machine": dataclasses.asdict(machine), "figures": [dataclasses.asdict(f) for f in figures]}
    return json.dumps(facts, indent=1)


def _step(options: argparse.Namespace, work: Path) -> Iterable[Figure]:
    for num_devices in NUM_DEVICES:
        yield from compare(num_devices, num_rounds=options.rounds, num_steps=options.steps, work=work)


def _restart(options: argparse.Namespace, work: Path) -> Iterable[Figure]:
    yield from restarts(num_rounds=options.rounds, work=work)
    yield from saves(work)


def _cli(options: argparse.Namespace, work: Path) -> Iterable[Figure]:
    return command_line()


def _gke(options: argparse.Namespace, work: Path) -> Iterable[Figure]:
    yield from submissions(work)
    yield from preemptions(num_rounds=options.rounds, work=work)


def _maxtext_cpu(options: argparse.Namespace, work: Path) -> Iterable[Figure]:
    return compare_maxtext.cpu(work, num_rounds=options.rounds)


def _maxtext_tpu(options: argparse.Namespace, work: Path) -> Iterable[Figure]:
    return compare_maxtext.tpu(work)


PARTS: Mapping[str, Callable[[argparse.Namespace, Path], Iterable[Figure]]] = {
    "step": _step,
    "restart": _restart,
    "cli": _cli,
    "gke": _gke,
    "maxtext-cpu": _maxtext_cpu,
    "maxtext-tpu": _maxtext_tpu,
}
BY_NAME_ONLY = {"maxtext-cpu", "maxtext-tpu"}
"""They install another trainer, and compile for an hour."""

if __name__ == "__main__":
    sys.exit(main())
