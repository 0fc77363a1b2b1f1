"""How often a while loop of scheduled HLO goes round: from its condition, its start value and its step.

A loop counts one element of the tuple that it carries. The bound is a constant of the condition or an
element that never changes; the start may be 1 where the compiler has peeled the first round off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.preflight.hlo import Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SAME_VALUE = {"copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "opt-barrier"}
_FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trips:
    """One loop, seen from the computation that runs it."""

    count: int | None
    """None when it cannot be told."""
    carried: Mapping[int, int]
    """Values of the carried elements that are known and never change, by their place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Linear:
    """An integer: an element of what the loop carries (None: zero), and a constant."""

    carry: int | None = None
    offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scope:
    """A computation, and the call that its parameters come from; None for what a loop carries."""

    computation: Computation
    caller: _Scope | None = None
    call: Instruction | None = None


def trips(module: Module, computation: Computation, loop: Instruction, carried: Mapping[int, int]) -> Trips:
    """Counts the rounds of ``loop``, an instruction of ``computation``.

    Args:
      carried: known elements of what ``computation`` itself carries, if it is the body of a loop.
    """
    body = module.computations[loop.called["body"][0]]
    here = _Scope(computation=computation)

    def start(place: int) -> int | None:
        return _known(_resolve(module, here, loop.operands[0], (place,)), carried)

    fixed = {}
    for place, array in enumerate(loop.arrays):
        if not array.dims and _step(module, body, place) == 0 and (value := start(place)) is not None:
            fixed[place] = value
    if known := _KNOWN.search(loop.attributes):
        return Trips(count=int(known[1]), carried=fixed)
    condition = _comparison(module, _Scope(computation=module.computations[loop.called["condition"][0]]))
    if condition is None:
        return Trips(count=None, carried=fixed)
    direction, left, right = condition
    if left.carry is None or left.carry in fixed:
        direction, left, right = _FLIPPED[direction], right, left
    bound = _known(right, fixed)
    if left.carry is None or bound is None:
        return Trips(count=None, carried=fixed)
    step, first = _step(module, body, left.carry), start(left.carry)
    if not step:
        return Trips(count=None, carried=fixed)
    # Nearly every loop counts from zero, so that is the better guess where the start cannot be followed.
    begin = (first or 0) + left.offset
    return Trips(count=_rounds(direction, begin, bound, step), carried=fixed)


def _rounds(direction: str, begin: int, bound: int, step: int) -> int | None:
    away = bound - begin if step > 0 else begin - bound
    if direction == ("LT" if step > 0 else "GT") or direction == "NE":
        return max(0, -(-away // abs(step)))
    if direction == ("LE" if step > 0 else "GE"):
        return max(0, away // abs(step) + 1)
    return None


def _step(module: Module, body: Computation, place: int) -> int | None:
    """What a round adds to an element; None when it is not a constant."""
    after = _resolve(module, _Scope(computation=body), body.root.name, (place,))
    return after.offset if after is not None and after.carry == place else None


def _known(value: _Linear | None, carried: Mapping[int, int]) -> int | None:
    if value is None:
        return None
    base = 0 if value.carry is None else carried.get(value.carry)
    return None if base is None else base + value.offset


def _comparison(module: Module, scope: _Scope) -> tuple[str, _Linear, _Linear] | None:
    """Direction and sides of the comparison that ends a condition."""
    root = scope.computation.root
    if root.opcode == "fusion":
        return _comparison(module, _inside(module, scope, root))
    direction = root.attribute("direction")
    if root.opcode != "compare" or direction not in _FLIPPED:
        return None
    left, right = (_resolve(module, scope, name, ()) for name in root.operands)
    return None if left is None or right is None else (direction, left, right)


def _inside(module: Module, scope: _Scope, call: Instruction) -> _Scope:
    return _Scope(computation=module.computations[call.computations[0]], caller=scope, call=call)


def _resolve(module: Module, scope: _Scope, name: str, path: tuple[int, ...]) -> _Linear | None:
    """The integer that ``name``, or the element of it at ``path``, stands for."""
    found = scope.computation.instructions[name]
    match found.opcode:
        case "constant" if not path:
            return _constant(found)
        case "parameter":
            return _argument(module, scope, found, path)
        case "get-tuple-element":
            index = int(found.attribute("index") or 0)
            return _resolve(module, scope, found.operands[0], (index, *path))
        case "tuple" if path:
            return _resolve(module, scope, found.operands[path[0]], path[1:])
        case "fusion" | "call":
            inner = _inside(module, scope, found)
            return _resolve(module, inner, inner.computation.root.name, path)
        case "while" if path and _step(module, module.computations[found.called["body"][0]], path[0]) == 0:
            return _resolve(module, scope, found.operands[0], path)
        case "add" | "subtract" if not path:
            return _sum(module, scope, found)
        case opcode if opcode in _SAME_VALUE:
            return _resolve(module, scope, found.operands[0], path)
        case _:
            return None


def _constant(found: Instruction) -> _Linear | None:
    try:
        return _Linear(offset=int(found.literal))
    except ValueError:
        return None


def _argument(module: Module, scope: _Scope, found: Instruction, path: tuple[int, ...]) -> _Linear | None:
    if scope.caller is not None and scope.call is not None:
        return _resolve(module, scope.caller, scope.call.operands[int(found.literal)], path)
    return _Linear(carry=path[0]) if len(path) == 1 else None


def _sum(module: Module, scope: _Scope, found: Instruction) -> _Linear | None:
    left, right = (_resolve(module, scope, name, ()) for name in found.operands)
    if left is None or right is None:
        return None
    if found.opcode == "subtract":
        right = None if right.carry is not None else _Linear(offset=-right.offset)
    if right is None or (left.carry is not None and right.carry is not None):
        return None
    carry = left.carry if right.carry is None else right.carry
    return _Linear(carry=carry, offset=left.offset + right.offset)
