"""The hardware catalogue against xpk's published table, row by row, and its refusals."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipes.hardware import (
    SliceShape,
    expand_alias,
    generation,
    generations,
    render_alias,
    slice_shape,
    topologies,
    topology_name,
)
from recipes.schema import HardwareConfig
from tests.golden.update import hardware_doc

TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of xpk's table."""

    generation: str
    topology: str
    device_type: str
    machine_type: str
    hosts: str
    alias: str


def _rows() -> Sequence[Row]:
    with Path(__file__).with_name("test_hardware_shapes.csv").open(encoding="ascii") as lines:
        return [Row(**row) for row in csv.DictReader(line for line in lines if not line.startswith("#"))]


ROWS = _rows()


def _slice(name: str, topology: str, chips_per_host: int | None = None) -> SliceShape:
    hardware = HardwareConfig(
        generation=name,  # type: ignore[arg-type]  # a table gives plain strings
        topology=topology,
        chips_per_host=chips_per_host,
    )
    return slice_shape(hardware)


def test_every_topology_of_xpk_has_its_machines_and_hosts() -> None:
    for row in ROWS:
        chips_per_host = 1 if row.machine_type.endswith("-1t") else 4
        shape = _slice(row.generation, row.topology, chips_per_host)
        assert (shape.machine_type, shape.num_hosts) == (row.machine_type, int(row.hosts)), row


@pytest.mark.parametrize("name", TPUS)
def test_no_topology_beyond_the_table(name: str) -> None:
    # xpk has no names for the two smallest v5e slices.
    extra = {"1x1", "2x2"} if name == "v5e" else set()
    listed = {row.topology for row in ROWS if row.generation == name}
    assert {topology_name(sides) for sides in topologies(name)} == listed | extra


def test_every_alias_of_xpk_means_the_same_topology() -> None:
    bare = [(row.device_type, row) for row in ROWS if row.alias == "1"]
    full = [(f"{row.device_type.split('-')[0]}-{row.topology}", row) for row in ROWS]
    for alias, row in itertools.chain(bare, full):
        (meaning,) = [found for found in expand_alias(alias) if found.tool == "xpk"]
        assert (meaning.topology, meaning.num_hosts) == (row.topology, int(row.hosts)), alias


@pytest.mark.parametrize("name", TPUS)
def test_a_sorted_walk_over_all_sides_finds_exactly_the_topologies(name: str) -> None:
    chip = generation(name)
    sides = [1, 2, 3, *range(4, 33, 4)]
    found = set()
    for candidate in itertools.product(sides, repeat=chip.num_dims):
        try:
            _slice(name, topology_name(candidate), 4 if candidate == (2, 4) else None)
        except ValueError:
            continue
        found.add(candidate)
    assert found == {topology for topology in topologies(name) if max(topology) <= 32}


@pytest.mark.parametrize(
    ("name", "topology", "chips_per_host", "expected"),
    [
        # hosts, devices, label, Cloud TPU API name, AOT name, wrap
        ("v4", "2x2x1", None, (1, 4, "tpu-v4-podslice", "v4-8", "v4:2x2x1", (False,) * 3)),
        ("v4", "8x4x4", None, (32, 128, "tpu-v4-podslice", "v4-256", "v4:8x4x4", (True,) * 3)),
        ("v5e", "1x1", None, (1, 1, "tpu-v5-lite-podslice", "v5litepod-1", "v5e:1x1", (False, False))),
        ("v5e", "2x4", 8, (1, 8, "tpu-v5-lite-podslice", "v5litepod-8", "v5e:2x4", (False, False))),
        ("v5e", "2x4", 4, (2, 8, "tpu-v5-lite-podslice", None, "v5e:2x4", (False, False))),
        ("v5e", "8x16", None, (32, 128, "tpu-v5-lite-podslice", "v5litepod-128", "v5e:8x16", (False, True))),
        ("v5p", "2x4x4", None, (8, 32, "tpu-v5p-slice", "v5p-64", "v5:2x4x4", (False,) * 3)),
        ("v5p", "16x20x28", None, (2240, 8960, "tpu-v5p-slice", "v5p-17920", "v5:16x20x28", (True,) * 3)),
        ("v6e", "16x16", None, (64, 256, "tpu-v6e-slice", "v6e-256", "v6e:16x16", (True, True))),
        ("tpu7x", "1x1x1", None, (1, 2, "tpu7x", None, "tpu7x:1x1x1", (False,) * 3)),
        ("tpu7x", "4x4x4", None, (16, 128, "tpu7x", None, "tpu7x:4x4x4", (True,) * 3)),
        ("cpu", "2x4", None, (2, 8, None, None, None, (False, False))),
    ],
)
def test_a_slice_in_every_vocabulary(
    name: str, topology: str, chips_per_host: int | None, expected: tuple[object, ...]
) -> None:
    shape = _slice(name, topology, chips_per_host)
    assert expected == (
        shape.num_hosts,
        shape.num_devices,
        shape.gke_accelerator,
        shape.accelerator_type,
        shape.aot_topology,
        shape.wrap,
    )


def test_only_multi_host_tpu7x_needs_a_workload_policy() -> None:
    assert _slice("tpu7x", "2x2x2").requires_workload_policy
    assert not _slice("tpu7x", "2x2x1").requires_workload_policy
    assert not _slice("v5p", "2x2x2").requires_workload_policy


@pytest.mark.parametrize(
    ("name", "topology", "chips_per_host", "said"),
    [
        ("v6e", "2x4", None, "use hardware.chips_per_host=8 or 4"),
        ("v6e", "2x4", 2, "use hardware.chips_per_host=8 or 4"),
        ("v6e", "4x4", 8, "leave hardware.chips_per_host out"),
        ("v6e", "4x2", None, "use 2x4"),
        ("v6e", "16x32", None, "8x16, 16x16"),
        ("v6e", "4x4x4", None, "use one of 1x1"),
        ("v5p", "8x4x4", None, "use 4x4x8"),
        ("v5p", "4x4x5", None, "use 4x4x4 or 4x4x8"),
        ("v5p", "4x4x600", None, "use 16x20x28"),
        ("v4", "16x16x20", None, "4096 chips"),
        ("v5p", "4x4", None, "use 2x2x4"),
        ("v5p", "0x4x4", None, "for example 4x4x8"),
        ("v5p", "4X4X4", None, "for example 4x4x8"),
        ("v5p", "v5p-128", None, "use hardware.generation=v5p hardware.topology=4x4x4"),
        ("v5e", "", None, "for example 8x16"),
        ("v6e", "\u0664x\u0664", None, "for example 8x16"),
        ("cpu", "8", None, "for example 1x4"),
        ("cpu", "1x2x2", None, "for example 1x4"),
        ("cpu", "999x999", None, "at most 4096 devices"),
        ("cpu", "1x4", 2, "leave hardware.chips_per_host out"),
    ],
)
def test_a_refusal_gives_a_reason_and_what_would_be_right(
    name: str, topology: str, chips_per_host: int | None, said: str
) -> None:
    with pytest.raises(ValueError, match="; ") as refusal:
        _slice(name, topology, chips_per_host)
    assert said in str(refusal.value)


def test_the_same_alias_is_different_hardware_in_different_tools() -> None:
    cloud, xpk = expand_alias("v6e-8")
    assert (cloud.tool, cloud.num_hosts, cloud.machine_type) == ("Cloud TPU API", 1, "ct6e-standard-8t")
    assert (xpk.tool, xpk.num_hosts, xpk.machine_type) == ("xpk", 2, "ct6e-standard-4t")
    assert "not the same hardware" in render_alias("v6e-8")


def test_an_alias_that_counts_cores_says_so() -> None:
    text = render_alias("v5p-128")
    assert "64 chips (128 TensorCores)" in text
    assert "hardware.generation=v5p hardware.topology=4x4x4" in text
    assert "not the same hardware" not in text


def test_names_that_count_chips_where_others_count_cores() -> None:
    (toolkit,) = expand_alias("v5p-4")
    (api, xpk) = expand_alias("v5p-8")
    assert toolkit.topology == api.topology == xpk.topology == "2x2x1"
    assert {toolkit.num_chips, api.num_chips, xpk.num_chips} == {4}


@pytest.mark.parametrize(
    ("alias", "said"),
    [("v5e-8", "v5litepod-8"), ("h100-8", "prefix of v4"), ("v5p-129", "prefix of v4"), ("v5p", "prefix")],
)
def test_an_unknown_alias_is_refused(alias: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        expand_alias(alias)


def test_what_a_chip_can_do() -> None:
    published = {
        # GiB, HBM GB/s, bf16 TFLOP/s, ICI links: docs.cloud.google.com/tpu/docs
        "v4": (32, 1200, 275, 6),
        "v5e": (16, 819, 197, 4),
        "v5p": (95, 2765, 459, 6),
        "v6e": (32, 1638, 918, 4),
        "tpu7x": (192, 7380, 2307, 6),
    }
    for name, (gib, gb_per_s, tflops, links) in published.items():
        chip = generation(name)
        assert chip.hbm_bytes == gib * 2**30
        assert chip.hbm_bytes_per_s == gb_per_s * 1e9
        assert chip.peak_flops_per_s["bf16"] == tflops * 1e12
        assert chip.ici_links == links
    assert list(generations()) == [*published, "cpu"]


def test_an_unknown_price_is_null_and_a_known_one_has_date_and_source() -> None:
    assert generation("tpu7x").price is None
    assert generation("cpu").price is None
    for name in ("v4", "v5e", "v5p", "v6e"):
        price = generation(name).price
        assert price is not None
        assert price.on_demand is not None
        assert price.spot is not None
        assert 0 < price.spot < price.on_demand
        assert price.date
        assert price.region
        assert "github.com/skypilot-org/skypilot-catalog" in price.source


def test_an_unknown_generation_names_what_there_is() -> None:
    with pytest.raises(ValueError, match="v4, v5e, v5p, v6e, tpu7x, cpu"):
        generation("v7")


def test_the_documented_table_is_the_catalogue(repo: Path) -> None:
    text = (repo / "docs" / "hardware.md").read_text(encoding="ascii")
    assert hardware_doc(text) == text, "python -m tests.golden.update"
    assert all(line in text for line in render_alias("v6e-8").splitlines())
