"""A scheduled program as a list of timed things: what its time is made of, without the times themselves.

Read once, timed often: `launcher/preflight/timeline.py` walks it under the rates of a generation. Each
operation keeps what its time depends on: the compiler's cycles, bytes, FLOPs of a kernel, or who exchanges
how much over which links. What runs beside the TensorCore is a start, and later a wait for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from launcher.preflight.collectives import (
    Collective,
    Naming,
    Part,
    axes_label,
    chain_of,
    collectives_in,
    ends_chain,
    host_transfers_in,
    rendezvous,
)
from launcher.preflight.flops import matmul_flops
from launcher.preflight.groups import MeshLayout
from launcher.preflight.hlo import HOST_MEMORY_SPACE, Computation, Instruction, Module
from launcher.preflight.kernels import Kernel, kernel_of
from launcher.preflight.loops import trips
from launcher.preflight.schedule import Step, instructions_of
from launcher.preflight.torus import Link, Torus

type Lane = Literal["core", "ici", "dcn", "host", "hbm"]
"""What an operation occupies: the TensorCore, the links of a slice, the network between slices, the bus to
the host's memory, or the copy engine of HBM."""

_NO_TIME = {
    *("add-dependency", "after-all", "async-update", "bitcast", "call-update", "constant"),
    *("get-tuple-element", "opt-barrier", "optimization-barrier", "parameter", "partition-id"),
    *("recv", "replica-id", "send-done", "tuple"),
}
_SAME_START = {"async-update", "call-update", "get-tuple-element", "bitcast"}
_SMALL_BYTES = 2**16
"""What is smaller stays in vector and scalar memory, and takes no time that counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One thing that takes time, or a wait for one."""

    name: str
    category: str
    """As the breakdown of a step shows it: ``matmul``, ``elementwise``, ``attention``, ``all-gather``."""
    lane: Lane = "core"
    is_start: bool = False
    """The TensorCore goes on meanwhile."""
    awaits: str = ""
    """Name of the start that this waits for."""
    cycles: int = 0
    """By the compiler."""
    flops: int = 0
    """Of matmuls of which the compiler said nothing."""
    size_bytes: int = 0
    """Read and written, or moved, by one device."""
    kernel: Kernel | None = None
    link: Link | None = None
    """Of a collective inside a slice."""
    group_size: int = 1
    axes: str = ""
    """Mesh axes of a collective, as :func:`launcher.preflight.collectives.axes_label`."""
    body: Sequence[Op] = ()
    """Of a loop."""
    rounds: int = 1
    source: str = ""
    """Where in the program it comes from."""


def program_of(module: Module, mesh: MeshLayout, torus: Torus) -> Sequence[Op]:
    """The operations of one run in the order of the schedule, those of loops inside of them.

    Raises:
      ValueError: a collective names its groups in no form that is known.
    """
    return tuple(_Reader(module, mesh, torus).read(module.entry, {}))


@dataclass(kw_only=True, slots=True)
class _Scope:
    """One computation while it is read."""

    computation: Computation
    carried: Mapping[int, int]
    chains: dict[str, str] = field(default_factory=dict)
    """Name of the start of each chain of fusions, by its number."""
    sends: dict[str, str] = field(default_factory=dict)
    """Name of the send across slices, by where it meets its receive."""


class _Reader:
    def __init__(self, module: Module, mesh: MeshLayout, torus: Torus) -> None:
        self._module, self._torus = module, torus
        self._naming = Naming(mesh, module.num_partitions)

    def read(self, name: str, carried: Mapping[int, int]) -> Iterator[Op]:
        scope = _Scope(computation=self._module.computations[name], carried=carried)
        for each in scope.computation.instructions.values():
            if each.opcode not in _NO_TIME:
                yield from self._ops(scope, each)

    def _ops(self, scope: _Scope, each: Instruction) -> Iterator[Op]:
        match each.opcode:
            case "while":
                yield self._loop(scope, each)
            case "call":
                yield from self.read(each.computations[0], {})
            case "conditional":
                branches = [list(self.read(name, {})) for name in each.computations]
                yield from max(branches, key=lambda ops: sum(op.cycles for op in ops))
            case "call-start" | "async-start":
                yield self._beside(each)
            case "recv-done":
                start = scope.computation.operands(each)[0]
                yield _wait(each, scope.sends.get(rendezvous(start) or "", ""))
            case opcode if opcode.endswith("-done"):
                yield _wait(each, _start_of(scope.computation, each))
            case _:
                yield from self._work(scope, each)

    def _loop(self, scope: _Scope, loop: Instruction) -> Op:
        found = trips(self._module, scope.computation, loop, scope.carried)
        body = tuple(self.read(loop.called["body"][0], found.carried))
        return Op(
            name=loop.name, category="loop", body=body, rounds=1 if found.count is None else found.count
        )

    def _beside(self, start: Instruction) -> Op:
        """What another unit (a sparse core) runs, or an operation that was made asynchronous."""
        inner = [op for name in start.computations for op in self.read(name, {})]
        moving = [op for op in inner if op.lane in ("ici", "dcn", "host")]
        if moving:
            return dataclasses.replace(moving[0], name=start.name, is_start=True)
        size = sum(op.size_bytes for op in inner)
        return Op(name=start.name, category="sparse core", lane="hbm", is_start=True, size_bytes=size)

    def _work(self, scope: _Scope, each: Instruction) -> Iterator[Op]:
        step = Step(instruction=each, computation=scope.computation, count=1, is_beside=False, is_async=False)
        inner = list(instructions_of(self._module, step))
        chain = chain_of(inner)
        if chain is not None and ends_chain(inner):
            yield _wait(each, scope.chains.get(chain, ""))
            return
        found = list(collectives_in(step, inner, self._naming))
        for collective in found:
            op = self._exchange(each, collective, inner)
            if chain is not None:
                scope.chains[chain] = op.name
            if op.lane == "dcn":
                scope.sends[rendezvous(each) or ""] = op.name
            yield op
        if each.estimated_cycles is not None or not found:
            yield from _other(scope.computation, each, inner)

    def _exchange(self, each: Instruction, collective: Collective, inner: Sequence[Part]) -> Op:
        kind = collective.kind
        # An all-reduce of which only a slice is kept is a reduce-scatter to this compiler.
        if kind == "all-reduce" and any(part.opcode == "dynamic-slice" for _, part in inner):
            kind = "reduce-scatter"
        return Op(
            name=each.name,
            category=kind,
            lane="dcn" if collective.is_dcn else "ici",
            is_start=collective.is_async,
            size_bytes=collective.payload_bytes,
            link=None if collective.is_dcn else self._torus.link(collective.group),
            group_size=collective.group_size,
            axes=axes_label(collective),
            source=collective.op_name,
        )


def _wait(done: Instruction, start: str) -> Op:
    return Op(name=done.name, category="wait", awaits=start)


def _start_of(computation: Computation, done: Instruction) -> str:
    """The start that a done belongs to, through what only passes it on."""
    name = done.operands[0] if done.operands else ""
    while (found := computation.instructions.get(name)) is not None and found.opcode in _SAME_START:
        name = found.operands[0]
    return name


def _other(computation: Computation, each: Instruction, inner: Sequence[Part]) -> Iterator[Op]:
    """What is no exchange: work of the TensorCore, a copy, or a transfer from or to the host."""
    moved = host_transfers_in(inner)
    is_start = each.opcode.endswith("-start")
    if moved.to_host_bytes or moved.from_host_bytes:
        category = "to host" if moved.to_host_bytes else "from host"
        size = moved.to_host_bytes + moved.from_host_bytes
        yield Op(
            name=each.name,
            category=category,
            lane="host",
            is_start=is_start,
            size_bytes=size,
            source=each.op_name,
        )
    elif is_start:
        size = each.arrays[0].size_bytes if each.arrays else 0
        yield Op(name=each.name, category="copy", lane="hbm", is_start=True, size_bytes=size)
    else:
        yield from _computed(computation, each, inner)


def _computed(computation: Computation, each: Instruction, inner: Sequence[Part]) -> Iterator[Op]:
    arrays = [array for operand in computation.operands(each) for array in operand.arrays]
    kernel = kernel_of(each, arrays) if each.opcode == "custom-call" else None
    size = 0
    if each.estimated_cycles is None and each.opcode != "custom-call":
        touched = [array for array in (*arrays, *each.arrays) if array.memory_space != HOST_MEMORY_SPACE]
        size = sum(array.size_bytes for array in touched)
        # Of a slice only the slice moves, in place.
        if each.opcode in ("dynamic-update-slice", "dynamic-slice"):
            size = 2 * min((array.size_bytes for array in touched if array.dims), default=0)
    if kernel or each.estimated_cycles or size > _SMALL_BYTES:
        yield Op(
            name=each.name,
            category=kernel.category if kernel else _category(each, inner),
            cycles=each.estimated_cycles or 0,
            size_bytes=size,
            kernel=kernel,
            source=each.op_name,
        )


def _category(each: Instruction, inner: Sequence[Part]) -> str:
    if any(matmul_flops(computation, part) for computation, part in inner):
        return "matmul"
    return "copy" if each.opcode in ("copy", "slice", "reshape", "transpose") else "elementwise"
