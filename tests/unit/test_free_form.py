"""Entries of free-form keys: from files, options and the command line, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from launcher import cli
from launcher.compose import Composed, compose
from recipes.errors import RecipeError
from recipes.load import flatten, nest, recipe_to_dict

MINE = """# mine
defaults: [quickstart, override target: ours, _self_]
target:
  env:
    OWN: "1"
    BOTH: mine
  labels: {example.com/team: red, "on": "no"}
"""
OURS = "# ours\nkind: local\nenv: {OURS: ours, BOTH: ours}\nlabels: {a.b/c: d}\n"


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MUSTER_RECIPES", raising=False)
    (tmp_path / "recipes" / "target").mkdir(parents=True)
    (tmp_path / "recipes" / "mine.yaml").write_text(MINE)
    (tmp_path / "recipes" / "target" / "ours.yaml").write_text(OURS)


def env(*overrides: str, recipe: str = "mine") -> Mapping[str, str]:
    return compose(recipe, overrides).recipe.target.env


FROM_FILES = {"OWN": "1", "BOTH": "mine", "OURS": "ours"}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], FROM_FILES),
        (["target.env.NEW=bar"], {**FROM_FILES, "NEW": "bar"}),
        (["+target.env.NEW=bar"], {**FROM_FILES, "NEW": "bar"}),
        (["++target.env.OWN=bar"], {**FROM_FILES, "OWN": "bar"}),
        (["~target.env.OWN"], {"BOTH": "mine", "OURS": "ours"}),
        (["~target.env"], {}),
        (["target.env.X=1", "~target.env"], {"X": "1"}),
        (["~target.env", "target.env.X=1"], {"X": "1"}),
        (['target.env={"OWN":"2","X":"a,b"}'], {**FROM_FILES, "OWN": "2", "X": "a,b"}),
        (["target.env={OWN: x y, X: '1'}"], {**FROM_FILES, "OWN": "x y", "X": "1"}),
        (["target=local"], {"OWN": "1", "BOTH": "mine"}),
    ],
)
def test_entries_are_merged_by_name(overrides: Sequence[str], expected: Mapping[str, str]) -> None:
    assert dict(env(*overrides)) == expected


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        *(
            (text, text)
            for text in ("1", "3e-4", "true", "0x10", "???", "1_000", "", " x ", "a,b", "[1", "{a:1}")
        ),
        *(
            (text, text)
            for text in ("--a=1 --b={c}", "$(X) $X %s", "a\\,b", 'say "x"', "None", "~", "@", "\u00e9")
        ),
        ("'1'", "1"),
        ('"null"', "null"),
        ('"a, b"', "a, b"),
        ('"say \\"x\\" \\\\"', 'say "x" \\'),
        ("'two\nlines'", "two\nlines"),
    ],
)
def test_values_are_the_texts_that_were_typed(typed: str, text: str) -> None:
    assert env(f"target.env.X={typed}", recipe="quickstart") == {"X": text}


def test_names_may_have_dots_and_slashes() -> None:
    overrides = ["target.labels.example.com/team=blue", "~target.labels.a.b/c", "+target.labels.x.y/z=1"]
    assert compose("mine", overrides).recipe.target.labels == {
        "example.com/team": "blue",
        "on": "no",
        "x.y/z": "1",
    }


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("target.env.X=null", "write ~target.env.X to remove it"),
        ("target.env.X=${train.seed}", "interpolates"),
        ("target.env.X='${train.seed}'", "interpolates"),
        ("target.env.X='a", "not one quoted text"),
        ("target.env.X='a' b", "not one quoted text"),
        ("target.env.X='a','b'", "not one quoted text"),
        (f"target.env.X={'x' * 5000}", "longer than 4096"),
        ("target.env.X", "write target.env.X=VALUE, or ~target.env.X"),
        ("target.env", "write target.env.NAME=VALUE"),
        ("target.env.=x", "names no entry"),
        ("target.env={}", "write ~target.env to remove all"),
        ("target.env=x", "not a mapping"),
        ("target.env={A:1}", "target.env.A=1 (override): is not a text"),
        ('target.env={"A":"1","A":"2"}', "not a mapping"),
        ("target.env={A:${train.seed}}", "interpolates"),
        ("~target.env.OWNN", "did you mean ~target.env.OWN?"),
        ("~target.secrets.X", "target.secrets has no entries"),
        ("~target.env.OWN=1", "write ~target.env.OWN"),
        ("target.env.X=1 target.env.X=2", "given twice"),
        ("target.env.X=1 target.env={X:b}", "given twice"),
        ("target.env.OWN=1 ~target.env.OWN", "given twice"),
        ("+target.queue=x", "adds a key"),
        ("+target.envs.X=1", "adds a key"),
    ],
)
def test_bad_entries(override: str, says: str) -> None:
    overrides = [override] if " b" in override else override.split()
    with pytest.raises(RecipeError) as caught:
        compose("mine", overrides)
    assert says in caught.value.message
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("env: {A: 1}", 'target.env.A=1 (./bad.yaml:3): is not a text\n    fix: quote it: A: "1"'),
        ("env: {A: yes, B: true}", 'quote it: B: "true"'),
        ("env: {A: 3e-4}", "quote it"),
        ("env: {A: }", "give a text"),
        ("env: {A: {B: c}}", "is not a text"),
        ("env: [A]", "target.env=['A'] (./bad.yaml:3): is not a mapping"),
        ("env: null", "is not a mapping"),
        ("env: {A: '${train.seed}'}", "target.env.A=${train.seed} (./bad.yaml:3): interpolates"),
        ("env: {A: x, A: y}", "target.env.A (./bad.yaml:3): is given twice"),
        ("labels: {a: &x b, c: *x}", "alias"),
        ("env: {'A.B': x}", "target.env.A.B=x (./bad.yaml:3): is not the name of an environment variable"),
        ("env.A: x", "is written with dots"),
    ],
)
def test_bad_files(text: str, says: str) -> None:
    Path("bad.yaml").write_text(f"defaults: [quickstart, _self_]\ntarget:\n  {text}\n")
    with pytest.raises(RecipeError) as caught:
        compose("./bad.yaml", [])
    assert says in caught.value.message


def test_a_global_package_and_no_entries() -> None:
    text = (
        "# @package _global_\n# g\nrun: {max_restarts: 7}\ntarget: {kind: local, env: {G: g}, labels: {}}\n"
    )
    Path("recipes/target/ours.yaml").write_text(text)
    composed = compose("mine", [])
    assert composed.recipe.target.env == {"G": "g", "OWN": "1", "BOTH": "mine"}
    assert composed.origins["target.env.G"] == "./recipes/target/ours.yaml:4"


def test_origins_of_entries() -> None:
    composed = compose("mine", ["target.env.OWN=2", "target.env.NEW=3", "target.secrets.S=s/k"])
    origins = {key: origin for key, origin in composed.origins.items() if key.startswith("target.")}
    assert origins["target.env.OWN"] == origins["target.env.NEW"] == origins["target.secrets"] == "override"
    assert origins["target.env.BOTH"] == "./recipes/mine.yaml:6"
    assert origins["target.env.OURS"] == "./recipes/target/ours.yaml:3"
    assert origins["target.labels.example.com/team"] == "./recipes/mine.yaml:7"
    assert origins["target.node_selector"] == "default"
    assert composed.notes == ()


def test_an_entry_that_hides_one_of_a_chosen_option_is_noted() -> None:
    composed = compose("mine", ["target=ours"])
    assert composed.notes == ("./recipes/mine.yaml:6 sets target.env.BOTH over target=ours",)


def test_the_order_of_entries_leaves_no_trace() -> None:
    first, second = ["target.env.A=1", "target.env.B=2"], ["target.env.B=2", "target.env.A=1"]
    assert list(env(*first)) == list(env(*second)) == sorted(env(*first))


def test_show_prints_entries_that_compose_again(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["target.env.X='a\n\tb: \"\\\\'", "target.env.Y=\U0001f600\u202e", "target.env.Z=on"]
    composed: Composed = compose("mine", overrides)
    assert cli.main(["show", "mine", *overrides]) == 0
    out = capsys.readouterr().out
    assert "    example.com/team: red " in out and "# ./recipes/mine.yaml:7" in out and "\u202e" not in out
    Path("again.yaml").write_text(out)
    again = compose("./again.yaml", []).recipe
    assert again.target == composed.recipe.target


def test_flat_and_nested() -> None:
    data = recipe_to_dict(compose("mine", []).recipe)
    flat = flatten(data)
    assert flat["target.labels"] == {"a.b/c": "d", "example.com/team": "red", "on": "no"}
    assert nest(flat) == data
    nested = nest({**flat, "target.labels.p.q/r": "s"})
    assert nested["target"]["labels"] == {**flat["target.labels"], "p.q/r": "s"}
    assert "p.q/r" not in flat["target.labels"]
