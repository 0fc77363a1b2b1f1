"""Which buffers fill the HBM of a device when most of it is in use, and which operation made each.

Read from the scheduled program: a value lives from the instruction that makes it to the last one that
uses it. What the compiler does in place is guessed (updates of slices, elementwise results over operands that
end with them), so the peak is some percent off the compiler's own; docs/compiled.md has the figures.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.preflight.hlo import Array, Computation, Instruction, Module

# Results that are (parts of) their operands, or take their place.
_SAME_BUFFER = {"add-dependency", "async-update", "bitcast", "optimization-barrier", "while"}
_ELEMENTWISE_FUSION = "kind=kLoop"
_ELEMENTWISE = {"add", "all-reduce", "divide", "maximum", "multiply", "negate", "select", "subtract"}
_HBM = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One buffer that is alive at the peak."""

    name: str
    """Of the instruction that makes it, or of the argument."""
    shape: str
    size_bytes: int
    op_name: str
    """Where in the program it comes from."""
    is_argument: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The moment with most in use."""

    size_bytes: int
    at: str
    """Name of the instruction, those of the loops around it before it."""
    buffers: Sequence[Buffer]
    """All of them, largest first."""


def peak_of(module: Module) -> Peak:
    """Of the whole program, arguments included."""
    found = _Walk(module).peak(module.computations[module.entry], is_entry=True)
    buffers = sorted(found.buffers, key=lambda buffer: buffer.size_bytes, reverse=True)
    return Peak(size_bytes=found.size_bytes, at=found.at, buffers=buffers)


class _Walk:
    def __init__(self, module: Module) -> None:
        self.module = module
        self._known: dict[str, Peak] = {}

    def peak(self, computation: Computation, *, is_entry: bool = False) -> Peak:
        """The peak of what one computation holds itself; its parameters belong to the caller."""
        if computation.name not in self._known:
            self._known[computation.name] = self._peak(computation, is_entry=is_entry)
        return self._known[computation.name]

    def _peak(self, computation: Computation, *, is_entry: bool) -> Peak:
        values = _Values(computation, is_entry=is_entry)
        best = Peak(size_bytes=0, at="", buffers=())
        for instruction in computation.instructions.values():
            values.make(instruction)
            inner = max(
                (self.peak(self.module.computations[name]) for name in _runs(instruction)),
                key=lambda peak: peak.size_bytes,
                default=None,
            )
            size_bytes = values.live_bytes + (inner.size_bytes if inner else 0)
            if size_bytes > best.size_bytes:
                at = instruction.name + (f" > {inner.at}" if inner and inner.at else "")
                buffers = (*values.live(), *(inner.buffers if inner else ()))
                best = Peak(size_bytes=size_bytes, at=at, buffers=buffers)
            values.end(instruction)
        return best


def _runs(instruction: Instruction) -> Iterator[str]:
    """Computations whose own buffers are alive while the instruction runs."""
    if instruction.opcode == "while":
        yield instruction.called["body"][0]
    elif instruction.opcode in ("call", "conditional", "async-start", "call-start"):
        yield from instruction.computations


Leaf = tuple[str, int]
"""One array of the result of the instruction so called: what a buffer is known by."""
Value = tuple[frozenset[Leaf], ...]
"""For each leaf of a result the buffers that it may be in; none of those that belong to the caller."""


class _Values:
    """The buffers of one computation while it is walked through."""

    def __init__(self, computation: Computation, *, is_entry: bool) -> None:
        self._computation = computation
        self._values = _values(computation, is_entry=is_entry)
        self._ends = _last_uses(computation, self._values)
        self._live: dict[Leaf, int] = {}
        self.live_bytes = 0

    def make(self, instruction: Instruction) -> None:
        own = self._own(instruction)
        if own and _is_elementwise(instruction):
            self._write_over_operands(instruction, collections.Counter(own.values()))
        self._live |= own
        self.live_bytes += sum(own.values())

    def end(self, instruction: Instruction) -> None:
        for leaf in self._ends.get(instruction.name, ()):
            self._free(leaf)

    def live(self) -> Iterator[Buffer]:
        for (name, number), size_bytes in self._live.items():
            made_by = self._computation.instructions[name]
            if size_bytes > 0:
                yield Buffer(
                    name=name,
                    shape=str(made_by.arrays[number]),
                    size_bytes=size_bytes,
                    op_name=made_by.op_name,
                    is_argument=made_by.opcode == "parameter",
                )

    def _own(self, instruction: Instruction) -> dict[Leaf, int]:
        """The buffers that it makes, with their sizes."""
        leaves = frozenset().union(*self._values[instruction.name])
        return {
            leaf: _hbm_bytes(instruction.arrays[leaf[1]]) for leaf in leaves if leaf[0] == instruction.name
        }

    def _free(self, leaf: Leaf) -> None:
        self.live_bytes -= self._live.pop(leaf, 0)

    def _write_over_operands(self, instruction: Instruction, results: collections.Counter[int]) -> None:
        """An elementwise operation leaves its results where operands were that end with it."""
        for leaf in self._ends.get(instruction.name, ()):
            size_bytes = self._live.get(leaf, 0)
            if results[size_bytes] > 0:
                results[size_bytes] -= 1
                self._free(leaf)


def _values(computation: Computation, *, is_entry: bool) -> Mapping[str, Value]:
    """What every instruction of a computation results in."""
    values: dict[str, Value] = {}
    for each in computation.instructions.values():
        operands = [values.get(name, ()) for name in each.operands]
        if each.opcode == "parameter" and not is_entry:
            values[each.name] = _no_buffers(len(each.arrays))
        elif each.opcode == "get-tuple-element":
            values[each.name] = _element(each, operands[0])
        elif each.opcode == "tuple":
            values[each.name] = tuple(leaf for operand in operands for leaf in operand)
        elif each.opcode == "dynamic-update-slice":
            values[each.name] = operands[0]
        elif each.opcode.endswith("-start") and each.opcode != "all-reduce-start":
            values[each.name] = _started(each, operands)
        elif each.opcode.endswith("-done"):
            values[each.name] = _done(each, operands)
        elif _is_same_buffer(each):
            values[each.name] = _same(each, operands)
        else:
            values[each.name] = _made(each)
    return values


def _element(each: Instruction, operand: Value) -> Value:
    index = int(each.attribute("index") or 0)
    # Of a nested tuple the place of an element is unknown, so it may be in any of its buffers.
    return (operand[index],) if len(each.arrays) == 1 and index < len(operand) else _same(each, [operand])


def _same(each: Instruction, operands: Sequence[Value]) -> Value:
    if len(operands) == 1 and len(operands[0]) == len(each.arrays):
        return operands[0]
    everything = frozenset().union(*(leaf for operand in operands for leaf in operand))
    return (everything,) * len(each.arrays)


def _started(each: Instruction, operands: Sequence[Value]) -> Value:
    """A start holds its operands until it is done, and makes a result and a context."""
    inputs = [leaf for operand in operands for leaf in operand]
    if each.opcode == "copy-start":
        return (frozenset(((each.name, 0),)), *inputs, *_no_buffers(len(each.arrays) - 1 - len(inputs)))
    made = (frozenset(((each.name, number),)) for number in range(len(inputs), len(each.arrays)))
    return (*inputs, *made)


def _done(each: Instruction, operands: Sequence[Value]) -> Value:
    """What the start made, without the operands that it held."""
    everything = frozenset().union(*(leaf for operand in operands for leaf in operand))
    result = frozenset(leaf for leaf in everything if leaf[0] in each.operands)
    return (result or everything,) * len(each.arrays)


def _made(each: Instruction) -> Value:
    return tuple(frozenset(((each.name, number),)) for number in range(len(each.arrays)))


def _no_buffers(count: int) -> Value:
    return (frozenset[Leaf](),) * count


def _last_uses(computation: Computation, values: Mapping[str, Value]) -> Mapping[str, Sequence[Leaf]]:
    """Instruction -> buffers that nothing needs after it."""
    last: dict[Leaf, str] = {}
    for each in computation.instructions.values():
        for name in (*each.operands, each.name):
            for leaf in frozenset().union(*values.get(name, ())):
                last[leaf] = each.name
    kept = frozenset().union(*values[computation.root.name])
    ends: dict[str, list[Leaf]] = {}
    for leaf, user in last.items():
        if leaf not in kept:
            ends.setdefault(user, []).append(leaf)
    return ends


def _is_same_buffer(instruction: Instruction) -> bool:
    return (
        instruction.opcode in _SAME_BUFFER
        or "output_to_operand_aliasing" in instruction.attributes
        or (instruction.opcode == "fusion" and "dynamic-update-slice" in instruction.name)
    )


def _is_elementwise(instruction: Instruction) -> bool:
    return instruction.opcode in _ELEMENTWISE or _ELEMENTWISE_FUSION in instruction.attributes


def _hbm_bytes(array: Array) -> int:
    return array.size_bytes if array.memory_space == _HBM else 0
