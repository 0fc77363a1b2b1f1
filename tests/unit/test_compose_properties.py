"""Whatever the names and overrides are: a recipe or a refusal; no escape, no secret, no file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher import cli, recipe_path
from launcher.compose import compose
from launcher.plan import make_plan, render_plan
from recipes.contract import ExitCode, is_run_name
from recipes.errors import UserError
from recipes.load import keys, recipe_to_dict

CANARY = "canary-5f2d91"
PIECES = [
    *(
        "=",
        "+",
        "~",
        ".",
        ",",
        "/",
        "..",
        "@",
        ":",
        "$",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        "'",
        '"',
        "\\",
        " ",
        "\n",
    ),
    *("${oc.env:MUSTER_CANARY}", "${oc.env:MUSTER_CANARY,x}", "${env:MUSTER_CANARY}", "$MUSTER_CANARY"),
    *(
        "${oc.decode:x}",
        "${hydra:runtime.cwd}",
        "${run.name}",
        "_target_",
        "os.system",
        "hydra.run.dir",
        "???",
    ),
    *(
        "null",
        "true",
        "1",
        "-1",
        "1e400",
        "0x10",
        "nan",
        "int(1)",
        "range(1,9)",
        "json_str(a)",
        "`id`",
        "$(id)",
        ";",
    ),
    *recipe_path.GROUPS,
    *keys(),
]
mangled = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=6).map("".join)
settled = st.builds("{}={}".format, st.sampled_from([*keys(), *recipe_path.GROUPS]), mangled)
names = st.one_of(
    mangled, st.sampled_from(["quickstart", "../quickstart", "recipes/quickstart.yaml", "a/../../etc"])
)


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUSTER_CANARY", CANARY)
    yield
    assert list(tmp_path.iterdir()) == []


def outcome(name: str, overrides: list[str]) -> str:
    """All that could be shown of it: recipe, origins and plan, or the refusal."""
    try:
        composed = compose(name, overrides)
    except UserError as error:
        assert error.exit_code == ExitCode.BAD_INPUT
        return f"{error.message}\n{error.hint}"
    assert is_run_name(composed.recipe.run_name)
    plan = make_plan(composed.recipe)
    values = json.dumps(recipe_to_dict(composed.recipe))
    return f"{values}\n{dict(composed.origins)}\n{composed.notes}\n{plan.to_json()}\n{render_plan(plan)}"


@examples(150)
@given(overrides=st.lists(st.one_of(mangled, settled), min_size=1, max_size=3))
def test_any_overrides(overrides: list[str]) -> None:
    assert CANARY not in outcome("quickstart", overrides)


@examples(200)
@given(name=names)
def test_any_recipe_name(name: str) -> None:
    text = outcome(name, [])
    assert CANARY not in text
    assert name == "quickstart" or any(why in text for why in ("no recipe", "not a name", "is not a file"))


@examples(40)
@given(value=mangled, place=st.sampled_from(["train.num_steps", "run.root", "data.path", "model.family"]))
def test_any_value_in_a_file(value: str, place: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    section, key = place.split(".")
    path = tmp_path_factory.mktemp("recipe") / "mine.yaml"
    text = f"defaults: [quickstart, _self_]\n{section}: {{{key}: {json.dumps(value)}}}\n"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert CANARY not in outcome(str(path), [])


@examples(30)
@given(words=st.lists(mangled.filter(lambda word: "\x00" not in word), max_size=3))
def test_any_command_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["plan", "quickstart", *words])
    captured = capsys.readouterr()
    assert code in (0, ExitCode.BAD_INPUT)
    assert CANARY not in captured.out + captured.err
    assert all(c.isprintable() or c in "\n\t" for c in captured.err)
