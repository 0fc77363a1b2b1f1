"""`muster tune` by sizes on published configurations whose mesh it is not told.

It must find the published mesh, or one that it predicts to be faster.
"""

from __future__ import annotations

import pytest

from benchmarks.published_steps import published, recipe_of
from launcher.tune.search import MARGIN, estimated, ranked
from launcher.tune.space import Candidate, candidates, changed
from recipes.fingerprint import fingerprint
from recipes.parallelism import recipe_mesh

HIDDEN = {
    "64B, v5p 64x1": {"fsdp": 16, "tensor": 4},
    "128B, v5p 256x1": {"fsdp": 32, "tensor": 8},
    "llama3.1-70b, v6e 32x1": {"fsdp": 32},
    "llama3.1-8b, v6e 256x1": {"fsdp": 256},
    "llama3.1-405b, tpu7x 256x1": {"fsdp": 512},
    "mixtral-8x22b, v6e 256x1": {"fsdp": 64, "expert": 4},
}
"""What was published, of the axes inside a slice."""


@pytest.mark.parametrize("name", HIDDEN)
def test_a_published_mesh_is_found_or_a_faster_one(name: str) -> None:
    told = next(recipe_of(row) for row in published() if row.name == name)
    plain = {f"mesh.{axis}": 1 for axis in ("data", "context", "expert", "tensor")}
    devices = recipe_mesh(told).num_devices
    start = changed(Candidate(changes={}, recipe=told), {**plain, "mesh.fsdp": devices})
    assert start is not None
    ranking = ranked(candidates(start.recipe), margin=MARGIN)
    best, published_s = ranking.trials[0].prediction, estimated(Candidate(changes={}, recipe=told)).prediction
    assert best is not None and published_s is not None
    assert best.step_s <= published_s.step_s * (1 + 1e-6)
    meshes = [recipe_mesh(each.candidate.recipe).ici for each in ranking.trials]
    assert HIDDEN[name] in [{axis: size for axis, size in mesh.items() if size > 1} for mesh in meshes]
    assert {fingerprint(each.candidate.recipe) for each in ranking.trials} == {fingerprint(told)}
