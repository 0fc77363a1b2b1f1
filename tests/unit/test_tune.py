"""`muster tune`: the experiment stays, what does not fit is never proposed, the winner is a recipe."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.published_steps import Published, published, recipe_of
from launcher.cli import main
from launcher.cli import tune as verb
from launcher.compose import compose
from launcher.preflight.estimate import estimate
from launcher.preflight.remedies import changed_recipe
from launcher.preflight.report import Report
from launcher.preflight.report import estimated as report_of
from launcher.tune.search import MARGIN, Trial, compiled, confirmed, estimated, fastest, ranked
from launcher.tune.space import Candidate, candidates, with_other_flags
from recipes.check import check
from recipes.contract import ExitCode
from recipes.errors import UserError
from recipes.fingerprint import fingerprint
from recipes.load import keys
from recipes.parallelism import recipe_mesh
from recipes.schema import Recipe
from recipes.schema_key import Effect

V5E, V5P = "llama3-8b-v5e-16x16", "llama3-70b-v5p-4x4x8"
SMALL = ("hardware.topology=4x4", "train.global_batch_size=16", "train.sequence_length=2048")


@pytest.fixture(scope="module")
def found() -> list[Candidate]:
    return list(candidates(compose(V5E, SMALL).recipe))


def test_candidates_are_the_same_experiment_and_pass_its_rules(found: list[Candidate]) -> None:
    own = found[0].recipe
    assert found[0].changes == {}
    assert len(found) > 100
    for candidate in found:
        assert fingerprint(candidate.recipe) == fingerprint(own)
        assert not check(candidate.recipe)
        assert all(keys()[key].effect is Effect.SPEED for key in candidate.changes)
    assert len({candidate.overrides for candidate in found}) == len(found)


def test_overrides_make_the_candidate(found: list[Candidate]) -> None:
    for candidate in found[1:200:17]:
        assert compose(V5E, [*SMALL, *candidate.overrides]).recipe == candidate.recipe


@pytest.mark.parametrize(
    ("name", "overrides", "axes"),
    [
        (V5E, SMALL, {"data", "fsdp", "tensor"}),
        ("mixtral-8x7b-v6e-16x16", (), {"data", "fsdp", "tensor", "expert"}),
        (V5E, (*SMALL[:2], "train.sequence_length=32768"), {"data", "fsdp", "tensor", "context"}),
        (V5E, (SMALL[0], "multislice=two-slices", "train.global_batch_size=32"), {"data", "fsdp", "tensor"}),
    ],
)
def test_axes_that_the_model_has_a_use_for(name: str, overrides: Sequence[str], axes: set[str]) -> None:
    meshes = [recipe_mesh(each.recipe) for each in candidates(compose(name, overrides).recipe)]
    assert {axis for mesh in meshes for axis, degree in mesh.ici.items() if degree > 1} == axes
    slices = {(mesh.dcn["data"], mesh.dcn["fsdp"]) for mesh in meshes}
    assert slices == ({(2, 1), (1, 2)} if "multislice=two-slices" in overrides else {(1, 1)})


def test_a_pipeline_gets_more_microbatches() -> None:
    recipe = compose(V5P, ["mesh.stage=2", "mesh.fsdp=64"]).recipe
    found = list(candidates(recipe))
    assert {each.recipe.mesh.stage for each in found} == {2}
    assert {each.recipe.mesh.stage_microbatches for each in found} == {None, 2, 4, 8, 16}
    slowest, fastest_ = (
        estimated(each).prediction
        for each in (found[0], max(found, key=lambda each: each.recipe.mesh.stage_microbatches or 0))
    )
    assert slowest is not None and fastest_ is not None
    assert fastest_.step_s < slowest.step_s


def test_ranks_are_by_speed_and_the_same_every_time(found: list[Candidate]) -> None:
    trials = ranked(found, margin=1 / MARGIN)
    steps = [trial.prediction.step_s for trial in trials if trial.prediction]
    assert steps == sorted(steps)
    assert [trial.candidate.overrides for trial in ranked(reversed(found), margin=1 / MARGIN)] == [
        trial.candidate.overrides for trial in trials
    ]
    assert steps[0] <= estimated(found[0]).prediction.step_s  # type: ignore[union-attr]


@pytest.mark.parametrize("margin", [1 / MARGIN, 1.0, MARGIN])
def test_what_cannot_fit_is_not_ranked(margin: float) -> None:
    large = compose(V5E, ["train.global_batch_size=1024"]).recipe
    all_of_them = list(candidates(large))
    kept = {trial.candidate.overrides for trial in ranked(all_of_them, margin=margin)}
    assert kept
    for candidate in all_of_them:
        memory = estimate(candidate.recipe)
        assert (candidate.overrides in kept) == (memory.hbm_bytes <= margin * memory.usable_hbm_bytes)


class Compiler:
    """Answers from sizes, and counts; refuses what has one of ``refused`` among its overrides."""

    def __init__(self, refused: str = "", limit: int = 1000) -> None:
        self.refused, self.limit = refused, limit
        self.asked: list[Recipe] = []

    def __call__(self, recipe: Recipe) -> Report:
        if len(self.asked) == self.limit:
            raise UserError("the TPU compiler was stopped", exit_code=ExitCode.INFRASTRUCTURE)
        self.asked.append(recipe)
        if self.refused == "flags":
            raise UserError("the TPU compiler refused it", exit_code=ExitCode.EXPERIMENT_FAILED)
        report = report_of(recipe)
        fits = not self.refused or recipe.mesh.tensor != int(self.refused)
        return dataclasses.replace(report, fits=fits, is_estimate=False)


def test_the_best_are_compiled_until_enough_fit(found: list[Candidate]) -> None:
    trials = ranked(found, margin=MARGIN)
    best = next(trial for trial in trials if trial.candidate.changes)
    refused = str(best.candidate.recipe.mesh.tensor)
    tried = list(confirmed(trials, Compiler(refused), num_wanted=2))
    assert tried[0].candidate.changes == {}
    fitting = [trial for trial in tried[1:] if trial.prediction]
    assert all(trial.is_compiled for trial in tried)
    assert all(str(trial.candidate.recipe.mesh.tensor) != refused for trial in fitting)
    assert not (tried[1].prediction or len(fitting) > 2)
    assert {trial.problem for trial in tried if not trial.prediction} == {"does not fit"}
    assert all(trial.prediction for trial in fastest(tried))


def test_a_refusal_is_an_answer_and_a_limit_is_not(found: list[Candidate]) -> None:
    assert compiled(found[0], Compiler("flags")).problem == "the TPU compiler refused it"
    trials = ranked(found, margin=MARGIN)
    seen: list[Trial] = []
    with pytest.raises(UserError, match="was stopped"):
        seen.extend(confirmed(trials, Compiler(limit=2), num_wanted=5))


def test_tuned_flags_are_left_out_one_by_one() -> None:
    recipe = compose("llama3-8b-v6e-16x16-x2", []).recipe
    tried = list(with_other_flags(Candidate(changes={"mesh.tensor": 2}, recipe=recipe)))
    assert "hardware.compiler_flags.xla_tpu_scoped_vmem_limit_kib=default" in {
        word for candidate in tried for word in candidate.overrides
    }
    assert all("mesh.tensor=2" in candidate.overrides for candidate in tried)
    assert not list(with_other_flags(Candidate(changes={}, recipe=untuned())))


def untuned() -> Recipe:
    return compose(V5E, ["hardware.tuned_flags=false"]).recipe


HIDDEN = [
    "64B, v5p 64x1",
    "128B, v5p 256x1",
    "llama3.1-70b, v6e 32x1",
    "llama3.1-405b, tpu7x 256x1",
    "mixtral-8x22b, v6e 256x1",
]
"""Published configurations, found again from plain fsdp."""


@pytest.mark.parametrize("name", HIDDEN)
def test_a_published_mesh_is_found_or_a_faster_one(name: str) -> None:
    row = next(row for row in published() if row.name == name)
    told = recipe_of(row)
    start = without_mesh(row)
    assert start.mesh.tensor == start.mesh.expert == 1
    best = ranked(candidates(start), margin=MARGIN)[0]
    told_s = estimated(Candidate(changes={}, recipe=told)).prediction
    assert best.prediction is not None and told_s is not None
    assert best.prediction.step_s <= told_s.step_s * (1 + 1e-6)


def without_mesh(row: Published) -> Recipe:
    plain = {f"mesh.{axis}": 1 for axis in ("data", "context", "expert", "tensor")}
    found = changed_recipe(recipe_of(row), {**plain, "mesh.fsdp": -1})
    assert found is not None
    return found


def run(*words: str) -> int:
    return main(["tune", V5E, *SMALL, "--quick", *words])


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--limit", "3") == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].split() == " ".join(verb.HEADER).split()
    assert len(lines) == 4
    assert "candidates" in captured.err
    assert run("--limit", "2", "--json") == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert len(trials) == 2
    assert trials[0]["prediction"]["step_s"] <= trials[1]["prediction"]["step_s"]
    assert "timeline" not in trials[0]["prediction"]


def test_the_winner_is_written_and_can_be_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("--json", "--write", "faster") == 0
    best = json.loads(capsys.readouterr().out)["trials"][0]
    assert [path.name for path in (tmp_path / "recipes").iterdir()] == ["faster.yaml"]
    written = compose("faster", []).recipe
    assert dataclasses.replace(written, name=V5E) == compose(V5E, [*SMALL, *best["overrides"]]).recipe
    assert main(["plan", "faster"]) == 0
    capsys.readouterr()
    assert run("--write", "faster") == 2
    assert "there already" in capsys.readouterr().err
    assert run("--write", "faster", "--force") == 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["tune", "quickstart"], 2, "is for CPU devices"),
        (["tune", V5E, "--quick", "--write", "../x"], 2, "not a name for a recipe"),
        (["tune", V5E, "--quick", "--write", V5P], 2, "has that name already"),
        (["tune", V5E, "--quick", "--write", V5E], 2, "has that name already"),
        (["tune", V5E, "--quick", "--confirm", "0"], 2, "--confirm"),
        (["tune", "llama3-405b-v5p-8x8x8-x2", "hardware.topology=2x2x1", "multislice=one-slice"], 1, "fits"),
    ],
)
def test_bad_input_is_one_error(
    words: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words, *(["--quick"] if "--quick" not in words else [])]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("error:") == 1
    assert message in captured.err
