"""A compiled train step as `trainer/aot.py` leaves it (``compiled.txt``, ``compiled.json``), and its cost.

compiled = read_compiled(Path(DIR))
analysis = analyze(compiled)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.preflight.buffers import Peak, peak_of
from launcher.preflight.collectives import Collective, HostTransfers, collectives, host_transfers
from launcher.preflight.groups import MeshLayout
from launcher.preflight.hlo import parse_module
from launcher.preflight.schedule import Schedule, ScheduledCost, schedule, scheduled_cost
from recipes.contract import COMPILED_FACTS_FILE, COMPILED_HLO_FILE
from recipes.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one device, by the compiler's own analysis."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Of the output, in place of arguments."""
    temp_bytes: int
    peak_bytes: int
    """The most in use at once, arguments included, in HBM and in the host's memory together. This, not the
    sum of arguments and temporaries, is what the compiler holds against usable HBM: the sum counts twice what
    takes the place of arguments that are used up."""
    generated_code_bytes: int
    host_bytes: int
    """In the host's memory."""
    usable_hbm_bytes: int | None
    """What the compiler lets a program use; None when it does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """One compiled train step."""

    recipe: str
    generation: str
    topology: str
    num_slices: int
    mesh: MeshLayout
    memory: Memory
    lower_s: float
    compile_s: float
    peak_rss_bytes: int
    compiler_flags: str
    jax_version: str
    libtpu_version: str
    hlo_text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """What one device does in one step."""

    schedule: Schedule
    cost: ScheduledCost
    collectives: Sequence[Collective]
    host: HostTransfers
    peak: Peak
    hbm_bytes: int
    """What the device must have: the compiler's peak. Of a program that uses the host's memory, which that
    peak has in it, the peak of its schedule (`launcher/preflight/buffers.py`)."""


def read_compiled(folder: Path) -> Compiled:
    """Reads both files.

    Raises:
      UserError: one is missing or is not what `trainer/aot.py` writes.
    """
    hint = "write them with python -m trainer.aot RECIPE.yaml --out DIR"
    try:
        text = (folder / COMPILED_HLO_FILE).read_text(encoding="utf-8")
        facts = json.loads((folder / COMPILED_FACTS_FILE).read_text(encoding="utf-8"))
        return _compiled(facts, text)
    except OSError as error:
        raise UserError(f"{error.strerror}: {error.filename}", hint=hint) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder / COMPILED_FACTS_FILE} is not a compiled step: {error!r}", hint=hint
        ) from error


def analyze(compiled: Compiled) -> Analysis:
    """Parses the program and sums it up.

    Raises:
      UserError: the text is not a compiled module, or names device groups in an unknown form.
    """
    try:
        plan = schedule(parse_module(compiled.hlo_text))
        peak, memory = peak_of(plan.module), compiled.memory
        return Analysis(
            schedule=plan,
            cost=scheduled_cost(plan),
            collectives=collectives(plan, compiled.mesh),
            host=host_transfers(plan),
            peak=peak,
            hbm_bytes=peak.size_bytes if memory.host_bytes else memory.peak_bytes,
        )
    except (ValueError, LookupError) as error:
        raise UserError(
            f"the compiled program of {compiled.recipe} cannot be read: {error}",
            hint=f"it may be of a libtpu newer than {compiled.libtpu_version} whose text differs",
        ) from error


def _compiled(facts: Mapping[str, Any], text: str) -> Compiled:
    sizes = {name: int(size) for name, size in facts["memory_bytes"].items()}
    usable = facts["usable_hbm_bytes"]
    return Compiled(
        recipe=str(facts["recipe"]),
        generation=str(facts["generation"]),
        topology=str(facts["topology"]),
        num_slices=int(facts["num_slices"]),
        mesh=MeshLayout(
            axes={str(axis): int(size) for axis, size in facts["mesh_axes"].items()},
            device_ids=tuple(map(int, facts["device_ids"])),
            device_slices=tuple(map(int, facts["device_slices"])),
        ),
        memory=Memory(
            argument_bytes=sizes["argument"],
            output_bytes=sizes["output"],
            alias_bytes=sizes["alias"],
            temp_bytes=sizes["temp"],
            peak_bytes=sizes["peak"],
            generated_code_bytes=sizes["generated_code"],
            host_bytes=sizes["host_argument"]
            + sizes["host_output"]
            - sizes["host_alias"]
            + sizes["host_temp"],
            usable_hbm_bytes=None if usable is None else int(usable),
        ),
        lower_s=float(facts["lower_s"]),
        compile_s=float(facts["compile_s"]),
        peak_rss_bytes=int(facts["peak_rss_bytes"]),
        compiler_flags=str(facts["compiler_flags"]),
        jax_version=str(facts["jax_version"]),
        libtpu_version=str(facts["libtpu_version"]),
        hlo_text=text,
    )
