"""Compiler flags: which a recipe gets, what its user may add or drop, and what is refused before a launch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from launcher.cli.hardware import command
from launcher.compose import compose
from launcher.gke.manifest import manifest
from launcher.plan import make_plan, render_plan
from recipes.check import check
from recipes.elastic import with_slices
from recipes.fingerprint import fingerprint
from recipes.flags import (
    CONDITIONS,
    LIBTPU_ARGS,
    OWN_REASON,
    flag_arguments,
    flag_catalogue,
    flags_of,
    libtpu_env,
    tuned_flags,
)
from recipes.hardware import generations
from recipes.load import flatten, nest, recipe_from_dict, recipe_to_dict
from recipes.schema import Recipe

V5P = flatten(recipe_to_dict(compose("llama3-70b-v5p-4x4x8", ["target=gke"]).recipe))
V6E = flatten(recipe_to_dict(compose("llama3-8b-v6e-16x16-x2", ["target=gke"]).recipe))
V5E = flatten(recipe_to_dict(compose("llama3-8b-v5e-16x16", ["target=gke"]).recipe))
MIXTRAL = flatten(recipe_to_dict(compose("mixtral-8x7b-v6e-16x16", ["target=gke"]).recipe))
CPU = flatten(recipe_to_dict(compose("quickstart", []).recipe))
EINSUM = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
VMEM = "xla_tpu_scoped_vmem_limit_kib"
FUSE = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"


def recipe_of(base: Mapping[str, Any], changed: Mapping[str, Any] | None = None) -> Recipe:
    return recipe_from_dict(nest({**base, **(changed or {})}))


def values(recipe: Recipe) -> Mapping[str, str]:
    return {flag.name: flag.value for flag in flags_of(recipe)}


def own(**flags: str) -> Mapping[str, Any]:
    return {"hardware.compiler_flags": flags}


def test_the_catalogue_is_whole(repo: Path) -> None:
    catalogue, tpus = flag_catalogue(), set(generations()) - {"cpu"}
    assert 5 <= len(catalogue.tuned) <= 24
    for flag in catalogue.tuned:
        assert flag.generations and set(flag.generations) <= tpus
        assert flag.when in CONDITIONS
        assert len(flag.reason) > 40 and re.search(r"^[\w.-]+/[\w.-]+ \S+.* @[0-9a-f]{40}$", flag.source)
    assert {flag.when for flag in catalogue.tuned} == set(CONDITIONS), "a condition that nothing asks"
    for refused in catalogue.refused:
        assert refused.message and refused.reason and refused.fix and set(refused.generations) <= tpus
    pinned = (repo / "k8s" / "requirements-tpu.lock").read_text()
    assert f"libtpu=={catalogue.libtpu} " in pinned, "probe the flags with this libtpu, then name it"


def test_no_two_entries_set_one_flag_at_once() -> None:
    disjoint = {"dense", "experts"}
    for generation in generations():
        by_name: dict[str, list[str]] = {}
        for flag in tuned_flags(generation):
            by_name.setdefault(flag.name, []).append(flag.when)
        assert all(len(whens) == 1 or set(whens) == disjoint for whens in by_name.values())


@pytest.mark.parametrize(
    ("base", "changed", "name", "value"),
    [
        (V6E, {}, EINSUM, "1000000"),
        (V6E, {}, VMEM, "98304"),
        (MIXTRAL, {}, VMEM, "81920"),
        (V6E, {"hardware.tuned_flags": False}, VMEM, None),
        (V6E, own(**{VMEM: "65536"}), VMEM, "65536"),
        (V6E, own(**{VMEM: "default"}), VMEM, None),
        (V6E, {"hardware.tuned_flags": False, **own(**{VMEM: "65536"})}, VMEM, "65536"),
        (V6E, {"target.controller": "pathways"}, VMEM, None),
        (V6E, {"target.controller": "pathways", **own(**{VMEM: "65536"})}, VMEM, "65536"),
        (CPU, own(**{VMEM: "65536"}), VMEM, None),
    ],
)
def test_flags_of_a_recipe(
    base: Mapping[str, Any], changed: Mapping[str, Any], name: str, value: str | None
) -> None:
    assert values(recipe_of(base, changed)).get(name) == value


@pytest.mark.parametrize(
    ("condition", "base", "changed", "holds"),
    [
        ("always", CPU, {}, True),
        ("dense", V6E, {}, True),
        ("dense", MIXTRAL, {}, False),
        ("experts", MIXTRAL, {}, True),
        ("experts", V6E, {}, False),
        ("no_tensor", V6E, {"mesh.tensor": 1}, True),
        ("no_tensor", V6E, {"mesh.tensor": 4}, False),
        ("multislice", V6E, {}, True),
        ("multislice", V5E, {}, False),
        ("dcn_fsdp", V6E, {"multislice.data": 1, "multislice.fsdp": -1}, True),
        ("dcn_fsdp", V6E, {}, False),
        ("dcn_fsdp", V5E, {"multislice.fsdp": -1}, False),
        ("host_offload", V6E, {"train.remat_policy": "named", "train.remat_offload": ["query"]}, True),
        ("host_offload", V6E, {"train.remat_policy": "named", "train.remat_save": ["query"]}, False),
        ("host_offload", V6E, {}, False),
    ],
)
def test_conditions(condition: str, base: Mapping[str, Any], changed: Mapping[str, Any], holds: bool) -> None:
    assert CONDITIONS[condition][1](recipe_of(base, changed)) is holds


def test_a_users_flags_say_so() -> None:
    (flag,) = [flag for flag in flags_of(recipe_of(V6E, own(**{VMEM: "65536"}))) if flag.name == VMEM]
    assert (flag.reason, flag.source) == (OWN_REASON, "")


@pytest.mark.parametrize(
    ("base", "flags", "name", "says"),
    [
        (V6E, {f"--{VMEM}": "1"}, f"--{VMEM}", f"write {VMEM}"),
        (V6E, {"XLA_TPU": "1"}, "XLA_TPU", "not the name"),
        (V6E, {"xla_a b": "1"}, "xla_a b", "not the name"),
        (V6E, {"xla_": "1"}, "xla_", "not the name"),
        (V6E, {"xla_\uff41": "1"}, "xla_\uff41", "not the name"),
        (V6E, {"tf_flag": "1"}, "tf_flag", "not the name"),
        (V6E, {VMEM: ""}, VMEM, "not the value"),
        (V6E, {VMEM: "1 --xla_b=2"}, VMEM, "blanks"),
        (V6E, {VMEM: "'1'"}, VMEM, "not the value"),
        (V6E, {VMEM: "$(id)"}, VMEM, "not the value"),
        (V6E, {VMEM: "1\n"}, VMEM, "not the value"),
        (CPU, {VMEM: "a b"}, VMEM, "not the value"),
        (V5P, {FUSE: "true"}, FUSE, "v5e only"),
        (V6E, {FUSE: "1"}, FUSE, "v5e only"),
        (V6E, {"xla_dump_to": "/tmp/x"}, "xla_dump_to", "target.env.XLA_FLAGS"),
        (V6E, {"xla_tpu_scoped_vmem_limit": "default"}, "xla_tpu_scoped_vmem_limit", f"did you mean {VMEM}?"),
        (V6E, {"xla_unheard_of": "default"}, "xla_unheard_of", "remove it"),
    ],
)
def test_bad_flags_are_refused(
    base: Mapping[str, Any], flags: Mapping[str, str], name: str, says: str
) -> None:
    (problem,) = check(recipe_of(base, {"hardware.compiler_flags": flags}))
    assert problem.key == f"hardware.compiler_flags.{name}"
    assert says in f"{problem.reason}; {problem.fix}"


@pytest.mark.parametrize(
    ("base", "flags"),
    [
        (V5E, {FUSE: "true"}),
        (V6E, {FUSE: "false"}),
        (V6E, {VMEM: "default"}),
        (V6E, {"xla_tpu_pcie_bandwidth_multiplier": "0.03", "megascale_graph_hang_threshold": "10m"}),
        (CPU, {FUSE: "true"}),
    ],
)
def test_good_flags(base: Mapping[str, Any], flags: Mapping[str, str]) -> None:
    assert check(recipe_of(base, {"hardware.compiler_flags": flags})) == []


def test_two_ways_to_run_one_collective_are_refused_together() -> None:
    first, second = flag_catalogue().exclusive[0].names
    problems = check(recipe_of(V6E, own(**{first: "true", second: "True"})))
    assert [problem.key.rpartition(".")[2] for problem in problems] == sorted((first, second))
    assert check(recipe_of(V6E, own(**{first: "true", second: "false"}))) == []


@pytest.mark.parametrize("section", ["env", "secrets"])
def test_the_variable_itself_is_refused_with_where_flags_go(section: str) -> None:
    value = "flags/tpu" if section == "secrets" else "--xla_a=1"
    (problem,) = check(recipe_of(V6E, {f"target.{section}": {LIBTPU_ARGS: value}}))
    assert problem.key == f"target.{section}.{LIBTPU_ARGS}"
    assert "hardware.compiler_flags.NAME=VALUE" in problem.fix


def test_every_shipped_recipe_passes_with_its_flags(repo: Path) -> None:
    for path in sorted((repo / "recipes").glob("*.yaml")):
        recipe = compose(path.stem, []).recipe
        assert [problem for problem in check(recipe) if "flags" in problem.key] == []
        arguments = flag_arguments(recipe)
        assert bool(arguments) == (recipe.hardware.generation != "cpu")
        assert all(re.fullmatch(r"--[a-z0-9_]+=\w+", argument) for argument in arguments)


def test_flags_change_no_experiment() -> None:
    assert fingerprint(recipe_of(V6E, own(**{VMEM: "65536"}))) == fingerprint(recipe_of(V6E))


def test_the_plan_shows_what_the_trainer_gets() -> None:
    recipe = recipe_of(V6E)
    (text,) = libtpu_env(recipe).values()
    assert f"{LIBTPU_ARGS}={text}\n" in render_plan(make_plan(recipe))
    assert LIBTPU_ARGS not in make_plan(recipe_of(CPU)).environment


def test_fewer_slices_are_compiled_for_fewer_slices() -> None:
    elastic = recipe_of(V6E)
    several = {flag.name for flag in tuned_flags("v6e") if flag.when == "multislice"}
    assert several and several <= set(values(elastic))
    assert not several & set(values(with_slices(elastic, 1)))


def test_the_proxy_of_pathways_takes_the_users_flags() -> None:
    images = {
        f"target.{name}": f"a/b@sha256:{'0' * 64}"
        for name in ("pathways_server_image", "pathways_proxy_image", "image")
    }
    recipe = recipe_of(V6E, {"target.controller": "pathways", **images, **own(**{VMEM: "65536"})})
    text = json.dumps(manifest(recipe, make_plan(recipe), bundle=None))
    assert text.count(f"--{VMEM}=65536") == 1


def test_hardware_lists_flags_with_reasons() -> None:
    text = CliRunner().invoke(command, ["v6e"], catch_exceptions=False).stdout
    assert f"--{VMEM}=98304   when model.num_experts=1\n" in text
    listed = json.loads(CliRunner().invoke(command, ["v6e", "--json"], catch_exceptions=False).stdout)
    assert {entry["name"] for entry in listed["compiler_flags"]} == {flag.name for flag in tuned_flags("v6e")}
    assert all(entry["reason"] and entry["source"] for entry in listed["compiler_flags"])
