"""Published steps as recipes, and the benchmark that holds predictions against them."""

from __future__ import annotations

import dataclasses
import statistics

import pytest

from benchmarks.predicted import Row, baseline, fit, left_out, main, mfu, predicted_s, quantile, read_row
from benchmarks.published_steps import ROWS, not_expressed, published, recipe_of
from launcher.preflight.prediction import OUTLINE
from launcher.preflight.rates import error_bands, fitted_constants
from recipes.hardware import slice_shape
from recipes.parallelism import recipe_mesh


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [read_row(each, compiles=False) for each in published()]


def test_every_row_is_a_recipe_or_says_why_not(rows: list[Row]) -> None:
    assert len(rows) == 62
    assert len(ROWS.read_text(encoding="utf-8").splitlines()) - 1 == 77
    assert not_expressed("deepseek3-671b") == "multi-head latent attention"
    assert not_expressed("llama2-70b") == ""
    for row in rows:
        each, recipe = row.published, recipe_of(row.published)
        chips = slice_shape(recipe.hardware).num_chips * recipe.multislice.num_slices
        assert (chips, recipe.multislice.num_slices) == (each.num_chips, each.num_slices)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("64B, v5p 64x2", {"fsdp": 16, "tensor": 4, "data": 2}),
        ("mixtral-8x22b, v6e 256x1", {"fsdp": 64, "expert": 4}),
        ("llama3.1-405b, v6e 256x2", {"fsdp": 512}),
        ("llama3.1-70b 128k, tpu7x 256x1", {"fsdp": 64, "context": 8}),
    ],
)
def test_meshes_of_rows(name: str, expected: dict[str, int]) -> None:
    row = next(row for row in published() if row.name == name)
    degrees = recipe_mesh(recipe_of(row)).total
    assert {axis: degree for axis, degree in degrees.items() if degree > 1} == expected


def test_what_is_offloaded_and_kept() -> None:
    row = next(row for row in published() if row.name == "llama3.1-405b, tpu7x 256x1")
    train = recipe_of(row).train
    assert (train.remat_policy, train.remat_save) == ("named", ("key", "value"))
    assert train.remat_offload == ("layer_input", "mlp_out")


def test_constants_as_shipped_are_within_the_stated_error(rows: list[Row]) -> None:
    constants = fitted_constants()
    errors = sorted(abs(predicted_s(row, constants) / row.published.step_s - 1) for row in rows)
    # Rows that had a part in the fit are nearer than the band, which is of those that had none.
    assert quantile(errors, 0.5) < error_bands()[OUTLINE].median + 0.01
    assert quantile(errors, 0.9) < error_bands()[OUTLINE].p90 + 0.01


def test_weak_scaling_over_slices_follows_the_published_curves(rows: list[Row]) -> None:
    constants = fitted_constants()
    for model in ("16B", "32B"):
        same = [row for row in rows if row.published.model == model and row.published.chip == "v5e"]
        first = same[0]
        assert [row.published.num_chips for row in same] == [256, 512, 1024, 2048, 4096, 8192]
        for row in same[1:]:
            told = row.published.step_s / first.published.step_s
            assert predicted_s(row, constants) / predicted_s(first, constants) == pytest.approx(
                told, abs=0.025
            )


def taking(row: Row, step_s: float) -> Row:
    return dataclasses.replace(row, published=dataclasses.replace(row.published, step_s=step_s))


def test_a_fit_finds_the_constants_that_made_the_steps(rows: list[Row]) -> None:
    share = {**fitted_constants().matmul_share, "v5p": 0.7}
    truth = dataclasses.replace(fitted_constants(), matmul_share=share)
    dense = [row for row in rows if row.published.chip == "v5p" and row.published.num_slices == 1]
    made = [
        dataclasses.replace(row, published=dataclasses.replace(row.published, step_s=predicted_s(row, truth)))
        for row in dense
    ]
    found = fit(made, OUTLINE, fitted_constants())
    errors = [abs(predicted_s(row, found) / row.published.step_s - 1) for row in made]
    assert statistics.median(errors) < 0.02
    before = [abs(predicted_s(row, fitted_constants()) / row.published.step_s - 1) for row in made]
    assert statistics.median(before) > 0.05


def test_a_row_is_predicted_without_its_own_kind(rows: list[Row]) -> None:
    v4 = [row for row in rows if row.published.chip == "v4"]
    slow = [
        dataclasses.replace(
            row, published=dataclasses.replace(row.published, step_s=2 * row.published.step_s)
        )
        if row.published.model == "22B"
        else row
        for row in v4
    ]
    errors = left_out(slow, lambda row: row.published.model)
    # By the other model alone, twice the time is not foreseen.
    assert all(errors[row.published] < -0.3 for row in slow if row.published.model == "22B")


def test_the_baseline_is_the_median_of_other_models(rows: list[Row]) -> None:
    v5e = [row for row in rows if row.published.chip == "v5e"]
    errors = baseline(v5e)
    mine = next(row.published for row in v5e if row.published.model == "16B")
    others = [mfu(row.published) for row in v5e if row.published.model == "32B"]
    assert errors[mine] == pytest.approx(mfu(mine) / statistics.median(others) - 1)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.5), (0.9, 3.7), (1.0, 4.0)])
def test_quantiles(share: float, value: float) -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], share) == pytest.approx(value)


def test_unknown_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--nonsense"])
    assert "--nonsense" in capsys.readouterr().err
