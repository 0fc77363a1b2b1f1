"""`muster dryrun` with real launchers, agents and trainers: every shipped recipe, and what can go wrong.

Meshes of 32 devices in miniature: ``pytest -m long tests/local/test_dryrun.py`` (about 6 minutes).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher import ledger
from launcher.orphans import HostProcesses
from recipes.contract import ExitCode
from recipes.miniature import NUM_STEPS
from tests.local.launching import REPO, none_running

pytestmark = pytest.mark.timeout(900)

RECIPES = sorted(path.stem for path in REPO.joinpath("recipes").glob("*.yaml"))
PATIENCE_S = 600.0
"""A dry run takes less than a minute; a busy machine may be slow."""
STAGES = ["compose", "plan", "manifest", "data", "preflight", "run", "kill", "resume", "compare"]


class Place:
    """A machine as far as a dry run could write to it: working directory, home and temporary files."""

    def __init__(self, root: Path, programs: Path) -> None:
        self.here, self.home, self.temporary = root / "here", root / "home", root / "tmp"
        for folder in (self.here, self.home, self.temporary):
            folder.mkdir()
        # What a launch from here would send.
        (self.here / "code.py").write_text("x = 1\n")
        self.env = {
            **os.environ,
            "PYTHONPATH": str(REPO),
            "HOME": str(self.home),
            "TMPDIR": str(self.temporary),
            "JAX_COMPILATION_CACHE_DIR": str(programs),
        }
        self.env.pop("XDG_CACHE_HOME", None)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "launcher", "dryrun", *words],
            cwd=self.here,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        with self.start(*words) as process:
            try:
                out, err = process.communicate(timeout=PATIENCE_S)
            finally:
                process.terminate()
        return process.returncode, out, err

    def written(self) -> list[Path]:
        """Whatever is there beside the code."""
        folders = (self.here, self.home, self.temporary)
        return [path for folder in folders for path in folder.rglob("*") if path.name != "code.py"]


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def place(tmp_path: Path, programs: Path) -> Place:
    return Place(tmp_path, programs)


def outcomes(report: Mapping[str, Any]) -> dict[str, str]:
    return {stage["name"]: stage["outcome"] for stage in report["stages"]}


def stage_of(report: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = {stage["name"]: stage for stage in report["stages"]}[name]
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_shipped(place: Place, recipe: str) -> None:
    code, out, err = place.run(recipe, "--no-preflight", "--json")
    assert code == 0, out + err
    report = json.loads(out)
    assert report["ok"] is True
    assert [stage["name"] for stage in report["stages"]] == STAGES
    expected = dict.fromkeys(STAGES, "ok") | {"preflight": "skipped"}
    if recipe == "quickstart":
        expected["manifest"] = "skipped"
    assert outcomes(report) == expected
    assert "killed once step" in stage_of(report, "kill")["detail"]
    assert stage_of(report, "resume")["detail"].endswith(f"to {NUM_STEPS}")
    assert "equal bit for bit" in stage_of(report, "compare")["detail"]
    assert place.written() == [], "nothing is left, and nothing was written elsewhere"


WILD: Mapping[str, Sequence[str]] = {
    "experts over five axes": (
        "mixtral-8x7b-v6e-16x16",
        "mesh.data=2",
        "mesh.context=4",
        "mesh.expert=8",
        "mesh.tensor=2",
        "mesh.zero1=true",
        "model.num_shared_experts=2",
        "model.dropout_rate=0.1",
        "model.attention_window=4096",
        "train.remat_policy=named",
        "train.remat_offload=[layer_input]",
        "train.grad_accum_steps=2",
    ),
    # Its processes may begin many collectives at once: `trainer/devices.py` keeps their order.
    "circular pipeline with a ring, in fp8": (
        "llama3-70b-v5p-4x4x8",
        "multislice=two-slices",
        "multislice.data=1",
        "multislice.fsdp=2",
        "mesh.stage=4",
        "mesh.stage_rounds=2",
        "mesh.stage_microbatches=16",
        "mesh.tensor=4",
        "mesh.context=2",
        "mesh.context_exchange=ring",
        "model.attention=xla_chunked",
        "model.quantization=fp8",
        "data.document_separator=128001",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WILD)
def test_everything_at_once(place: Place, name: str) -> None:
    code, out, err = place.run(*WILD[name], "--no-preflight")
    assert code == 0, out + err
    assert "equal bit for bit" in out


def test_all_failures_are_in_one_report(place: Place) -> None:
    """It does not fit, its data are not here, and the rest is rehearsed all the same."""
    overrides = ["hardware.topology=4x4x4", "data=token-file", "data.path=/no/such/tokens"]
    kept = place.here / "kept"
    code, out, err = place.run("llama3-405b-v5p-8x8x8-x2", *overrides, "--quick", "--dir", str(kept))
    assert code == ExitCode.BAD_INPUT, out + err
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert "data.path=/no/such/tokens: does not exist" in lines["data"]
    assert "--synthetic-data" in out
    assert "does not fit" in lines["preflight"]
    assert "muster preflight" in out
    assert "equal bit for bit" in lines["compare"]
    assert lines["directory"].split()[1] == str(kept)
    assert out.splitlines()[-1] == "failed: data, preflight"
    assert (kept / "cut" / "attempts" / "0002" / "start.json").exists()
    assert {path for path in place.written() if kept not in (path, *path.parents)} == set()


def test_a_run_that_fails_keeps_its_folder(place: Place) -> None:
    texts = place.here / "texts"
    texts.mkdir()
    (texts / "short.txt").write_text("too short\n")
    code, out, err = place.run("quickstart", "data=text-files", "data.path=texts", "--json")
    assert code == ExitCode.BAD_INPUT, out + err
    report = json.loads(out)
    rest = dict.fromkeys(("kill", "resume", "compare"), "skipped")
    assert outcomes(report).items() >= ({"run": "failed"} | rest).items()
    run = stage_of(report, "run")
    assert "10 tokens are less than one sequence" in run["detail"]
    assert run["hint"]
    directory = Path(report["directory"])
    assert directory.parent == place.temporary
    assert (directory / "whole" / "attempts" / "0001" / "logs").is_dir()
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(place: Place, number: signal.Signals) -> None:
    with place.start("quickstart", "--no-preflight") as process:
        trainers = wait_for_trainers(place, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "interrupted"
    assert none_running(trainers)
    assert place.written() == []


def test_killed(place: Place) -> None:
    """Nobody can clean up, but no process goes on."""
    with place.start("quickstart", "--no-preflight") as process:
        trainers = wait_for_trainers(place, process)
        process.kill()
    deadline_s = time.monotonic() + PATIENCE_S
    while not none_running(trainers):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def wait_for_trainers(place: Place, process: subprocess.Popen[str]) -> Sequence[HostProcesses]:
    """Agents and trainers of the first run, once all are there."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, process.communicate()
        paths = list(place.temporary.glob("muster-dryrun-*/whole/attempts/0001/processes/*.json"))
        found = [ledger.decode(path.read_bytes(), HostProcesses, str(path)) for path in paths]
        if len(found) == 2 and all(each.trainer for each in found):
            return found
        time.sleep(0.05)
    raise AssertionError("no trainers")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-recipe"], "no recipe 'no-such-recipe'"),
        (["quickstart", "mesh.fsdp=3"], "recipe quickstart: 1 problem"),
        (["quickstart", "--dir", "."], "--dir .: there is something in it"),
        (["quickstart", "--dir", "code.py"], "no folder code.py"),
    ],
)
def test_bad_input(place: Place, words: Sequence[str], message: str) -> None:
    code, out, err = place.run(*words)
    assert (code, out) == (ExitCode.BAD_INPUT, "")
    assert err.startswith(f"error: {message}")
    assert "Traceback" not in err
    assert place.written() == []
