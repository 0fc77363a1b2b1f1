"""``muster hardware``: generations, slices, aliases."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from launcher.cli.hardware import command
from launcher.compose import compose
from recipes.errors import RecipeError, UserError


def run(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_generations_and_slices() -> None:
    assert {row["generation"] for row in json.loads(run("--json"))} == {"v4", "v5e", "v5p", "v6e", "tpu7x"}
    slices = json.loads(run("v6e", "--json"))["slices"]
    assert {
        "topology": "16x16",
        "chips": 256,
        "hosts": 64,
        "chips_per_host": 4,
        "machine_type": "ct6e-standard-4t",
    } in slices
    assert [row["hosts"] for row in slices if row["topology"] == "2x4"] == [1, 2]
    assert "16x16     256    64" in run("v6e")


def test_an_alias_that_tools_understand_differently() -> None:
    text = run("v6e-8")
    assert "v6e-8 in Cloud TPU API: v6e 2x4, 8 chips, 1 host of 8" in text
    assert "v6e-8 in xpk: v6e 2x4, 8 chips, 2 hosts of 4" in text
    assert "not the same hardware in every tool" in text
    assert [meaning["num_hosts"] for meaning in json.loads(run("v6e-8", "--json"))] == [1, 2]


@pytest.mark.parametrize(("name", "hint"), [("v5", "did you mean v5"), ("nonsense", "muster hardware")])
def test_what_nobody_knows(name: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(command, [name], catch_exceptions=False)
    assert hint in caught.value.hint


def test_an_alias_as_topology_is_refused_with_what_it_means() -> None:
    with pytest.raises(RecipeError) as caught:
        compose("llama3-70b-v5p-4x4x8", ["hardware.topology=v5p-128"])
    (problem,) = [p for p in caught.value.problems if p.key == "hardware.topology"]
    assert problem.fix == ("use hardware.generation=v5p hardware.topology=4x4x4 (as in Cloud TPU API, xpk)")
