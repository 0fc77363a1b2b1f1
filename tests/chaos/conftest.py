"""The uninterrupted run that cut and resized ones are compared with; made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.training import Lab, Training


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(cache=tmp_path_factory.mktemp("cache"), programs=tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def finished(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Root of a run that nobody disturbed, with all its checkpoints."""
    root = tmp_path_factory.mktemp("finished")
    with Training(lab, root, changes={"checkpoint.keep": 100}) as training:
        code, _, err = training.finish()
    assert code == 0, err
    return root
