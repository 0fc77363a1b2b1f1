"""Programs read from real HLO and in outline, predictions of recipes, and what is drawn of them."""

from __future__ import annotations

import collections
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.compose import compose
from launcher.preflight.groups import MeshLayout
from launcher.preflight.hlo import parse_module
from launcher.preflight.outline import outline
from launcher.preflight.prediction import OUTLINE, Prediction, attended_share, predict
from launcher.preflight.program import Op, program_of
from launcher.preflight.schedule import schedule, scheduled_cost
from launcher.preflight.torus import Torus
from launcher.preflight.trace import bars, chrome_trace, html_page
from recipes.flops import step_flops
from tests.unit.hlo_support import FOLDER

SQUARE = MeshLayout(axes={"fsdp": 2, "tensor": 4}, device_ids=range(8), device_slices=[0] * 8)
LINE = MeshLayout(axes={"data": 1, "fsdp": 8}, device_ids=range(8), device_slices=[0] * 8)
TWO_SLICES = MeshLayout(
    axes={"data": 2, "fsdp": 8},
    device_ids=[*range(100_000, 100_008), *range(200_000, 200_008)],
    device_slices=[0] * 8 + [1] * 8,
)
SMALL = Torus(topology=(2, 4), wrap=(False, False), devices_per_chip=1)
V5E, V6E, V5P = "llama3-8b-v5e-16x16", "llama3-8b-v6e-16x16-x2", "llama3-70b-v5p-4x4x8"


def flat(program: Sequence[Op], rounds: int = 1) -> Iterator[tuple[Op, int]]:
    for op in program:
        if op.body:
            yield from flat(op.body, rounds * op.rounds)
        else:
            yield op, rounds


def read(name: str, mesh: MeshLayout) -> list[tuple[Op, int]]:
    module = parse_module((FOLDER / f"{name}.txt").read_text(encoding="ascii"))
    return list(flat(program_of(module, mesh, SMALL)))


PROGRAMS = [
    ("fsdp_scan", LINE),
    ("async_chain", LINE),
    ("tensor_sum", SQUARE),
    ("ring", SQUARE),
    ("exchange", SQUARE),
    ("slices_sum", TWO_SLICES),
    ("kernel_in_scan", SQUARE),
    ("offload", SQUARE),
]


@pytest.mark.parametrize(("name", "mesh"), PROGRAMS)
def test_no_cycle_of_a_real_program_is_lost_and_every_wait_has_a_start(name: str, mesh: MeshLayout) -> None:
    module = parse_module((FOLDER / f"{name}.txt").read_text(encoding="ascii"))
    ops = list(flat(program_of(module, mesh, SMALL)))
    assert sum(op.cycles * rounds for op, rounds in ops) == scheduled_cost(schedule(module)).estimated_cycles
    starts = {op.name for op, _ in ops if op.is_start}
    assert {op.awaits for op, _ in ops if op.category == "wait"} <= starts


@pytest.mark.parametrize(
    ("name", "mesh", "kind", "lane", "count", "num_starts"),
    [
        ("async_chain", LINE, "all-gather", "ici", 12, 6),
        ("tensor_sum", SQUARE, "all-reduce", "ici", 1, 0),
        ("ring", SQUARE, "collective-permute", "ici", 1, 1),
        ("exchange", SQUARE, "all-to-all", "ici", 1, 0),
        ("slices_sum", TWO_SLICES, "all-reduce", "dcn", 1, 1),
        ("kernel_in_scan", SQUARE, "attention", "core", 3, 0),
    ],
)
def test_operations_of_real_programs(
    name: str, mesh: MeshLayout, kind: str, lane: str, count: int, num_starts: int
) -> None:
    found = [(op, rounds) for op, rounds in read(name, mesh) if op.category == kind and op.lane == lane]
    assert sum(rounds for _, rounds in found) == count
    assert sum(rounds for op, rounds in found if op.is_start) == num_starts


def test_transfers_from_and_to_the_host_go_on_beside() -> None:
    found = collections.Counter(op.category for op, _ in read("offload", SQUARE) if op.lane == "host")
    assert found["to host"] and found["from host"]


def predicted(name: str, *overrides: str) -> Prediction:
    recipe = compose(name, list(overrides)).recipe
    return predict(recipe, outline(recipe), method=OUTLINE)


@pytest.mark.parametrize("name", [V5E, V6E, V5P, "llama3-405b-v5p-8x8x8-x2", "mixtral-8x7b-v6e-16x16"])
def test_an_outline_does_the_work_of_the_model(name: str) -> None:
    recipe = compose(name, []).recipe
    flops = sum(
        rounds * (op.flops + (op.kernel.flops if op.kernel else 0)) for op, rounds in flat(outline(recipe))
    )
    devices = 1
    for part in (*map(int, recipe.hardware.topology.split("x")), recipe.multislice.num_slices):
        devices *= part
    # Forward again in the backward pass, and whole score matrices of which a mask leaves half.
    assert 1.2 < flops * devices / step_flops(recipe) < 1.9


def test_a_prediction_adds_up() -> None:
    found = predicted(V6E)
    assert sum(share.time_s for share in (*found.work, *found.waits)) == pytest.approx(found.step_s)
    assert found.low_s < found.step_s < found.high_s
    assert found.tokens_per_s_per_chip == pytest.approx(512 * 8192 / found.step_s / 512)
    assert found.run_days == pytest.approx(found.step_s * 100_000 / 86_400)
    assert found.run_cost_usd == pytest.approx(found.run_days * 24 * 512 * 0.54421, rel=1e-4)
    assert found.exposed_s == pytest.approx(sum(share.time_s for share in found.waits))
    assert {share.axes for share in found.waits} >= {"fsdp", "dcn:data", "dcn"}


@pytest.mark.parametrize(
    ("name", "slower", "least", "most"),
    [
        (V5P, ("train.global_batch_size=512",), 1.8, 2.0),
        (V5P, ("train.grad_accum_steps=2",), 1.0, 1.1),
        (V5P, ("hardware.topology=4x4x4",), 1.9, 2.1),
        (V5E, ("mesh.fsdp=16", "mesh.tensor=8", "mesh.data=2"), 1.0, 2.5),
        (V5E, ("multislice=two-slices", "train.global_batch_size=512"), 1.01, 1.2),
        (V6E, ("multislice=four-slices", "train.global_batch_size=1024"), 1.01, 1.1),
        (V5P, ("model.quantization=int8",), 0.6, 0.8),
        (V5P, ("train.remat_policy=minimal",), 0.75, 0.9),
        (V5P, ("train.sequence_length=32768", "train.global_batch_size=128"), 2.0, 3.0),
    ],
)
def test_time_follows_what_is_asked(name: str, slower: Sequence[str], least: float, most: float) -> None:
    assert least <= predicted(name, *slower).step_s / predicted(name).step_s <= most


def test_offloading_is_waited_for_where_the_bus_is_too_slow() -> None:
    offload = ("train.remat_policy=named", "train.remat_offload=[layer_input,query,mlp_gate,mlp_up]")
    assert "to host" in {share.category for share in predicted(V5E, *offload).waits}


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        ([], (4096 + 256) / 8192),
        (["model.attention_chunk=2048"], (4096 + 1024) / 8192),
        (["model.attention=xla"], 1.0),
        (["model.attention_window=1024"], (1024 - 64 + 256) / 8192),
    ],
)
def test_blocks_round_a_mask_up(overrides: list[str], share: float) -> None:
    assert attended_share(compose(V5E, overrides).recipe) == pytest.approx(share)


def test_no_price_is_no_cost() -> None:
    found = predicted(V5P, "hardware.generation=tpu7x", "hardware.topology=4x4x4")
    assert (found.run_cost_usd, found.price_source) == (None, None)
    own = predicted(
        V5P, "hardware.generation=tpu7x", "hardware.topology=4x4x4", "hardware.price_per_chip_hour=10"
    )
    assert own.run_cost_usd == pytest.approx(own.run_days * 24 * 64 * 10)


def test_bars_fill_the_step_without_a_gap() -> None:
    found = predicted(V5E)
    core = sorted(
        (bar for bar in bars(found.timeline.events) if bar.lane == "core"), key=lambda bar: bar.start_s
    )
    end_s = 0.0
    for bar in core:
        assert bar.start_s == pytest.approx(end_s, abs=1e-9)
        end_s = bar.start_s + bar.duration_s
    assert end_s == pytest.approx(found.timeline.duration_s)
    assert [bar.label for bar in core if bar.kind == "loop"] == ["30 more rounds"] * 2


def test_a_trace_is_what_perfetto_reads() -> None:
    found = predicted(V5E)
    events = json.loads(chrome_trace(found, "a <step>"))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in complete} <= {
        event["tid"] for event in events if event["ph"] == "M" and "tid" in event
    }
    last_us = max(event["ts"] + event["dur"] for event in complete)
    assert last_us == pytest.approx(1e6 * found.timeline.duration_s)


def test_a_page_escapes_what_it_is_told() -> None:
    page = html_page(predicted(V5E), "<script>x</script>", "a & <b>")
    assert "<script>" not in page
    assert "a &amp; &lt;b&gt;" in page
    svg = ET.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    assert len(svg.findall("rect")) > 20


@pytest.mark.parametrize(("name", "begins"), [("t.html", "<!doctype html>"), ("t.json", '{"traceEvents"')])
def test_the_verb_writes_a_timeline(
    name: str, begins: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    assert main(["preflight", V5E, "--quick", "--timeline", str(file)]) == 0
    assert file.read_text().startswith(begins)
    captured = capsys.readouterr()
    assert f"timeline: {file}" in captured.err
    assert "step       " in captured.out


@pytest.mark.parametrize(
    ("name", "message"),
    [("t.svg", "the suffix says what is written"), ("none/t.html", "cannot write")],
)
def test_a_timeline_that_cannot_be_written(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preflight", V5E, "--quick", "--timeline", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_json_has_all_but_the_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preflight", V5E, "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["prediction"]
    assert "timeline" not in found
    assert found["method"] == "outline"
    assert found["work"][0]["category"] == "matmul"
    assert found["exposed_s"] == pytest.approx(sum(share["time_s"] for share in found["waits"]))
