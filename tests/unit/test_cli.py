"""The command line as its user meets it: output, errors, exit codes, what is imported, completion."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
import yaml

from launcher import cli
from launcher.cli import app, output
from launcher.cli.interrupts import INTERRUPTED
from launcher.cli.show import yaml_scalar
from launcher.compose import compose
from launcher.recipe_yaml import plain_scalar
from recipes.errors import UserError
from recipes.load import flatten, keys, recipe_to_dict

HEAVY = ("jax", "hydra", "omegaconf", "kubernetes", "google.cloud", "rich", "numpy")
MAIN = "import sys; from launcher.cli import main; code = main(); "


def muster(*words: str, after: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the real command; ``after`` is Python to run at its end."""
    repo = str(Path(cli.__file__).parents[2])
    code = f"{MAIN}{after}\nsys.exit(code)"
    environment = {**os.environ, "PYTHONPATH": repo, **env}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *words], env=environment, capture_output=True, text=True
    )


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The same in this process."""
    code = cli.main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


LOADED = f"print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"


@pytest.mark.parametrize(
    "words",
    [["--help"], ["recipes"], ["recipes", "--group", "model"], ["show", "--keys"], ["completion", "bash"]],
)
def test_fast_verbs_import_nothing_heavy(words: Sequence[str]) -> None:
    done = muster(*words, after=LOADED)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert done.stdout


def test_plan_imports_no_jax_no_cloud_client_and_no_rich() -> None:
    done = muster("plan", "llama3-405b-v5p-8x8x8-x2", after=LOADED)
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == "['hydra', 'omegaconf']"
    assert "405,853,388,800" in done.stdout


@pytest.mark.parametrize(
    ("words", "budget_s"),
    [
        (["--help"], 0.15),
        (["plan", "llama3-405b-v5p-8x8x8-x2"], 0.7),
        (["plan", "quickstart", "mesh.fsdp=7"], 1.0),
    ],
)
def test_cpu_time(words: Sequence[str], budget_s: float) -> None:
    timing = "import time; print(time.process_time(), file=sys.stderr)"
    cheapest = min(float(muster(*words, after=timing).stderr.splitlines()[-1]) for _ in range(4))
    # Twice the budget: other tests share the cores and their caches; a heavy import costs more than that.
    assert cheapest < 2 * budget_s


@pytest.mark.parametrize("verb", app.VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, verb, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: muster {verb} ")


def test_recipes_lists_names_and_comments(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "recipes")
    assert (code, err) == (0, "")
    assert "Llama 3 8B on 256 v5e chips" in out
    code, out, _ = run(capsys, "recipes", "--group", "mesh", "--json")
    assert {"fsdp", "data"} <= {entry["name"] for entry in json.loads(out)}


def test_show_prints_a_recipe_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "show", "quickstart", "train.seed=3")
    assert code == 0
    assert "  seed: 3 " in out and "# override" in out and "# recipes/quickstart.yaml:" in out
    recipe = compose("quickstart", ["train.seed=3"]).recipe
    (tmp_path / "quickstart.yaml").write_text(out)
    assert compose(str(tmp_path / "quickstart.yaml"), []).recipe == recipe
    expected = {path: value for path, value in flatten(recipe_to_dict(recipe)).items() if path != "name"}
    assert flatten(yaml.safe_load(out)) == expected


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "quickstart", "--json", "model.dropout_rate=0.5")
    shown = json.loads(out)
    assert code == 0
    assert shown["recipe"]["model"]["dropout_rate"] == 0.5
    assert shown["origins"]["model.dropout_rate"] == "override"


def test_show_explains_one_key(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "quickstart", "--key", "optimizer.learning_rate")
    assert code == 0
    for text in ("0.003", "adamw-small.yaml:3", "peak learning rate", "above 0", "changes the experiment"):
        assert text in out
    code, out, _ = run(capsys, "show", "quickstart", "--json", "--key", "mesh.fsdp")
    assert json.loads(out)["effect"] == "speed"
    code, _, err = run(capsys, "show", "quickstart", "--key", "optimizer.learning_rat")
    assert code == 2
    assert "did you mean optimizer.learning_rate?" in err


def test_show_documents_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "--keys")
    assert code == 0
    assert set(keys()) <= set(out.splitlines())
    assert [entry["key"] for entry in json.loads(run(capsys, "show", "--keys", "--json")[1])] == list(keys())


def test_plan_as_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "plan", "llama3-8b-v6e-16x16-x2")
    assert (code, err) == (0, "")
    assert "8,030,261,248" in out
    before = run(capsys, "plan", "--json", "quickstart", "train.seed=1")
    after = run(capsys, "plan", "quickstart", "train.seed=1", "--json")
    assert before == after
    assert json.loads(after[1])


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["plna"], "no verb 'plna'", "did you mean `muster plan`?"),
        (["plan"], "missing argument 'RECIPE'", "`muster plan --help`"),
        (["plan", "quickstart", "--jsn"], "no such option '--jsn'", "`muster plan --help`"),
        (["plan", "quickstart", "--js"], "no such option '--js'", "`muster plan --help`"),
        (["plan", "--recip", ".", "quickstart"], "no such option '--recip'", "`muster plan --help`"),
        (["plan", "quickstart", "-x=3"], "no such option", "`muster plan --help`"),
        (["--verison"], "no such option '--verison'", "`muster --help`"),
        (["plan", "quickstart", "--", "--json"], "--json", ""),
        (["plan", "quikstart"], "no recipe 'quikstart'", "did you mean quickstart?"),
        (["recipes", "--group", "modle"], "'modle' is not one of", "`muster recipes --help`"),
        (["recipes", "--recipes", "/nowhere"], "no folder /nowhere", "give a folder that holds recipes"),
        (["show", "quickstart", "--keys"], "--keys takes no recipe", "`muster show --help`"),
        (["completion", "tcsh"], "'tcsh' is not one of", ""),
        (["show", "quickstart", "train.sed=1"], "train.sed=1", ""),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: Sequence[str], error: str, hint: str) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("error:") == 1
    assert error in err
    assert not hint or f"hint: {hint}" in err


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "quickstart", "+step=5"],
        ["plan", "quickstart", "model._target_=os.system"],
        ["launch", "quickstart", "mesh.fsdp=7"],
        ["show", "quickstart", "train.num_steps=[1"],
        ["plan", "llama3-8b-v5e-16x16", "hardware.topology=3x5"],
        ["plan", "quickstart", "data.path=\x1b[31mred\udcff"],
    ],
)
def test_refusals_of_the_real_command(words: Sequence[str], tmp_path: Path) -> None:
    done = muster(*words, MUSTER_RECIPES=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr and "\x1b" not in done.stderr


def test_output_has_no_colour_when_not_a_terminal_or_unwanted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert output.use_color(Terminal())
    assert not output.use_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not output.use_color(Terminal())


HOSTILE = "a\x1b[31m\u202eb\r\nc"
HARMLESS = "a\\x1b[31m\\u202eb\\r\nc"


def test_control_characters_never_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output.data(HOSTILE)
    output.say(HOSTILE)
    output.note(HOSTILE)
    output.user_error(UserError(HOSTILE, hint=HOSTILE))
    captured = capsys.readouterr()
    assert captured.out == f"{HARMLESS}\n"
    assert captured.err == f"{HARMLESS}\nnote: {HARMLESS}\nerror: {HARMLESS}\nhint: {HARMLESS}\n"


def test_a_table_is_one_harmless_line_a_row() -> None:
    rows = [("run", "two  spaces"), (HOSTILE, ""), ("", "a\tb")]
    assert output.table(rows, header=("NAME", "WHAT"), indent=1).splitlines() == [
        " NAME                   WHAT",
        " run                    two  spaces",
        " a\\x1b[31m\\u202eb\\r\\nc  -",
        " -                      a\\tb",
    ]


def test_json_is_strict_and_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"loss": float("nan"), "all": (float("inf"), 1.5, {"x": -float("inf")}), "name": "\u202e\x1b"}
    output.data_json(values)
    out = capsys.readouterr().out
    assert json.loads(out, parse_constant=lambda name: pytest.fail(name)) == {
        "loss": None,
        "all": [None, 1.5, {"x": None}],
        "name": "\u202e\x1b",
    }
    assert out.isascii() and "\x1b" not in out
    output.data_json(values, indent=None)
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(
    "value", [None, True, 3, 1e-5, 3e10, 0.1, "no", "a b", "1x4", "123", "gs://b/p", "x: y", "", "\u00e9"]
)
def test_scalars_are_read_back_by_both_yamls(value: object) -> None:
    text = yaml_scalar(value)
    assert yaml.safe_load(text) == value
    assert text.startswith('"') or plain_scalar(text) == value


def test_a_closed_pipe_is_no_error() -> None:
    repo = str(Path(cli.__file__).parents[2])
    command = [sys.executable, "-c", f"{MAIN}\nsys.exit(code)", "show", "--keys"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": repo}, stdout=writing, stderr=-1)
    os.close(writing)
    assert (done.returncode, done.stderr) == (app.PIPE_CLOSED, b"")


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def command() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.cli.recipes.command", command)
    code, out, err = run(capsys, "recipes")
    assert (code, out, err.strip()) == (INTERRUPTED, "", "interrupted")


def test_version() -> None:
    assert muster("--version").stdout.startswith("muster")


COMPLETIONS = [
    (["muster", ""], list(app.VERBS)),
    (["muster", "pl"], ["plan"]),
    (["muster", "plan", "qu"], ["quickstart"]),
    (["muster", "launch", "qu"], ["quickstart"]),
    (["muster", "launch", "--rec"], ["--recipes"]),
    (["muster", "plan", "--js"], ["--json"]),
    (["muster", "plan", "quickstart", "model", "=", "llama3-"], ["llama3-405b", "llama3-70b", "llama3-8b"]),
    (["muster", "plan", "quickstart", "multislice.n"], ["multislice.num_slices="]),
    (["muster", "plan", "quickstart", "train.s"], ["train.sequence_length=", "train.seed="]),
    (
        ["muster", "plan", "quickstart", "train.remat_p"],
        [f"train.remat_policy={p}" for p in ("none", "minimal", "full", "named")],
    ),
    (["muster", "plan", "quickstart", "data.shuffle", "="], ["true", "false"]),
    (["muster", "show", "quickstart", "--key", "optimizer.le"], ["optimizer.learning_rate"]),
]


@pytest.mark.parametrize(("words", "expected"), COMPLETIONS, ids=lambda value: " ".join(value)[:30])
def test_completion_in_bash(words: Sequence[str], expected: Sequence[str], tmp_path: Path) -> None:
    command = tmp_path / "muster"
    command.write_text(f"#!{sys.executable}\n{MAIN}\nassert 'hydra' not in sys.modules\nsys.exit(code)\n")
    command.chmod(0o755)
    quoted = " ".join(f"'{word}'" for word in words)
    script = (
        'eval "$(muster completion bash)"; compopt() { :; }\n'
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _muster_completion muster\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    done = subprocess.run(["bash", "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == expected, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_the_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "completion", shell)
    assert (code, err) == (0, "")
    assert "_MUSTER_COMPLETE" in out
