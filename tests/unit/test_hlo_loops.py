"""How often loops go round: constant bounds of two types, steps, carried bounds, peeled rounds, nesting."""

from __future__ import annotations

import pytest

from launcher.preflight.hlo import Module, parse_module
from launcher.preflight.loops import trips
from launcher.preflight.schedule import schedule
from tests.unit.hlo_support import FOLDER


def loop_text(
    *,
    kind: str = "s32",
    start: str = "constant(0)",
    step: str = "add(%i, %one)",
    one: int = 1,
    bound: str = "constant(6)",
    condition: str = "compare(%i, %n), direction=LT",
    attributes: str = "",
) -> str:
    """A loop over (counter, a bound that never changes)."""
    carried = f"({kind}[], {kind}[])"
    return f"""HloModule m

%body (p: {carried}) -> {carried} {{
  %p = {carried} parameter(0)
  %i = {kind}[] get-tuple-element(%p), index=0
  %bound = {kind}[] get-tuple-element(%p), index=1
  %one = {kind}[] constant({one})
  %next = {kind}[] {step}
  ROOT %t = {carried} tuple(%next, %bound)
}}

%condition (p: {carried}) -> pred[] {{
  %p = {carried} parameter(0)
  %n = {kind}[] {bound}
  %i = {kind}[] get-tuple-element(%p), index=0
  ROOT %c = pred[] {condition}
}}

ENTRY %e (x: {kind}[]) -> {carried} {{
  %x = {kind}[] parameter(0)
  %three = {kind}[] constant(3)
  %start = {kind}[] {start}
  %copied = {kind}[] copy(%start)
  %init = {carried} tuple(%copied, %three)
  ROOT %loop = {carried} while(%init), condition=%condition, body=%body{attributes}
}}
"""


DOWN = {"start": "constant(5)", "condition": "compare(%i, %n), direction=GT"}


def count(module: Module) -> int | None:
    entry = module.computations[module.entry]
    return trips(module, entry, entry.root, {}).count


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 6),
        ({"kind": "u32"}, 6),
        ({"one": 2}, 3),
        ({"one": 4}, 2),
        ({"start": "constant(1)"}, 5),
        ({"start": "constant(7)"}, 0),
        ({"condition": "compare(%i, %n), direction=LE"}, 7),
        ({"condition": "compare(%n, %i), direction=GT"}, 6),
        ({"condition": "compare(%i, %n), direction=NE"}, 6),
        (DOWN | {"one": -1, "bound": "constant(0)", "condition": "compare(%i, %n), direction=GE"}, 6),
        (DOWN | {"step": "subtract(%i, %one)", "bound": "constant(1)"}, 4),
        # The bound may be carried, if it never changes; the start may be unknown, and is then taken for 0.
        ({"bound": "get-tuple-element(%p), index=1"}, 3),
        ({"start": "negate(%x)"}, 6),
        ({"attributes": ', backend_config={"known_trip_count":{"n":"9"}}'}, 9),
        ({"step": "multiply(%i, %one)"}, None),
        ({"one": 0}, None),
        ({"bound": "negate(%i)"}, None),
        ({"condition": "compare(%i, %n), direction=GT"}, None),
        ({"condition": "constant(true)"}, None),
    ],
)  # fmt: skip
def test_rounds(changes: dict[str, str], expected: int | None) -> None:
    assert count(parse_module(loop_text(**changes))) == expected  # type: ignore[arg-type]


def test_a_comparison_and_a_step_inside_fusions() -> None:
    text = loop_text(
        condition="fusion(%n, %i), kind=kLoop, calls=%compared", step="fusion(%i), calls=%stepped"
    )
    inner = """
%compared (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = pred[] compare(%b, %a), direction=LT
}

%stepped (a: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %two = s32[] constant(2)
  ROOT %c = s32[] add(%two, %a)
}
"""
    assert count(parse_module(text.replace("\n\n%body", f"\n{inner}\n%body"))) == 3


@pytest.mark.parametrize(
    ("program", "rounds"),
    [
        # 6 layers; where the backward pass reads from the host the compiler peels a round off.
        ("fsdp_scan", [6]),
        ("async_chain", [6]),
        ("offload", [5, 5]),
        ("kernel_in_scan", [3]),
    ],
)
def test_loops_of_real_programs(program: str, rounds: list[int]) -> None:
    module = parse_module((FOLDER / f"{program}.txt").read_text(encoding="ascii"))
    entry = module.computations[module.entry]
    loops = [each for each in entry.instructions.values() if each.opcode == "while"]
    assert [trips(module, entry, loop, {}).count for loop in loops] == rounds
    assert schedule(module).uncounted_loops == ()


def nested_text() -> str:
    """An inner loop whose bound the outer one carries: 4 rounds of 3."""
    inner = loop_text(bound="get-tuple-element(%p), index=1")
    head, _, entry = inner.partition("ENTRY")
    del entry
    carried = "(s32[], s32[])"
    return f"""{head}
%outer_body (q: {carried}) -> {carried} {{
  %q = {carried} parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %limit = s32[] get-tuple-element(%q), index=1
  %zero = s32[] constant(0)
  %init = {carried} tuple(%zero, %limit)
  %inner = {carried} while(%init), condition=%condition, body=%body
  %kept = s32[] get-tuple-element(%inner), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%j, %one)
  ROOT %t = {carried} tuple(%next, %kept)
}}

%outer_condition (q: {carried}) -> pred[] {{
  %q = {carried} parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %four = s32[] constant(4)
  ROOT %c = pred[] compare(%j, %four), direction=LT
}}

ENTRY %e () -> {carried} {{
  %zero = s32[] constant(0)
  %three = s32[] constant(3)
  %init = {carried} tuple(%zero, %three)
  ROOT %loop = {carried} while(%init), condition=%outer_condition, body=%outer_body
}}
"""


def test_rounds_multiply_and_known_values_are_handed_inwards() -> None:
    steps = schedule(parse_module(nested_text())).steps
    counts = {step.instruction.name: step.count for step in steps if step.computation.name == "body"}
    assert set(counts.values()) == {12}


def test_a_loop_without_a_count_counts_once_and_is_named() -> None:
    found = schedule(parse_module(loop_text(step="multiply(%i, %one)")))
    assert found.uncounted_loops == ("loop",)
    assert {step.count for step in found.steps} == {1}
