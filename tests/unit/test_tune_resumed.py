"""An interrupted `muster tune` goes on where it was: what was compiled is kept, and said to be.

The compiler is a stand-in here, a real process all the same; tests/unit/trainer/test_preflight_real.py has
the real one.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.cli import tune as verb
from launcher.compose import compose
from launcher.preflight.compiled import analyze
from launcher.preflight.compiler import Limits, compile_step
from launcher.preflight.report import Report, fitting
from launcher.tune.search import MARGIN, Ranking, Trial, ranked
from launcher.tune.space import candidates
from recipes.schema import Recipe
from tests.unit.hlo_support import FOLDER
from tests.unit.test_hlo_tables import FACTS

SMALL = ("hardware.topology=4x4", "train.global_batch_size=16", "train.sequence_length=2048")


class Compiler:
    """Leaves the same answer for every recipe; Ctrl-C comes in place of the call number ``last``."""

    def __init__(self, folder: Path, *, last: int, fresh: bool = False) -> None:
        self.done, self.last, self.fresh, self.calls = folder / "done", last, fresh, 0
        self.done.mkdir(exist_ok=True)
        (self.done / "compiled.json").write_text(json.dumps(FACTS))
        shutil.copy(FOLDER / "tensor_sum.txt", self.done / "compiled.txt")

    def __call__(self, recipe: Recipe) -> Report:
        compiled = compile_step(recipe, limits=Limits(), command=self._command, fresh=self.fresh)
        return fitting(recipe, compiled, analyze(compiled))

    def _command(self, recipe: Path, out: Path) -> Sequence[str]:
        self.calls += 1
        if self.calls == self.last:
            raise KeyboardInterrupt
        return (sys.executable, "-c", f"import shutil; shutil.copytree({str(self.done)!r}, {str(out)!r})")


@pytest.fixture
def ranking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranking:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return ranked(candidates(compose("llama3-8b-v5e-16x16", SMALL).recipe), margin=MARGIN)


def tuned(ranking: Ranking, compiler: Compiler, *, flags: bool = False) -> Sequence[Trial]:
    return verb.compile_best(ranking, compiler, num_wanted=3, tries_flags=flags, fresh=compiler.fresh)


def test_an_interrupted_search_goes_on_where_it_was(
    ranking: Ranking, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        tuned(ranking, Compiler(tmp_path, last=3))
    assert "read again" not in capsys.readouterr().err
    kept = list((tmp_path / "cache/muster/preflight").iterdir())
    assert len(kept) == 2
    resumed = Compiler(tmp_path, last=100)
    trials = tuned(ranking, resumed)
    assert (len(trials), resumed.calls) == (4, 2)
    assert capsys.readouterr().err.count("compiled before, and read again") == 2
    again = Compiler(tmp_path, last=1)
    assert (tuned(ranking, again), again.calls) == (trials, 0)


def test_fresh_starts_anew(ranking: Ranking, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned(ranking, Compiler(tmp_path, last=100))
    anew = Compiler(tmp_path, last=100, fresh=True)
    tuned(ranking, anew)
    assert anew.calls == 4
    assert "read again" not in capsys.readouterr().err


def test_flags_of_the_winner_are_tried(ranking: Ranking, tmp_path: Path) -> None:
    *plain, last = tuned(ranking, Compiler(tmp_path, last=100), flags=True)
    assert len(plain) >= 4
    winner = min(plain[:4], key=lambda trial: trial.prediction.step_s if trial.prediction else 0)
    (dropped,) = set(last.candidate.changes) - set(winner.candidate.changes)
    assert dropped == "hardware.compiler_flags"
