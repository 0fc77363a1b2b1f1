"""What one device executes, in order and how often: the walk over scheduled HLO that all else uses.

Bodies of loops count as often as they run. Of a conditional the costliest branch is taken, because the
slowest device decides. What a fusion calls is part of that one step.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.preflight.flops import matmul_flops
from launcher.preflight.hlo import Array, Computation, Instruction, Module
from launcher.preflight.loops import trips

# Custom calls that are names for buffers and marks for the compiler, not work.
_NO_WORK = {
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "ConcatBitcast",
    "GatherScatterIndicesBitpacked",
    "SliceBitcast",
    "SliceId",
    "ZeroCrop",
}
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_MAIN = (None, '"main"')
_SUFFIX = re.compile(r"(\.\d+|\.clone|\.remat\d*)+$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One scheduled instruction."""

    instruction: Instruction
    computation: Computation
    """Where it stands; its operands are instructions of it."""
    count: int
    """Executions in one run of the program."""
    is_beside: bool
    """Runs on another unit (a sparse core) beside the schedule, which its cycles do not lengthen."""
    is_async: bool
    """Was started by one instruction and is awaited by another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """All steps of a program."""

    module: Module
    steps: Sequence[Step]
    uncounted_loops: Sequence[str]
    """Names of loops whose trips could not be told; their bodies count once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCall:
    """A custom call, of which the compiler estimates nothing: a kernel, for example splash attention."""

    name: str
    """Of the kernel, without the compiler's numbering."""
    target: str
    """``tpu_custom_call`` for Pallas kernels."""
    count: int
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    op_name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledCost:
    """Work of one device in one run. Kernels and collectives are not in the cycles."""

    estimated_cycles: int
    matmul_flops: int
    """Of dot products and convolutions; two for a multiplication with its addition."""
    kernels: Sequence[KernelCall]


def schedule(module: Module) -> Schedule:
    """Walks the program from its entry."""
    walk = _Walk(module)
    steps = tuple(walk.run(module.entry, 1, _State()))
    return Schedule(module=module, steps=steps, uncounted_loops=tuple(walk.uncounted))


def scheduled_cost(plan: Schedule) -> ScheduledCost:
    """Sums up cycles and FLOPs, and lists the kernels."""
    return ScheduledCost(
        estimated_cycles=_cycles(plan.steps),
        matmul_flops=sum(
            step.count * matmul_flops(computation, inner)
            for step in plan.steps
            for computation, inner in instructions_of(plan.module, step)
        ),
        kernels=tuple(_kernels(plan.steps)),
    )


def instructions_of(module: Module, step: Step) -> Iterator[tuple[Computation, Instruction]]:
    """The instruction itself, or those that a fusion is made of."""
    return _unfused(module, step.computation, step.instruction)


def _unfused(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    if instruction.opcode != "fusion":
        yield computation, instruction
        return
    inner = module.computations[instruction.called["calls"][0]]
    for each in inner.instructions.values():
        yield from _unfused(module, inner, each)


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """What a computation inherits from the instruction that runs it."""

    is_beside: bool = False
    is_async: bool = False
    carried: Mapping[int, int] = dataclasses.field(default_factory=dict)


class _Walk:
    """The walk, and the loops that it could not count."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.uncounted: list[str] = []

    def run(self, name: str, count: int, state: _State) -> Iterator[Step]:
        """Everything that ``count`` runs of a computation execute."""
        computation = self.module.computations[name]
        for each in computation.instructions.values():
            step = Step(
                instruction=each,
                computation=computation,
                count=count,
                is_beside=state.is_beside,
                is_async=state.is_async,
            )
            yield step
            if each.opcode == "while":
                yield from self._loop(step, state)
            elif each.opcode in ("call", "call-start", "async-start"):
                inner = _State(
                    is_beside=state.is_beside or each.attribute("async_execution_thread") not in _MAIN,
                    is_async=state.is_async or each.opcode != "call",
                )
                for called in each.computations:
                    yield from self.run(called, count, inner)
            elif each.opcode == "conditional":
                inner = dataclasses.replace(state, carried={})
                branches = [list(self.run(branch, count, inner)) for branch in each.computations]
                yield from max(branches, key=_cycles)

    def _loop(self, step: Step, state: _State) -> Iterator[Step]:
        loop = step.instruction
        found = trips(self.module, step.computation, loop, state.carried)
        if found.count is None:
            self.uncounted.append(loop.name)
        rounds = step.count * (1 if found.count is None else found.count)
        inner = dataclasses.replace(state, carried=found.carried)
        yield from self.run(loop.called["body"][0], rounds, inner)


def _cycles(steps: Sequence[Step]) -> int:
    return sum(step.count * (step.instruction.estimated_cycles or 0) for step in steps if not step.is_beside)


def _kernels(steps: Sequence[Step]) -> Iterator[KernelCall]:
    for step in steps:
        each = step.instruction
        found = _TARGET.search(each.attributes) if each.opcode == "custom-call" else None
        if found is not None and found[1] not in _NO_WORK:
            operands = step.computation.operands(each)
            yield KernelCall(
                name=_SUFFIX.sub("", each.name),
                target=found[1],
                count=step.count,
                operands=tuple(array for operand in operands for array in operand.arrays),
                results=each.arrays,
                op_name=each.op_name,
            )
