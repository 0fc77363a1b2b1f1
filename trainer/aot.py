"""Compiles a recipe's train step for its TPUs without a TPU: ``python -m trainer.aot RECIPE.yaml --out DIR``.

The compiler in libtpu needs no chip, only the name of a topology. DIR gets ``compiled.txt``, the scheduled
HLO of one device, and ``compiled.json``, what the compiler says of memory and cost and how the mesh lies
over the devices; `launcher/preflight` reads both. Compiler flags come through LIBTPU_INIT_ARGS. The exit
code is 1 where the step does not compile, for example because it does not fit in HBM.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.contract import (
    COMPILE_PROBLEM_FILE,
    COMPILED_FACTS_FILE,
    COMPILED_HLO_FILE,
    CompileProblem,
    ExitCode,
)
from recipes.errors import UserError
from recipes.hardware import CPU, generation, slice_shape
from recipes.schema import Recipe

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

_SIZES = (
    "argument",
    "output",
    "alias",
    "temp",
    "generated_code",
    "host_argument",
    "host_output",
    "host_alias",
    "host_temp",
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([0-9.]+)([KMGT]?)"
_DOES_NOT_FIT = (
    re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)
_TOO_LARGE_BYTES = 2**42


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What ``compiled.json`` holds; sizes and FLOPs are of one device."""

    recipe: str
    generation: str
    topology: str
    num_slices: int
    mesh_axes: Mapping[str, int]
    """Size by axis, outermost first."""
    device_ids: Sequence[int]
    """In mesh order: partition i of the program runs on the i-th device."""
    device_slices: Sequence[int]
    """Slice of each of them."""
    usable_hbm_bytes: int | None
    memory_bytes: Mapping[str, int]
    """By the compiler's memory analysis; alias is the part of output that reuses arguments."""
    cost: Mapping[str, float]
    """By the compiler's cost analysis, which counts the body of a loop once."""
    lower_s: float
    compile_s: float
    peak_rss_bytes: int
    compiler_flags: str
    """LIBTPU_INIT_ARGS."""
    jax_version: str
    libtpu_version: str


class DoesNotFit(UserError):
    """The compiler needs more HBM than there is."""

    def __init__(self, needed_bytes: int, usable_bytes: int) -> None:
        gib = 2**30
        super().__init__(
            f"the train step does not fit: it needs {needed_bytes / gib:.2f} GiB of the"
            f" {usable_bytes / gib:.2f} GiB of HBM that a device has for programs",
            hint="use more shards (mesh.fsdp, mesh.tensor), train.remat_policy=full, more"
            " train.vocab_chunks, or a smaller train.global_batch_size",
            exit_code=ExitCode.EXPERIMENT_FAILED,
        )
        self.needed_bytes = needed_bytes
        self.usable_bytes = usable_bytes


def main() -> int:
    arguments = _parse(sys.argv[1:])
    configure_environment(os.environ)
    try:
        # Only now: it imports nothing of JAX, but what it imports must not before the environment is set.
        from trainer.__main__ import read_recipe

        facts = compile_to(read_recipe(arguments.recipe), arguments.out)
    except UserError as error:
        _write_problem(arguments.out, error)
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return int(error.exit_code)
    print(f"{facts.recipe}: compiled in {facts.compile_s:.0f} s, {arguments.out}", file=sys.stderr)
    return ExitCode.COMPLETE


def _write_problem(out: Path, error: UserError) -> None:
    sizes = (error.needed_bytes, error.usable_bytes) if isinstance(error, DoesNotFit) else (None, None)
    problem = CompileProblem(
        exit_code=int(error.exit_code),
        message=error.message,
        hint=error.hint,
        needed_bytes=sizes[0],
        usable_bytes=sizes[1],
    )
    # Where it cannot be written, standard error still says it.
    with contextlib.suppress(OSError):
        out.mkdir(parents=True, exist_ok=True)
        (out / COMPILE_PROBLEM_FILE).write_text(
            json.dumps(dataclasses.asdict(problem)) + "\n", encoding="utf-8"
        )


def configure_environment(environment: dict[str, str] | os._Environ[str]) -> None:
    """Lets libtpu compile beside other processes and keeps JAX off chips that this machine may have.

    Call before JAX is imported.
    """
    environment["JAX_PLATFORMS"] = "cpu"
    # Neither the metadata server nor the lock that keeps two programs off one chip is of use here.
    environment.setdefault("TPU_SKIP_MDS_QUERY", "1")
    environment.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # An executable without a client cannot be read back from the cache.
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"


def compile_to(recipe: Recipe, out: Path) -> Facts:
    """Compiles the train step and writes both files into ``out``.

    Raises:
      UserError: there is no compiler or topology for it, the mesh cannot be laid over the devices,
        ``out`` cannot be written, or (exit code 1) the step does not compile.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in (COMPILED_HLO_FILE, COMPILED_FACTS_FILE, COMPILE_PROBLEM_FILE):
            (out / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}", hint="give another --out") from error
    mesh = topology_mesh(recipe)
    compiled, lower_s, compile_s = _compile(recipe, mesh)
    facts = _facts(recipe, mesh, compiled, lower_s=lower_s, compile_s=compile_s)
    (out / COMPILED_HLO_FILE).write_text(compiled.as_text() or "", encoding="utf-8")
    text = json.dumps(dataclasses.asdict(facts), indent=1)
    (out / COMPILED_FACTS_FILE).write_text(text + "\n", encoding="utf-8")
    return facts


def topology_mesh(recipe: Recipe) -> Mesh:
    """The recipe's mesh over the devices of its topology.

    Raises:
      UserError: no TPU, no compiler, or no such topology or mesh.
    """
    chip = generation(recipe.hardware.generation)
    if chip.name == CPU:
        raise UserError(
            "the train step is compiled ahead of time for TPUs only, and hardware.generation is cpu",
            hint="choose a recipe with a TPU generation: `muster recipes` lists them",
        )
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("libtpu, the TPU compiler, is not installed", hint="pip install 'muster-tpu[tpu]'")
    from jax.experimental import topologies

    from trainer.devices import make_mesh

    shape = slice_shape(recipe.hardware)
    name = shape.aot_topology or chip.name
    # libtpu shows the two cores of a v4 chip as two devices unless told otherwise; programs see one.
    megacore = chip.devices_per_chip < chip.cores_per_chip
    options: dict[str, Any] = {"chip_config_name": "megacore"} if megacore else {}
    # Without its wrap-around links a slice is a mesh to libtpu, on which it gathers by all-reduce.
    options["wrap"] = (*shape.wrap, False)[:3]
    try:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=name, num_slices=recipe.multislice.num_slices, **options
        )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise UserError(
            f"the TPU compiler knows no topology {name}: {_first_line(error)}",
            hint="another libtpu may know it: pip install -U libtpu",
        ) from error
    try:
        return make_mesh(recipe, topology.devices)
    except (NotImplementedError, ValueError, AssertionError) as error:
        raise UserError(
            f"the mesh cannot be laid over {name}: {_first_line(error)}",
            hint="choose degrees that are products of sides of the topology",
        ) from error


def usable_hbm_bytes(device: jax.Device) -> int | None:
    """HBM that a program may use, as the compiler says when asked for more; None if it does not say."""
    import jax
    import jax.numpy as jnp

    sharding = jax.sharding.SingleDeviceSharding(device)
    too_large = jax.ShapeDtypeStruct((_TOO_LARGE_BYTES,), jnp.int8, sharding=sharding)
    try:
        jax.jit(lambda x: x + 1).lower(too_large).compile()
    except jax.errors.JaxRuntimeError as error:
        sizes = needed_and_usable(str(error))
        return None if sizes is None else sizes[1]
    return None


def needed_and_usable(message: str) -> tuple[int, int] | None:
    """The two sizes in what the compiler says when a program does not fit; None for other messages."""
    for pattern in _DOES_NOT_FIT:
        if found := pattern.search(message):
            needed, needed_unit, usable, usable_unit = found.groups()
            return round(float(needed) * _UNITS[needed_unit]), round(float(usable) * _UNITS[usable_unit])
    return None


def _compile(recipe: Recipe, mesh: Mesh) -> tuple[jax.stages.Compiled, float, float]:
    """The train step, seconds until it was lowered, and seconds of the compiler."""
    import jax

    from trainer.program import build_program

    compiling: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiling.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    start = time.monotonic()
    try:
        compiled = build_program(recipe, mesh).train_step
    except jax.errors.JaxRuntimeError as error:
        raise _refusal(error) from error
    total_s = time.monotonic() - start
    return compiled, total_s - sum(compiling), sum(compiling)


def _refusal(error: Exception) -> UserError:
    sizes = needed_and_usable(str(error))
    if sizes is not None:
        return DoesNotFit(*sizes)
    return UserError(
        f"the TPU compiler refused the train step: {_first_line(error)}",
        hint="look for flags in LIBTPU_INIT_ARGS that this libtpu does not support",
        exit_code=ExitCode.EXPERIMENT_FAILED,
    )


def _facts(
    recipe: Recipe, mesh: Mesh, compiled: jax.stages.Compiled, *, lower_s: float, compile_s: float
) -> Facts:
    devices = list(mesh.devices.flat)
    memory: Any = compiled.memory_analysis()
    cost: Any = compiled.cost_analysis() or {}
    return Facts(
        recipe=recipe.name,
        generation=recipe.hardware.generation,
        topology=recipe.hardware.topology,
        num_slices=recipe.multislice.num_slices,
        mesh_axes=dict(mesh.shape),
        device_ids=[device.id for device in devices],
        device_slices=_slices(devices),
        usable_hbm_bytes=usable_hbm_bytes(devices[0]),
        memory_bytes={
            **{name: getattr(memory, f"{name}_size_in_bytes") for name in _SIZES},
            "peak": memory.peak_memory_in_bytes,
        },
        cost={name: value for name, value in cost.items() if name in ("flops", "transcendentals")},
        lower_s=round(lower_s, 3),
        compile_s=round(compile_s, 3),
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        compiler_flags=os.environ.get("LIBTPU_INIT_ARGS", ""),
        jax_version=importlib.metadata.version("jax"),
        libtpu_version=importlib.metadata.version("libtpu"),
    )


def _slices(devices: Sequence[jax.Device]) -> list[int]:
    """Slice of each device; those of a single slice do not say."""
    return [getattr(device, "slice_index", None) or 0 for device in devices]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainer.aot", description=__doc__, allow_abbrev=False)
    parser.add_argument("recipe", type=Path, help="resolved recipe (muster show RECIPE > recipe.yaml)")
    parser.add_argument("--out", type=Path, required=True, help="folder for compiled.txt and compiled.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
