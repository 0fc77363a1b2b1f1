"""500 seeded hostile texts wherever a recipe takes one: refused, naming the key, or carried exactly.

Carried means: through files or overrides into the recipe, through ``recipe.yaml`` and back, and into the
manifest as YAML, where Kubernetes would expand ``$(NAME)``.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.compose import compose
from launcher.gke.manifest import manifest, manifest_bytes
from launcher.plan import make_plan
from launcher.rundir import encode_recipe, read_recipe
from launcher.storage_local import LocalStorage
from recipes.contract import Env
from recipes.errors import RecipeError
from recipes.load import free_form, free_form_node, recipe_to_dict
from recipes.schema import Recipe

PIECES = (
    *(
        "'",
        '"',
        "\\",
        "`",
        ";",
        "&",
        "|",
        "<",
        ">",
        "#",
        "%s",
        "%n",
        "{{",
        "}}",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "=",
    ),
    *(
        "\n",
        "\r",
        "\t",
        " ",
        "\x00",
        "\x1b[2J",
        "\x7f",
        "\x85",
        "\u2028",
        "\ufeff",
        "\u202e",
        "\u200b",
        "\u2066",
    ),
    *(
        "$",
        "$$",
        "$(id)",
        "$(MUSTER_POD_IP)",
        "$$(MUSTER_POD_IP)",
        "$((",
        "${HOME}",
        "${oc.env:HOME}",
        "${train.seed}",
    ),
    *(
        "..",
        "../..",
        "/",
        "//",
        "/etc/passwd",
        "-",
        "--",
        "_",
        ".",
        "~",
        "@",
        "*",
        "!",
        "!!python/none",
        "&a",
        "<<",
    ),
    *(
        "null",
        "true",
        "on",
        "1",
        "3e-4",
        "0x10",
        "???",
        "NaN",
        "_target_",
        "hydra",
        "kubernetes.io/",
        "MUSTER_",
    ),
    *("\u0430bc", "\uff41", "\u0131", "\U0001f600", "e\u0301", "\u0660", "\udc80", "\ud800"),
)
WORDS = ("train", "a", "team-7", "Z9", "x" * 64, "y" * 300, "default")
DIGEST = "@sha256:" + "0123456789abcdef" * 4
GOOD: Mapping[str, Any] = {
    "run.name": "good",
    "run.root": "gs://some-bucket/runs",
    "data.path": "gs://some-bucket/tokens",
    "target.capacity": "reserved",
    "target.reservation": "mine",
    "target.cluster": "main",
    "target.namespace": "training",
    "target.image": f"registry.io/muster{DIGEST}",
    "target.service_account": "trainer",
    "target.queue": "tpus",
    "target.priority_class": "high",
}
"""What is overwritten by hostile texts, one by one."""
SINGLE = [key for key in GOOD if key != "target.capacity"]
ENTRIES = [*free_form(), "target.env", "target.env", "target.env"]
RECIPE = "defaults: [llama3-8b-v5e-16x16, override target: gke, override data: token-file, _self_]\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hostile:
    """One text and where it is put."""

    key: str
    """A key, or a free-form key and the entry's name."""
    text: str
    channel: str
    """``file``, ``override``, or ``json`` for an override of the whole free-form key."""

    def override(self) -> str:
        node = free_form_node(self.key)
        if self.channel == "json" and node:
            return f"{node}={json.dumps({self.key.removeprefix(f'{node}.'): self.text})}"
        return f"{self.key}={quoted(self.text)}"


def quoted(text: str) -> str:
    """A text by Hydra's grammar: backslashes are themselves, but before a quote and at the end."""
    return '"' + re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + (found[2] and '\\"'), text) + '"'


def some_text(rng: random.Random) -> str:
    parts = rng.choices(PIECES, k=rng.randint(0, 3)) + rng.choices(WORDS, k=rng.randint(0, 1))
    rng.shuffle(parts)
    return "".join(parts)


def some_word(rng: random.Random, place: str) -> str:
    """Something near to what is valid there, so that what is carried is tested too."""
    parts = rng.choices(
        (*"abcdef789", "-a", ".b", "_", "/", "A", "\u0430", "$(A)", "'", "..", "x" * 30), k=rng.randint(1, 4)
    )
    word = "".join(parts)
    shapes = {
        "run.root": f"gs://abc/{word}",
        "target.image": f"{word}{DIGEST}",
        "target.secrets": f"s{word}/k{word}",
    }
    return shapes.get(place, f"n{word}")


def batch(rng: random.Random) -> list[Hostile]:
    """One text for each single key; for each free-form key one hostile name and one hostile text."""
    found = {}
    for key in SINGLE:
        found[key] = some_text(rng) if rng.random() < 0.5 else some_word(rng, key)
    for number, node in enumerate(ENTRIES):
        name = some_text(rng) if rng.random() < 0.6 else some_word(rng, "")
        found[f"{node}.{name}"] = {"target.secrets": "secret/key"}.get(node, "value")
        found[f"{node}.N{number}"] = expandable(rng) + (
            some_text(rng) if rng.random() < 0.8 else some_word(rng, node)
        )
    return [Hostile(key=key, text=text, channel=channel(rng, key, text)) for key, text in found.items()]


def expandable(rng: random.Random) -> str:
    """For half of all texts, something that Kubernetes would expand if it were not escaped."""
    return rng.choice(("", "", "", "$(MUSTER_POD_IP)", "$$(A)", "$$$"))


def channel(rng: random.Random, key: str, text: str) -> str:
    """A way that can carry it at all: no file holds half a character, and ``=`` ends a name."""
    ways = ["file", "json" if free_form_node(key) else "override"]
    if "=" not in key and not key.endswith("."):
        ways.append("override")
    if any("\ud800" <= char <= "\udfff" for char in key + text):
        ways.remove("file")
    return rng.choice(ways)


BATCHES = [batch(random.Random(seed)) for seed in range(21)]


def test_there_are_500_of_them() -> None:
    assert sum(map(len, BATCHES)) >= 500


@pytest.mark.parametrize("number", range(len(BATCHES)))
def test_hostile_texts_are_refused_by_name_or_carried_exactly(number: int, tmp_path: Path) -> None:
    left, refused = list(BATCHES[number]), list[Hostile]()
    while True:
        try:
            recipe = composed(left, tmp_path)
            break
        except RecipeError as error:
            named = Counter(problem.key for problem in error.problems)
            bad = [hostile for hostile in left if named[shown(hostile.key, named)]]
            # One problem for each, and no problem that is of none.
            assert sum(named.values()) == len(bad) > 0, error.message
            left, refused = [hostile for hostile in left if hostile not in bad], [*refused, *bad]
    values = recipe_to_dict(recipe)
    for hostile in left:
        assert value_of(values, hostile.key) == hostile.text
    assert read_back(recipe, tmp_path) == recipe
    check_manifest(recipe)
    assert left and refused


def shown(key: str, named: Mapping[str, int]) -> str:
    """The key as a problem names it; very long ones are cut."""
    return key if key in named or len(key) <= 80 else f"{key[:77]}..."


def composed(hostile: Sequence[Hostile], folder: Path) -> Recipe:
    data: dict[str, Any] = {}
    in_file = {one.key: one.text for one in hostile if one.channel == "file"}
    overridden = {one.key for one in hostile} - in_file.keys()
    for key, value in {**GOOD, **in_file}.items():
        if key in overridden:
            continue
        node = free_form_node(key)
        section, _, leaf = (node or key).partition(".")
        if node:
            data.setdefault(section, {}).setdefault(leaf, {})[key.removeprefix(f"{node}.")] = value
        else:
            data.setdefault(section, {})[leaf] = value
    path = folder / "hostile.yaml"
    path.write_text(RECIPE + yaml.safe_dump(data, sort_keys=False))
    return compose(str(path), [one.override() for one in hostile if one.channel != "file"]).recipe


def value_of(values: Mapping[str, Any], key: str) -> object:
    node = free_form_node(key)
    section, _, leaf = (node or key).partition(".")
    found = values[section][leaf]
    return found[key.removeprefix(f"{node}.")] if node else found


def read_back(recipe: Recipe, folder: Path) -> Recipe:
    storage = LocalStorage(folder / "run")
    storage.create("recipe.yaml", encode_recipe(recipe))
    return read_recipe(storage, "recipe.yaml")


def check_manifest(recipe: Recipe) -> None:
    """Every text is in the manifest's YAML as it is in the recipe."""
    target, made = recipe.target, manifest(recipe, make_plan(recipe), bundle=None)
    read = yaml.safe_load(manifest_bytes(made))
    assert read == made
    assert (read["metadata"]["name"], read["metadata"]["namespace"]) == (recipe.run_name, target.namespace)
    assert read["metadata"]["annotations"]["muster.tpu/run-dir"] == recipe.run_dir
    assert target.labels.items() <= read["metadata"]["labels"].items()
    assert {target.queue, target.priority_class} <= set(read["metadata"]["labels"].values())
    template = read["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    pod, container = template["spec"], template["spec"]["containers"][0]
    assert target.labels.items() <= template["metadata"]["labels"].items()
    assert target.node_selector.items() <= pod["nodeSelector"].items()
    assert target.reservation in pod["nodeSelector"].values()
    assert (pod["serviceAccountName"], container["image"]) == (target.service_account, target.image)
    seen = environment(container["env"])
    assert target.env.items() <= seen.items()
    assert seen[Env.RUN_DIR] == recipe.run_dir
    secrets = {
        e["name"]: e["valueFrom"]["secretKeyRef"] for e in container["env"] if "secretKeyRef" in str(e)
    }
    assert {n: f"{ref['name']}/{ref['key']}" for n, ref in secrets.items()} == dict(target.secrets)


def environment(entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What a container finds: ``$$`` is ``$``, and ``$(NAME)`` of an earlier variable is its value."""
    found: dict[str, str] = {}
    for entry in entries:
        value = entry.get("value", "<field>")
        found[entry["name"]] = re.sub(
            r"\$\$|\$\(([^)]*)\)",
            lambda m: "$" if m[0] == "$$" else found.get(m[1], m[0]),
            value,
        )
    return found


@pytest.mark.parametrize(
    ("name", "value"),
    [("HF_TOKEN", "canary-77"), ("DB_PASSWORD", '"canary-77'), ("aws_secret_access_key", "${canary-77}")],
)
def test_a_secret_in_the_environment_is_refused_and_not_repeated(
    name: str, value: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: [quickstart, _self_]\n" + yaml.safe_dump({"target": {"env": {name: value}}}))
    for recipe, overrides in (
        ("quickstart", [f"target.env.{name}={value}"]),
        ("quickstart", [f"+target.secrets.{name}={value}"]),
        ("quickstart", [f"target.env={json.dumps({name: value})}"]),
        ("quickstart", [f"target.envs.{name}={value}"]),
        (str(path), []),
    ):
        with pytest.raises(RecipeError) as caught:
            compose(recipe, overrides)
        assert name in caught.value.message
        assert "canary" not in caught.value.message + caught.value.hint
