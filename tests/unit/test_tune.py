"""`muster tune`: the experiment stays, what does not fit is never proposed, the winner is a recipe."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.cli import tune as verb
from launcher.compose import compose
from launcher.preflight.estimate import estimate
from launcher.preflight.report import Report
from launcher.preflight.report import estimated as report_of
from launcher.tune.search import MARGIN, Trial, compiled, confirmed, estimated, fastest, ranked
from launcher.tune.space import Candidate, candidates, changed, thriftier, with_other_flags
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


def test_what_is_the_same_however_written_is_no_candidate(found: list[Candidate]) -> None:
    assert found[0].recipe.mesh.fsdp == -1
    assert not [each for each in found if each.overrides == ("mesh.fsdp=16",)]
    named = ["train.remat_policy=named", "train.remat_offload=[value,layer_input,key,query]"]
    own, *others = candidates(compose(V5E, [*SMALL, *named]).recipe)
    same = set(own.recipe.train.remat_offload)
    assert not [
        each for each in others if set(each.recipe.train.remat_offload) == same and len(each.changes) == 1
    ]


def test_accumulation_of_the_recipe_is_kept_among_the_choices() -> None:
    recipe = compose(V5E, ["train.grad_accum_steps=16", "train.global_batch_size=4096"]).recipe
    parts = {each.recipe.train.grad_accum_steps for each in candidates(recipe)}
    assert parts == {1, 2, 4, 8, 16}


@pytest.mark.parametrize(
    ("min_slices", "across"), [("null", {(-1, 1), (-1, 2)}), ("1", {(-1, 1)})], ids=["fixed", "elastic"]
)
def test_an_open_axis_across_slices_stays_open(min_slices: str, across: set[tuple[int, int]]) -> None:
    recipe = compose("llama3-8b-v6e-16x16-x2", [f"multislice.min_slices={min_slices}"]).recipe
    found = {(each.recipe.multislice.data, each.recipe.multislice.fsdp) for each in candidates(recipe)}
    assert found == across


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
    assert not any(mesh.ici["tensor"] > 16 for mesh in meshes)
    slices = {(mesh.dcn["data"], mesh.dcn["fsdp"]) for mesh in meshes}
    assert slices == ({(2, 1), (1, 2)} if "multislice=two-slices" in overrides else {(1, 1)})


def test_a_pipeline_gets_more_microbatches() -> None:
    recipe = compose(V5P, ["mesh.stage=2", "mesh.fsdp=64"]).recipe
    found = list(candidates(recipe))
    assert {each.recipe.mesh.stage for each in found} == {2}
    assert {each.recipe.mesh.stage_microbatches for each in found} == {None, 4, 8, 16}
    slowest, fastest_ = (
        estimated(each).prediction
        for each in (found[0], max(found, key=lambda each: each.recipe.mesh.stage_microbatches or 0))
    )
    assert slowest is not None and fastest_ is not None
    assert fastest_.step_s < slowest.step_s


def test_ranks_are_by_speed_and_the_same_every_time(found: list[Candidate]) -> None:
    trials = ranked(found, margin=1 / MARGIN).trials
    steps = [trial.prediction.step_s for trial in trials if trial.prediction]
    assert steps == sorted(steps)
    assert [trial.candidate.overrides for trial in ranked(reversed(found), margin=1 / MARGIN).trials] == [
        trial.candidate.overrides for trial in trials
    ]
    assert steps[0] <= estimated(found[0]).prediction.step_s  # type: ignore[union-attr]


@pytest.mark.parametrize("margin", [1 / MARGIN, 1.0, MARGIN])
def test_what_cannot_fit_is_not_ranked(margin: float) -> None:
    large = compose(V5E, ["train.global_batch_size=1024"]).recipe
    all_of_them = list(candidates(large))
    ranking = ranked(all_of_them, margin=margin)
    assert ranking.num_candidates == len(all_of_them) > len(ranking.trials) > 0
    for trial in ranking.trials:
        assert trial.usable_hbm_bytes is not None
        assert trial.hbm_bytes == estimate(trial.candidate.recipe).hbm_bytes
        assert trial.hbm_bytes <= margin * trial.usable_hbm_bytes
        assert trial.hbm_bytes >= ranking.least.hbm_bytes
        assert fingerprint(trial.candidate.recipe) == fingerprint(large)
    # What was left out does not fit however thrifty.
    kept = {without_thrift(trial.candidate) for trial in ranking.trials}
    for candidate in all_of_them:
        others = [candidate, *thriftier(candidate)] if candidate.changes else [candidate]
        needs = [estimate(other.recipe) for other in others]
        is_known = margin > 1 or candidate.recipe.train.remat_policy in ("full", "named")
        fits = is_known and any(need.hbm_bytes <= margin * need.usable_hbm_bytes for need in needs)
        assert (without_thrift(candidate) in kept) == fits


def without_thrift(candidate: Candidate) -> tuple[str, ...]:
    thrift = ("mesh.zero1=", "train.vocab_chunks=")
    return tuple(word for word in candidate.overrides if not word.startswith(thrift))


def test_memory_is_saved_only_where_it_must_be() -> None:
    recipe = compose(V5E, ["train.global_batch_size=1024", "train.vocab_chunks=1"]).recipe
    trials = ranked(candidates(recipe), margin=1 / MARGIN).trials
    thrifty = [trial for trial in trials if without_thrift(trial.candidate) != trial.candidate.overrides]
    assert any("mesh.zero1=true" in trial.candidate.overrides for trial in thrifty)
    assert any(trial.candidate.recipe.train.vocab_chunks > 1 for trial in thrifty)
    for trial in thrifty:
        spending = {
            key: value
            for key, value in trial.candidate.changes.items()
            if key not in ("mesh.zero1", "train.vocab_chunks")
        }
        plain = changed(Candidate(changes={}, recipe=recipe), spending)
        assert plain is not None
        need = estimate(plain.recipe)
        assert need.hbm_bytes > need.usable_hbm_bytes / MARGIN


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
    trials = ranked(found, margin=MARGIN).trials
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


class Hungry(Compiler):
    """Finds that steps need so many times what their sizes say."""

    def __init__(self, times: float, policy: str = "") -> None:
        super().__init__()
        self.times, self.policy = times, policy

    def __call__(self, recipe: Recipe) -> Report:
        report = super().__call__(recipe)
        is_hungry = self.policy in ("", recipe.train.remat_policy)
        need = round((self.times if is_hungry else 1) * report.hbm_bytes)
        assert report.usable_hbm_bytes is not None
        return dataclasses.replace(report, hbm_bytes=need, fits=need <= report.usable_hbm_bytes)


def test_what_the_compiler_says_of_memory_is_learned_from() -> None:
    recipe = compose(V5E, ["train.global_batch_size=1024"]).recipe
    trials = ranked(candidates(recipe), margin=MARGIN).trials
    compiler = Hungry(1.1)
    tried = list(confirmed(trials, compiler, num_wanted=3))
    assert [trial.candidate.changes for trial in tried[:1]] == [{}]
    assert sum(trial.prediction is not None for trial in tried[1:]) == 3
    # Many that come first need more than there is by their sizes alone; hardly any was compiled.
    ahead = [trial for trial in trials if trial.hbm_bytes * 1.1 > (trial.usable_hbm_bytes or 0)]
    assert len(ahead) > 9
    assert sum(trial.prediction is None for trial in tried[1:]) <= 1


def test_what_is_learned_of_one_policy_is_not_taken_for_others() -> None:
    recipe = compose(V5E, ["train.sequence_length=1024"]).recipe
    trials = ranked(candidates(recipe), margin=MARGIN).trials
    assert trials[0].candidate.recipe.train.remat_policy == "none"
    tried = list(confirmed(trials, Hungry(3.4, policy="none"), num_wanted=3))
    policies = [trial.candidate.recipe.train.remat_policy for trial in tried]
    assert policies.count("none") == 1
    fitting = [trial for trial in tried if trial.prediction and trial.candidate.changes]
    others = [each for each in trials if each.candidate.recipe.train.remat_policy != "none"]
    fits = [each for each in others if each.hbm_bytes <= (each.usable_hbm_bytes or 0)]
    assert [trial.candidate for trial in fitting] == [each.candidate for each in fits[:3]]


def test_without_a_compiler_only_known_sizes_are_proposed(found: list[Candidate]) -> None:
    assert {"none", "minimal"} <= {each.recipe.train.remat_policy for each in found}
    for margin, policies in ((1 / MARGIN, {"full", "named"}), (MARGIN, {"full", "named", "none", "minimal"})):
        trials = ranked(found, margin=margin).trials
        assert {each.candidate.recipe.train.remat_policy for each in trials} == policies


def test_a_refusal_is_an_answer_and_a_limit_is_not(found: list[Candidate]) -> None:
    assert compiled(found[0], Compiler("flags")).problem == "the TPU compiler refused it"
    trials = ranked(found, margin=MARGIN).trials
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


def run(*words: str) -> int:
    return main(["tune", V5E, *SMALL, "--quick", *words])


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--limit", "3") == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].split() == " ".join(verb.HEADER).split()
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]
    assert lines[4].endswith("none: the recipe itself")
    assert len(lines) == 5
    assert "candidates" in captured.err
    assert run("--limit", "2", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["num_candidates"] > answer["num_may_fit"] > 2
    assert answer["own"]["overrides"] == []
    trials = answer["trials"]
    assert len(trials) == 2
    assert trials[0]["prediction"]["step_s"] <= trials[1]["prediction"]["step_s"]
    assert "timeline" not in trials[0]["prediction"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["tune", "quickstart"], 2, "is for CPU devices"),
        (["tune", V5E, "--quick", "--write", "../x"], 2, "not a name for a recipe"),
        (["tune", V5E, "--quick", "--write", V5P], 2, "has that name already"),
        (["tune", V5E, "--quick", "--write", V5E], 2, "has that name already"),
        (["tune", V5E, "--quick", "--write", "Fast.v2"], 2, "is not a run name"),
        (["tune", V5E, "--quick", "--confirm", "0"], 2, "--confirm"),
        (["tune", "no-such-recipe"], 2, "no recipe"),
        (
            ["tune", "llama3-405b-v5p-8x8x8-x2", "hardware.topology=2x2x1", "multislice=one-slice"],
            1,
            "TiB of 93.1 GiB on each device by its sizes: ",
        ),
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
    assert not list(tmp_path.iterdir())
    assert message in captured.err


def test_a_recipe_that_may_not_fit_is_no_proposal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", V5E, "train.global_batch_size=1024", "--quick", "--limit", "2"]) == 0
    *rows, own = capsys.readouterr().out.splitlines()[1:]
    assert own.endswith("none: the recipe itself, which may not fit")
    assert not own[0].isdigit()
    assert all(row[0].isdigit() and "the recipe itself" not in row for row in rows)
