"""Communication in a compiled step: collectives by kind and mesh axis, and copies from and to the host.

Counted once: an asynchronous collective (its ``-done`` is skipped), one that the TPU compiler hides in a
chain of fusions (only the fusion that starts it counts), and a transfer over the data-center network,
which is a send and a receive with a ``_xla_megascale_target``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.preflight.groups import (
    Groups,
    MeshLayout,
    groups_across_slices,
    pairs,
    replica_groups,
)
from launcher.preflight.hlo import HOST_MEMORY_SPACE, Array, Computation, Instruction
from launcher.preflight.schedule import Schedule, Step, instructions_of

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_ACROSS_SLICES = {"ONE_TO_ONE": "collective-permute"}
_ATTRIBUTE = '{name}=(?:"([^"]*)"|(\\{{\\{{.*?\\}}\\}}))'
_START = 'custom_call_target="AsyncCollectiveStart"'
_END = 'custom_call_target="AsyncCollectiveDone"'
_CHAIN = re.compile(r'chain_id="(\d+)"')

type Part = tuple[Computation, Instruction]
"""An instruction, or one that a fusion is made of, and where it stands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective of the schedule."""

    name: str
    kind: str
    """One of KINDS."""
    axes: tuple[str, ...]
    """Mesh axes along which the members of a group differ."""
    is_dcn: bool
    """Between slices."""
    is_async: bool
    """Something else may run meanwhile."""
    group_size: int
    group: tuple[int, ...]
    """Device ids of one of its groups."""
    count: int
    """Executions in one run of the program."""
    payload_bytes: int
    """The larger of what one device puts in and gets out, once."""
    op_name: str

    @property
    def total_bytes(self) -> int:
        return self.count * self.payload_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Collectives of one kind along the same axes."""

    count: int
    total_bytes: int
    sync_bytes: int
    """Of it in collectives during which nothing else runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTransfers:
    """Copies between HBM and the host's memory by one device in one run."""

    to_host_bytes: int
    from_host_bytes: int


def collectives(plan: Schedule, mesh: MeshLayout) -> list[Collective]:
    """Every collective that moves something, in the order of the schedule.

    Raises:
      ValueError: a collective names its groups in no form that is known.
    """
    naming = Naming(mesh, plan.module.num_partitions)
    found: list[Collective] = []
    for step in plan.steps:
        found += collectives_in(step, list(instructions_of(plan.module, step)), naming)
    return found


def collectives_in(step: Step, inner: Sequence[Part], naming: Naming) -> Iterator[Collective]:
    """Those of one step, of which ``inner`` are the parts (:func:`instructions_of`)."""
    starts_chain = any(_START in each.attributes for _, each in inner)
    if chain_of(inner) is not None and not starts_chain:
        return
    for computation, each in inner:
        yield from _collective(step, computation, each, naming, starts_chain=starts_chain)


def chain_of(inner: Sequence[Part]) -> str | None:
    """The number of the chain of fusions that a step belongs to, if it does."""
    for _, each in inner:
        if _kind(each) is not None and (found := _CHAIN.search(each.attributes)):
            return found[1]
    return None


def ends_chain(inner: Sequence[Part]) -> bool:
    """Whether a step waits for the end of its chain."""
    return any(_END in each.attributes for _, each in inner)


def rendezvous(instruction: Instruction) -> str | None:
    """What a send across slices and the receive that belongs to it have in common."""
    return _quoted("_xla_host_transfer_rendezvous", instruction)


def traffic(found: Sequence[Collective]) -> Mapping[tuple[str, str], Traffic]:
    """Sums by (axes, kind); axes as ``fsdp+tensor``, across slices as ``dcn:data``."""
    sums: dict[tuple[str, str], list[Collective]] = {}
    for each in found:
        sums.setdefault((axes_label(each), each.kind), []).append(each)
    return {
        key: Traffic(
            count=sum(each.count for each in same),
            total_bytes=sum(each.total_bytes for each in same),
            sync_bytes=sum(each.total_bytes for each in same if not each.is_async),
        )
        for key, same in sorted(sums.items())
    }


def axes_label(collective: Collective) -> str:
    return ("dcn:" if collective.is_dcn else "") + "+".join(collective.axes)


def host_transfers(plan: Schedule) -> HostTransfers:
    """Bytes of copies, slices and updates with one side in the host's memory."""
    to_host = from_host = 0
    for step in plan.steps:
        moved = host_transfers_in(list(instructions_of(plan.module, step)))
        to_host += step.count * moved.to_host_bytes
        from_host += step.count * moved.from_host_bytes
    return HostTransfers(to_host_bytes=to_host, from_host_bytes=from_host)


def host_transfers_in(inner: Sequence[Part]) -> HostTransfers:
    """Of one execution of one step."""
    to_host = from_host = 0
    for computation, each in inner:
        source, target, size_bytes = _copied(computation, each)
        if source != HOST_MEMORY_SPACE and target == HOST_MEMORY_SPACE:
            to_host += size_bytes
        elif source == HOST_MEMORY_SPACE and target != HOST_MEMORY_SPACE:
            from_host += size_bytes
    return HostTransfers(to_host_bytes=to_host, from_host_bytes=from_host)


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedGroups:
    """Device groups of a collective."""

    axes: tuple[str, ...]
    size: int
    first: tuple[int, ...]
    """Device ids of the first group; the others lie like it."""


class Naming:
    """Axes and groups of collectives; a module names the same few groups again and again."""

    def __init__(self, mesh: MeshLayout, num_partitions: int) -> None:
        self._mesh, self._num_partitions = mesh, num_partitions
        self._local, self._by_id = mesh.local_positions(), mesh.positions()
        self.inside = functools.cache(self._inside)
        self.across = functools.cache(self._across)

    def _inside(self, text: str, is_permute: bool) -> NamedGroups:
        groups = pairs(text) if is_permute else replica_groups(text, self._num_partitions)
        return self._named([[self._local[partition] for partition in group] for group in groups])

    def _across(self, text: str) -> NamedGroups:
        groups = groups_across_slices(text)
        return self._named([[self._by_id[device] for device in group] for group in groups])

    def _named(self, groups: Groups) -> NamedGroups:
        largest = max(groups, key=len, default=())
        return NamedGroups(
            axes=self._mesh.axes_between(groups),
            size=max(len(largest), 1),
            first=tuple(self._mesh.device_ids[place] for place in largest),
        )


def _kind(instruction: Instruction) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def _collective(
    step: Step, computation: Computation, each: Instruction, naming: Naming, *, starts_chain: bool
) -> Iterator[Collective]:
    kind = _kind(each)
    target = _quoted("_xla_megascale_target", each) if each.opcode == "send" else None
    if kind is not None:
        is_permute = kind == "collective-permute"
        text = each.attribute("source_target_pairs" if is_permute else "replica_groups") or "{}"
        groups = naming.inside(text, is_permute)
        payload = _payload(computation, each)
        is_async = starts_chain or each.opcode.endswith("-start") or step.is_async
    elif target is not None:
        transfer = _quoted("_xla_megascale_transfer_type", each) or ""
        kind = _ACROSS_SLICES.get(transfer, transfer.lower().replace("_", "-"))
        groups = naming.across(target)
        payload, is_async = _payload_across(computation, each), True
    else:
        return
    # A group of one, or a permutation that moves nothing, is a copy.
    if groups.axes:
        yield Collective(
            name=each.name,
            kind=kind,
            axes=groups.axes,
            is_dcn=target is not None,
            is_async=is_async,
            group_size=groups.size,
            group=groups.first,
            count=step.count,
            payload_bytes=payload,
            op_name=each.op_name,
        )


def _payload(computation: Computation, each: Instruction) -> int:
    operands = computation.operands(each)
    put_in = _size(array for operand in operands for array in operand.arrays)
    if not each.opcode.endswith("-start"):
        return max(put_in, _size(each.arrays))
    # The result of a start holds operands, results and the context; of an all-reduce, only results.
    num_inputs = sum(len(operand.arrays) for operand in operands)
    is_nested = each.opcode != "all-reduce-start"
    results = each.arrays[num_inputs : 2 * num_inputs] if is_nested else each.arrays
    return max(put_in, _size(results))


def _payload_across(computation: Computation, send: Instruction) -> int:
    """Of a send and of the receive that belongs to it."""
    meeting = rendezvous(send)
    receives = [
        each
        for each in computation.instructions.values()
        if each.opcode == "recv" and rendezvous(each) == meeting
    ]
    return max(_size(each.arrays[:1]) for each in (send, *receives))


def _quoted(name: str, instruction: Instruction) -> str | None:
    found = re.search(_ATTRIBUTE.format(name=name), instruction.attributes)
    return None if found is None else found[1] or found[2]


def _size(arrays: Iterator[Array] | Sequence[Array]) -> int:
    return sum(array.size_bytes for array in arrays)


def _copied(computation: Computation, each: Instruction) -> tuple[int, int, int]:
    """Memory spaces of source and target, and bytes, of an instruction that copies."""
    operands = [operand.arrays for operand in computation.operands(each)]
    match each.opcode.removesuffix("-start"):
        case "copy" if operands and operands[0]:
            # The result of copy-start begins with the target.
            source, target = operands[0][0], each.arrays[0]
            return source.memory_space, target.memory_space, target.size_bytes
        case "dynamic-update-slice" if len(operands) > 1:
            (whole, *_), (update, *_) = operands[:2]
            return update.memory_space, whole.memory_space, update.size_bytes
        case "slice" | "dynamic-slice" if operands:
            place = sum(map(len, operands)) if each.opcode.endswith("-start") else 0
            source, target = operands[0][0], each.arrays[place]
            return source.memory_space, target.memory_space, target.size_bytes
        case _:
            return 0, 0, 0
