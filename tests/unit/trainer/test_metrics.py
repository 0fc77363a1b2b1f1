"""What the reporter writes, and when."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from recipes.contract import PROGRESS_FILE, HostContext, Phase
from recipes.schema import Recipe
from trainer.metrics import Reporter

ENTROPY = "data/eval_unigram_entropy_nats"


def _context(scratch: Path) -> HostContext:
    return HostContext(
        run_dir=str(scratch),
        attempt=2,
        slice_id=0,
        num_slices=1,
        host_id=0,
        hosts_per_slice=1,
        coordinator="",
        grace_period_s=1.0,
        scratch_dir=str(scratch),
    )


def _lines(scratch: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (scratch / "metrics/0002.jsonl").read_text().splitlines()]


def _progress(scratch: Path) -> dict[str, float]:
    metrics: dict[str, float] = json.loads((scratch / PROGRESS_FILE).read_text())["metrics"]
    return metrics


@pytest.mark.parametrize("entropy", [3.25, None])
def test_what_is_known_of_the_data_goes_out_once_with_the_first_metrics(
    tmp_path: Path, small: Callable[..., Recipe], entropy: float | None
) -> None:
    with Reporter(small({"train.log_interval_steps": 1}), _context(tmp_path)) as reporter:
        reporter.describe_data(eval_unigram_entropy_nats=entropy)
        reporter.phase(Phase.COMPILING)
        reporter.resumed(4, 4)
        # Whoever times steps by the metrics must not see any before the first step.
        assert _progress(tmp_path) == {}
        for step in (5, 6):
            reporter.record(step, {"train/loss": jnp.float32(2.5)})
        reporter.finish()
    expected = {} if entropy is None else {ENTROPY: entropy}
    first, second = _lines(tmp_path)
    assert {name: value for name, value in first.items() if name.startswith("data/")} == expected
    assert ENTROPY not in second
    assert (second["step"], second["train/loss"]) == (6, 2.5)
    assert _progress(tmp_path)["train/loss"] == 2.5
    assert _progress(tmp_path).get(ENTROPY) == entropy
