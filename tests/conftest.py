"""Fixtures that more than one test file uses. Imports no JAX: unit tests must be collected without it."""

from __future__ import annotations

from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the project's tree."""
    return REPO
