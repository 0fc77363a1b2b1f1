"""The tables of `python -m benchmarks compiled`, from a small compiled program and from one that failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compiled import Row, described, main, markdown, markdown_collectives
from launcher.compose import compose
from launcher.preflight.compiled import analyze, read_compiled
from tests.unit.hlo_support import FOLDER

FACTS: dict[str, Any] = {
    "recipe": "llama3-8b-v5e-16x16",
    "generation": "v5e",
    "topology": "2x4",
    "num_slices": 1,
    "mesh_axes": {"fsdp": 2, "tensor": 4},
    "device_ids": list(range(8)),
    "device_slices": [0] * 8,
    "usable_hbm_bytes": 63 * 2**28,
    "memory_bytes": {
        "argument": 5 * 2**30,
        "output": 4 * 2**30,
        "alias": 4 * 2**30,
        "temp": 7 * 2**30,
        "peak": 11 * 2**30,
        "generated_code": 2**20,
        "host_argument": 0,
        "host_output": 0,
        "host_alias": 0,
        "host_temp": 0,
    },
    "cost": {"flops": 1.0},
    "lower_s": 2.0,
    "compile_s": 40.0,
    "peak_rss_bytes": 2**30,
    "compiler_flags": "",
    "jax_version": "0.12.0",
    "libtpu_version": "0.0.50",
}


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    (tmp_path / "compiled.json").write_text(json.dumps(FACTS))
    (tmp_path / "compiled.txt").write_bytes((FOLDER / "tensor_sum.txt").read_bytes())
    compiled = read_compiled(tmp_path)
    recipe = compose("llama3-8b-v5e-16x16", []).recipe
    return [
        Row(recipe=recipe, compiled=compiled, analysis=analyze(compiled)),
        Row(recipe=recipe, problem="it needs 32.90 GiB of the 31.25 GiB"),
    ]


def test_the_compilers_peak_is_the_need_where_it_is_of_hbm_alone(tmp_path: Path) -> None:
    (tmp_path / "compiled.txt").write_bytes((FOLDER / "tensor_sum.txt").read_bytes())
    found = []
    for host_bytes in (0, 2**30):
        sizes = {**FACTS["memory_bytes"], "host_temp": host_bytes}
        (tmp_path / "compiled.json").write_text(json.dumps({**FACTS, "memory_bytes": sizes}))
        found.append(analyze(read_compiled(tmp_path)))
    assert found[0].hbm_bytes == 11 * 2**30
    assert found[1].hbm_bytes == found[1].peak.size_bytes < 2**21


def test_the_table_has_a_line_for_each_recipe(rows: list[Row]) -> None:
    header, rule, whole, failed = markdown(rows)
    assert header.count("|") == rule.count("|") == whole.count("|") == failed.count("|")
    assert whole == (
        "| llama3-8b-v5e-16x16 | 8 | 5.00 | 7.00 | 0.00 | 11.00 of 15.75"
        " | 3.36e+07 | 4.38e+03 | 0.00, 0.00 | 42 |"
    )
    assert "it needs 32.90 GiB" in failed


def test_collectives_have_a_table_of_their_own(rows: list[Row]) -> None:
    assert list(markdown_collectives(rows))[2:] == [
        "| llama3-8b-v5e-16x16 | tensor | all-reduce | 1 | 3.05e-05 | 3.05e-05 |"
    ]


def test_in_lines_of_text(rows: list[Row]) -> None:
    text = "\n".join(line for row in rows for line in described(row))
    assert "11.00 of 15.75 GiB HBM" in text
    assert "tensor all-reduce: 1 x" in text
    assert "it needs 32.90 GiB" in text


def test_a_recipe_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nosuch"]) == 2
    assert "error: no recipe 'nosuch'" in capsys.readouterr().err
