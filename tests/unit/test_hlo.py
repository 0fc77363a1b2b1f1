"""Reading scheduled HLO: shapes, instructions, modules, and the traps of the compiler's text."""

from __future__ import annotations

import pytest

from launcher.preflight.hlo import parse_arrays, parse_instruction, parse_module
from tests.unit.hlo_support import FOLDER


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16[8,256]{1,0:T(8,128)(2,1)}", [("bf16[8,256]", 4096, 0)]),
        ("bf16[6,32]{1,0:T(8,128)(2,1)S(5)}", [("bf16[6,32]", 384, 5)]),
        ("s32[]{:T(128)S(6)}", [("s32[]", 4, 6)]),
        ("pred[3]{0}", [("pred[3]", 3, 0)]),
        ("f8e4m3fn[10]{0:T(128)(4,1)}", [("f8e4m3fn[10]", 10, 0)]),
        ("s4[5]{0}", [("s4[5]", 3, 0)]),
        ("token[]", [("token[]", 0, 0)]),
        ("f32[<=4,2]{1,0}", [("f32[4,2]", 32, 0)]),
        (
            "((f32[2]{0}, s32[]), bf16[4]{0:T(256)S(1)}, /*index=5*/u32[]{:S(2)})",
            [("f32[2]", 8, 0), ("s32[]", 4, 0), ("bf16[4]", 8, 1), ("u32[]", 4, 2)],
        ),
    ],
)
def test_arrays_of_a_shape(text: str, expected: list[tuple[str, int, int]]) -> None:
    found = [(str(array), array.size_bytes, array.memory_space) for array in parse_arrays(text)]
    assert found == expected


def test_every_part_of_an_instruction() -> None:
    is_root, found = parse_instruction(
        "  ROOT %fusion.9 = (f32[4]{0:T(128)}, /*index=1*/s32[]) fusion(%a.1, /*index=1*/%b-start),"
        " kind=kOutput, output_to_operand_aliasing={{0}: (0, {})}, calls=%fused.2,"
        ' metadata={op_name="jit(step)/while, body=%no/\\"dot\\"" stack_frame_id=5},'
        ' backend_config={"window_config":{"estimated_cycles":"5170"}}'
    )
    assert is_root
    assert (found.name, found.opcode, found.operands) == ("fusion.9", "fusion", ("a.1", "b-start"))
    assert list(map(str, found.arrays)) == ["f32[4]", "s32[]"]
    assert found.attribute("kind") == "kOutput"
    assert found.attribute("output_to_operand_aliasing") == "{{0}: (0, {})}"
    assert found.attribute("nosuch") is None
    assert found.op_name == 'jit(step)/while, body=%no/\\"dot\\"'
    assert found.estimated_cycles == 5170


@pytest.mark.parametrize(
    ("attributes", "roles"),
    [
        ("condition=%c.1, body=%b.2", {"condition": ("c.1",), "body": ("b.2",)}),
        ("branch_computations={%x, %y}", {"branch_computations": ("x", "y")}),
        ("channel_id=1, to_apply=%add", {"to_apply": ("add",)}),
        ('metadata={op_name="f(x, calls=%g)"}, dimensions={0}', {}),
    ],
)
def test_called_computations(attributes: str, roles: dict[str, tuple[str, ...]]) -> None:
    _, found = parse_instruction(f"  %x = f32[] while(%y), {attributes}")
    assert found.called == roles


@pytest.mark.parametrize("attribute", ["replica_groups", "source_target_pairs"])
@pytest.mark.parametrize(
    "value",
    [
        "{{0,1},{2,3}}",
        "[2,4]<=[8]",
        "[4,16]<=[16,4]T(1,0)",
        "mesh['fsdp'=2,'tensor'=4] {'tensor'}",
        "mesh['a'=2,'b'=2], device_ids=([[0,2],[1,3]]) {'a','b'}",
        "{}",
    ],
)
def test_attributes_that_hold_groups_are_read_whole(attribute: str, value: str) -> None:
    _, found = parse_instruction(
        f"  %x = f32[8]{{0}} all-gather(%y), channel_id=1, {attribute}={value}, a={{0}}"
    )
    assert found.attribute(attribute) == value


def test_the_largest_integer_means_unknown_cycles() -> None:
    _, found = parse_instruction(
        '  %g = f32[] fusion(%x), backend_config={"estimated_cycles":"9223372036854775807"}'
    )
    assert found.estimated_cycles is None


def test_a_module_by_computation() -> None:
    module = parse_module((FOLDER / "fsdp_scan.txt").read_text(encoding="ascii"))
    assert module.entry == "main.3_spmd"
    assert module.num_partitions == 8
    entry = module.computations[module.entry]
    assert entry.root.opcode == "copy-done"
    loop = next(each for each in entry.instructions.values() if each.opcode == "while")
    assert set(loop.computations) <= set(module.computations)
    assert [each.opcode for each in entry.operands(loop)] == ["tuple"]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_every_name_in_a_real_program_is_known(path: object) -> None:
    module = parse_module((FOLDER / str(path)).read_text(encoding="ascii"))
    for computation in module.computations.values():
        for each in computation.instructions.values():
            assert set(each.operands) <= set(computation.instructions)
            assert set(each.computations) <= set(module.computations)


def test_an_attribute_may_span_lines_and_close_in_column_0() -> None:
    text = (FOLDER / "kernel_in_scan.txt").read_text(encoding="ascii")
    assert "\n}}, metadata=" in text
    module = parse_module(text)
    kernel = next(
        each
        for computation in module.computations.values()
        for each in computation.instructions.values()
        if each.attribute("custom_call_target") == '"tpu_custom_call"'
    )
    assert kernel.op_name.endswith("splash_mha_fwd_no_residuals/pallas_call")


def test_a_brace_alone_in_an_attribute_does_not_end_the_computation() -> None:
    module = parse_module(
        "HloModule m, num_partitions=2\n\nENTRY %e (x: f32[]) -> f32[] {\n"
        '  %x = f32[] parameter(0), frontend_attributes={a={\n"b":"}"\n}\n}\n'
        "  ROOT %y = f32[] negate(%x)\n}\n"
    )
    assert list(module.computations["e"].instructions) == ["x", "y"]


def test_a_computation_of_another_thread_ends_with_its_thread() -> None:
    module = parse_module(
        "HloModule m\n\n%c (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n"
        '}, execution_thread="sparsecore"\n\nENTRY %e (x: f32[]) -> f32[] {\n'
        "  ROOT %x = f32[] parameter(0)\n}\n"
    )
    assert set(module.computations) == {"c", "e"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no ENTRY"),
        ("not HLO at all\n}", "no ENTRY"),
        ("ENTRY %e () -> f32[] {\n}\n", "no instructions"),
        ("ENTRY %e () -> f32[] {\n  %x = f32[] \n}\n", "no opcode"),
    ],
)
def test_other_text_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_module(text)
