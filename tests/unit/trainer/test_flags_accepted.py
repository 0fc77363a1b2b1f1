"""What the catalogue of compiler flags says of libtpu, asked of libtpu itself, without a TPU."""

from __future__ import annotations

import importlib.util

import pytest

from recipes.flags import RefusedFlag, flag_catalogue, tuned_flags
from tests.flags.probe import TOPOLOGIES, probe

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")

REFUSED = [
    pytest.param(refused, generation, id=f"{refused.name}-{generation}")
    for refused in flag_catalogue().refused
    for generation in refused.generations
]


def sets_of(generation: str) -> list[dict[str, str]]:
    """All tuned flags of a generation in as few sets as their values allow."""
    sets: list[dict[str, str]] = [{}]
    for flag in tuned_flags(generation):
        place = next((each for each in sets if flag.name not in each), None)
        if place is None:
            sets.append(place := {})
        place[flag.name] = flag.value
    return sets


@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_tuned_flags_are_accepted(generation: str) -> None:
    for flags in sets_of(generation):
        done = probe(generation, flags, num_slices=2)
        assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("refused", "generation"), REFUSED)
def test_refused_flags_are_refused(refused: RefusedFlag, generation: str) -> None:
    value = "true" if refused.value is None else refused.value
    done = probe(generation, {refused.name: value, **refused.shown_with})
    assert done.returncode != 0
    assert refused.message in done.stderr
