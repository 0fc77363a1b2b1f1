"""``muster hardware``: the catalogue; slices and flags of a generation; what another tool's alias means."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import click

from launcher.cli import output
from launcher.cli.arguments import json_option
from recipes.errors import UserError
from recipes.flags import CONDITIONS, TunedFlag, flag_catalogue, tuned_flags
from recipes.hardware import (
    CPU,
    Generation,
    expand_alias,
    generations,
    host_shapes,
    max_chips,
    render_alias,
    topologies,
    topology_name,
)
from recipes.load import nearest


@click.command("hardware")
@click.argument("name", required=False)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """List the TPU generations, slices and compiler flags of one, or what an alias such as v6e-8 means.

    NAME is a generation (v5p) or a name that other tools use (v5p-128, v6e-8, v5litepod-256).
    """
    chips = {chip.name: chip for chip in generations().values() if chip.name != CPU}
    if name is None:
        rows = [_facts(chip) for chip in chips.values()]
        output.data_json(rows) if as_json else output.data(_table(rows))
    elif name in chips:
        _generation(chips[name], as_json)
    else:
        _alias(name, list(chips), as_json)


def _generation(chip: Generation, as_json: bool) -> None:
    slices, flags = _slices(chip), tuned_flags(chip.name)
    if as_json:
        output.data_json({"slices": slices, "compiler_flags": [dataclasses.asdict(flag) for flag in flags]})
        return
    output.data(_table(slices))
    output.data(f"\ncompiler flags (hardware.tuned_flags), tried with libtpu {flag_catalogue().libtpu}")
    for flag in flags:
        output.data(_flag_text(flag))


def _flag_text(flag: TunedFlag) -> str:
    when = CONDITIONS[flag.when][0]
    head = f"  --{flag.name}={flag.value}" + (f"   when {when}" if when else "")
    return f"{head}\n    {flag.reason}\n    {flag.source}"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    header = [column.replace("_", " ") for column in rows[0]]
    cells = [["-" if value is None else str(value) for value in row.values()] for row in rows]
    return output.table([header, *cells])


def _facts(chip: Generation) -> dict[str, Any]:
    price = chip.price
    return {
        "generation": chip.name,
        "HBM_GiB": None if chip.hbm_bytes is None else chip.hbm_bytes >> 30,
        "bf16_TFLOP/s": round(chip.peak_flops_per_s["bf16"] / 1e12),
        "devices_per_chip": chip.devices_per_chip,
        "largest_slice_chips": max_chips(chip),
        "USD_chip_hour": price.on_demand if price else None,
        "USD_chip_hour_spot": price.spot if price else None,
        "priced_on": price.date if price else None,
    }


def _slices(chip: Generation) -> list[dict[str, Any]]:
    return [
        {
            "topology": topology_name(sides),
            "chips": math.prod(sides),
            "hosts": math.prod(sides) // host.chips_per_host,
            "chips_per_host": host.chips_per_host,
            "machine_type": host.machine_type,
        }
        for sides in topologies(chip.name)
        for host in host_shapes(chip, sides)
    ]


def _alias(name: str, known: Sequence[str], as_json: bool) -> None:
    try:
        meanings = expand_alias(name)
    except ValueError as error:
        guess = nearest(name, known)
        hint = f"did you mean {guess}?" if guess else "`muster hardware` lists the generations"
        raise UserError(f"{name} {error}", hint=hint) from None
    if as_json:
        output.data_json([dataclasses.asdict(meaning) for meaning in meanings])
    else:
        output.data(render_alias(name).rstrip("\n"))
