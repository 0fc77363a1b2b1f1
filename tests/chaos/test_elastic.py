"""One run on other hardware: the same restored state, the same data order, the same losses up to rounding.

More shapes: ``pytest -m long tests/chaos/test_elastic.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.training import (
    NUM_STEPS,
    Lab,
    Training,
    cut_at,
    digests,
    look_at,
    read_arrays,
    restored_arrays,
    train_alone,
)

pytestmark = pytest.mark.timeout(900)

FROM_STEP = 20
TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("num_slices", "topology"),
    [
        pytest.param(1, "1x4", id="1 slice of 4"),
        pytest.param(2, "1x4", id="2 slices of 4"),
        pytest.param(1, "2x2", id="1 slice of 2 hosts", marks=pytest.mark.long),
        pytest.param(4, "1x1", id="4 slices of 1", marks=pytest.mark.long),
    ],
)
def test_launched_on_other_slices(
    lab: Lab, finished: Path, tmp_path: Path, num_slices: int, topology: str
) -> None:
    checkpoint = cut_at(finished, tmp_path, FROM_STEP)
    before = digests(read_arrays(checkpoint))
    changes = {"multislice.num_slices": num_slices, "hardware.topology": topology}
    with Training(lab, tmp_path, changes=changes) as training:
        code, _, err = training.finish()
    assert code == 0, err
    assert f"changed since this run began: hardware.topology={topology} (safe" in err
    _check_same_experiment(finished, tmp_path, before)


@pytest.mark.parametrize(
    ("topology", "fsdp"),
    [
        pytest.param("1x8", -1, marks=pytest.mark.long),
        pytest.param("1x2", -1),
        pytest.param("1x1", -1),
        pytest.param("1x2", 1, marks=pytest.mark.long),
    ],
)
def test_trained_alone_on_other_devices(
    lab: Lab, finished: Path, tmp_path: Path, topology: str, fsdp: int
) -> None:
    before = digests(read_arrays(cut_at(finished, tmp_path, FROM_STEP)))
    mesh = {"mesh.fsdp": fsdp, "mesh.data": 1 if fsdp == -1 else -1}
    train_alone(lab, tmp_path, {"multislice.num_slices": 1, "hardware.topology": topology, **mesh})
    _check_same_experiment(finished, tmp_path, before)


def _check_same_experiment(finished: Path, root: Path, before: dict[str, str]) -> None:
    checkpoint = root / f"quickstart/checkpoints/{NUM_STEPS}"
    assert digests(restored_arrays(root, checkpoint)) == before
    expected, found = look_at(finished), look_at(root)
    steps = range(FROM_STEP + 1, NUM_STEPS + 1)
    assert set(found.losses) == set(found.rows) == set(steps)
    assert found.rows == {step: expected.rows[step] for step in steps}
    for mine, theirs in ((found.losses, expected.losses), (found.held_out, expected.held_out)):
        for step, values in mine.items():
            (value,), (reference,) = values, theirs[step]
            assert abs(value - reference) <= TOLERANCE, f"step {step}: {value} and {reference}"
    assert set(found.held_out) == {30, 40}
