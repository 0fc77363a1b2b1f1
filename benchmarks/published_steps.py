"""Published training steps (`benchmarks/published/steps.csv`) as recipes, to hold predictions against.

A row says hardware, model, batch, mesh, what is recomputed and precision in the words of its source; each
is read into overrides by a table here. Rows whose model Muster cannot express are named with the reason.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.compose import compose
from recipes.parameters import count_matmul_parameters
from recipes.schema import ModelConfig, Recipe

ROWS = Path(__file__).with_name("published") / "steps.csv"
_BASE = "llama3-8b-v5e-16x16"
_GPT3 = (
    *("model=dense-16b", "model.num_layers=96", "model.embed_dim=12288", "model.mlp_dim=49152"),
    *("model.num_heads=96", "model.num_kv_heads=96", "model.head_dim=128", "model.vocab_size=50304"),
)
_LADDER = re.compile(r"(\d+)B \(emb")
_MODELS: Mapping[str, Sequence[str]] = {
    "llama2-7b": ("model=llama2-7b",),
    "llama2-70b": ("model=llama2-70b",),
    "llama3.1-8b": ("model=llama3.1-8b",),
    "llama3.1-70b": ("model=llama3.1-70b",),
    "llama3.1-405b": ("model=llama3-405b",),
    "mixtral-8x7b": ("model=mixtral-8x7b",),
    "mixtral-8x22b": ("model=mixtral-8x22b",),
    "gpt3-175b": _GPT3,
    "llama4-scout-17b-16e": (
        *("model=mixtral-8x7b", "model.num_layers=48", "model.embed_dim=5120", "model.mlp_dim=8192"),
        *("model.num_heads=40", "model.num_kv_heads=8", "model.num_experts=16"),
        *("model.num_experts_per_token=1", "model.num_shared_experts=1", "model.vocab_size=202048"),
    ),
    "qwen3-235b-a22b": (
        *("model=mixtral-8x7b", "model.num_layers=94", "model.embed_dim=4096", "model.mlp_dim=1536"),
        *("model.num_heads=64", "model.num_kv_heads=4", "model.num_experts=128"),
        *("model.num_experts_per_token=8", "model.vocab_size=151936"),
    ),
}
"""Overrides by the model of a row. Qwen3's norms of queries and keys are left out."""
NOT_EXPRESSED: Mapping[str, str] = {
    "deepseek": "multi-head latent attention",
    "gemma": "layers that differ in their attention window",
    "gpt-oss": "layers that differ in their attention window",
    "custom_moe": "SGD",
}
"""Why rows of a model, by how its name begins, are not predicted."""
_TOPOLOGIES: Mapping[str, Mapping[int, str]] = {
    "v4": {64: "4x4x4", 192: "4x4x12"},
    "v5e": {256: "16x16"},
    "v5p": {
        4: "2x2x1",
        64: "4x4x4",
        128: "4x4x8",
        256: "4x8x8",
        512: "8x8x8",
        1024: "8x8x16",
        2048: "8x16x16",
    },
    "v6e": {8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    "tpu7x": {64: "4x4x4", 128: "4x4x8", 256: "4x8x8"},
}
"""Of one slice, by its chips."""
_AXES = {"DP": "data", "FSDP": "fsdp", "FSDP_T": "fsdp", "TP": "tensor", "CP": "context", "EP": "expert"}
_DEGREE = re.compile(r"(ICI |DCN )?([A-Z_]+)=(\d+)")
_TENSORS = {
    "decoder_layer_input": "layer_input",
    "q": "query",
    "k": "key",
    "v": "value",
    "context": "attention_out",
    "out_proj": "attention_projected",
    "mlpwo": "mlp_out",
}
_POLICY = re.compile(r"([\w,]+)=(device|offload)")
_SAVE_DOTS_BUT_MLP = "[query,key,value,attention_projected,mlp_out]"
_QUANTIZATIONS = {"bf16": "none", "fp8_full": "fp8", "int8": "int8"}
_TERA = 1e12
_LONG = 32_768


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One row that a recipe can be made of."""

    name: str
    tier: str
    chip: str
    num_chips: int
    num_slices: int
    model: str
    """As the row calls it: what is left out together in cross-validation."""
    quantization: str
    step_s: float
    overrides: Sequence[str]

    @property
    def precision(self) -> str:
        return "bf16" if self.quantization == "none" else self.quantization


def published(path: Path = ROWS) -> Sequence[Published]:
    """All rows that a recipe can be made of, in the order of the file."""
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(_published(row) for row in csv.DictReader(file) if not not_expressed(row["model"]))


def not_expressed(model: str) -> str:
    """Why no recipe can be made of a model; empty where one can."""
    return next((reason for start, reason in NOT_EXPRESSED.items() if model.startswith(start)), "")


def recipe_of(row: Published) -> Recipe:
    return _composed(row.overrides)


@functools.cache
def _composed(overrides: Sequence[str]) -> Recipe:
    return compose(_BASE, overrides).recipe


def _published(row: Mapping[str, str]) -> Published:
    num_chips, num_slices = int(row["chips"]), int(row["slices"])
    quantization = next(value for name, value in _QUANTIZATIONS.items() if row["quant"].startswith(name))
    overrides = (*_overrides(row, num_chips, num_slices), f"model.quantization={quantization}")
    model = row["model"].split(" (")[0]
    label = f"{model} {quantization}" if quantization != "none" else model
    if int(row["seq"]) >= _LONG:
        label += f" {int(row['seq']) // 1024}k"
    return Published(
        name=f"{label}, {row['chip']} {num_chips // num_slices}x{num_slices}",
        tier=row["tier"],
        chip=row["chip"],
        num_chips=num_chips,
        num_slices=num_slices,
        model=model,
        quantization=quantization,
        step_s=float(row["step_s"]) if row["step_s"] else _derived_step_s(row, overrides),
        overrides=overrides,
    )


def _overrides(row: Mapping[str, str], num_chips: int, num_slices: int) -> Iterator[str]:
    chip, model, other = row["chip"], row["model"], row["other"]
    yield f"hardware.generation={chip}"
    yield f"hardware.topology={_TOPOLOGIES[chip][num_chips // num_slices]}"
    if chip == "v6e" and num_chips == 8:
        yield "hardware.chips_per_host=8"
    ladder = _LADDER.match(model)
    yield from (f"model=dense-{ladder[1]}b",) if ladder else _MODELS[model]
    yield from _mesh(row["mesh"], num_slices)
    yield f"train.global_batch_size={row['gbs']}"
    yield f"train.sequence_length={row['seq']}"
    yield f"train.vocab_chunks={4 if ladder else 8}"
    yield from _remat(row["remat"])
    if chip in ("v6e", "tpu7x"):
        yield "model.attention_chunk=2048"
    if re.search(r"weights? bf16|weight_dtype=bf16", other):
        yield "model.weight_dtype=bfloat16"
    if capacity := re.search(r"cf=([\d.]+)", other):
        yield f"model.expert_capacity={capacity[1]}"
        yield "model.grouped_matmul=xla"
    if "mu bf16" in other or "mu/grad bf16" in other:
        yield "optimizer.first_moment_dtype=bfloat16"
    yield from _flags(chip, other, is_old=ladder is not None)


def _mesh(text: str, num_slices: int) -> Iterator[str]:
    """``ICI FSDP=16 x TP=4 x DCN DP=2``; several degrees of one axis are one."""
    ici = {"fsdp": 1}
    across = {"data": 1, "fsdp": 1}
    for where, name, degree in _DEGREE.findall(text):
        degrees = across if where == "DCN " else ici
        degrees[_AXES[name]] = degrees.get(_AXES[name], 1) * int(degree)
    if "FSDP" not in text or "FSDP=-1" in text:
        ici["fsdp"] = -1
    yield from (f"mesh.{axis}={degree}" for axis, degree in ici.items())
    yield f"multislice.num_slices={num_slices}"
    yield from (f"multislice.{axis}={degree}" for axis, degree in across.items())


def _remat(text: str) -> Iterator[str]:
    if text.startswith("save_dot_except_mlpwi"):
        yield "train.remat_policy=named"
        yield f"train.remat_save={_SAVE_DOTS_BUT_MLP}"
    elif text.startswith("custom"):
        yield "train.remat_policy=named"
        named: dict[str, list[str]] = {"device": [], "offload": []}
        for names, place in _POLICY.findall(text.replace(", ", ",")):
            named[place] += [_TENSORS[name] for name in names.split(",") if name in _TENSORS]
        yield f"train.remat_save=[{','.join(named['device'])}]"
        yield f"train.remat_offload=[{','.join(named['offload'])}]"
    else:
        yield f"train.remat_policy={'minimal' if text.startswith('minimal') else 'full'}"


def _flags(chip: str, other: str, *, is_old: bool) -> Iterator[str]:
    """Tables of 2023 are from before the limit of vector memory was raised."""
    if "no XLA tuning flags" in other:
        yield "hardware.tuned_flags=false"
    elif is_old and chip == "v5e":
        yield "hardware.compiler_flags.xla_tpu_scoped_vmem_limit_kib=default"


def _derived_step_s(row: Mapping[str, str], overrides: Sequence[str]) -> float:
    """From TFLOP/s, with MaxText's FLOPs of then: attention not causal."""
    recipe = _composed(tuple(overrides))
    tokens = int(row["gbs"]) * int(row["seq"])
    flops = 6 * count_matmul_parameters(recipe.model) + attention_flops_per_token(
        recipe.model, int(row["seq"])
    )
    return tokens * flops / (float(row["tflops_chip"]) * _TERA * int(row["chips"]))


def attention_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Forward and backward, every token with every other."""
    return 12 * model.num_layers * model.num_heads * model.head_dim * sequence_length
