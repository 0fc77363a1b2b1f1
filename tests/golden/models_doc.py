"""Writes the table of docs/models.md anew: every shipped model with its exact counts.

python -m tests.golden.models_doc
"""

from __future__ import annotations

import functools
from pathlib import Path

from launcher import recipe_path
from launcher.compose import compose
from recipes.flops import token_flops
from recipes.parameters import count_active_parameters, count_parameters
from recipes.schema import ModelConfig

MODELS_DOC = Path(__file__).resolve().parents[2] / "docs" / "models.md"
_BEGIN, _END = "tests.golden.models_doc -->\n", "<!-- end of models -->"
_COLUMNS = (
    "model",
    "parameters",
    "active",
    "layers",
    "embed",
    "MLP",
    "heads",
    "head",
    "vocabulary",
    "GFLOP a token at 8192",
)


@functools.cache
def shipped_model(name: str) -> ModelConfig:
    """One option of the group ``model``, as a recipe gets it."""
    return compose("quickstart", [f"model={name}", "model.attention=xla"]).recipe.model


def models_doc(text: str) -> str:
    """docs/models.md with its table made anew."""
    before, _, rest = text.partition(_BEGIN)
    return f"{before}{_BEGIN}{_table()}{_END}{rest.partition(_END)[2]}"


def _table() -> str:
    models = {name: shipped_model(name) for name in recipe_path.names([recipe_path.SHIPPED], "model")}
    by_size = sorted(models, key=lambda name: (count_parameters(models[name]), name))
    rows = [_COLUMNS, tuple("---" for _ in _COLUMNS), *(_row(name, models[name]) for name in by_size)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(name: str, model: ModelConfig) -> tuple[str, ...]:
    experts = f"{model.num_experts} x " if model.num_experts > 1 else ""
    return (
        name,
        f"{count_parameters(model):,}",
        f"{count_active_parameters(model):,}",
        str(model.num_layers),
        str(model.embed_dim),
        f"{experts}{model.mlp_dim} {model.mlp_activation}",
        f"{model.num_heads} / {model.num_kv_heads}",
        str(model.head_dim),
        f"{model.vocab_size}{' tied' if model.tie_embeddings else ''}",
        f"{token_flops(model, 8192) / 1e9:,.4g}",
    )


def main() -> None:
    text = MODELS_DOC.read_text(encoding="ascii")
    MODELS_DOC.write_text(models_doc(text), encoding="ascii")


if __name__ == "__main__":
    main()
