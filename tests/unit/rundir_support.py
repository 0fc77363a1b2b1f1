"""A recipe and a run directory for tests of the run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.rundir import RunDir, create_or_open
from launcher.storage import Storage, open_storage
from recipes.load import recipe_from_dict
from recipes.schema import Recipe


def make_recipe(**train: Any) -> Recipe:
    """A small recipe; keyword arguments are keys of ``train``."""
    return recipe_from_dict(
        {
            "name": "tiny",
            "hardware": {"generation": "cpu", "topology": "1x4"},
            "model": {
                "vocab_size": 256,
                "num_layers": 1,
                "embed_dim": 8,
                "mlp_dim": 8,
                "num_heads": 1,
                "num_kv_heads": 1,
                "head_dim": 8,
            },
            "data": {"source": "synthetic"},
            "optimizer": {"learning_rate": 1e-5},
            "target": {"kind": "local"},
            "train": {"num_steps": 20, "global_batch_size": 4, "sequence_length": 8} | train,
        }
    )


def make_run(root: Path, name: str = "tiny") -> RunDir:
    """A new run under ``root``."""
    return create_or_open(open_storage(str(root / name)), make_recipe(), {}).run


def commit_checkpoint(storage: Storage, step: int) -> None:
    """What the launcher sees of a committed checkpoint."""
    storage.replace(f"checkpoints/{step}/_CHECKPOINT_METADATA", b"{}")
    storage.replace(f"checkpoints/{step}/commit_success.txt", b"")
