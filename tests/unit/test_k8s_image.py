"""The text of k8s/Dockerfile: pinned base and packages, little to rebuild, no secret, the agent as PID 1.

pytest tests/unit/test_k8s_image.py
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launcher.gke.podspec import COMMAND
from tests.unit.k8s_support import K8S

REPO = K8S.parent
DOCKERFILE = (K8S / "Dockerfile").read_text(encoding="utf-8")
DIGEST = re.compile(r"[a-z0-9./:_-]+@sha256:(?!0{64})[0-9a-f]{64}")
LOCKS = ("requirements-build.lock", "requirements.lock", "k8s/requirements-tpu.lock")


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    word: str
    rest: str


def instructions() -> list[Instruction]:
    lines = [line for line in DOCKERFILE.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [Instruction(word=line.split()[0], rest=line.split(maxsplit=1)[1]) for line in joined]


def stage(name: str | None) -> list[Instruction]:
    """The instructions of one stage; None is the last one, which has no name."""
    stages: dict[str | None, list[Instruction]] = {}
    current: str | None = ""
    for instruction in instructions():
        if instruction.word == "FROM":
            current = instruction.rest.split(" AS ")[1] if " AS " in instruction.rest else None
        stages.setdefault(current, []).append(instruction)
    return stages[name]


def rests(word: str, found: list[Instruction]) -> list[str]:
    return [instruction.rest for instruction in found if instruction.word == word]


def test_every_base_is_a_digest_or_a_stage() -> None:
    default = next(rest for rest in rests("ARG", instructions()) if rest.startswith("BASE="))
    assert DIGEST.fullmatch(default.removeprefix("BASE="))
    sources = [rest.split()[0] for rest in rests("FROM", instructions())]
    assert set(sources) == {"${BASE}", "tools"}


def test_every_package_is_hashed_and_nothing_else_is_fetched() -> None:
    installs = [
        part
        for rest in rests("RUN", instructions())
        for part in re.findall(r"-m pip (?:install|wheel) .*", rest)
    ]
    assert len(installs) == len(LOCKS) + 2
    for install in installs:
        assert "--no-deps" in install
        from_lock = re.search(r"-r /locks/(\S+)", install)
        if from_lock:
            assert "--require-hashes" in install
            assert from_lock[1] in {lock.split("/")[-1] for lock in LOCKS}
        else:
            assert "--no-index" in install or "--no-build-isolation" in install
    text = " ".join(rests("RUN", instructions()))
    assert not re.search(r"\b(curl|wget|apt-get|apt|git|ADD)\b|://", text)


def test_code_comes_after_the_dependencies() -> None:
    """So that an edit of the code leaves the large layer alone."""
    copied = " ".join(rests("COPY", stage("dependencies")) + rests("COPY", stage("tools")))
    assert not re.search(r"launcher|trainer|recipes|pyproject", copied)
    last = stage(None)
    assert [instruction.word for instruction in last[:3]] == ["FROM", "COPY", "RUN"]
    assert last[1].rest == "--from=dependencies /opt/muster /opt/muster"
    assert "from=wheel" in last[2].rest


def test_only_named_files_are_sent_to_the_builder() -> None:
    """Deny all, then allow: neither .git nor .venv, runs, keys or kubeconfigs can get into a layer."""
    text = (K8S / "Dockerfile.dockerignore").read_text(encoding="utf-8")
    patterns = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert patterns[0] == "*"
    allowed = {line.removeprefix("!") for line in patterns if line.startswith("!")}
    copied = {
        source.rstrip("/")
        for rest in rests("COPY", instructions())
        if not rest.startswith("--from=")
        for source in rest.split()[:-1]
    }
    assert copied == allowed
    assert not [name for name in allowed if not (REPO / name).exists()]


def test_no_secret_is_in_it() -> None:
    words = " ".join(rests("ARG", instructions()) + rests("ENV", instructions()))
    assert not re.search(r"(?i)secret|token|passw|credential|api_?key", words)


def test_the_agent_is_the_entry_point() -> None:
    last = stage(None)
    assert last[-1].word == "ENTRYPOINT"
    assert json.loads(last[-1].rest) == list(COMMAND)
    assert rests("USER", last) == ["${USER_ID}:${USER_ID}"]
    user = next(rest for rest in rests("ARG", last) if rest.startswith("USER_ID="))
    assert user.removeprefix("USER_ID=").isdecimal()


# Locks


def pins(name: str) -> dict[str, str]:
    text = (REPO / name).read_text(encoding="utf-8")
    found = re.findall(r"(?m)^([A-Za-z0-9._-]+)==(\S+)", text)
    return {canonicalize_name(name): version for name, version in found}


def test_libtpu_is_locked_beside_the_same_jax() -> None:
    """Installed over requirements.lock, so what both name has to be the same."""
    common, tpu = pins("requirements.lock"), pins("k8s/requirements-tpu.lock")
    assert {name: version for name, version in tpu.items() if name != "libtpu"}.items() <= common.items()
    assert "libtpu" in tpu
    text = (REPO / "k8s/requirements-tpu.lock").read_text(encoding="utf-8")
    blocks = re.split(r"\n(?=[A-Za-z])", text)[1:]
    assert not [block for block in blocks if not re.search(r"--hash=sha256:[0-9a-f]{64}\b", block)]


def test_libtpu_is_what_jax_asks_for() -> None:
    from importlib.metadata import requires

    wanted = [Requirement(text) for text in requires("jax") or []]
    libtpu = [each for each in wanted if each.name == "libtpu"]
    if not libtpu:
        pytest.fail("jax[tpu] no longer names libtpu: see what it needs now")
    assert libtpu[0].specifier.contains(pins("k8s/requirements-tpu.lock")["libtpu"])
