"""Launches a tiny run with the real trainer, watches it, kills it, and compares what is left.

The run has dropout and shuffled data, so that whatever is random is seen to come back. A probe around
the trainer (``probe/``) notes which rows each step reads and which arrays were restored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from launcher.ledger import HostRecord
from launcher.orphans import HostProcesses
from launcher.processes import ProcessId, is_running
from recipes.contract import PROGRESS_FILE, RunPath
from tests.local.launching import REPO, Launch

PROBE = Path(__file__).parent / "probe"
NUM_STEPS = 40
SAVE_INTERVAL = 5
EVAL_INTERVAL = 10
PATIENCE_S = 300.0
"""For anything that only a broken run would not reach; a busy machine may be slow."""

TINY: Mapping[str, Any] = {
    "hardware.topology": "1x2",
    "model.num_layers": 2,
    "model.embed_dim": 32,
    "model.mlp_dim": 64,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.head_dim": 16,
    "model.dropout_rate": 0.1,
    "train.num_steps": NUM_STEPS,
    "train.global_batch_size": 8,
    "train.sequence_length": 32,
    "train.eval_interval_steps": EVAL_INTERVAL,
    "train.eval_num_batches": 2,
    "checkpoint.save_interval_steps": SAVE_INTERVAL,
    "target.grace_period_s": 30,
    "run.peer_timeout_s": 10,
}
"""2 slices x 1 host x 2 devices; changes to quickstart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lab:
    """What the runs of one test session share: nobody reads or compiles twice."""

    cache: Path
    """Tables of the data."""
    programs: Path
    """Compiled programs."""

    def env(self, root: Path, *, step_s: float, hold: str) -> dict[str, str]:
        """The environment of a watched trainer, and of a launcher of such."""
        temporary, out = root / "tmp", root / "probe"
        for folder in (temporary, out):
            folder.mkdir(parents=True, exist_ok=True)
        return {
            "PYTHONPATH": f"{PROBE}{os.pathsep}{REPO}",
            "PROBE_OUT": str(out),
            "PROBE_STEP_S": str(step_s),
            "PROBE_HOLD": hold,
            "TMPDIR": str(temporary),
            "XDG_CACHE_HOME": str(self.cache),
            "JAX_COMPILATION_CACHE_DIR": str(self.programs),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }


class Training(Launch):
    """One ``muster launch`` of the tiny run under ``root``; the same ``root`` resumes it."""

    def __init__(
        self,
        lab: Lab,
        root: Path,
        *,
        changes: Mapping[str, Any] | None = None,
        options: Sequence[str] = (),
        step_s: float = 0.0,
        hold: str = "",
    ) -> None:
        self.root = root
        self.noticed_s = 0.0
        """When a notice was given, by the monotonic clock."""
        root.mkdir(exist_ok=True)
        keys = {**TINY, "run.root": str(root), **(changes or {})}
        super().__init__(
            root,
            overrides=[f"{key}={value}" for key, value in keys.items()],
            options=options,
            env=lab.env(root, step_s=step_s, hold=hold),
        )

    def __enter__(self) -> Training:
        return self

    def finish(self, timeout_s: float = PATIENCE_S) -> tuple[int, str, str]:
        return super().finish(timeout_s)

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"no {what} within {PATIENCE_S:.0f} s"
            if self.process.poll() is not None:
                raise AssertionError(f"ended before {what}: {self.finish()}")
            time.sleep(0.01)

    def attempt(self) -> int:
        """Number of the newest attempt; 0 when there is none."""
        return max(self.run.attempts(), default=0)

    def wait_for_trainers(self, after: int = 0) -> list[HostProcesses]:
        """The processes of an attempt later than ``after``, once both trainers have been started."""

        def started() -> bool:
            found = self.processes() if self.attempt() > after else []
            return len(found) == 2 and all(host.trainer for host in found)

        self.wait_for(started, "trainers")
        return self.processes()

    def begun_by_host(self) -> list[int]:
        """The newest step that each host of the newest attempt has begun, in host order."""
        files = sorted((self.root / "probe").glob(f"{self.attempt()}-*.rows.jsonl"))
        return [max((line["step"] for line in _lines(file)), default=0) for file in files]

    def begun(self) -> int:
        """The newest step that any host of the newest attempt has begun; 0 when none."""
        return max(self.begun_by_host(), default=0)

    def wait_until_begun(self, step: int, after: int = 0) -> None:
        """Until an attempt later than ``after`` is in ``step``."""
        self.wait_for(lambda: self.attempt() > after and self.begun() >= step, f"step {step}")

    def phases(self) -> list[str]:
        """What each trainer says that it is doing."""
        found = []
        for path in (self.root / "tmp").glob(f"muster-*/*/{PROGRESS_FILE}"):
            with contextlib.suppress(FileNotFoundError):
                found.append(json.loads(path.read_text())["phase"])
        return found

    def release(self) -> None:
        """Let trainers go that were held."""
        (self.root / "probe" / "release").touch()

    def kill_all(self) -> None:
        """SIGKILL to launcher, agents and trainers, as when the machine goes down."""
        self.process.kill()
        self.process.wait()
        for process in identities(self.processes()):
            if is_running(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def checkpoint(self, step: int) -> Path:
        return self.run_path / RunPath.CHECKPOINTS / str(step)

    def records(self) -> list[HostRecord]:
        """How the hosts of the newest attempt ended."""
        return list(self.run.hosts(self.attempt()))


def identities(hosts: Sequence[HostProcesses]) -> list[ProcessId]:
    """All agents and trainers."""
    return [one for host in hosts for one in (host.agent, host.trainer) if one is not None]


def train_alone(lab: Lab, root: Path, changes: Mapping[str, Any]) -> None:
    """``python -m trainer`` on the run under ``root``, with some keys of its recipe changed."""
    run_dir = root / "quickstart"
    recipe = yaml.safe_load((run_dir / RunPath.RECIPE).read_text())
    for key, value in changes.items():
        group, name = key.split(".")
        recipe[group][name] = value
    (root / "changed.yaml").write_text(yaml.safe_dump(recipe))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trainer", str(root / "changed.yaml"), "--run-dir", str(run_dir)],
        env={**os.environ, **lab.env(root, step_s=0.0, hold="")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What one run did, over all its attempts."""

    losses: Mapping[int, set[float]]
    """By step; more than one value when attempts that made the same step do not agree."""
    held_out: Mapping[int, set[float]]
    rows: Mapping[int, Mapping[int, set[str]]]
    """Digest of each row of each global batch, likewise."""

    @property
    def steps(self) -> set[int]:
        return set(self.losses)


def look_at(root: Path) -> Seen:
    """Read the metrics and the probe's notes of the run under ``root``.

    Metrics that a killed host could not ship any more are taken from its scratch directory.
    """
    losses: dict[int, set[float]] = {}
    held_out: dict[int, set[float]] = {}
    rows: dict[int, dict[int, set[str]]] = {}
    shipped = root.glob("quickstart/metrics/*.jsonl")
    stranded = root.glob("tmp/muster-*/*/metrics/*.jsonl")
    for line in (line for path in (*shipped, *stranded) for line in _lines(path)):
        for name, found in (("train/loss", losses), ("eval/loss", held_out)):
            if name in line:
                found.setdefault(line["step"], set()).add(line[name])
    for line in (line for path in root.glob("probe/*.rows.jsonl") for line in _lines(path)):
        step = rows.setdefault(line["step"], {})
        for row, digest in line["rows"].items():
            step.setdefault(int(row), set()).add(digest)
    return Seen(losses=losses, held_out=held_out, rows=rows)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file that may be growing, or be cut in its last line."""
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.split("\n") if line]


def leaves(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """What the manifest says of each array of a checkpoint: shape, dtype, fingerprint."""
    manifest = json.loads((checkpoint / "manifest" / "metadata").read_text())
    found: dict[str, dict[str, Any]] = manifest["leaves"]
    return found


def read_arrays(checkpoint: Path) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, without Orbax and JAX."""
    import tensorstore

    kvstore = {"driver": "ocdbt", "base": f"file://{checkpoint}/state/"}
    reads = {
        path: tensorstore.open(
            {"driver": "zarr3", "kvstore": {**kvstore, "path": path.replace("/", ".")}}, open=True
        )
        for path in leaves(checkpoint)
    }
    return {path: np.asarray(read.result().read().result()) for path, read in reads.items()}


def digests(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """SHA-256 of each array: type, shape and every bit."""
    return {
        path: hashlib.sha256(f"{a.dtype}{a.shape}".encode() + np.ascontiguousarray(a).tobytes()).hexdigest()
        for path, a in arrays.items()
    }


def restored_arrays(root: Path, checkpoint: Path) -> dict[str, np.ndarray]:
    """The state that the hosts of the run under ``root`` had restored, put together from their shards."""
    whole = {
        path: np.zeros(leaf["shape"], np.dtype(leaf["dtype"])) for path, leaf in leaves(checkpoint).items()
    }
    filled = {path: np.zeros(array.shape, bool) for path, array in whole.items()}
    for file in root.glob("probe/*.restored.npz"):
        with np.load(file) as shards:
            for name, data in shards.items():
                path, _, starts = name.partition("@")
                offsets = [int(start) for start in starts.split(",") if start]
                place = tuple(slice(o, o + n) for o, n in zip(offsets, data.shape, strict=True))
                # A replica that another host has too must be the same there.
                assert not np.any(filled[path][place]) or np.array_equal(whole[path][place], data), name
                whole[path][place], filled[path][place] = data, True
    assert all(np.all(array) for array in filled.values()), "some shards were restored by nobody"
    return whole


def cut_at(finished: Path, root: Path, step: int) -> Path:
    """A copy of a finished run as it was when ``step`` had just been saved; returns its checkpoint."""
    source, target = finished / "quickstart", root / "quickstart"
    target.mkdir(parents=True)
    for name in (RunPath.RECIPE, RunPath.LOCK):
        shutil.copy(source / name, target / name)
    shutil.copytree(source / RunPath.CHECKPOINTS / str(step), target / RunPath.CHECKPOINTS / str(step))
    return target / RunPath.CHECKPOINTS / str(step)


def is_finite(arrays: Mapping[str, np.ndarray]) -> bool:
    return all(bool(np.all(np.isfinite(array))) for array in arrays.values())


def differences(one: Seen, other: Seen) -> list[str]:
    """Where two runs did not do the very same, over the steps that both made."""
    found = []
    for what, mine, theirs in (
        ("loss", one.losses, other.losses),
        ("held-out loss", one.held_out, other.held_out),
        ("rows", one.rows, other.rows),
    ):
        both = sorted(set(mine) & set(theirs))
        found += [
            f"{what} of step {step}: {mine[step]} and {theirs[step]}"
            for step in both
            if mine[step] != theirs[step] or _ambiguous(mine[step])
        ]
    return found


def _ambiguous(values: Any) -> bool:
    """Whether attempts of one run did not agree."""
    if isinstance(values, dict):
        return any(len(each) != 1 for each in values.values())
    return len(values) != 1
