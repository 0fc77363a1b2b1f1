"""What is in use at the peak of a scheduled program, worked out by hand; sizes in KiB."""

from __future__ import annotations

import pytest

from launcher.preflight.buffers import Peak, peak_of
from launcher.preflight.hlo import parse_module

KIB = 2**10
# f32[1024] is 4 KiB. The loop's body holds two of its own beside what it carries.
MODULE = """\
HloModule step, is_scheduled=true, num_partitions=1

%add.1 (a: f32[1024], b: f32[1024]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  %b = f32[1024]{0} parameter(1)
  ROOT %sum = f32[1024]{0} add(%a, %b)
}

%body (carried: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %carried = (s32[], f32[1024]{0}) parameter(0)
  %i = s32[] get-tuple-element(%carried), index=0
  %x = f32[1024]{0} get-tuple-element(%carried), index=1
  %first = f32[1024]{0} custom-call(%x), custom_call_target="make"
  %second = f32[1024]{0} custom-call(%first), custom_call_target="make", metadata={op_name="jit(f)/second"}
  %update = f32[1024]{0} dynamic-update-slice(%x, %second, %i)
  ROOT %out = (s32[], f32[1024]{0}) tuple(%i, %update)
}

%cond (carried.1: (s32[], f32[1024])) -> pred[] {
  %carried.1 = (s32[], f32[1024]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (p: f32[1024], q: f32[1024]) -> f32[1024] {
  %p = f32[1024]{0} parameter(0)
  %q = f32[1024]{0} parameter(1), metadata={op_name="batch"}
  %zero = s32[] constant(0)
  %made = f32[1024]{0} custom-call(%p), custom_call_target="make"
  %moved = f32[2048]{0:S(5)} custom-call(%p), custom_call_target="host"
  %start = (s32[], f32[1024]{0}) tuple(%zero, %made)
  %loop = (s32[], f32[1024]{0}) while(%start), condition=%cond, body=%body
  %result = f32[1024]{0} get-tuple-element(%loop), index=1
  %far-start = (f32[1024]{0}, f32[1024]{0}, u32[]) copy-start(%q)
  %far-done = f32[1024]{0} copy-done(%far-start)
  ROOT %total = f32[1024]{0} fusion(%result, %far-done), kind=kLoop, calls=%add.1
}
"""


@pytest.fixture
def peak() -> Peak:
    return peak_of(parse_module(MODULE))


def test_the_peak_is_in_the_loop(peak: Peak) -> None:
    assert peak.at == "loop > second"
    # q waits, made is carried, and two are the body's own; p is used up. Scalars come to 4 bytes.
    assert peak.size_bytes == pytest.approx(4 * 4 * KIB, abs=16)


def test_buffers_say_what_they_are(peak: Peak) -> None:
    whole = [(buffer.name, buffer.size_bytes // KIB, buffer.is_argument) for buffer in peak.buffers]
    assert whole[:4] == [("q", 4, True), ("made", 4, False), ("first", 4, False), ("second", 4, False)]
    assert peak.buffers[0].op_name == "batch"
    assert peak.buffers[3].op_name == "jit(f)/second"
    assert peak.buffers[0].shape == "f32[1024]"


def test_what_is_in_the_hosts_memory_does_not_count(peak: Peak) -> None:
    assert "moved" not in {buffer.name for buffer in peak.buffers}


@pytest.mark.parametrize(("kind", "kib"), [("kLoop", 12), ("kOutput", 16)])
def test_an_elementwise_result_takes_the_place_of_operands_that_end(kind: str, kib: int) -> None:
    entry = (
        MODULE[: MODULE.index("ENTRY")]
        + f"""\
ENTRY %main (p: f32[1024]) -> f32[1024] {{
  %p = f32[1024]{{0}} parameter(0)
  %one = f32[1024]{{0}} custom-call(%p), custom_call_target="make"
  %two = f32[1024]{{0}} custom-call(%p), custom_call_target="make"
  ROOT %sum.1 = f32[1024]{{0}} fusion(%one, %two, %p), kind={kind}, calls=%add.1
}}
"""
    )
    assert peak_of(parse_module(entry)).size_bytes == kib * KIB


def test_elements_of_a_result_end_on_their_own_and_a_start_holds_its_operands() -> None:
    entry = """\
HloModule step, is_scheduled=true, num_partitions=1

ENTRY %main (p: f32[1024]) -> f32[1024] {
  %p = f32[1024]{0} parameter(0)
  %both = (f32[1024]{0}, f32[2048]{0}) custom-call(%p), custom_call_target="make"
  %large = f32[2048]{0} get-tuple-element(%both), index=1
  %small = f32[1024]{0} get-tuple-element(%both), index=0
  %start = ((f32[2048]{0}), f32[512]{0}, u32[]) slice-start(%large)
  %made = f32[3072]{0} custom-call(%small), custom_call_target="make"
  %done = f32[512]{0} slice-done(%start)
  %made.1 = f32[4096]{0} custom-call(%done, %made), custom_call_target="make"
  ROOT %end = f32[1024]{0} custom-call(%made.1), custom_call_target="make"
}
"""
    peak = peak_of(parse_module(entry))
    assert peak.at == "made.1"
    # 16 of its own, 12 of what it reads, 2 of the slice: large and small are over.
    assert peak.size_bytes == pytest.approx(30 * KIB, abs=16)
    beside = peak_of(parse_module(entry.replace("f32[4096]{0} custom", "f32[256]{0} custom")))
    assert beside.at == "made"
    assert beside.size_bytes == pytest.approx((8 + 4 + 2 + 12) * KIB, abs=16)
