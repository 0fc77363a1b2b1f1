"""Which steps are traced, by whom, and that nothing of it can hurt the training."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from recipes.contract import HostContext
from recipes.schema import Recipe
from trainer.profiling import Profiler, begins_trace

STEPS = 12


@pytest.fixture(scope="module")
def step() -> Callable[[jax.Array], jax.Array]:
    compiled: Callable[[jax.Array], jax.Array] = (
        jax.jit(lambda x: x @ x / 64).lower(jnp.ones((64, 64))).compile()
    )
    return compiled


@pytest.fixture(autouse=True)
def no_trace_left() -> Iterator[None]:
    """A test that failed in the middle of a trace must not fail those after it."""
    yield
    try:
        jax.profiler.stop_trace()
    except RuntimeError:
        return
    pytest.fail("a trace was still running")


def _context(scratch: Path, **changes: Any) -> HostContext:
    context = HostContext(
        run_dir="gs://nowhere/at-all",
        attempt=2,
        slice_id=1,
        num_slices=2,
        host_id=0,
        hosts_per_slice=2,
        coordinator="",
        grace_period_s=1.0,
        scratch_dir=str(scratch),
    )
    return dataclasses.replace(context, **changes)


def _train(
    profiler: Profiler, step: Callable[[jax.Array], jax.Array], first: int = 1, last: int = STEPS
) -> None:
    """The part of the loop in trainer/train.py that matters here."""
    state = jnp.ones((64, 64))
    for done in range(first, last + 1):
        profiler.before_step(done, state)
        with jax.profiler.StepTraceAnnotation("train", step_num=done):
            state = step(state)
        profiler.after_step(done, state)


def _recipe(small: Callable[..., Recipe], **train: int | None) -> Recipe:
    return small({"train.num_steps": STEPS} | {f"train.{key}": value for key, value in train.items()})


def _steps_in(trace: Path) -> list[int]:
    """Numbers of the steps that a trace shows."""
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    return sorted(int(event["args"]["step_num"]) for event in events if event.get("name") == "train")


def _files(scratch: Path) -> list[str]:
    return sorted(str(path.relative_to(scratch)) for path in scratch.rglob("*") if path.is_file())


def test_a_trace_holds_exactly_its_steps_under_the_name_of_its_host(
    tmp_path: Path, small: Callable[..., Recipe], step: Callable[[jax.Array], jax.Array]
) -> None:
    recipe = _recipe(small, profile_start_step=3, profile_num_steps=2, profile_interval_steps=6)
    _train(Profiler(recipe.train, _context(tmp_path)), step)
    folders = [
        f"profiles/attempt-0002/step-{first:08d}/plugins/profile/attempt_0002_step_{first:08d}"
        for first in (3, 9)
    ]
    assert _files(tmp_path) == sorted(
        f"{folder}/s1-h0{suffix}" for folder in folders for suffix in (".trace.json.gz", ".xplane.pb")
    )
    assert _steps_in(tmp_path / folders[0] / "s1-h0.trace.json.gz") == [3, 4]
    assert _steps_in(tmp_path / folders[1] / "s1-h0.trace.json.gz") == [9, 10]


@pytest.mark.parametrize(
    ("keys", "traces"),
    [
        ({}, []),
        ({"profile_start_step": 1}, [1]),
        ({"profile_start_step": 10}, [10]),
        # Of three steps each; the last one would not fit.
        ({"profile_start_step": 2, "profile_interval_steps": 3}, [2, 5, 8]),
        ({"profile_start_step": 11}, []),
        ({"profile_start_step": 12, "profile_num_steps": 1}, [12]),
        ({"profile_start_step": 5, "profile_interval_steps": 100}, [5]),
    ],
)
def test_where_traces_begin(small: Callable[..., Recipe], keys: dict[str, int], traces: list[int]) -> None:
    train = _recipe(small, **keys).train
    assert [number for number in range(1, STEPS + 1) if begins_trace(train, number)] == traces


def test_what_was_traced_before_a_resume_is_not_traced_in_part(
    tmp_path: Path, small: Callable[..., Recipe], step: Callable[[jax.Array], jax.Array]
) -> None:
    recipe = _recipe(small, profile_start_step=2, profile_interval_steps=5)
    _train(Profiler(recipe.train, _context(tmp_path)), step, first=4)
    assert {Path(name).parts[2] for name in _files(tmp_path)} == {"step-00000007"}


@pytest.mark.parametrize(
    ("keys", "context"), [({}, {}), ({"profile_start_step": 2}, {"host_id": 1})], ids=["off", "other host"]
)
def test_who_takes_no_trace_does_nothing(
    tmp_path: Path,
    small: Callable[..., Recipe],
    step: Callable[[jax.Array], jax.Array],
    keys: dict[str, int],
    context: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profiler = Profiler(_recipe(small, **keys).train, _context(tmp_path, **context))
    monkeypatch.setattr(jax, "block_until_ready", lambda _: pytest.fail("waited for the devices"))
    _train(profiler, step)
    assert _files(tmp_path) == []


def test_a_trace_that_cannot_be_written_is_said_and_costs_the_later_ones(
    tmp_path: Path,
    small: Callable[..., Recipe],
    step: Callable[[jax.Array], jax.Array],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "profiles").write_text("a file in the way")
    recipe = _recipe(small, profile_start_step=2, profile_interval_steps=3)
    _train(Profiler(recipe.train, _context(tmp_path)), step)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "trainer.profiling"]
    assert re.match("no profile of step 2 and later: .", line)
    assert _files(tmp_path) == ["profiles"]


def test_the_trainings_own_error_passes_through(tmp_path: Path, small: Callable[..., Recipe]) -> None:
    class Lost:
        """A state whose computation failed."""

        def block_until_ready(self) -> None:
            raise jax.errors.JaxRuntimeError("a peer was lost")

    profiler = Profiler(_recipe(small, profile_start_step=2).train, _context(tmp_path))
    with pytest.raises(jax.errors.JaxRuntimeError, match="a peer was lost"):
        profiler.before_step(2, Lost())
