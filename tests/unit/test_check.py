"""Rules across keys: bad recipes with the key that is named and the fix that is offered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from recipes.check import check
from recipes.errors import Problem
from recipes.load import flatten, nest, recipe_from_dict
from recipes.schema import Recipe

LOCAL: Mapping[str, Any] = flatten(
    {
        "name": "tiny",
        "hardware": {"generation": "cpu", "topology": "1x4"},
        "model": {
            "vocab_size": 256,
            "num_layers": 2,
            "embed_dim": 64,
            "mlp_dim": 128,
            "num_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 16,
        },
        "multislice": {"num_slices": 2},
        "data": {"source": "python_stdlib"},
        "optimizer": {"learning_rate": 1e-3},
        "target": {"kind": "local"},
        "train": {"num_steps": 100, "global_batch_size": 32, "sequence_length": 128},
    }
)
"""2 slices x 4 CPU devices: data 2 x fsdp 4."""

TPU: Mapping[str, Any] = {
    **LOCAL,
    "hardware.generation": "v5p",
    "hardware.topology": "2x2x4",
    "multislice.num_slices": 1,
    "data.source": "synthetic",
    "target.kind": "gke",
    "run.root": "gs://some-bucket/runs",
}
"""16 chips: fsdp 16."""

MIXTRAL: Mapping[str, Any] = {
    **LOCAL,
    "model.family": "mixtral",
    "model.num_experts": 8,
    "model.num_experts_per_token": 2,
}


def _recipe(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Recipe:
    return recipe_from_dict(nest({**base, **changes}))


def _problems(base: Mapping[str, Any], changes: Mapping[str, Any]) -> list[Problem]:
    return check(_recipe(base, changes))


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (LOCAL, {}),
        (TPU, {}),
        (MIXTRAL, {}),
        (MIXTRAL, {"mesh.expert": 4, "mesh.fsdp": 1}),
        (LOCAL, {"mesh.fsdp": 2, "mesh.tensor": 2}),
        (LOCAL, {"mesh.fsdp": 4, "multislice.data": 1, "multislice.fsdp": 2}),
        (LOCAL, {"mesh.context": 4, "mesh.fsdp": -1, "train.global_batch_size": 2}),
        (LOCAL, {"run.root": "/data/my runs/v1.2"}),
        (LOCAL, {"run.root": "gs://a.b-c_d/x"}),
        (LOCAL, {"run.root": "gs://abc"}),
        (TPU, {"target.kind": "tpu"}),
        (TPU, {"hardware.generation": "tpu7x", "mesh.fsdp": 32}),
        (TPU, {"multislice.num_slices": 2}),
        (TPU, {"hardware.topology": "2x2x1"}),
        (LOCAL, {"data.source": "text_files", "data.path": "/texts", "data.eval_path": "/held out"}),
        (LOCAL, {"data.tokenizer": "huggingface", "data.tokenizer_path": "t.json", "model.vocab_size": 100}),
        (LOCAL, {"data.source": "token_file", "data.path": "t.bin", "model.vocab_size": 2**16}),
        (LOCAL, {"model.attention": "xla_chunked", "model.attention_chunk": 64}),
        (LOCAL, {"model.attention": "xla", "model.attention_chunk": 100}),
        (LOCAL, {"model.attention": "xla_chunked"}),
        (LOCAL, {"optimizer.warmup_steps": 99}),
        (LOCAL, {"train.profile_start_step": 98}),
        (LOCAL, {"train.profile_start_step": 1, "train.profile_interval_steps": 3}),
        (LOCAL, {"checkpoint.save_interval_minutes": None, "checkpoint.save_interval_steps": 1}),
    ],
)
def test_nothing_is_wrong(base: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    assert _problems(base, changes) == []


BAD = [
    # hardware
    (TPU, {"hardware.topology": "4x4x5"}, "hardware.topology", "use 4x4x4 or 4x4x8"),
    (TPU, {"hardware.topology": "8x4x4"}, "hardware.topology", "use 4x4x8"),
    (TPU, {"hardware.topology": "nonsense"}, "hardware.topology", "4x4x8"),
    (TPU, {"hardware.generation": "v6e", "hardware.topology": "2x4"}, "hardware.chips_per_host", "=8 or 4"),
    (TPU, {"hardware.chips_per_host": 8}, "hardware.chips_per_host", "leave hardware.chips_per_host out"),
    (LOCAL, {"hardware.topology": "8"}, "hardware.topology", "1x4"),
    # mesh
    (LOCAL, {"mesh.fsdp": 8}, "mesh.fsdp", "use mesh.fsdp=4 or -1"),
    (LOCAL, {"mesh.fsdp": 1}, "mesh.fsdp", "use mesh.fsdp=4 or -1"),
    (LOCAL, {"mesh.fsdp": 2, "mesh.tensor": 4}, "mesh.tensor", "use mesh.tensor=2 or -1"),
    (
        LOCAL,
        {"mesh.fsdp": 3, "mesh.tensor": 7},
        "mesh.tensor",
        "make the product of the other axes (3) divide 4",
    ),
    (LOCAL, {"mesh.tensor": 3}, "mesh.tensor", "1, 2, 4"),
    (LOCAL, {"mesh.data": -1}, "mesh.fsdp", "give a number"),
    (LOCAL, {"mesh.fsdp": 0}, "mesh.fsdp", "at least 1"),
    (LOCAL, {"mesh.tensor": -2}, "mesh.tensor", "at least 1"),
    (TPU, {"hardware.generation": "tpu7x", "mesh.fsdp": 16}, "mesh.fsdp", "use mesh.fsdp=32 or -1"),
    (LOCAL, {"multislice.data": 3}, "multislice.data", "use multislice.data=2 or -1"),
    (LOCAL, {"multislice.data": 1}, "multislice.data", "use multislice.data=2 or -1"),
    (LOCAL, {"multislice.fsdp": -1}, "multislice.fsdp", "give a number"),
    (LOCAL, {"multislice.data": 0}, "multislice.data", "at least 1"),
    (TPU, {"multislice.num_slices": 2, "hardware.topology": "2x2x1"}, "multislice.num_slices", "one slice"),
    # model
    (LOCAL, {"model.head_dim": 15}, "model.head_dim", "use 16 or 14"),
    (LOCAL, {"model.num_kv_heads": 3}, "model.num_kv_heads", "1, 2, 4, 8"),
    (LOCAL, {"model.num_heads": 4, "model.num_kv_heads": 8}, "model.num_kv_heads", "1, 2, 4"),
    (LOCAL, {"model.num_experts": 8}, "model.num_experts", "model.family=mixtral"),
    (LOCAL, {"model.family": "mixtral"}, "model.num_experts", "at least 2"),
    (MIXTRAL, {"model.num_experts_per_token": 9}, "model.num_experts_per_token", "use at most 8"),
    (MIXTRAL, {"mesh.expert": 4, "mesh.fsdp": 1, "model.num_experts": 6}, "model.num_experts", "1, 2"),
    (LOCAL, {"mesh.expert": 4, "mesh.fsdp": 1}, "model.num_experts", "expert degree that divides 1"),
    (LOCAL, {"mesh.fsdp": 1, "mesh.tensor": 4, "model.num_kv_heads": 2}, "model.num_kv_heads", "1, 2"),
    (LOCAL, {"mesh.fsdp": 1, "mesh.tensor": 4, "model.mlp_dim": 130}, "model.mlp_dim", "128 or 132"),
    (LOCAL, {"mesh.fsdp": 1, "mesh.tensor": 4, "model.vocab_size": 258}, "model.vocab_size", "256 or 260"),
    (LOCAL, {"model.embed_dim": 66}, "model.embed_dim", "64 or 68"),
    (
        LOCAL,
        {"model.attention": "xla_chunked", "model.attention_chunk": 48},
        "model.attention_chunk",
        "32 or 64",
    ),
    (LOCAL, {"model.vocab_size": 128}, "model.vocab_size", "at least 256"),
    # batch and sequence
    (LOCAL, {"train.global_batch_size": 13}, "train.global_batch_size", "8 or 16"),
    (LOCAL, {"train.global_batch_size": 7}, "train.global_batch_size", "use the nearest: 8"),
    (LOCAL, {"train.grad_accum_steps": 3}, "train.global_batch_size", "24 or 48"),
    (LOCAL, {"mesh.context": 4, "train.sequence_length": 126}, "train.sequence_length", "120 or 128"),
    # run
    (LOCAL, {"run.name": "My_Run"}, "run.name", "run.name=my-run"),
    (LOCAL, {"run.name": "a" * 41}, "run.name", "run.name="),
    (LOCAL, {"name": "7b.yaml"}, "run.name", "run.name=run-7b-yaml"),
    (LOCAL, {"run.name": "___"}, "run.name", "run.name="),
    (LOCAL, {"run.root": " "}, "run.root", "gs://BUCKET"),
    (LOCAL, {"run.root": "../runs"}, "run.root", "without it"),
    (LOCAL, {"run.root": "runs//x"}, "run.root", "single slashes"),
    (LOCAL, {"run.root": "runs\n"}, "run.root", "remove"),
    (LOCAL, {"run.root": "~/runs"}, "run.root", "whole path"),
    (LOCAL, {"run.root": "s3://bucket/runs"}, "run.root", "gs://BUCKET"),
    (LOCAL, {"run.root": "gs:/bucket/runs"}, "run.root", "gs://BUCKET"),
    (LOCAL, {"run.root": "gs://"}, "run.root", "gs://BUCKET"),
    (LOCAL, {"run.root": "gs://Bucket/runs"}, "run.root", "gs://BUCKET"),
    (LOCAL, {"run.root": "gs://ab/runs"}, "run.root", "gs://BUCKET"),
    (LOCAL, {"run.root": "gs://10.0.0.1/runs"}, "run.root", "gs://BUCKET"),
    (LOCAL, {"run.root": "gs://goog-x/runs"}, "run.root", "gs://BUCKET"),
    (LOCAL, {"run.root": "gs://bucket//runs"}, "run.root", "single slashes"),
    (LOCAL, {"run.root": "gs://bucket/./runs"}, "run.root", "without it"),
    (LOCAL, {"run.peer_timeout_s": 30.0}, "run.peer_timeout_s", "use at most 15"),
    # target
    (TPU, {"target.kind": "local"}, "target.kind", "hardware.generation=cpu"),
    (TPU, {"target.kind": "tpu", "hardware.generation": "tpu7x"}, "target.kind", "use target=gke"),
    (
        TPU,
        {
            "target.kind": "tpu",
            "hardware.generation": "v6e",
            "hardware.topology": "2x4",
            "hardware.chips_per_host": 4,
        },
        "hardware.chips_per_host",
        "hardware.chips_per_host=8, or target=gke",
    ),
    # data
    (LOCAL, {"data.source": "text_files"}, "data.path", "set data.path"),
    (LOCAL, {"data.source": "array_record", "data.path": ""}, "data.path", "set data.path"),
    (LOCAL, {"data.path": "/texts"}, "data.path", "data.source=text_files"),
    (TPU, {"data.eval_path": "/texts"}, "data.eval_path", "data.source=text_files"),
    (LOCAL, {"data.source": "text_files", "data.path": "a\x00b"}, "data.path", "remove"),
    (LOCAL, {"data.tokenizer": "huggingface"}, "data.tokenizer_path", "tokenizer.json"),
    (LOCAL, {"data.tokenizer_path": "t.json"}, "data.tokenizer_path", "data.tokenizer=huggingface"),
    (
        LOCAL,
        {"data.source": "token_file", "data.path": "t.bin", "model.vocab_size": 128256},
        "data.token_dtype",
        "uint32",
    ),
    # length
    (LOCAL, {"optimizer.warmup_steps": 100}, "optimizer.warmup_steps", "use at most 99, for example 10"),
    (LOCAL, {"checkpoint.save_interval_minutes": None}, "checkpoint.save_interval_steps", "set one"),
    # profiles
    (LOCAL, {"train.profile_start_step": 99}, "train.profile_start_step", "use at most 98"),
    (
        LOCAL,
        {"train.profile_start_step": 1, "train.profile_num_steps": 10, "train.num_steps": 5},
        "train.profile_start_step",
        "train.profile_num_steps=5",
    ),
    (LOCAL, {"train.profile_interval_steps": 10}, "train.profile_interval_steps", "profile_start_step"),
    (
        LOCAL,
        {"train.profile_start_step": 1, "train.profile_interval_steps": 2},
        "train.profile_interval_steps",
        "use at least 3",
    ),
]


@pytest.mark.parametrize(("base", "changes", "key", "fix"), BAD)
def test_a_bad_recipe_is_refused_with_key_and_fix(
    base: Mapping[str, Any], changes: Mapping[str, Any], key: str, fix: str
) -> None:
    (problem,) = _problems(base, changes)
    assert problem.key == key
    assert fix in problem.fix
    assert problem.reason
    assert not problem.reason.endswith(".")


@pytest.mark.parametrize(("base", "changes", "key", "fix"), BAD)
def test_the_value_is_the_recipes_own(
    base: Mapping[str, Any], changes: Mapping[str, Any], key: str, fix: str
) -> None:
    (problem,) = _problems(base, changes)
    node: Any = _recipe(base, changes)
    for name in problem.key.split("."):
        node = getattr(node, name)
    named_by_recipe = problem.key == "run.name" and node is None
    assert problem.value == (changes["name"] if named_by_recipe else node)


def test_fixed_as_told_nothing_is_wrong() -> None:
    changes = {"mesh.fsdp": 8, "train.global_batch_size": 30, "optimizer.warmup_steps": 500}
    assert {problem.key for problem in _problems(LOCAL, changes)} == {"mesh.fsdp", "optimizer.warmup_steps"}
    mended = {**changes, "mesh.fsdp": 4, "optimizer.warmup_steps": 99}
    (left,) = _problems(LOCAL, mended)
    assert left.fix == "use the nearest: 24 or 32"
    assert _problems(LOCAL, {**mended, "train.global_batch_size": 32}) == []


def test_every_problem_is_reported_at_once_with_its_origin() -> None:
    changes = {
        "mesh.fsdp": 0,
        "multislice.data": 5,
        "model.head_dim": 3,
        "run.root": "..",
        "optimizer.warmup_steps": 100,
    }
    found = check(_recipe(LOCAL, changes), origins={key: f"from {key}" for key in changes})
    assert {problem.key for problem in found} == set(changes)
    assert all(problem.origin == f"from {problem.key}" for problem in found)


def test_heads_of_both_kinds_are_named() -> None:
    changes = {"mesh.fsdp": 1, "mesh.tensor": 4, "model.num_heads": 6, "model.num_kv_heads": 2}
    found = _problems(LOCAL, changes)
    assert [problem.key for problem in found] == ["model.num_heads", "model.num_kv_heads"]
    assert found[0].fix == "use a tensor degree that divides 6: 1, 2"


def test_what_cannot_be_judged_is_not_guessed() -> None:
    changes = {"hardware.topology": "4x4x5", "mesh.fsdp": 3, "train.global_batch_size": 7}
    assert [problem.key for problem in _problems(TPU, changes)] == ["hardware.topology"]
