"""Composition: the shipped recipes, overrides, the search path, and where values come from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher import recipe_path
from launcher.compose import compose, recompose
from launcher.plan import make_plan, render_plan
from recipes.check_target import launch_problems
from recipes.errors import RecipeError, UserError
from recipes.load import flatten, keys, recipe_from_dict, recipe_to_dict

SHIPPED = recipe_path.names([recipe_path.SHIPPED])
PARAMETERS = {
    "llama3-8b-v5e-16x16": 8_030_261_248,
    "llama3-8b-v6e-16x16-x2": 8_030_261_248,
    "llama3-70b-v5p-4x4x8": 70_553_706_496,
    "llama3-405b-v5p-8x8x8-x2": 405_853_388_800,
    "mixtral-8x7b-v6e-16x16": 46_702_792_704,
}
"""Of the published checkpoints, exactly."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MUSTER_RECIPES", raising=False)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_recipes_that_the_readme_promises_are_there() -> None:
    assert {"quickstart", *PARAMETERS} <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_recipe_composes_and_plans(name: str) -> None:
    recipe = compose(name, []).recipe
    plan = make_plan(recipe)
    assert recipe.name == name
    assert render_plan(plan)
    assert plan.model.num_parameters == PARAMETERS.get(name, plan.model.num_parameters)
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe


@pytest.mark.parametrize("name", SHIPPED)
def test_complete_recipes_are_short_and_leave_the_rest_to_groups(name: str) -> None:
    text = (recipe_path.SHIPPED / f"{name}.yaml").read_text()
    assert len(text.splitlines()) < 40
    data = yaml.safe_load(text)
    # A key set here would win in silence over an option that the user chooses for its group.
    assert set(data) <= {"defaults", "hardware", "run", "train"}
    assert [next(iter(item)) for item in data["defaults"][:-1]] == list(recipe_path.GROUPS)


@pytest.mark.parametrize("group", [None, *recipe_path.GROUPS])
def test_every_file_says_what_it_is_for(group: str | None) -> None:
    for entry in recipe_path.entries([recipe_path.SHIPPED], group):
        assert entry.comment, entry.label


NEEDS = {
    **{
        f"model={name}": ["model.attention=xla"] for name in recipe_path.names([recipe_path.SHIPPED], "model")
    },
    "data=token-file": ["data.path=x", "model.vocab_size=128256"],
    "data=text-files": ["data.path=x"],
    "data=array-record": ["data.path=x"],
    "mesh=fsdp-expert8": ["model=mixtral-8x7b", "model.attention=xla", "hardware.topology=1x8"],
    "optimizer=adamw": ["train.num_steps=10000"],
    "optimizer=adamw-large": ["train.num_steps=10000"],
    "mesh=fsdp-tensor4": ["model.num_kv_heads=4"],
    "multislice=four-slices": [],
}
"""What an option needs besides itself to fit quickstart."""
OPTIONS = [
    f"{group}={name}"
    for group in recipe_path.GROUPS
    if group != "target"
    for name in recipe_path.names([recipe_path.SHIPPED], group)
]


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_every_group_can_be_chosen(option: str) -> None:
    composed = compose("quickstart", [option, *NEEDS.get(option, [])])
    group, name = option.split("=")
    assert any(f"recipes/{group}/{name}.yaml:" in origin for origin in composed.origins.values())


@pytest.mark.parametrize("name", recipe_path.names([recipe_path.SHIPPED], "target"))
def test_every_target_can_be_chosen(name: str) -> None:
    recipe = "quickstart" if name == "local" else "llama3-8b-v5e-16x16"
    assert compose(recipe, [f"target={name}"]).recipe.target.kind in name


def test_keys_that_no_file_mentions_can_be_overridden() -> None:
    composed = compose("quickstart", ["train.seed=3", "run.name=mine", "optimizer.clip_norm=null"])
    assert composed.recipe.train.seed == 3
    assert composed.recipe.run_name == "mine"
    assert composed.recipe.optimizer.clip_norm is None


def test_values_are_numbers_also_without_a_point() -> None:
    assert compose("quickstart", ["optimizer.learning_rate=3e-4"]).recipe.optimizer.learning_rate == 3e-4
    assert compose("quickstart", ["optimizer.weight_decay=0"]).recipe.optimizer.weight_decay == 0.0


def test_origins_name_file_and_line_override_or_default() -> None:
    origins = compose("quickstart", ["train.seed=3", "model=llama3-8b", "model.attention=xla"]).origins
    assert list(origins) == list(keys())
    assert origins["train.seed"] == "override"
    assert origins["run.max_restarts"] == "default"
    for key, path in (("model.num_layers", "model/llama3-8b.yaml"), ("train.num_steps", "quickstart.yaml")):
        file, _, line = origins[key].rpartition(":")
        assert file == f"recipes/{path}"
        text = (recipe_path.SHIPPED / path).read_text().splitlines()[int(line) - 1]
        assert text.strip().startswith(f"{key.rsplit('.', 1)[1]}:")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_origin_points_at_the_value(name: str) -> None:
    composed = compose(name, [])
    flat = flatten(recipe_to_dict(composed.recipe))
    for key, origin in composed.origins.items():
        if key == "name" or origin == "default":
            continue
        file, _, line = origin.rpartition(":")
        text = (recipe_path.SHIPPED.parent / file).read_text().splitlines()[int(line) - 1]
        leaf, _, value = text.strip().partition(": ")
        assert leaf == key.rsplit(".", 1)[1]
        loaded = yaml.safe_load(value)
        assert loaded == flat[key] or float(loaded) == flat[key]


def test_a_recipe_of_the_working_directory_extends_a_shipped_one(here: Path) -> None:
    write(here / "recipes" / "mine.yaml", "# mine\ndefaults: [quickstart, _self_]\ntrain: {num_steps: 300}\n")
    composed = compose("mine", ["train.seed=1"])
    assert composed.recipe.name == "mine"
    assert composed.recipe.train.num_steps == 300
    assert composed.recipe.model.num_layers == compose("quickstart", []).recipe.model.num_layers
    assert composed.origins["train.num_steps"] == "./recipes/mine.yaml:3"
    assert composed.origins["name"] == "./recipes/mine.yaml"


def test_a_recipe_extends_another_and_chooses_other_options(here: Path) -> None:
    text = "defaults: [quickstart, override model: small, override mesh: data, _self_]\n"
    write(here / "recipes" / "mine.yaml", text + "run: {root: elsewhere}\n")
    write(
        here / "recipes" / "model" / "small.yaml",
        "# small\ndefaults: [byte-llama-tiny, _self_]\nnum_layers: 2\n",
    )
    recipe = compose("mine", []).recipe
    assert (recipe.model.num_layers, recipe.mesh.fsdp, recipe.run.root) == (2, 1, "elsewhere")


def test_the_command_line_wins_over_an_override_in_a_defaults_list(here: Path) -> None:
    write(here / "mine.yaml", "defaults: [quickstart, override mesh: data, _self_]\nrun: {root: x}\n")
    assert compose("mine.yaml", []).recipe.mesh.data == -1
    composed = compose("mine.yaml", ["mesh=fsdp", "optimizer=adamw", "train.num_steps=9000"])
    assert (composed.recipe.mesh.fsdp, composed.recipe.mesh.data) == (-1, 1)
    assert composed.origins["mesh.fsdp"] == "recipes/mesh/fsdp.yaml:3"
    assert composed.origins["optimizer.warmup_steps"].startswith("recipes/optimizer/adamw.yaml:")


def test_the_search_path_has_an_order(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, steps in (("recipes", 101), ("variable", 102), ("option", 103)):
        write(here / folder / "mine.yaml", f"defaults: [quickstart, _self_]\ntrain: {{num_steps: {steps}}}\n")
    assert compose("mine", []).recipe.train.num_steps == 101
    monkeypatch.setenv("MUSTER_RECIPES", f"{here / 'variable'}{os.pathsep}")
    assert compose("mine", []).recipe.train.num_steps == 102
    assert compose("mine", [], search=[here / "option"]).recipe.train.num_steps == 103
    assert compose("recipes/mine.yaml", []).recipe.train.num_steps == 101


def test_own_recipes_hide_shipped_ones_and_are_listed_so(here: Path) -> None:
    write(here / "recipes" / "model" / "llama3-8b.yaml", "# mine\nnum_layers: 2\n")
    entry = next(e for e in recipe_path.entries(recipe_path.search_path(), "model") if e.name == "llama3-8b")
    assert (entry.comment, entry.label) == ("mine", "./recipes/model/llama3-8b.yaml")
    assert entry.shadows == ("recipes/model/llama3-8b.yaml",)


def test_an_option_for_a_group_that_the_recipe_leaves_open(here: Path) -> None:
    open_groups = "model: byte-llama-tiny, data: python-stdlib, optimizer: adamw-small, checkpoint: null"
    text = f"defaults: [{open_groups}, _self_]\nhardware: {{generation: cpu, topology: 1x4}}\n"
    write(here / "mine.yaml", text + "train: {num_steps: 50, global_batch_size: 8, sequence_length: 64}\n")
    with pytest.raises(UserError, match=r"target\.kind"):
        compose("mine.yaml", [])
    recipe = compose("mine.yaml", ["target=local", "checkpoint=often", "mesh=data"]).recipe
    assert (recipe.target.kind, recipe.checkpoint.save_interval_steps, recipe.mesh.data) == ("local", 50, -1)


def test_a_chosen_option_that_the_recipe_overrules_is_noted(here: Path) -> None:
    write(here / "mine.yaml", "defaults: [quickstart, _self_]\nmodel: {num_layers: 2}\n")
    composed = compose("mine.yaml", ["model=llama3-8b", "model.attention=xla"])
    assert composed.recipe.model.num_layers == 2
    assert composed.notes == ("./mine.yaml:2 sets model.num_layers over model=llama3-8b",)


def test_interpolation_of_another_key(here: Path) -> None:
    text = "defaults: [quickstart, _self_]\noptimizer: {warmup_steps: '${train.eval_interval_steps}'}\n"
    write(here / "mine.yaml", text)
    recipe = compose("mine.yaml", ["train.eval_interval_steps=77"]).recipe
    assert recipe.optimizer.warmup_steps == 77


def test_a_global_package_sets_keys_of_several_sections(here: Path) -> None:
    text = "# @package _global_\n# short runs\nrun: {max_restarts: 7}\ncheckpoint: {keep: 2}\n"
    write(here / "recipes" / "checkpoint" / "short.yaml", text)
    write(here / "mine.yaml", "defaults: [quickstart, override checkpoint: short]\n")
    composed = compose("mine.yaml", [], search=[here / "recipes"])
    assert (composed.recipe.run.max_restarts, composed.recipe.checkpoint.keep) == (7, 2)
    assert composed.origins["run.max_restarts"] == "./recipes/checkpoint/short.yaml:3"
    entry = recipe_path.entries([here / "recipes"], "checkpoint")[0]
    assert entry.comment == "short runs"


def test_yaml_words_and_numbers_are_those_of_yaml_1_2(here: Path) -> None:
    text = "defaults: [quickstart, _self_]\nrun: {root: no, name: '123'}\noptimizer: {learning_rate: 3e-4}\n"
    write(here / "mine.yaml", text)
    with pytest.raises(UserError, match=r"run.name=123"):
        compose("mine.yaml", [])
    recipe = compose("mine.yaml", ["run.name=x"]).recipe
    assert (recipe.run.root, recipe.optimizer.learning_rate) == ("no", 3e-4)


def test_composing_twice_gives_the_same() -> None:
    first = compose("quickstart", ["model=llama3-8b", "model.attention=xla"])
    compose("llama3-70b-v5p-4x4x8", [])
    assert compose("quickstart", ["model=llama3-8b", "model.attention=xla"]) == first


def test_the_recipe_does_not_depend_on_directory_locale_or_hash_seed(tmp_path: Path, repo: Path) -> None:
    code = "from launcher.compose import compose; print(compose('quickstart', ['train.seed=3']))"

    def run(seed: str, locale: str, cwd: Path) -> bytes:
        env = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": locale, "PYTHONPATH": str(repo)}
        return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, check=True, stdout=-1).stdout

    assert run("1", "C", tmp_path) == run("2", "C.UTF-8", repo)


def test_the_example_of_the_documentation_works(here: Path, repo: Path) -> None:
    text = (repo / "docs" / "recipes.md").read_text()
    complete, option, target = [block.split("```")[0] for block in text.split("```yaml\n")[1:]]
    write(here / "recipes" / "mine.yaml", complete)
    write(here / "recipes" / "model" / "my-model.yaml", option)
    recipe = compose("mine", []).recipe
    assert (recipe.train.num_steps, recipe.model.num_layers, recipe.model.vocab_size) == (1000, 2, 256)
    write(here / "remote.yaml", f"defaults: [llama3-8b-v5e-16x16, override target: gke, _self_]\n{target}")
    remote = compose("remote.yaml", ["run.root=gs://some-bucket/runs"]).recipe
    assert launch_problems(remote) == []
    assert remote.target.secrets == {"HF_TOKEN": "hugging-face/token"}


def test_installed_hydra_plugins_are_not_imported(here: Path, repo: Path) -> None:
    write(here / "hydra_plugins" / "evil" / "__init__.py", "raise SystemExit('imported')\n")
    code = "from launcher.compose import compose; compose('quickstart', ['train.seed=3'])"
    env = {**os.environ, "PYTHONPATH": f"{repo}{os.pathsep}{here}"}
    subprocess.run([sys.executable, "-c", code], cwd=here, env=env, check=True)


def test_problems_of_every_kind_are_reported_together() -> None:
    overrides = [
        "model.num_layer=3",
        "train.remat_policy=ful",
        "checkpoint.save_interval_steps=0",
        "mesh.tensor=3",
    ]
    with pytest.raises(RecipeError) as caught:
        compose("quickstart", overrides)
    assert [problem.key for problem in caught.value.problems] == [
        "model.num_layer",
        "checkpoint.save_interval_steps",
        "train.remat_policy",
        "mesh.tensor",
    ]


def test_a_complete_recipe_again_with_other_keys() -> None:
    recipe = compose("quickstart", ["target=gke", "target.env.A=1", "target.env.B=2"]).recipe
    again = recompose(recipe, ["target.namespace=b", "target.env.A=3", "~target.env.B", "target.queue=null"])
    changed = {"target.namespace": "b", "target.env": {"A": "3"}}
    assert flatten(recipe_to_dict(again)) == flatten(recipe_to_dict(recipe)) | changed
    with pytest.raises(RecipeError) as caught:
        recompose(recipe, ["target.namespac=b", "target.grace_period_s=1", "target=gke"])
    assert {problem.key for problem in caught.value.problems} == {
        "target.namespac",
        "target.grace_period_s",
        "target",
    }
