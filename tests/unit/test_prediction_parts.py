"""What a prediction is made of: links of a torus, seconds of exchanges and kernels, and the walk in time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from launcher.preflight.hlo import Array, parse_instruction
from launcher.preflight.kernels import ATTENTION, GROUPED_MATMUL, Kernel, kernel_of
from launcher.preflight.outline import axis_links
from launcher.preflight.program import Op
from launcher.preflight.rates import Rates, dcn_s, exchange_s, fitted_constants, kernel_s, rates_of
from launcher.preflight.timeline import Event, core_events, timeline
from launcher.preflight.torus import Link, Side, Torus
from launcher.text import time_text
from recipes.parallelism import AXES

GB = 10**9
RATES = Rates(
    cycle_s=1e-9,
    matmul_flops_per_s=1e12,
    attention_flops_per_s=1e12,
    grouped_matmul_flops_per_s=1e12,
    matmul_width=128,
    hbm_bytes_per_s=1e12,
    link_bytes_per_s=1e10,
    core_bytes_per_s=1e12,
    dcn_bytes_per_s=1e9,
    host_bytes_per_s=1e10,
    beside_share=0.0,
    slice_wait_share=0.0,
)
RING = Link(sides=(Side(size=16, wraps=True),))
LINE = Link(sides=(Side(size=4, wraps=False),))
TORUS = Link(sides=(Side(size=16, wraps=True), Side(size=16, wraps=True)))
V5P = Torus(topology=(4, 4, 8), wrap=(True, True, True), devices_per_chip=1)
V6E = Torus(topology=(16, 16), wrap=(True, True), devices_per_chip=1)
IRONWOOD = Torus(topology=(4, 4, 4), wrap=(True, True, True), devices_per_chip=2)


@pytest.mark.parametrize(
    ("torus", "device", "coordinates"),
    [
        (V5P, 0, (0, 0, 0)),
        (V5P, 1, (1, 0, 0)),
        (V5P, 4, (0, 1, 0)),
        (V5P, 127, (3, 3, 7)),
        (V6E, 100_017, (1, 1)),
        (IRONWOOD, 3, (1, 0, 0)),
        (IRONWOOD, 127, (3, 3, 3)),
    ],
)
def test_coordinates_of_devices(torus: Torus, device: int, coordinates: tuple[int, ...]) -> None:
    assert torus.coordinates(device) == coordinates


@pytest.mark.parametrize(
    ("torus", "devices", "sides"),
    [
        (V5P, range(128), [(4, True), (4, True), (8, True)]),
        (V5P, range(4), [(4, True)]),
        (V5P, range(2), [(2, False)]),
        (V5P, [0, 16, 32, 48, 64, 80, 96, 112], [(8, True)]),
        (V6E, range(16), [(16, True)]),
        (V6E, range(8), [(8, False)]),
        (IRONWOOD, (0, 1), []),
        (IRONWOOD, range(8), [(4, True)]),
    ],
)
def test_sides_that_a_group_spans(
    torus: Torus, devices: Sequence[int], sides: list[tuple[int, bool]]
) -> None:
    assert [(side.size, side.wraps) for side in torus.link(devices).sides] == sides


@pytest.mark.parametrize(
    ("torus", "degrees", "links"),
    [
        (V5P, {"fsdp": 128}, {"fsdp": [(4, True), (4, True), (8, True)], "tensor": []}),
        (V5P, {"fsdp": 16, "tensor": 8}, {"tensor": [(8, True)], "fsdp": [(4, True), (4, True)]}),
        (V5P, {"fsdp": 32, "tensor": 4}, {"tensor": [(4, True)], "fsdp": [(4, True), (8, True)]}),
        (V6E, {"fsdp": 64, "tensor": 4}, {"tensor": [(4, False)], "fsdp": [(4, False), (16, True)]}),
        (IRONWOOD, {"fsdp": 64, "tensor": 2}, {"tensor": [], "fsdp": [(4, True)] * 3}),
    ],
)
def test_sides_of_mesh_axes(
    torus: Torus, degrees: dict[str, int], links: dict[str, list[tuple[int, bool]]]
) -> None:
    found = axis_links({axis: degrees.get(axis, 1) for axis in AXES}, torus)
    assert {axis: [(side.size, side.wraps) for side in found[axis].sides] for axis in links} == links


@pytest.mark.parametrize(
    ("kind", "group_size", "link", "seconds"),
    [
        # 15/16 of 1 GB over two directions of 10 GB/s; a line has half of that.
        ("all-gather", 16, RING, 15 / 16 / 20),
        ("reduce-scatter", 16, RING, 15 / 16 / 20),
        ("all-reduce", 16, RING, 2 * 15 / 16 / 20),
        ("all-gather", 4, LINE, 3 / 4 / 10),
        ("all-gather", 256, TORUS, 255 / 256 / 40),
        # Half of what 16 chips have crosses two links each way.
        ("all-to-all", 16, RING, 16 / 8 / 10),
        ("all-to-all", 4, LINE, 4 / 4 / 10),
        ("collective-permute", 2, RING, 1 / 20),
        ("all-gather", 2, Link(sides=()), 1 / 2 / 1000),
    ],
)
def test_seconds_of_an_exchange(kind: str, group_size: int, link: Link, seconds: float) -> None:
    assert exchange_s(RATES, kind, GB, group_size, link) == pytest.approx(seconds, abs=1e-4)


def test_seconds_between_slices_grow_to_twice_the_gradients() -> None:
    times = [dcn_s(RATES, "all-reduce", GB, slices) for slices in (2, 4, 32)]
    assert times == pytest.approx([1.001, 1.501, 1.9385])


def test_a_kernel_fills_the_matrix_unit_as_far_as_its_heads_are_wide() -> None:
    narrow, wide = (Kernel(category=ATTENTION, flops=10**12, width=width) for width in (64, 256))
    assert kernel_s(RATES, narrow, 0.5) == pytest.approx(1.0)
    assert kernel_s(RATES, wide, 0.5) == pytest.approx(0.5)
    grouped = Kernel(category=GROUPED_MATMUL, flops=10**12, width=128)
    assert kernel_s(RATES, grouped, 0.5) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "quantization", "is_faster"),
    [
        ("v4", "int8", False),
        ("v5e", "int8", True),
        ("v5p", "fp8", False),
        ("tpu7x", "fp8", True),
        ("tpu7x", "int8", False),
    ],
)
def test_a_dtype_is_faster_where_the_chip_has_units_for_it(
    name: str, quantization: str, is_faster: bool
) -> None:
    plain, quantized = (
        rates_of(name, each, fitted_constants()).matmul_flops_per_s for each in ("none", quantization)
    )
    assert (quantized > plain) is is_faster


def floats(*shapes: tuple[int, ...]) -> list[Array]:
    return [Array(dtype="bf16", dims=shape, memory_space=0) for shape in shapes]


QKV = floats((2, 64, 8192, 128), (2, 8, 8192, 128), (2, 8, 8192, 128))
SCORES = 2 * 64 * 8192 * 8192 * 128
ROWS, EXPERTS = (32768, 4096), (8, 4096, 14336)


@pytest.mark.parametrize(
    ("text", "operands", "flops", "width"),
    [
        ("%splash_mha_fwd_residuals.3 = bf16[2,64,8192,128] custom-call()", QKV, 4 * SCORES, 128),
        ("%splash_mha_dq_no_residuals.1 = bf16[2,64,8192,128] custom-call()", QKV, 6 * SCORES, 128),
        (
            "%splash_mha_dkv_no_residuals = (bf16[2,8,8192,128], bf16[2,8,8192,128]) custom-call()",
            QKV,
            8 * SCORES,
            128,
        ),
        (
            "%splash_mha_dkv = (bf16[2,64,8192,128], bf16[2,8,8192,128], bf16[2,8,8192,128]) custom-call()",
            QKV,
            10 * SCORES,
            128,
        ),
        ("%gmm.4 = bf16[32768,14336] custom-call()", floats(ROWS, EXPERTS), 2 * 32768 * 4096 * 14336, 4096),
        (
            "%tgmm = bf16[8,4096,14336] custom-call()",
            floats(ROWS, (32768, 14336)),
            2 * 32768 * 4096 * 14336,
            4096,
        ),
    ],
)
def test_flops_of_kernels(text: str, operands: list[Array], flops: int, width: int) -> None:
    _, call = parse_instruction(f"  {text}")
    kernel = kernel_of(call, operands)
    assert kernel is not None
    assert (kernel.flops, kernel.width) == (flops, width)


@pytest.mark.parametrize("text", ["%fusion.1 = bf16[8] custom-call()", "%gmm = bf16[8] custom-call()"])
def test_other_calls_are_no_kernels(text: str) -> None:
    _, call = parse_instruction(f"  {text}")
    assert kernel_of(call, []) is None


def test_rates_of_a_device_are_its_share_of_the_chip() -> None:
    constants = fitted_constants()
    ironwood, trillium = (rates_of(name, "none", constants) for name in ("tpu7x", "v6e"))
    assert ironwood.matmul_flops_per_s == pytest.approx(2307e12 / 2 * constants.matmul_share["tpu7x"])
    assert trillium.link_bytes_per_s == pytest.approx(90e9 * 0.8)
    fp8 = rates_of("tpu7x", "fp8", constants).matmul_flops_per_s
    assert fp8 / ironwood.matmul_flops_per_s == pytest.approx(constants.quantized_speed["fp8"])


def work(cycles: int, name: str = "work") -> Op:
    return Op(name=name, category="matmul", cycles=cycles)


def start(name: str, axes: str = "fsdp", size_bytes: int = GB) -> Op:
    return Op(
        name=name,
        category="all-gather",
        lane="ici",
        is_start=True,
        size_bytes=size_bytes,
        link=LINE,
        group_size=4,
        axes=axes,
    )


def wait(name: str) -> Op:
    return Op(name=f"{name} done", category="wait", awaits=name)


GATHER_S = 0.075003
SECOND = 10**9
"""Cycles."""


@pytest.mark.parametrize(
    ("program", "seconds"),
    [
        ([work(SECOND), work(SECOND)], 2.0),
        # Hidden behind work; partly; one after the other on the same links; beside each other on others.
        ([start("a"), work(SECOND), wait("a")], 1.0),
        ([start("a"), work(SECOND // 20), wait("a")], GATHER_S),
        ([start("a"), start("b"), wait("a"), wait("b")], 2 * GATHER_S),
        ([start("a"), start("b", "tensor"), wait("a"), wait("b")], GATHER_S),
        ([start("a"), wait("b"), wait("a")], GATHER_S),
        ([Op(name="loop", category="loop", body=(work(SECOND),), rounds=7), work(SECOND)], 8.0),
        ([Op(name="x", category="elementwise", size_bytes=2 * 10**12)], 2.0),
        ([Op(name="m", category="matmul", flops=3 * 10**12, size_bytes=10**12)], 3.0),
        ([Op(name="o", category="to host", lane="host", is_start=True, size_bytes=GB), wait("o")], 0.1),
        ([Op(name="s", category="all-reduce", lane="dcn", size_bytes=GB, group_size=2)], 1.001),
    ],
)
def test_seconds_of_a_program(program: list[Op], seconds: float) -> None:
    line = timeline(program, RATES, attended_share=1.0)
    assert line.duration_s == pytest.approx(seconds, rel=1e-6)
    assert sum(time_s for _, time_s in core_events(line)) == pytest.approx(seconds, rel=1e-6)


def test_what_is_waited_for_is_said() -> None:
    line = timeline([start("a"), work(SECOND // 20), wait("a")], RATES, attended_share=1.0)
    waits = [(event, time_s) for event, time_s in core_events(line) if event.is_wait]
    assert [(event.category, event.axes) for event, _ in waits] == [("all-gather", "fsdp")]
    assert waits[0][1] == pytest.approx(GATHER_S - 0.05)
    starts = [event for event in line.events if event.lane == "ici"]
    (gather,) = starts
    assert (gather.start_s, gather.duration_s) == pytest.approx((0.0, GATHER_S))


def test_what_goes_on_beside_holds_work_up_by_a_share() -> None:
    rates = dataclasses.replace(RATES, beside_share=0.4)
    line = timeline([start("a"), work(SECOND), wait("a")], rates, attended_share=1.0)
    assert line.duration_s == pytest.approx(1.0 + 0.4 * GATHER_S)


def test_events_of_a_loop_are_those_of_one_round() -> None:
    line = timeline(
        [Op(name="loop", category="loop", body=(work(SECOND), work(SECOND)), rounds=3)],
        RATES,
        attended_share=1.0,
    )
    loop: Event = line.events[0]
    assert loop.duration_s == pytest.approx(6.0)
    assert [event.start_s for event in loop.inside] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("time_s", "text"),
    [(0.0123456, "12.3 ms"), (0.9994, "999 ms"), (1.0, "1 s"), (12.345, "12.3 s"), (125808.7, "125,809 s")],
)
def test_seconds_in_words(time_s: float, text: str) -> None:
    assert time_text(time_s) == text
