"""A trainer without a model: plain arrays that are saved and restored on command.

Run as a script it is a nursery: it imports JAX once and forks a worker for each line of JSON on its
standard input, because starting Python and JAX costs seconds and a chaos test starts hundreds. Each
worker connects to a Unix socket, takes commands as lines of JSON and answers in lines of JSON.
"""

# mypy: disable-error-code="no-untyped-call"
# JAX does not annotate shardings and dtypes.

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from recipes.errors import UserError
from recipes.schema import CheckpointConfig
from trainer import integrity
from trainer.checkpoints import Checkpoints

Spec = Mapping[str, Any]


class _Warnings(logging.Handler):
    """Keeps the warnings of the code under test."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Worker:
    """One process of one attempt."""

    def __init__(self, spec: Spec, channel: socket.socket) -> None:
        self._spec = spec
        self._channel = channel
        self._warnings = _Warnings()
        logging.getLogger("trainer").addHandler(self._warnings)
        self._now_s = 0.0
        self._checkpoints: Checkpoints | None = None

    def say(self, **what: Any) -> None:
        self._channel.sendall(json.dumps(what).encode() + b"\n")

    def serve(self) -> int:
        """Carry out commands until one ends this process; gives the exit code."""
        for line in self._channel.makefile("r"):
            command = json.loads(line)
            if command["do"] == "exit":
                return int(command["code"])
            try:
                self.say(done=command["do"], **getattr(self, command.pop("do"))(**command))
            except UserError as error:
                self.say(
                    error=error.message, hint=error.hint, code=int(error.exit_code), type=type(error).__name__
                )
            except Exception as error:
                logging.exception("unexpected")
                self.say(error=repr(error), code=-1, type=type(error).__name__)
        return 0

    def open(self, run: str, recipe: str = "r", data: str = "d", attempt: int = 1, **config: Any) -> Spec:
        config = {"save_interval_steps": 1, "save_interval_minutes": None, "keep": 3} | config
        self._checkpoints = Checkpoints(
            run,
            CheckpointConfig(**config),
            recipe_fingerprint=recipe,
            data_fingerprint=data,
            attempt=attempt,
            now=lambda: self._now_s,
        )
        return {}

    def restore(self, devices: int | None = None, model: str = "") -> Spec:
        """Restore onto the first ``devices`` devices and compare every bit."""
        assert self._checkpoints is not None
        self._warnings.texts = []
        shardings = _shardings(_structure(model), devices)
        abstract = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            _structure(model),
            shardings,
        )
        state = self._checkpoints.restore(abstract)
        answer = {"committed": self._checkpoints.committed_step, "warnings": self._warnings.texts}
        if state is None:
            return answer | {"step": None}
        step = int(state["step"])
        placed = jax.tree.leaves(jax.tree.map(lambda leaf, want: leaf.sharding == want, state, shardings))
        return answer | {"step": step, "exact": _is_exact(state, step), "placed": all(placed)}

    def train(
        self,
        begin: int,
        end: int,
        devices: int | None = None,
        step_s: float = 0.0,
        clock_s: float = 0.0,
        last: bool = False,
    ) -> Spec:
        """Pretend to train steps ``begin`` to ``end``; reports after each, and what came of it."""
        assert self._checkpoints is not None
        stepping = jax.jit(lambda state: state, donate_argnums=0)
        for step in range(begin, end + 1):
            self._now_s += clock_s
            time.sleep(step_s)
            state = make_state(step, devices)
            self.say(event="saving", step=step)
            preempted = self._checkpoints.after_step(step, state, last=last and step == end)
            jax.block_until_ready(stepping(state))
            self.say(event="step", step=step, committed=self._checkpoints.committed_step)
            if preempted:
                return {"step": step, "preempted": True, "committed": self._checkpoints.committed_step}
        return {"step": end, "preempted": False, "committed": self._checkpoints.committed_step}

    def wait(self) -> Spec:
        """Finish the save under way."""
        assert self._checkpoints is not None
        self._checkpoints.close()
        return {"committed": self._checkpoints.committed_step}

    def grow(self, saves: int, megabytes: int) -> Spec:
        """Save a larger state again and again; memory after the first few saves and at the end."""
        assert self._checkpoints is not None
        here = NamedSharding(_mesh(None), PartitionSpec("fsdp"))
        state = {"w": jax.device_put(jnp.ones((megabytes, 512, 512), jnp.float32), here)}
        sizes, arrays = [], []
        for step in range(1, saves + 1):
            self._checkpoints.after_step(step, state, last=True)
            sizes.append(_resident_bytes())
            arrays.append(sum(array.nbytes for array in jax.live_arrays()))
        return {"resident_bytes": sizes, "array_bytes": arrays}

    def preempted(self) -> Spec:
        assert self._checkpoints is not None
        return {"preempted": self._checkpoints.preempted()}

    def limit_file_size(self, size_bytes: int) -> Spec:
        """From now on no file may grow beyond this: a full disk, for this process."""
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))
        return {}

    def fingerprints(self, dtype: str, changes: int) -> Spec:
        """Of one array, on several shardings, and how many small changes to it would not be seen."""
        random = np.random.default_rng(zlib.crc32(dtype.encode()))
        if dtype == "key":
            raw = random.integers(0, 2**32, (64, 2), np.uint32)
        elif dtype == "bool":
            raw = random.integers(0, 2, (64, 8)).astype(np.bool_)
        else:
            raw = random.standard_normal((64, 8), np.float32) * 50
            raw = raw.astype(jnp.dtype(dtype))

        def value(values: np.ndarray[Any, Any], devices: int = 1, spec: PartitionSpec | None = None) -> int:
            mesh = jax.make_mesh((devices,), ("x",), (AxisType.Auto,), devices=jax.devices()[:devices])
            array = jax.device_put(values, NamedSharding(mesh, spec or PartitionSpec()))
            if dtype == "key":
                array = jax.jit(jax.random.wrap_key_data)(array)
            return integrity.describe({"leaf": array})["leaf"].fingerprint

        shardings = [
            (1, None),
            (8, None),
            (8, PartitionSpec("x")),
            (4, PartitionSpec("x")),
            (2, PartitionSpec("x")),
        ]
        if dtype != "key":
            shardings.append((8, PartitionSpec(None, "x")))
        original = value(raw)
        unseen = 0
        for _ in range(changes):
            changed = raw.copy()
            if dtype == "bool":
                changed.reshape(-1)[random.integers(changed.size)] ^= True
            else:
                octets = changed.view(np.uint8).reshape(-1)
                octets[random.integers(octets.size)] ^= np.uint8(1 << random.integers(8))
            unseen += value(changed) == original
        swapped = raw.copy()
        swapped[[0, 32]] = swapped[[32, 0]]
        values = [value(raw, *sharding) for sharding in shardings]
        return {"values": values, "unseen": unseen, "swap_seen": value(swapped) != original}


def _structure(model: str = "") -> Any:
    """Shapes and dtypes of the state; ``model`` names a deviation."""
    shape = jax.ShapeDtypeStruct
    width = 48 if model == "wider" else 32
    params: dict[str, Any] = {
        "embedding": shape((64, width), jnp.float32),
        "blocks": {"w": shape((2, 16, width), jnp.bfloat16 if model == "half" else jnp.float32)},
        "scale": shape((width,), jnp.float32),
        "head": shape((width, 64), jnp.bfloat16),
    }
    if model == "deeper":
        params["extra"] = shape((8,), jnp.float32)
    return {
        "step": shape((), jnp.int32),
        "params": params,
        "opt_state": jax.eval_shape(optax.adamw(1e-3).init, params),
        "mask": shape((16,), jnp.bool_),
        "rng": jax.eval_shape(lambda: jax.random.key(0)),
    }


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _mesh(devices: int | None) -> jax.sharding.Mesh:
    chosen = np.array(jax.devices()[:devices])
    grid = chosen.reshape(-1, 2) if chosen.size > 1 else chosen.reshape(1, 1)
    return jax.sharding.Mesh(grid, ("data", "fsdp"), axis_types=(AxisType.Auto, AxisType.Auto))


def _shardings(structure: Any, devices: int | None) -> Any:
    mesh = _mesh(devices)

    def place(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        if leaf.ndim == 2 and leaf.shape[0] % 8 == 0:
            return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        return NamedSharding(
            mesh, PartitionSpec(*[None] * (leaf.ndim - 1), "fsdp") if leaf.ndim else PartitionSpec()
        )

    return jax.tree.map(place, structure)


def _values(path: str, leaf: jax.ShapeDtypeStruct, step: int) -> np.ndarray[Any, Any]:
    """What the leaf holds after ``step``: a pure function of both."""
    if path == "step":
        return np.array(step, np.int32)
    random = np.random.default_rng([step, zlib.crc32(path.encode())])
    if leaf.dtype == jnp.bool_:
        return np.asarray(random.integers(0, 2, leaf.shape), np.bool_)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return np.asarray(random.integers(0, 2**31 - 1, leaf.shape), leaf.dtype)
    return np.asarray(random.standard_normal(leaf.shape, np.float32), leaf.dtype)


def _named(tree: Any) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def _key_data(step: int) -> np.ndarray[Any, Any]:
    return np.array([step, 7], np.uint32)


def make_state(step: int, devices: int | None = None) -> Any:
    structure = _structure()
    shardings = jax.tree.leaves(_shardings(structure, devices))
    leaves = []
    for (path, leaf), sharding in zip(_named(structure), shardings, strict=True):
        if path == "rng":
            data = jax.device_put(_key_data(step), NamedSharding(sharding.mesh, PartitionSpec()))
            leaves.append(jax.jit(jax.random.wrap_key_data, out_shardings=sharding)(data))
            continue
        values = _values(path, leaf, step)
        leaves.append(jax.make_array_from_callback(leaf.shape, sharding, values.__getitem__))
    return jax.tree.unflatten(jax.tree.structure(structure), leaves)


def _is_exact(state: Any, step: int) -> bool:
    """Whether every local piece of every leaf has the very bits of that step."""
    for path, leaf in _named(state):
        expected = _key_data(step) if path == "rng" else _values(path, leaf, step)
        array = jax.random.key_data(leaf) if path == "rng" else leaf
        for shard in array.addressable_shards:
            if np.asarray(shard.data).tobytes() != np.ascontiguousarray(expected[shard.index]).tobytes():
                return False
    return True


def _work(spec: Spec) -> int:
    os.environ.update(spec["env"])
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(spec["socket"])
    worker = Worker(spec, channel)
    if not spec["notices"]:
        jax.config.update("jax_enable_preemption_service", False)
    if spec["distributed"]:
        jax.distributed.initialize(
            spec["coordinator"],
            spec["count"],
            spec["rank"],
            coordinator_bind_address=spec["coordinator"],
            heartbeat_timeout_seconds=10,
            initialization_timeout=60,
        )
    worker.say(event="ready", pid=os.getpid())
    return worker.serve()


def _nursery() -> None:
    for line in sys.stdin:
        spec = json.loads(line)
        if os.fork() == 0:
            code = 1
            try:
                code = _work(spec)
            finally:
                os._exit(code)
        while True:  # children that ended are collected at the next birth
            try:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    break
            except ChildProcessError:
                break


if __name__ == "__main__":
    _nursery()
