"""Reads scheduled HLO text, as ``compiled.as_text()`` prints it for TPUs, into computations of instructions.

Traps: an attribute may span lines and close with ``}`` in column 0; shapes hold ``/*index=5*/`` comments;
``estimated_cycles`` of 2^63-1 means that the compiler does not know.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

HOST_MEMORY_SPACE = 5
"""``S(5)`` in a layout: the host's memory."""

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_CLOSING = re.compile(r'\}(, execution_thread="[^"]*")?')
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_REFERENCE = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:^|, )(calls|to_apply|condition|body|true_computation|false_computation|branch_computations"
    r"|called_computations)=(\{[^{}]*\}|%?[\w.\-]+)"
)
_OP_NAME = re.compile(r'metadata=\{op_name="((?:[^"\\]|\\.)*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_PARTITIONS = re.compile(r"num_partitions=(\d+)")
_BITS = re.compile(r"[a-z]+(\d+)")
_UNKNOWN_CYCLES = 2**62
_BITS_OF_WORDS = {"pred": 8, "token": 0, "opaque": 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Array:
    """One array of an instruction's result, on one device."""

    dtype: str
    dims: tuple[int, ...]
    memory_space: int
    """0 is HBM, 1 vector memory, HOST_MEMORY_SPACE the host."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.dims)

    @property
    def size_bytes(self) -> int:
        """Without the padding of tiles."""
        return -(-self.num_elements * _bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    """Leaves of the result, in order."""
    operands: tuple[str, ...]
    """Names of instructions of the same computation."""
    literal: str
    """What stands between the parentheses: the value of a constant, the number of a parameter."""
    attributes: str
    """What follows the parentheses, as printed."""
    called: Mapping[str, tuple[str, ...]]
    """Names of computations by role, for example ``body``."""

    @property
    def op_name(self) -> str:
        """Where in the program it comes from; empty when unknown."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def estimated_cycles(self) -> int | None:
        """The compiler's estimate; None when it has none."""
        found = _CYCLES.search(self.attributes)
        cycles = int(found[1]) if found else _UNKNOWN_CYCLES
        return cycles if cycles < _UNKNOWN_CYCLES else None

    @property
    def computations(self) -> tuple[str, ...]:
        """Names of all computations that it calls."""
        return tuple(name for names in self.called.values() for name in names)

    def attribute(self, name: str) -> str | None:
        """The value of an attribute as printed, or None."""
        found = re.search(rf"(?:^|, ){re.escape(name)}=", _without_quoted(self.attributes))
        return None if found is None else _value(self.attributes, found.end())


@dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """A list of instructions in the order of their schedule."""

    name: str
    instructions: Mapping[str, Instruction]
    root: Instruction

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that an instruction of this computation reads."""
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]

    def parameter(self, number: int) -> Instruction | None:
        for each in self.instructions.values():
            if each.opcode == "parameter" and each.literal == str(number):
                return each
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """A compiled program: what one device of one slice runs."""

    computations: Mapping[str, Computation]
    entry: str
    num_partitions: int
    """Devices of one slice."""


def parse_module(text: str) -> Module:
    """Reads a whole module.

    Raises:
      ValueError: it is not HLO text, or lacks an entry; the message says where.
    """
    computations: dict[str, Computation] = {}
    entry = None
    for is_entry, name, bodies in _computations(text.splitlines()):
        instructions: dict[str, Instruction] = {}
        root = None
        for body in bodies:
            is_root, instruction = parse_instruction(body)
            instructions[instruction.name] = instruction
            root = instruction if is_root or root is None else root
        if root is None:
            raise ValueError(f"computation {name} has no instructions")
        computations[name] = Computation(name=name, instructions=instructions, root=root)
        entry = name if is_entry else entry
    if entry is None:
        raise ValueError("no ENTRY computation: this is not the text of a compiled module")
    found = _PARTITIONS.search(text.partition("\n")[0])
    return Module(computations=computations, entry=entry, num_partitions=int(found[1]) if found else 1)


def parse_instruction(text: str) -> tuple[bool, Instruction]:
    """Whether it is the root, and the instruction.

    Raises:
      ValueError: it is none.
    """
    head = _INSTRUCTION.match(text)
    if head is None:
        raise ValueError(f"not an instruction: {text[:80]!r}")
    shape_end = _end_of_value(text, head.end())
    opcode = _OPCODE.match(text, shape_end)
    if opcode is None:
        raise ValueError(f"no opcode in {text[:80]!r}")
    end = _end_of_value(text, opcode.end() - 1)
    literal = text[opcode.end() : end - 1]
    attributes = text[end:].removeprefix(", ")
    instruction = Instruction(
        name=head[2],
        opcode=opcode[1],
        arrays=tuple(parse_arrays(text[head.end() : shape_end])),
        operands=tuple(_REFERENCE.findall(literal)),
        literal=literal,
        attributes=attributes,
        called={role: tuple(_names(names)) for role, names in _CALLED.findall(_without_quoted(attributes))},
    )
    return head[1] is not None, instruction


def parse_arrays(text: str) -> Iterator[Array]:
    """The arrays of a shape; those of nested tuples one after the other."""
    for dtype, dims, layout in _ARRAY.findall(text):
        space = _SPACE.search(layout)
        yield Array(
            dtype=dtype,
            dims=tuple(int(dim.removeprefix("<=")) for dim in dims.split(",") if dim),
            memory_space=int(space[1]) if space else 0,
        )


def _computations(lines: Iterable[str]) -> Iterator[tuple[bool, str, Sequence[str]]]:
    """Each computation: whether it is the entry, its name, and the text of its instructions."""
    header: re.Match[str] | None = None
    bodies: list[str] = []
    for line in lines:
        if header is None:
            header = _HEADER.match(line) if line.endswith("{") and " -> " in line else None
        elif _INSTRUCTION.match(line):
            bodies.append(line)
        elif _CLOSING.fullmatch(line) and (not bodies or _is_closed(bodies[-1])):
            yield header[1] is not None, header[2], bodies
            header, bodies = None, []
        elif bodies:
            bodies[-1] += "\n" + line


def _without_quoted(text: str) -> str:
    """Every quoted text, which may hold anything, as as many underscores."""
    return _QUOTED.sub(lambda found: "_" * len(found[0]), text)


def _is_closed(text: str) -> bool:
    bare = _without_quoted(text)
    return bare.count("{") == bare.count("}")


def _end_of_value(text: str, start: int) -> int:
    """Where the shape, or the parenthesis, that begins at ``start`` ends."""
    depth = 0
    index = start
    while index < len(text):
        character = text[index]
        if character == '"':
            quoted = _QUOTED.match(text, index)
            index = quoted.end() if quoted else len(text)
            continue
        if character in "({[":
            depth += 1
        elif character in ")}]":
            depth -= 1
        elif depth == 0 and character in " ,\n":
            return index
        index += 1
    return index


def _value(attributes: str, start: int) -> str:
    end = _end_of_value(attributes, start)
    # Replica groups over a mesh are two values: mesh['fsdp'=4,'tensor'=2] {'tensor'}
    if attributes.startswith("mesh[", start):
        end = _end_of_value(attributes, attributes.find("{", start))
    return attributes[start:end]


def _names(text: str) -> Iterator[str]:
    return (name.strip().removeprefix("%") for name in text.strip("{}").split(",") if name.strip())


def _bits(dtype: str) -> int:
    if dtype in _BITS_OF_WORDS:
        return _BITS_OF_WORDS[dtype]
    found = _BITS.match(dtype)
    return int(found[1]) if found else 0
