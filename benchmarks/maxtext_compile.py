"""Run by MaxText's own interpreter: its train step compiled ahead of time, and what the compiler says of it.

``python maxtext_compile.py OUT KEY=VALUE ...`` runs MaxText's ``train_compile`` with those settings over
its ``base.yml`` and writes ``compiled.txt`` and ``compiled.json`` into OUT, as ``trainer.aot`` does.
Imports nothing of this repository, which that interpreter does not have.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

SIZES = (
    *("argument", "output", "alias", "temp", "generated_code"),
    *("host_argument", "host_output", "host_alias", "host_temp"),
)


def main() -> None:
    from maxtext.trainers.pre_train import train_compile  # type: ignore[import-not-found]

    out, *settings = sys.argv[1:]
    config = Path(train_compile.__file__).parents[2] / "configs" / "base.yml"
    compile_step = train_compile.jit_and_compile

    def recorded(function: Any, args: Any, kwargs: Any, mesh: Any, *more: Any) -> Any:
        start_s = time.monotonic()
        compiled = compile_step(function, args, kwargs, mesh, *more)
        _write(Path(out), compiled, mesh, time.monotonic() - start_s)
        return compiled

    train_compile.jit_and_compile = recorded
    train_compile.main([sys.argv[0], str(config), *settings])


def _write(out: Path, compiled: Any, mesh: Any, seconds: float) -> None:
    memory = compiled.memory_analysis()
    devices = list(mesh.devices.flat)
    facts = {
        "recipe": "maxtext",
        "generation": devices[0].device_kind,
        "topology": "",
        "num_slices": 1,
        "mesh_axes": dict(mesh.shape),
        "device_ids": [device.id for device in devices],
        "device_slices": [0] * len(devices),
        "usable_hbm_bytes": None,
        "memory_bytes": {
            **{name: getattr(memory, f"{name}_size_in_bytes") for name in SIZES},
            "peak": memory.peak_memory_in_bytes,
        },
        "lower_s": 0.0,
        "compile_s": round(seconds, 3),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "compiler_flags": os.environ.get("LIBTPU_INIT_ARGS", ""),
        **{f"{name}_version": importlib.metadata.version(name) for name in ("jax", "libtpu")},
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "compiled.txt").write_text(compiled.as_text(), encoding="utf-8")
    # Last: its presence says that the other is whole.
    (out / "compiled.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
