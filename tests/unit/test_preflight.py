"""The compiler in a process of its own: its limits, its ends, its kept answers; and what is said of them.

The compiler is a stand-in here, a real process all the same; tests/unit/trainer/test_aot.py has the real one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli import main
from launcher.compose import compose
from launcher.preflight.compiled import analyze, read_compiled
from launcher.preflight.compiler import (
    CompileError,
    Limits,
    Usage,
    compile_step,
    content_key,
    resident_bytes,
)
from launcher.preflight.remedies import remedies
from launcher.preflight.report import fitting, not_fitting, render
from recipes.check import check
from recipes.contract import COMPILE_PROBLEM_FILE, CompileProblem, ExitCode
from recipes.errors import UserError
from recipes.fingerprint import fingerprint
from recipes.schema import Recipe
from tests.unit.hlo_support import FOLDER
from tests.unit.test_hlo_tables import FACTS

NAME = "llama3-8b-v5e-16x16"
MIB = 2**20
TOO_LARGE = CompileProblem(
    exit_code=1,
    message="the train step does not fit",
    hint="use more shards",
    needed_bytes=20 * 2**30,
    usable_bytes=63 * 2**28,
)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return compose(NAME, []).recipe


class Compiler:
    """Stands for the compiler: runs a line of Python with ``out`` in scope, and counts its calls."""

    def __init__(self, line: str) -> None:
        self.line, self.calls = line, 0

    def __call__(self, recipe: Path, out: Path) -> Sequence[str]:
        self.calls += 1
        assert recipe.read_text()
        head = f"import os, pathlib, sys, time; out = pathlib.Path({str(out)!r}); out.mkdir()"
        return (sys.executable, "-c", f"{head}; {self.line}")


def succeeding(tmp_path: Path) -> Compiler:
    done = tmp_path / "done"
    done.mkdir()
    (done / "compiled.json").write_text(json.dumps(FACTS))
    shutil.copy(FOLDER / "tensor_sum.txt", done / "compiled.txt")
    return Compiler(f"import shutil; shutil.copytree({str(done)!r}, out, dirs_exist_ok=True)")


def refusing(problem: CompileProblem) -> Compiler:
    text = json.dumps(dataclasses.asdict(problem))
    return Compiler(f"(out / {COMPILE_PROBLEM_FILE!r}).write_text({text!r}); sys.exit({problem.exit_code})")


def left_behind(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache/muster/preflight").iterdir()]


def test_a_second_call_reads_the_first_answer(recipe: Recipe, tmp_path: Path) -> None:
    compiler = succeeding(tmp_path)
    first = compile_step(recipe, limits=Limits(), command=compiler)
    renamed = dataclasses.replace(recipe, name="other")
    assert compile_step(renamed, limits=Limits(), command=compiler) == first
    assert compiler.calls == 1
    compile_step(recipe, limits=Limits(), command=compiler, fresh=True)
    assert compiler.calls == 2
    assert left_behind(tmp_path) == [content_key(recipe)]


def test_an_answer_that_is_not_whole_is_made_anew(recipe: Recipe, tmp_path: Path) -> None:
    compiler = succeeding(tmp_path)
    compile_step(recipe, limits=Limits(), command=compiler)
    (tmp_path / "cache/muster/preflight" / content_key(recipe) / "compiled.json").write_text("{")
    compile_step(recipe, limits=Limits(), command=compiler)
    assert compiler.calls == 2


def test_old_answers_and_abandoned_work_are_forgotten(recipe: Recipe, tmp_path: Path) -> None:
    folder = tmp_path / "cache/muster/preflight"
    for name, age_s in (
        *((f"{number:03}", number) for number in range(120)),
        ("compiling-a", 1e5),
        ("compiling-b", 60),
    ):
        (folder / name).mkdir(parents=True)
        os.utime(folder / name, (time.time() - age_s - 60,) * 2)
    compile_step(recipe, limits=Limits(), command=succeeding(tmp_path))
    left = set(left_behind(tmp_path))
    assert left == {content_key(recipe), "compiling-b", *(f"{number:03}" for number in range(99))}


def test_a_refusal_is_kept_too(recipe: Recipe) -> None:
    compiler = refusing(TOO_LARGE)
    for _ in range(2):
        with pytest.raises(CompileError) as refused:
            compile_step(recipe, limits=Limits(), command=compiler)
        assert refused.value.problem == TOO_LARGE
    assert compiler.calls == 1


def test_a_missing_compiler_may_be_there_next_time(recipe: Recipe, tmp_path: Path) -> None:
    compiler = refusing(dataclasses.replace(TOO_LARGE, exit_code=2, needed_bytes=None, usable_bytes=None))
    for _ in range(2):
        with pytest.raises(CompileError) as refused:
            compile_step(recipe, limits=Limits(), command=compiler)
        assert refused.value.exit_code == ExitCode.BAD_INPUT
    assert compiler.calls == 2
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("line", "limits", "message", "hint"),
    [
        ("time.sleep(60)", Limits(time_s=0.5), "stopped after 1 s, its limit", "--time-limit"),
        (
            "held = bytearray(200 * 2**20); time.sleep(60)",
            Limits(memory_bytes=100 * MIB),
            "of memory, its limit",
            "--memory-limit",
        ),
        ("os.kill(os.getpid(), 9)", Limits(), "was killed by signal 9 without an answer", "kernel kills"),
        (
            "print('not supported on this chip: --xla_foo', flush=True); os.abort()",
            Limits(),
            "not supported on this chip: --xla_foo",
            "tuned_flags=false",
        ),
        ("sys.exit(1)", Limits(), "ended with 1 without an answer", "tuned_flags=false"),
    ],
    ids=["time", "memory", "killed", "aborted", "silent"],
)
def test_a_compiler_without_an_answer(
    recipe: Recipe, tmp_path: Path, line: str, limits: Limits, message: str, hint: str
) -> None:
    seen: list[Usage] = []
    with pytest.raises(UserError) as ended:
        compile_step(recipe, limits=limits, command=Compiler(line), watch=seen.append)
    assert message in ended.value.message
    assert hint in ended.value.hint
    assert ended.value.exit_code == ExitCode.INFRASTRUCTURE
    assert left_behind(tmp_path) == []
    assert all(usage.memory_bytes > 0 for usage in seen)


def test_an_unknown_flag_is_named(recipe: Recipe) -> None:
    compiler = Compiler("print(\"ERROR: Unknown command line flag 'xla_foo'\", flush=True); sys.exit(1)")
    with pytest.raises(UserError, match="does not know the compiler flag --xla_foo") as error:
        compile_step(recipe, limits=Limits(), command=compiler)
    assert error.value.exit_code == ExitCode.BAD_INPUT
    assert "hardware.compiler_flags.xla_foo" in error.value.hint


def test_flags_of_the_user_do_not_reach_the_compiler(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_mine")
    monkeypatch.setenv("XLA_FLAGS", "--xla_mine")
    seen = tmp_path / "seen"
    line = f"pathlib.Path({str(seen)!r}).write_text(str(os.environ)); sys.exit(1)"
    with pytest.raises(UserError):
        compile_step(recipe, limits=Limits(), command=Compiler(line))
    assert "xla_mine" not in seen.read_text()
    assert "LIBTPU_INIT_ARGS" in seen.read_text()


def test_a_cache_that_cannot_be_written_is_said(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match="cannot keep") as error:
        compile_step(recipe, limits=Limits(), command=Compiler("pass"))
    assert "XDG_CACHE_HOME" in error.value.hint


@pytest.mark.parametrize(
    ("overrides", "is_same"),
    [
        (["run.name=other"], True),
        (["train.log_interval_steps=7"], True),
        (["checkpoint.keep=9"], True),
        (["target=tpu"], True),
        (["train.vocab_chunks=2"], False),
        (["train.global_batch_size=512"], False),
        (["hardware.tuned_flags=false"], False),
        (["hardware.topology=8x16"], False),
        (["mesh.tensor=2"], False),
    ],
)
def test_what_the_answer_depends_on(overrides: list[str], is_same: bool) -> None:
    assert (content_key(compose(NAME, overrides).recipe) == content_key(compose(NAME, []).recipe)) == is_same


def test_memory_of_a_process_is_that_of_the_system() -> None:
    assert resident_bytes(os.getpid()) > 10 * MIB
    assert resident_bytes(2**22 + 1) == 0


FITS = """\
recipe     llama3-8b-v5e-16x16
hardware   v5e 16x16: 256 devices
memory     fits: 11.0 GiB of 15.8 GiB of HBM on each device
           5.0 GiB of it arguments: weights, optimizer state, batch
"""
DOES_NOT_FIT = """\
recipe    llama3-8b-v5e-16x16
hardware  v5e 16x16: 256 devices
memory    does not fit: 20.0 GiB of 15.8 GiB of HBM on each device, 4.2 GiB too much
to fit    use more shards"""


def test_reports_in_words(recipe: Recipe, tmp_path: Path) -> None:
    compiled = compile_step(recipe, limits=Limits(), command=succeeding(tmp_path))
    text = render(fitting(recipe, compiled, analyze(compiled)))
    assert text.startswith(FITS)
    assert "\nlargest       1.0 MiB  bf16[1024,512]  " in text
    assert "\nexchanged  tensor all-reduce: 1 x, " in text
    assert text.endswith("\ncompiled   in 42 s with 1.0 GiB by libtpu 0.0.50")
    assert render(not_fitting(recipe, TOO_LARGE)) == DOES_NOT_FIT


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [],
            [
                ["train.vocab_chunks"],
                ["train.remat_offload", "train.remat_policy", "train.vocab_chunks"],
            ],
        ),
        (
            ["train.vocab_chunks=32", "train.remat_policy=none", "mesh=data", "mesh.data=4", "mesh.fsdp=64"],
            [
                ["mesh.zero1"],
                ["mesh.zero1", "train.remat_policy"],
                ["mesh.zero1", "train.remat_offload", "train.remat_policy"],
            ],
        ),
        (
            ["train.global_batch_size=1024", "train.vocab_chunks=32", "train.remat_policy=named"],
            [["train.grad_accum_steps"], ["train.grad_accum_steps"]],
        ),
        (
            ["train.vocab_chunks=32", "train.remat_policy=named", "train.remat_save=[query]"],
            [["train.remat_offload", "train.remat_save"]],
        ),
    ],
    ids=["usual", "replicas", "large batch", "saved"],
)
def test_remedies_keep_the_experiment_and_add_up(overrides: list[str], expected: list[list[str]]) -> None:
    recipe = compose(NAME, overrides).recipe
    found = list(remedies(recipe))
    assert [sorted(changes) for changes, _ in found] == expected
    for _, changed in found:
        assert fingerprint(changed) == fingerprint(recipe)
        assert check(changed) == []


class PickyCompiler(Compiler):
    """Takes a step only from so many parts of the vocabulary on."""

    def __init__(self, tmp_path: Path, chunks: int) -> None:
        super().__init__("")
        self.chunks = chunks
        self.good, self.bad = succeeding(tmp_path).line, refusing(TOO_LARGE).line

    def __call__(self, recipe: Path, out: Path) -> Sequence[str]:
        fits = yaml.safe_load(recipe.read_text())["train"]["vocab_chunks"] >= self.chunks
        self.line = self.good if fits else self.bad
        return super().__call__(recipe, out)


@pytest.mark.parametrize(("chunks", "num_compiled"), [(32, 2), (1000, 3)])
def test_the_cheapest_change_that_fits_is_compiled(
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    chunks: int,
    num_compiled: int,
) -> None:
    compiler = PickyCompiler(tmp_path, chunks)
    defaults = compile_step.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "command", compiler)
    code, out, err = run(capsys)
    assert (code, compiler.calls) == (1, num_compiled)
    assert "it does not fit; trying train.vocab_chunks=32\n" in err
    last = out.splitlines()[-1]
    if chunks == 32:
        assert last == "to fit    train.vocab_chunks=32: 11.0 GiB"
    else:
        assert last == "to fit    use more shards"
        assert "train.remat_policy=named train.remat_offload=[layer_input]" in err


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["preflight", NAME, *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_verb_reads_kept_answers(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_step(recipe, limits=Limits(), command=succeeding(tmp_path))
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert out.startswith(FITS)
    code, out, _ = run(capsys, "--json")
    found: dict[str, Any] = json.loads(out)
    assert (code, found["fits"], found["hbm_bytes"]) == (0, True, 11 * 2**30)
    assert found["step"]["largest_buffers"][0]["size_bytes"] > 0


def test_the_verb_exits_with_1_where_it_does_not_fit(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CompileError):
        compile_step(recipe, limits=Limits(), command=refusing(TOO_LARGE))
    assert run(capsys, "--no-remedy") == (1, DOES_NOT_FIT + "\n", "")
    code, out, _ = run(capsys, "--no-remedy", "--json")
    assert (code, json.loads(out)["fits"], json.loads(out)["step"]) == (1, False, None)


def test_the_compiled_step_is_read_from_the_kept_folder(recipe: Recipe, tmp_path: Path) -> None:
    compiled = compile_step(recipe, limits=Limits(), command=succeeding(tmp_path))
    assert read_compiled(tmp_path / "cache/muster/preflight" / content_key(recipe)) == compiled
