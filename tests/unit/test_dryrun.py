"""The stages of a rehearsal that need no run, the comparison of two runs, and the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.compose import compose
from launcher.dryrun.checks import Seen, data_stage, manifest_stage, plan_stage, skipped, staged
from launcher.dryrun.children import child, run_env
from launcher.dryrun.ends import differences, read_end, summarized
from launcher.dryrun.report import Outcome, Report, Stage, render
from recipes.contract import ExitCode
from recipes.errors import UserError
from tests.local.launching import REPO

STEP = 2


def write_run(path: Path, attempts: Mapping[int, list[dict[str, Any]]], arrays: Mapping[str, Any]) -> Path:
    """What a run of two steps leaves, as far as it is compared."""
    (path / "metrics").mkdir(parents=True)
    for attempt, records in attempts.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (path / "metrics" / f"{attempt:04d}.jsonl").write_text(lines)
    manifest = path / "checkpoints" / str(STEP) / "manifest"
    manifest.mkdir(parents=True)
    (manifest / "metadata").write_text(json.dumps({"leaves": arrays}))
    return path


FIRST = {"step": 1, "time_s": 10.0, "train/loss": 5.25, "perf/step_time_s": 0.5}
SECOND = {"step": 2, "time_s": 11.0, "train/loss": 5.125, "eval/loss": 5.5}
ARRAYS = {
    "params/a": {"shape": [2], "dtype": "float32", "fingerprint": 17},
    "step": {"shape": [], "dtype": "int32", "fingerprint": 2},
}


def whole(tmp_path: Path) -> Path:
    return write_run(tmp_path / "whole", {1: [FIRST, SECOND]}, ARRAYS)


@pytest.mark.parametrize(
    ("attempts", "arrays", "expected"),
    [
        ({1: [FIRST, SECOND]}, ARRAYS, []),
        ({1: [FIRST], 2: [FIRST | {"time_s": 99.0, "perf/step_time_s": 7.0}, SECOND]}, ARRAYS, []),
        (
            {1: [FIRST], 2: [FIRST | {"train/loss": 5.250001}, SECOND]},
            ARRAYS,
            ["train/loss of step 1: 5.25 and 5.250001 instead of 5.25"],
        ),
        ({1: [FIRST]}, ARRAYS, ["eval/loss of step 2: nothing instead of 5.5"]),
        (
            {1: [FIRST, SECOND, {"step": 3, "train/loss": 1.0}]},
            ARRAYS,
            ["train/loss of step 3: 1.0 instead of nothing"],
        ),
        (
            {1: [FIRST, SECOND]},
            ARRAYS | {"params/a": {"shape": [2], "dtype": "float32", "fingerprint": 18}},
            ["array params/a of the last checkpoint"],
        ),
        ({1: [FIRST, SECOND]}, {"step": ARRAYS["step"]}, ["array params/a of the last checkpoint"]),
    ],
)
def test_ends(tmp_path: Path, attempts: Any, arrays: Any, expected: list[str]) -> None:
    cut = write_run(tmp_path / "cut", attempts, arrays)
    found = differences(read_end(whole(tmp_path), STEP), read_end(cut, STEP))
    assert set(expected) <= set(found)
    assert bool(found) == bool(expected)


def test_a_line_that_was_cut_is_passed_over(tmp_path: Path) -> None:
    cut = write_run(tmp_path / "cut", {1: [FIRST], 2: [SECOND]}, ARRAYS)
    with (cut / "metrics" / "0001.jsonl").open("a") as stream:
        stream.write('{"step": 2, "train/lo')
    assert differences(read_end(whole(tmp_path), STEP), read_end(cut, STEP)) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"leaves": 3}'])
def test_a_damaged_end_is_an_error(tmp_path: Path, text: str) -> None:
    path = whole(tmp_path)
    (path / "checkpoints" / str(STEP) / "manifest" / "metadata").write_text(text)
    with pytest.raises(UserError, match="what the run left cannot be read"):
        read_end(path, STEP)


def test_many_differences_are_counted() -> None:
    assert summarized(["a", "b", "c", "d", "e"]) == "a; b; c; and 2 more"
    assert summarized(["a"]) == "a"


# Stages


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder with code to send."""
    (tmp_path / "code.py").write_text("x = 1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "overrides", "what", "placeholders"),
    [
        ("llama3-8b-v6e-16x16-x2", [], "JobSet", "run.root, target.image"),
        ("llama3-8b-v6e-16x16-x2", ["run.root=gs://my-bucket/runs"], "JobSet", "target.image"),
        (
            "llama3-8b-v5e-16x16",
            ["target=tpu-spot"],
            "queued resource",
            "run.root, target.project, target.zone",
        ),
        (
            "llama3-8b-v5e-16x16",
            ["target.controller=pathways"],
            "JobSet",
            "run.root, target.image, target.pathways_server_image, target.pathways_proxy_image",
        ),
    ],
)
def test_manifest(code: Path, name: str, overrides: list[str], what: str, placeholders: str) -> None:
    seen = manifest_stage(compose(name, overrides).recipe, code)
    assert seen.detail.startswith(f"{what} of ")
    assert seen.detail.endswith(f"a launch also needs {placeholders}, here with placeholders")


def test_no_manifest_without_code(tmp_path: Path) -> None:
    stage = staged("manifest", lambda: manifest_stage(compose("llama3-8b-v5e-16x16", []).recipe, tmp_path))
    assert stage.outcome == Outcome.FAILED
    assert stage.exit_code == ExitCode.BAD_INPUT
    assert "no files to send" in stage.detail


def test_local_runs_have_no_manifest(tmp_path: Path) -> None:
    assert manifest_stage(compose("quickstart", []).recipe, tmp_path).skipped


def test_plan() -> None:
    assert plan_stage(compose("llama3-8b-v6e-16x16-x2", []).recipe).detail == (
        "2 slices of v6e 16x16, each 64 hosts"
    )
    late = compose("quickstart", ["run.deadline=2020-01-01T00:00Z"]).recipe
    with pytest.raises(UserError, match="has passed"):
        plan_stage(late)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gs://bucket/tokens", "data.path=gs://bucket/tokens: data are read from local paths"),
        ("/no/such/file", "data.path=/no/such/file: does not exist"),
    ],
)
def test_data_that_are_not_here(path: str, message: str) -> None:
    recipe = compose("quickstart", ["data=token-file", f"data.path={path}"]).recipe
    with pytest.raises(UserError, match=message) as error:
        data_stage(recipe)
    assert "--synthetic-data" in error.value.hint


def test_data_that_are_here(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_bytes(b"\0\0")
    recipe = compose("quickstart", ["data=token-file", f"data.path={tmp_path}/tokens"]).recipe
    assert data_stage(recipe).detail == f"token_file: {tmp_path}/tokens"


# Children


def test_a_child_that_fails_tells_why(tmp_path: Path) -> None:
    env = {**run_env({}, tmp_path), "PYTHONPATH": str(REPO)}
    with child(["plan", "quickstart", "mesh.fsdp=3"], directory=tmp_path, name="asked", env=env) as asked:
        assert asked.wait() == ExitCode.BAD_INPUT
    error = asked.error()
    assert error.message.startswith("recipe quickstart: 1 problem\n  mesh.fsdp=3 (override):")
    assert "fix: " in error.message
    assert error.exit_code == ExitCode.BAD_INPUT
    assert asked.answer() == {}


def test_runs_write_below_their_directory_only(tmp_path: Path) -> None:
    env = run_env({"HOME": "/h", "XLA_FLAGS": "--xla_dump_to=/d", "TMPDIR": "/t"}, tmp_path)
    assert env["JAX_COMPILATION_CACHE_DIR"].endswith("/.cache/muster/xla")
    assert env["XLA_FLAGS"].endswith(" --xla_dump_to=/d"), "the user's flags come last, which win"
    assert Path(env["TMPDIR"]).is_relative_to(tmp_path)
    assert Path(env["XDG_CACHE_HOME"]).is_relative_to(tmp_path)


# The report


def test_report() -> None:
    failure = UserError("a\nb", hint="do this")

    def fail() -> Seen:
        raise failure

    stages = [
        staged("plan", lambda: Seen(detail="fine")),
        staged("manifest", lambda: Seen(detail="none", skipped=True)),
        staged("run", fail),
        skipped("compare", "no run"),
    ]
    report = Report(recipe="r", stages=stages, miniature="small", directory="/d")
    assert not report.ok
    assert report.exit_code == ExitCode.BAD_INPUT
    assert render(report).splitlines() == [
        "recipe     r",
        "miniature  small",
        "plan       ok         0.0 s  fine",
        "manifest   skipped           none",
        "run        failed     0.0 s  a b",
        "           to do: do this",
        "compare    skipped           no run",
        "directory  /d",
        "failed: run (skipped: manifest, compare)",
    ]
    as_json = report.to_json()
    assert (as_json["ok"], as_json["exit_code"]) == (False, 2)
    assert as_json["stages"][2]["detail"] == "a\nb"


def test_the_first_failure_gives_the_exit_code() -> None:
    def stage(code: int) -> Stage:
        return Stage(name="s", outcome=Outcome.FAILED, detail="", exit_code=code)

    report = Report(recipe="r", stages=[stage(75), stage(1)], miniature="", directory=None)
    assert report.exit_code == 75
    assert Report(recipe="r", stages=[], miniature="", directory=None).ok
