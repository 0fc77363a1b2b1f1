"""What a compiled program costs: cycles weighted by rounds, FLOPs of matmuls, kernels."""

from __future__ import annotations

import pytest

from launcher.preflight.flops import matmul_flops
from launcher.preflight.hlo import Computation, parse_module
from launcher.preflight.schedule import ScheduledCost, schedule, scheduled_cost
from tests.unit.hlo_support import FOLDER


def cost_of(program: str) -> ScheduledCost:
    text = (FOLDER / f"{program}.txt").read_text(encoding="ascii")
    return scheduled_cost(schedule(parse_module(text)))


def computation_of(body: str) -> Computation:
    module = parse_module(f"HloModule m\n\nENTRY %e () -> f32[] {{\n{body}\n}}\n")
    return module.computations[module.entry]


def matmul(lhs: str, rhs: str, out: str, attributes: str, opcode: str = "convolution") -> int:
    computation = computation_of(
        f"  %a = {lhs} parameter(0)\n  %b = {rhs} parameter(1)\n"
        f"  ROOT %c = {out} {opcode}(%a, %b), {attributes}"
    )
    return matmul_flops(computation, computation.root)


@pytest.mark.parametrize(
    ("shapes", "attributes", "multiplications"),
    [
        # A matmul, plain and transposed.
        (("bf16[32,1024]", "bf16[1024,512]", "bf16[32,512]"), "dim_labels=bf_io->bf", 32 * 1024 * 512),
        (("bf16[1024,32]", "bf16[1024,512]", "bf16[512,32]"), "dim_labels=fb_io->fb", 32 * 1024 * 512),
        # Seven images of 10x10 by 3x3, with padding (300 positions less the border) and without.
        (
            ("f32[7,10,5]", "f32[3,5,6]", "f32[7,8,6]"),
            "window={size=3}, dim_labels=b0f_0io->b0f",
            7 * 5 * 6 * 8 * 3,
        ),
        (
            ("f32[7,10,5]", "f32[3,5,6]", "f32[7,10,6]"),
            "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
            7 * 5 * 6 * (8 * 3 + 2 * 2),
        ),
        (
            ("f32[7,10,5]", "f32[3,5,6]", "f32[7,4,6]"),
            "window={size=3 stride=2}, dim_labels=b0f_0io->b0f",
            7 * 5 * 6 * 4 * 3,
        ),
        # Groups: every feature meets its own group only.
        (
            ("f32[7,10,6]", "f32[3,2,9]", "f32[7,8,9]"),
            "window={size=3}, feature_group_count=3, dim_labels=b0f_0io->b0f",
            7 * 6 * 9 * 8 * 3 // 3,
        ),
        # A batch of 8 matmuls as the TPU compiler writes it: dilated until one position is left.
        (
            ("bf16[8,64,32]", "bf16[8,16,32]", "bf16[8,64,16]"),
            "window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0oi->0bf",
            8 * 64 * 32 * 16,
        ),
        # The kernel's rows as a window over the whole input: a sum over two dimensions.
        (
            ("bf16[4,16,32]", "bf16[16,32,8]", "bf16[4,1,8]"),
            "window={size=16}, dim_labels=b0f_0io->b0f",
            4 * 16 * 32 * 8,
        ),
    ],
)
def test_flops_of_convolutions(shapes: tuple[str, str, str], attributes: str, multiplications: int) -> None:
    assert matmul(*shapes, attributes) == 2 * multiplications


def test_flops_of_a_dot() -> None:
    attributes = "lhs_batch_dims={0}, lhs_contracting_dims={2,3}, rhs_contracting_dims={1,2}"
    shapes = ("f32[3,4,5,6]", "f32[3,5,6,7]", "f32[3,4,7]")
    assert matmul(*shapes, attributes, opcode="dot") == 2 * 3 * 4 * 7 * 5 * 6


def test_other_instructions_have_none() -> None:
    assert matmul("f32[8]", "f32[8]", "f32[8]", "x=1", opcode="add") == 0


@pytest.mark.parametrize(
    ("program", "flops"),
    [
        ("tensor_sum", 2 * 32 * 1024 * 512),
        ("fsdp_scan", 6 * 2 * 8 * 256 * 256),
        ("async_chain", 6 * 2 * 2 * 1024 * 4096 * 4096),
        # Forward, forward again, and two backward, but no gradient of the first layer's input.
        ("offload", (6 * 4 - 1) * 2 * 1024 * 512 * 512),
        ("ring", 0),
    ],
)
def test_flops_of_real_programs(program: str, flops: int) -> None:
    assert cost_of(program).matmul_flops == flops


def test_cycles_are_weighted_by_rounds() -> None:
    # 2104 of the matmul, 1832 of a copy and 1921 of a slice, in each of 6 rounds.
    assert cost_of("fsdp_scan").estimated_cycles == 6 * (2104 + 1832 + 1921)
    assert cost_of("tensor_sum").estimated_cycles == 4378


def test_a_kernel_is_listed_once_for_each_place() -> None:
    (kernel,) = cost_of("kernel_in_scan").kernels
    assert (kernel.name, kernel.target) == ("splash_mha_fwd_no_residuals", "tpu_custom_call")
    assert kernel.count == 3
    assert list(map(str, kernel.results)) == ["bf16[2,1024,128]"]
    assert "bf16[2,1024,128]" in map(str, kernel.operands)


def test_buffers_are_no_kernels() -> None:
    text = (FOLDER / "offload.txt").read_text(encoding="ascii")
    assert "AllocateBuffer" in text
    assert cost_of("offload").kernels == ()


BRANCHES = """HloModule m

%cheap (a: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %small = f32[] negate(%a), backend_config={"estimated_cycles":"10"}
}

%dear (a: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %large = f32[] negate(%a), backend_config={"estimated_cycles":"1000"}
}

%beside (a: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %other = f32[] negate(%a), backend_config={"estimated_cycles":"5000"}
}, execution_thread="sparsecore"

ENTRY %e (p: pred[], x: f32[]) -> f32[] {
  %p = pred[] parameter(0)
  %x = f32[] parameter(1)
  %started = ((f32[]), f32[], u32[]) call-start(%x), async_execution_thread="sparsecore", to_apply=%beside
  %done = f32[] call-done(%started)
  %called = f32[] call(%done), to_apply=%cheap
  ROOT %chosen = f32[] conditional(%p, %called, %x), true_computation=%dear, false_computation=%cheap
}
"""


def test_branches_calls_and_other_threads() -> None:
    found = schedule(parse_module(BRANCHES))
    # The dear branch, the call, and nothing of what runs beside.
    assert scheduled_cost(found).estimated_cycles == 1000 + 10
    names = [step.instruction.name for step in found.steps]
    assert names.count("small") == 1
    other = next(step for step in found.steps if step.instruction.name == "other")
    assert (other.is_beside, other.is_async) == (True, True)
