"""Recipes that must be refused, as tables: overrides, and files. Each names the key and says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.compose import compose
from recipes.contract import ExitCode
from recipes.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One bad input and what its refusal must say."""

    overrides: Sequence[str]
    says: Sequence[str]
    recipe: str = "quickstart"


def row(override: str, *says: str, recipe: str = "quickstart") -> Row:
    return Row(overrides=override.split(), says=says, recipe=recipe)


LARGE = "llama3-8b-v5e-16x16"

BAD_OVERRIDES = [
    # Hydra's silent traps, and what else it would do that a recipe does not need.
    row("+step=5", "+step=5", "adds a key", "write train.num_steps=5"),
    row("++model.n_layer=3", "++model.n_layer", "adds a key", "model.num_layers=3"),
    row("+train.seed=3", "adds a key", "write train.seed=3"),
    row("+recipe=llama3-8b", "adds a key"),
    row("~optimizer", "~optimizer", "removes a key"),
    row("~train.seed=0", "removes a key"),
    row("train.seed=1,2", "train.seed=1,2", "sweep"),
    row("train.seed=range(1,4)", "train.seed", "sweep"),
    row("optimizer.learning_rate=interval(1e-4,1e-3)", "optimizer.learning_rate", "sweep"),
    row("model=llama3-8b,llama3-70b", "model", "sweep"),
    row("model=glob(*)", "model", "sweep"),
    row("hydra.run.dir=/tmp", "hydra.run.dir", "not part of a recipe"),
    row("hydra/launcher=basic", "hydra/launcher", "not part of a recipe"),
    row("hydra.searchpath=[file:///tmp]", "hydra.searchpath", "not part of a recipe"),
    row("model@optimizer=llama3-8b", "moves a group"),
    row("model._target_=os.system", "model._target_", "code"),
    row("_target_=os.system", "_target_", "code"),
    row("model={_target_:os.system}", "model", "not an option"),
    row("data.path=${oc.env:HOME}", "data.path", "interpolates"),
    row("data.path=${oc.env:HOME,x}", "data.path", "interpolates"),
    row("data.path='${hydra:runtime.cwd}'", "data.path", "interpolates"),
    row("data.path=${model.nothing}", "data.path=${model.nothing}", "interpolates model.nothing"),
    row("data.path=${train.sed}", "interpolates train.sed", "did you mean ${train.seed}?"),
    row("data.path=${target.env}", "interpolates target.env"),
    row("data.path=${name}", "interpolates name"),
    row("train.seed=1 train.seed=2", "train.seed", "twice"),
    row("model=llama3-8b model=llama3-70b", "model", "twice"),
    row("train.seed", "train.seed", "not an override", "train.seed=VALUE"),
    row("seed", "not an override", "train.seed=VALUE"),
    row("train.num_steps=[1", "train.num_steps", "grammar"),
    row("=3", "not a key"),
    row("train.seed=4294967296", "train.seed", "above 2,147,483,647"),
    row("train.num_steps=99999999999999999999999", "train.num_steps", "above 2,147,483,647"),
    row("train.num_steps=1e3", "not a whole number", "write 1000"),
    row("run.name=''", "run.name", "not a run name"),
    row(f"optimizer.learning_rate={'9' * 400}", "optimizer.learning_rate", "not finite"),
    row("checkpoint.save_interval_minutes=1e300", "checkpoint.save_interval_minutes", "above 1,440"),
    row(f"train.seed={'9' * 3000}", "train.seed=9999", "...", "above"),
    # Names that do not exist, with what was probably meant.
    row("train.sed=3", "train.sed=3", "did you mean train.seed?"),
    row("model.n_layers=3", "did you mean model.num_layers?"),
    row("learning_rate=1e-3", "did you mean optimizer.learning_rate?"),
    row("modle=llama3-8b", "modle", "did you mean model?"),
    row("model=llama8", "model=llama8", "did you mean model=llama3-8b?", "recipes (shipped)"),
    row("optimizer=adam", "optimizer=adam", "did you mean optimizer=adamw?"),
    row("optimizer=", "not an option of the group optimizer"),
    row("target=../target/gke", "target", "not an option"),
    row("train={}", "train", "section"),
    row("mesh={}", "mesh", "not an option"),
    row("mesh=null", "mesh", "not an option"),
    row("name=other", "name=other", "run.name"),
    row("model.family=lama", "model.family=lama", "did you mean llama?"),
    row("train.remat_policy=ful", "train.remat_policy=ful", "did you mean full?"),
    row("model.attention=flash", "model.attention=flash", "xla_chunked"),
    row("optimizer.name=adamW", "optimizer.name=adamW", "did you mean adamw?"),
    row("data.source=python_stdlb", "data.source", "did you mean python_stdlib?"),
    row(
        "hardware.generation=v6p",
        "hardware.generation=v6p",
        "did you mean v6e? (one of v4, v5e, v5p, v6e, tpu7x, cpu)",
    ),
    row("target.capacity=preemptible", "target.capacity", "spot"),
    row("model.compute_dtype=float16", "model.compute_dtype", "bfloat16"),
    # Values of the wrong type or out of bounds.
    row("train.sequence_length=0", "train.sequence_length=0", "below 1"),
    row("train.num_steps=0", "train.num_steps=0", "below 1"),
    row("train.num_steps=-1", "train.num_steps=-1", "below 1"),
    row("train.num_steps=1e3", "train.num_steps", "not a whole number"),
    row("train.num_steps=many", "train.num_steps=many", "not a whole number"),
    row("train.num_steps=true", "train.num_steps=True", "not a whole number"),
    row("train.num_steps=null", "train.num_steps", "not a whole number"),
    row("train.num_steps={a:1}", "train.num_steps", "not a whole number"),
    row("train.global_batch_size=0", "train.global_batch_size=0", "below 1"),
    row("checkpoint.save_interval_steps=0", "checkpoint.save_interval_steps=0", "below 1"),
    row("checkpoint.keep=1", "checkpoint.keep=1", "below 2"),
    row("optimizer.learning_rate=0", "optimizer.learning_rate", "not above 0"),
    row("optimizer.learning_rate=nan", "optimizer.learning_rate=nan", "not finite"),
    row("optimizer.learning_rate=inf", "optimizer.learning_rate=inf", "not finite"),
    row("optimizer.learning_rate=fast", "optimizer.learning_rate=fast", "not a number"),
    row("optimizer.b1=1", "optimizer.b1", "above 0.9999"),
    row("model.tie_embeddings=1", "model.tie_embeddings=1", "true or false"),
    row("model.tie_embeddings=yes", "model.tie_embeddings=yes", "true or false"),
    row("model.num_layers=0", "model.num_layers=0", "below 1"),
    row("model.vocab_size=???", "model.vocab_size", "must be given"),
    row("multislice.num_slices=0", "multislice.num_slices=0", "below 1"),
    # Values that do not go together.
    row("mesh.fsdp=3", "mesh.fsdp=3", "4 devices"),
    row("mesh.fsdp=7", "mesh.fsdp=7", "4 devices"),
    row("mesh.fsdp=0", "mesh.fsdp=0", "not a degree"),
    row("mesh.tensor=-2", "mesh.tensor=-2", "not a degree"),
    row("mesh.tensor=-1", "mesh.", "only one axis can be -1"),
    row("mesh.fsdp=1", "mesh.fsdp=1", "4 devices"),
    row("multislice.data=3", "multislice.data=3", "2 slices"),
    row("multislice.fsdp=-1", "multislice.", "only one axis can be -1"),
    row("multislice.data=0", "multislice.data=0", "not a degree"),
    row("hardware.topology=3x5", "hardware.topology=3x5", recipe=LARGE),
    row("hardware.topology=16x16x16", "hardware.topology=16x16x16", recipe=LARGE),
    row("hardware.topology=256", "hardware.topology=256", recipe=LARGE),
    row("hardware.topology=0x4", "hardware.topology=0x4"),
    row("model.num_heads=6 mesh.tensor=4", "model.num_heads=6", "tensor axis"),
    row("model.num_kv_heads=3", "model.num_kv_heads=3", "model.num_heads=4"),
    row("model.head_dim=31", "model.head_dim=31", "RoPE"),
    row("train.global_batch_size=30", "train.global_batch_size=30", "32"),
    row("train.grad_accum_steps=3", "train.global_batch_size=32", "train.grad_accum_steps 3"),
    row("train.sequence_length=130 mesh=fsdp-context4", "train.sequence_length=130", "context 4"),
    row("model.num_experts=4", "model.num_experts=4", "no experts"),
    row("model=mixtral-8x7b model.num_experts_per_token=9", "model.num_experts_per_token=9", "at most 8"),
    row("target=tpu target.zone=NOPE", "target.zone=NOPE", "is not a zone"),
    row("target=local", "target.kind=local", recipe=LARGE),
    row("data=token-file", "data.path", "must be given"),
    row("data.path=/tmp/x", "data.path=/tmp/x", "not used"),
    row("data.tokenizer=huggingface", "data.tokenizer_path", "must be given"),
    row("model.vocab_size=100", "model.vocab_size=100", "256"),
    row("train.num_steps=10", "optimizer.warmup_steps=20", "train.num_steps=10"),
    row("checkpoint.save_interval_steps=null", "checkpoint.save_interval_steps", "both null"),
    row("run.peer_timeout_s=60", "run.peer_timeout_s=60", "grace"),
    row("run.name=../escape", "run.name=../escape", "run name"),
    row("run.name=UPPER", "run.name=UPPER", "run.name=upper"),
    row("run.root=s3://bucket/x", "run.root", "gs://"),
    row("run.root=a/../../b", "run.root", ".."),
    # The recipe itself.
    row("", "no recipe 'quikstart'", "did you mean quickstart?", "recipes (shipped)", recipe="quikstart"),
    row("", "no recipe 'zzz'", "`muster recipes` lists", recipe="zzz"),
    row("", "no recipe ''", recipe=""),
    row("", "no recipe file '../quickstart'", recipe="../quickstart"),
    row("", "no recipe file '/etc/passwd.yaml'", recipe="/etc/passwd.yaml"),
    row("", "not a name for a recipe", recipe="/etc/passwd"),
]


def refusal(recipe: str, overrides: Sequence[str]) -> str:
    """Everything the user reads when ``recipe`` is refused."""
    with pytest.raises(UserError) as caught:
        compose(recipe, overrides)
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    text = f"{caught.value.message}\n{caught.value.hint}"
    assert "Traceback" not in text and "+model" not in text.replace("++model", "")
    return text


@pytest.mark.parametrize(
    "bad", BAD_OVERRIDES, ids=lambda bad: f"{bad.recipe} {' '.join(bad.overrides)}".strip()
)
def test_bad_overrides(bad: Row) -> None:
    text = refusal(bad.recipe, bad.overrides)
    for expected in bad.says:
        assert expected in text


HEAD = (
    "defaults: [model: byte-llama-tiny, mesh: fsdp, multislice: one-slice, data: python-stdlib, "
    "optimizer: adamw-small, checkpoint: often, target: local, _self_]\n"
    "hardware: {generation: cpu, topology: 1x4}\n"
)
TRAIN = "train: {num_steps: 50, global_batch_size: 8, sequence_length: 64}\n"
GOOD = HEAD + TRAIN

BAD_FILES = {
    "unknown key": (HEAD + "train:\n  num_step: 5\n", "train.num_step=5 (./mine.yaml:4)", "train.num_steps?"),
    "unknown section": (
        GOOD + "optimiser:\n  b1: 0.5\n",
        "optimiser",
        "./mine.yaml:4",
        "did you mean optimizer",
    ),
    "missing values": (HEAD, "train.num_steps", "train.sequence_length", "must be given"),
    "all at once": (
        HEAD + "train: {num_steps: 0, sequence_length: -1, seed: x}",
        "4 problems",
        "num_steps=0",
        "seed=x",
    ),
    "target": (GOOD + "data:\n  _target_: os.system\n", "data._target_", "./mine.yaml:5", "code"),
    "target nested": (GOOD + "data: {path: {a: {_target_x: os.system}}}\n", "data.path.a._target_x", "code"),
    "defaults as a text": ("defaults: quickstart\n", "defaults=quickstart (./mine.yaml:1)", "is not a list"),
    "hydra section": (GOOD + "hydra: {run: {dir: /tmp}}\n", "hydra", "not part of a recipe"),
    "hydra searchpath": (GOOD + "hydra: {searchpath: ['file:///tmp']}\n", "hydra", "not part of a recipe"),
    "name": (GOOD + "name: other\n", "name=other", "name of the file"),
    "env": (GOOD + "run: {root: '${oc.env:HOME}'}\n", "run.root", "interpolates"),
    "nested interpolation": (GOOD + "run: {root: '${a:${run.name}}'}\n", "run.root", "interpolates"),
    "section is null": (GOOD + "mesh:\n", "mesh (./mine.yaml:4)", "not a mapping"),
    "section is a list": (GOOD + "mesh: [1, 2]\n", "mesh=... (./mine.yaml:4)", "not a mapping"),
    "section is a number": (GOOD + "mesh: 4\n", "mesh=4", "not a mapping"),
    "mapping for a value": (
        HEAD + "train: {num_steps: {a: 1}}\n",
        "train.num_steps={'a': 1}",
        "not a whole number",
    ),
    "list for a value": (HEAD + "train: {num_steps: [1]}\n", "train.num_steps=[1]", "not a whole number"),
    "empty mesh": (GOOD + "mesh: {}\n", "mesh", "is empty"),
    "empty": ("", "recipe", "no keys"),
    "only a comment": ("# nothing\n", "recipe", "no keys"),
    "a list": ("- 1\n", "recipe", "no keys"),
    "a text": ("hello\n", "recipe", "no keys"),
    "not yaml": ("train: {num_steps: 1\n", "./mine.yaml:", "not YAML"),
    "tab": ("train:\n\tnum_steps: 1\n", "./mine.yaml:2", "not YAML"),
    "two documents": (GOOD + "---\n" + GOOD, "second document"),
    "duplicate": (GOOD + TRAIN, "train", "given twice", "./mine.yaml:4"),
    "duplicate leaf": (HEAD + "train: {num_steps: 1, num_steps: 2}\n", "train.num_steps", "given twice"),
    "python tag": (GOOD + "run: {root: !!python/object/apply:os.system ['true']}\n", "run.root", "YAML tag"),
    "alias": (HEAD + "train: &t {num_steps: 50}\nrun: *t\n", "run=*t", "alias"),
    "merge key": (HEAD + "train: &t {num_steps: 50}\nrun: {<<: *t}\n", "alias"),
    "dotted key": (GOOD + "run.root: x\n", "run.root", "nest it"),
    "mapping as key": (GOOD + "? {a: 1}\n: 2\n", "not a word"),
    "unknown recipe in defaults": (
        GOOD.replace("[model", "[quikstart, model"),
        "no recipe 'quikstart'",
        "quickstart?",
    ),
    "unknown option in defaults": (
        GOOD.replace("llama-tiny", "lama-tiny"),
        "model",
        "'byte-lama-tiny'",
        "byte-llama-tiny?",
    ),
    "unknown group in defaults": (
        GOOD.replace("mesh: f", "mush: f"),
        "mush",
        "does not name a group",
        "mesh?",
    ),
    "optional in defaults": (GOOD.replace("mesh: f", "optional mesh: f"), "optional mesh", "in silence"),
    "package in defaults": (GOOD.replace("mesh: fsdp", "mesh@model: fsdp"), "mesh@model", "not"),
    "hydra in defaults": (GOOD.replace("mesh: f", "override hydra/launcher: f"), "hydra/launcher", "group"),
    "env in defaults": (GOOD.replace("mesh: fsdp", "mesh: '${oc.env:HOME}'"), "defaults", "interpolates"),
    "defaults of a group": (
        GOOD.replace("mesh: fsdp", "mesh: [fsdp]"),
        "defaults",
        "does not name an option",
    ),
    "defaults with a number": (GOOD.replace("_self_", "3"), "defaults", "not an entry"),
    "itself": ("defaults: [mine, _self_]\n" + TRAIN, "mine"),
    "twice in defaults": (GOOD.replace("mesh: fsdp", "mesh: fsdp, mesh: data"), "mesh"),
    "package header": ("# @package os.path\n" + GOOD, "@package", "not a package"),
    "long integer": (HEAD + f"train: {{seed: {'9' * 5000}}}\n", "train.seed", "not a whole number"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MUSTER_RECIPES", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(name: str, here: Path) -> None:
    text, *says = BAD_FILES[name]
    (here / "mine.yaml").write_text(text)
    refused = refusal("./mine.yaml", [])
    for expected in says:
        assert expected in refused


def test_the_file_that_the_bad_ones_differ_from_is_good(here: Path) -> None:
    (here / "mine.yaml").write_text(GOOD)
    assert compose("mine.yaml", []).recipe.train.num_steps == 50


def test_a_file_that_is_too_large_is_not_read(here: Path) -> None:
    (here / "mine.yaml").write_text(GOOD + "#" * (1 << 20))
    assert "larger than" in refusal("mine.yaml", [])


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_a_file_that_is_too_deep_is_refused(here: Path, opening: str) -> None:
    (here / "mine.yaml").write_text(GOOD + "run: {root: " + opening * 5000)
    text = refusal("mine.yaml", [])
    assert "nested too deeply" in text or "not YAML" in text


def test_a_file_that_is_not_text_is_refused(here: Path) -> None:
    (here / "mine.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refusal("mine.yaml", [])


def test_a_bad_group_file_is_named_with_its_line(here: Path) -> None:
    (here / "recipes" / "model").mkdir(parents=True)
    (here / "recipes" / "model" / "odd.yaml").write_text("# odd\nfamily: llama\nnum_layer: 3\n")
    text = refusal("quickstart", ["model=odd"])
    assert "model.num_layer=3 (./recipes/model/odd.yaml:3)" in text
    assert "did you mean model.num_layers?" in text


def test_every_bad_override_is_reported_at_once() -> None:
    text = refusal("quickstart", ["+step=5", "train.sed=1", "model=llama8", "train.seed=1,2"])
    assert "4 problems" in text


def test_a_folder_of_recipes_that_does_not_exist_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_RECIPES", str(here / "nowhere"))
    assert "MUSTER_RECIPES: no folder" in refusal("quickstart", [])
