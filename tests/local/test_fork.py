"""``muster launch ... --fork NEW`` with the real trainer: another run from a run's newest checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.rundir import RunDir
from launcher.storage import open_storage
from recipes.contract import RunPath
from tests.chaos.training import Lab, Training, cut_at, digests, read_arrays

pytestmark = pytest.mark.timeout(600)

CUT, END = 5, 9
CHANGES: Mapping[str, Any] = {
    "multislice.num_slices": 1,
    "model.num_layers": 1,
    "train.num_steps": END,
    "optimizer.warmup_steps": 2,
    "checkpoint.save_interval_steps": CUT,
    "train.eval_interval_steps": END,
}


def _files(folder: Path) -> dict[Path, str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def _arrays(run: Path, step: int) -> dict[str, str]:
    return digests(read_arrays(run / RunPath.CHECKPOINTS / str(step)))


def _steps(run: Path) -> list[int]:
    lines = [
        json.loads(line) for file in run.glob("metrics/*.jsonl") for line in file.read_text().splitlines()
    ]
    return [line["step"] for line in lines if "train/loss" in line]


def test_a_fork_goes_on_from_the_checkpoint_and_leaves_its_source_alone(tmp_path: Path) -> None:
    lab = Lab(cache=tmp_path / "cache", programs=tmp_path / "programs")
    whole, root = tmp_path / "whole", tmp_path / "forks"
    with Training(lab, whole, changes=CHANGES) as training:
        code, _, err = training.finish()
    assert code == 0, err
    checkpoint = cut_at(whole, root, CUT)
    source, before = checkpoint.parents[1], _files(root)

    # Nothing changed: the state is whole, so the end is the end that the source would have had.
    with Training(lab, root, changes=CHANGES, options=["--fork", "same"]) as training:
        code, _, err = training.finish()
    assert code == 0, err
    assert f"from step {CUT} of quickstart" in err
    assert _arrays(root / "same", CUT) == _arrays(source, CUT)
    assert _arrays(root / "same", END) == _arrays(whole / "quickstart", END)
    assert _steps(root / "same") == list(range(CUT + 1, END + 1))

    changes = {**CHANGES, "optimizer.learning_rate": 0.001}
    with Training(lab, root, changes=changes, options=["--fork", "lower-lr", "--json"]) as training:
        code, out, err = training.finish()
    assert code == 0, err
    assert json.loads(out)["run"] == "lower-lr"
    assert _arrays(root / "lower-lr", CUT) == _arrays(source, CUT)
    assert _arrays(root / "lower-lr", END) != _arrays(root / "same", END)
    fork = RunDir(open_storage(str(root / "lower-lr"))).fork()
    assert fork is not None
    assert (fork.source_url, fork.step, fork.changed_keys) == (str(source), CUT, ("optimizer.learning_rate",))
    assert _files(source) == {path: digest for path, digest in before.items() if source in path.parents}

    # From now on it is a run like any other.
    with Training(lab, root, changes={**changes, "run.name": "lower-lr"}) as training:
        code, _, err = training.finish()
    assert (code, "complete already" in err) == (0, True), err
