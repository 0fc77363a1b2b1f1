"""Whether two runs came to the same end: every number of every step, and every array of the last checkpoint.

Arrays are compared by the fingerprints that the trainer computed when it saved them, so no JAX is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.contract import RunPath
from recipes.errors import UserError

_COMPARED = ("train/", "eval/")
"""Metrics of the experiment itself; the others are of time."""
_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """What one run did over all its attempts, and what it left."""

    metrics: Mapping[tuple[int, str], frozenset[float]]
    """By step and name; more than one value where attempts that made the same step do not agree."""
    arrays: Mapping[str, Any]
    """Shape, dtype and fingerprint of each array of the last checkpoint."""


def read_end(run_dir: Path, step: int) -> RunEnd:
    """Reads what a local run left when it ended with ``step``.

    Raises:
      UserError: something of it is missing or cannot be read.
    """
    manifest = run_dir / RunPath.CHECKPOINTS / str(step) / "manifest" / "metadata"
    try:
        arrays = dict(json.loads(manifest.read_text(encoding="utf-8"))["leaves"])
        metrics: dict[tuple[int, str], frozenset[float]] = {}
        for record in _records(run_dir / RunPath.METRICS):
            for name, value in record.items():
                if name.startswith(_COMPARED):
                    key = (record["step"], name)
                    metrics[key] = metrics.get(key, frozenset()) | {value}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run_dir}: what the run left cannot be read ({error!r})") from error
    return RunEnd(metrics=metrics, arrays=arrays)


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    """Every whole line; the last one of a killed trainer may be cut."""
    for path in sorted(folder.glob("*.jsonl")):
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
        yield from (json.loads(line) for line in whole.split("\n") if line)


def differences(whole: RunEnd, cut: RunEnd) -> Sequence[str]:
    """Where ``cut`` is not bit for bit ``whole``, in order of steps; empty when it is."""
    return [*_metric_differences(whole, cut), *_array_differences(whole, cut)]


def _metric_differences(whole: RunEnd, cut: RunEnd) -> Iterator[str]:
    for step, name in sorted(whole.metrics.keys() | cut.metrics.keys()):
        expected = whole.metrics.get((step, name), frozenset())
        found = cut.metrics.get((step, name), frozenset())
        if expected != found or len(expected) != 1:
            yield f"{name} of step {step}: {_values(found)} instead of {_values(expected)}"


def _values(values: frozenset[float]) -> str:
    return " and ".join(map(repr, sorted(values))) or "nothing"


def _array_differences(whole: RunEnd, cut: RunEnd) -> Iterator[str]:
    for path in sorted(whole.arrays.keys() | cut.arrays.keys()):
        if whole.arrays.get(path) != cut.arrays.get(path):
            yield f"array {path} of the last checkpoint"


def summarized(found: Sequence[str]) -> str:
    """The first few differences, and how many more there are."""
    rest = len(found) - _SHOWN
    return "; ".join(found[:_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")
