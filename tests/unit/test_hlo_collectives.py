"""Collectives by kind and axis, in every form in which groups are printed; copies from and to the host."""

from __future__ import annotations

import pytest

from launcher.preflight.collectives import HostTransfers, Traffic, collectives, host_transfers, traffic
from launcher.preflight.groups import MeshLayout, groups_across_slices, pairs, replica_groups
from launcher.preflight.hlo import parse_module
from launcher.preflight.schedule import Schedule, schedule
from tests.unit.hlo_support import FOLDER

SQUARE = MeshLayout(axes={"fsdp": 2, "tensor": 4}, device_ids=range(8), device_slices=[0] * 8)
LINE = MeshLayout(axes={"data": 1, "fsdp": 8}, device_ids=range(8), device_slices=[0] * 8)
TWO_SLICES = MeshLayout(
    axes={"data": 2, "fsdp": 8},
    device_ids=[*range(100_000, 100_008), *range(200_000, 200_008)],
    device_slices=[0] * 8 + [1] * 8,
)
MIB = 2**20


def plan_of(program: str) -> Schedule:
    return schedule(parse_module((FOLDER / f"{program}.txt").read_text(encoding="ascii")))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[2,4]<=[2,2,2]T(1,0,2)", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("[8]<=[8]", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=([[0,2],[1,3]]) {'b'}", [[0, 2], [1, 3]]),
    ],
)
def test_replica_groups(text: str, groups: list[list[int]]) -> None:
    found = [sorted(group) for group in replica_groups(text, 8)]
    assert sorted(found) == groups


def test_unknown_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="no known form"):
        replica_groups("tiles[4]", 8)


def test_pairs_leave_out_who_keeps_its_own() -> None:
    assert pairs("{{0,0},{1,4},{2,1}}") == [(1, 4), (2, 1)]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{1,2}x{0:2}", [[100_000, 200_000], [100_001, 200_001], [100_002, 200_002]]),
        ("{1:3}x{4}", [[100_004, 200_004, 300_004]]),
        ("{{100000,300000},{100001,300001}}", [[100_000, 300_000], [100_001, 300_001]]),
        ("{{100000->300000},{300000->100000}}", [(100_000, 300_000), (300_000, 100_000)]),
    ],
)
def test_groups_across_slices(text: str, groups: list[object]) -> None:
    assert groups_across_slices(text) == groups


@pytest.mark.parametrize(
    ("program", "mesh", "expected"),
    [
        (
            "fsdp_scan",
            LINE,
            {("fsdp", "all-gather"): (6, 6 * 256 * 256 * 2, 6 * 256 * 256 * 2)},
        ),
        # Twelve gathers of 32 MiB; six of them in chains of three fusions each, counted once.
        ("async_chain", LINE, {("fsdp", "all-gather"): (12, 12 * 32 * MIB, 6 * 32 * MIB)}),
        ("tensor_sum", SQUARE, {("tensor", "all-reduce"): (1, 32 * 512 * 2, 32 * 512 * 2)}),
        ("ring", SQUARE, {("tensor", "collective-permute"): (1, 512 * 128 * 2, 0)}),
        ("exchange", SQUARE, {("tensor", "all-to-all"): (1, 512 * 128 * 2, 512 * 128 * 2)}),
        (
            "slices_sum",
            TWO_SLICES,
            {("dcn:data", "all-reduce"): (1, 8192, 0), ("fsdp", "all-reduce"): (1, 8192, 8192)},
        ),
        ("kernel_in_scan", SQUARE, {}),
    ],
)
def test_traffic_of_real_programs(
    program: str, mesh: MeshLayout, expected: dict[tuple[str, str], tuple[int, int, int]]
) -> None:
    found = traffic(collectives(plan_of(program), mesh))
    assert found == {
        key: Traffic(count=count, total_bytes=total, sync_bytes=sync)
        for key, (count, total, sync) in expected.items()
    }


def test_partitions_are_positions_in_the_mesh_not_device_ids() -> None:
    snake = MeshLayout(
        axes={"fsdp": 2, "tensor": 4}, device_ids=[0, 1, 2, 3, 7, 6, 5, 4], device_slices=[0] * 8
    )
    (found,) = collectives(plan_of("tensor_sum"), snake)
    assert (found.axes, found.group_size) == (("tensor",), 4)


STARTS = """HloModule m, num_partitions=8

%gathered (a: bf16[4]) -> bf16[32] {{
  %a = bf16[4] parameter(0)
  ROOT %inner = bf16[32] all-gather(%a), replica_groups={{}}, dimensions={{0}}
}}

ENTRY %e (x: bf16[4], y: bf16[8]) -> bf16[4] {{
  %x = bf16[4] parameter(0)
  %y = bf16[8] parameter(1)
  {instruction}
  ROOT %z = bf16[4] negate(%x)
}}
"""


@pytest.mark.parametrize(
    ("instruction", "kind", "payload_bytes", "is_async"),
    [
        # Operands, then results, then the context.
        (
            "%s = ((bf16[4], bf16[8]), (bf16[32], bf16[64])) all-gather-start(%x, %y), replica_groups={}",
            "all-gather",
            192,
            True,
        ),
        ("%s = (bf16[4], bf16[8]) all-reduce-start(%x, %y), replica_groups={}", "all-reduce", 24, True),
        (
            "%s = bf16[1] reduce-scatter(%y), replica_groups={}, to_apply=%gathered",
            "reduce-scatter",
            16,
            False,
        ),
        (
            "%s = ((bf16[4]), bf16[32], u32[]) async-start(%x), calls=%gathered",
            "all-gather",
            64,
            True,
        ),
        (
            "%s = (bf16[4], bf16[4], u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1}}",
            "collective-permute",
            8,
            True,
        ),
    ],
)
def test_payload_of_each_form(instruction: str, kind: str, payload_bytes: int, is_async: bool) -> None:
    plan = schedule(parse_module(STARTS.format(instruction=instruction)))
    (found,) = collectives(plan, LINE)
    assert (found.kind, found.payload_bytes, found.is_async) == (kind, payload_bytes, is_async)


@pytest.mark.parametrize(
    "instruction",
    [
        "%s = bf16[4] all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}",
        "%s = (bf16[4], bf16[4]) collective-permute-start(%x), source_target_pairs={{0,0},{1,1}}",
        "%s = (bf16[4], bf16[4]) collective-permute-start(%x), source_target_pairs={}",
    ],
)
def test_what_moves_nothing_is_none(instruction: str) -> None:
    assert collectives(schedule(parse_module(STARTS.format(instruction=instruction))), LINE) == []


def test_layers_offloaded_to_the_host_and_read_back() -> None:
    # 6 layers of (1024, 512) bfloat16.
    expected = 6 * 1024 * 512 * 2
    assert host_transfers(plan_of("offload")) == HostTransfers(
        to_host_bytes=expected, from_host_bytes=expected
    )
    assert host_transfers(plan_of("fsdp_scan")) == HostTransfers(to_host_bytes=0, from_host_bytes=0)


@pytest.mark.parametrize(
    ("instruction", "to_host", "from_host"),
    [
        ("%s = bf16[4]{0:S(5)} copy(%x)", 8, 0),
        ("%s = (bf16[4]{0:S(5)}, bf16[4], u32[]) copy-start(%x)", 8, 0),
        ("%h = bf16[4]{0:S(5)} parameter(2)\n  %s = bf16[4] copy(%h)", 0, 8),
        ("%h = bf16[4]{0:S(5)} parameter(2)\n  %s = bf16[2] slice(%h), slice={[0:2]}", 0, 4),
        ("%h = bf16[4]{0:S(5)} parameter(2)\n  %s = bf16[4]{0:S(5)} copy(%h)", 0, 0),
        ("%s = bf16[4]{0:S(1)} copy(%x)", 0, 0),
    ],
)
def test_host_copies(instruction: str, to_host: int, from_host: int) -> None:
    plan = schedule(parse_module(STARTS.format(instruction=instruction)))
    assert host_transfers(plan) == HostTransfers(to_host_bytes=to_host, from_host_bytes=from_host)
