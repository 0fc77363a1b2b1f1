"""Recipes for the data tests: everything but the data is as small as may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from array_record.python import array_record_module

from recipes.load import recipe_from_dict
from recipes.schema import Recipe


def make_recipe(
    *,
    source: str = "python_stdlib",
    vocab_size: int = 256,
    global_batch_size: int = 8,
    sequence_length: int = 16,
    seed: int = 0,
    eval_num_batches: int = 2,
    **data: Any,
) -> Recipe:
    """A recipe whose ``data`` group is ``source`` and the further keys."""
    return recipe_from_dict(
        {
            "name": "data-test",
            "run": {},
            "hardware": {"generation": "cpu", "topology": "1x1"},
            "model": {
                "vocab_size": vocab_size,
                "num_layers": 1,
                "embed_dim": 8,
                "mlp_dim": 8,
                "num_heads": 1,
                "num_kv_heads": 1,
                "head_dim": 8,
            },
            "mesh": {},
            "multislice": {},
            "data": {"source": source, **data},
            "optimizer": {"learning_rate": 0.1},
            "checkpoint": {},
            "target": {"kind": "local"},
            "train": {
                "num_steps": 1,
                "global_batch_size": global_batch_size,
                "sequence_length": sequence_length,
                "seed": seed,
                "eval_num_batches": eval_num_batches,
            },
        }
    )


def write_records(path: Path, records: list[bytes]) -> None:
    """An ArrayRecord file of ``records``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
