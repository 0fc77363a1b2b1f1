"""``muster preflight`` with the real TPU compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.unit.trainer.test_aot import NEEDS_LIBTPU, TINY

TOO_LARGE = ("model.embed_dim=16384", "model.mlp_dim=131072", "--no-remedy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a recipe, and with kept answers from one test to the next."""
    folder = tmp_path_factory.mktemp("preflight")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return folder


def preflight(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return muster(folder, "preflight", "./tiny.yaml", *words)


def muster(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("muster")), *words],
        cwd=folder,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )


@NEEDS_LIBTPU
def test_a_step_that_fits_is_compiled_once(folder: Path) -> None:
    first = preflight(folder, "--json")
    assert first.returncode == 0, first.stderr
    report = json.loads(first.stdout)
    assert (report["fits"], report["is_estimate"], report["num_devices"]) == (True, False, 8)
    assert report["step"]["argument_bytes"] < report["hbm_bytes"] < report["usable_hbm_bytes"]
    predicted = report["prediction"]
    assert predicted["method"] == "compiled"
    assert predicted["outline_s"] < predicted["step_s"] < predicted["program_s"]
    assert {share["axes"] for share in predicted["waits"]} >= {"fsdp", "tensor"}
    # No compiler answers within a second.
    second = preflight(folder, "run.name=other", "--time-limit", "1")
    assert second.returncode == 0, second.stderr
    assert second.stdout.startswith("recipe     tiny\nhardware   v5e 2x4: 8 devices\nmemory     fits: ")


@NEEDS_LIBTPU
def test_the_winner_of_a_search_was_compiled_and_can_be_planned(folder: Path) -> None:
    words = ("tune", "tiny", "--recipes", ".", "--confirm", "1", "--json")
    first = muster(folder, *words, "--write", "faster")
    assert first.returncode == 0, first.stderr
    trials = json.loads(first.stdout)["trials"]
    assert sorted(bool(trial["overrides"]) for trial in trials) == [False, True]
    steps = [trial["prediction"]["step_s"] for trial in trials]
    assert steps == sorted(steps)
    assert all(trial["is_compiled"] and trial["hbm_bytes"] < trial["usable_hbm_bytes"] for trial in trials)
    assert muster(folder, "plan", "faster", "--recipes", ".").returncode == 0
    # All that was compiled is kept: no compiler answers within a second.
    second = muster(folder, *words, "--time-limit", "1")
    assert second.returncode == 0, second.stderr
    # The recipe itself was compiled by the test before, the winner here.
    assert first.stderr.count("read again") < second.stderr.count("read again") == 2
    assert json.loads(second.stdout) == json.loads(first.stdout)


@NEEDS_LIBTPU
def test_a_step_that_does_not_fit(folder: Path) -> None:
    done = preflight(folder, *TOO_LARGE)
    assert done.returncode == 1
    assert (
        "memory    does not fit: 31.9 GiB of 15.8 GiB of HBM on each device, 16.2 GiB too much" in done.stdout
    )
    assert "Traceback" not in done.stderr


@NEEDS_LIBTPU
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("hardware.compiler_flags.xla_of_nobody=1",), 2, "does not know the compiler flag --xla_of_nobody"),
        (("train.seed=5", "--time-limit", "2"), 75, "stopped after 2 s, its limit"),
        (("train.seed=5", "--memory-limit", "0.25"), 75, "its limit"),
    ],
    ids=["flag", "time", "memory"],
)
def test_no_answer_is_one_error(folder: Path, words: tuple[str, ...], code: int, message: str) -> None:
    done = preflight(folder, *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
