"""scripts/bootstrap.sh for real, but the Pythons it finds are scripts that record what is asked of them.

pytest tests/local/test_bootstrap.py
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
TOOLS = (
    "sh",
    "cat",
    "cmp",
    "cp",
    "cut",
    "date",
    "dirname",
    "grep",
    "head",
    "mkdir",
    "ps",
    "rm",
    "sleep",
    "tail",
)
PYTHON = """#!/bin/sh
case "$*" in
*"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
*"-m pip install"*)
    echo "$*" >>"$MUSTER_TEST_CALLS"
    [ -z "${MUSTER_TEST_HANG:-}" ] || exec sleep 60
    exit "${MUSTER_TEST_PIP_STATUS:-0}"
    ;;
*"-m pip --version"*) ;;
*) %s ;;
esac
"""
FITS = "echo 3.12.9"
TOO_OLD = "echo is Python 3.11.7; exit 1"
DOES_NOT_RUN = "exit 127"


class Checkout:
    """A copy of what bootstrap reads, and a PATH with only a few tools and the Pythons of a test."""

    def __init__(self, root: Path) -> None:
        self.root = root / "a checkout"
        self.bin = root / "bin"
        self.calls_file = root / "calls"
        self.environment = {
            "PATH": str(self.bin),
            "PYENV_ROOT": str(root / "pyenv"),
            "MUSTER_TEST_CALLS": str(self.calls_file),
        }
        (self.root / "scripts").mkdir(parents=True)
        for name in ("pyproject.toml", *(path.name for path in REPO.glob("*.lock")), "scripts/bootstrap.sh"):
            shutil.copy(REPO / name, self.root / name)
        self.bin.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, f"these tests need {tool}"
            (self.bin / tool).symlink_to(found)

    def python(self, name: str, behaviour: str, *, folder: Path | None = None) -> Path:
        path = (folder or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PYTHON % behaviour, encoding="ascii")
        path.chmod(0o755)
        return path

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / "scripts" / "bootstrap.sh"), *arguments],
            cwd="/", env=self.environment | environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def run(self, *arguments: str, status: int = 0, **environment: str) -> str:
        """What it wrote to stderr; its exit status and silence on stdout are checked."""
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (status, ""), err
        return err

    def new_calls(self) -> list[str]:
        """The pip runs since this was last asked."""
        calls = self.calls_file.read_text(encoding="ascii").splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return calls


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_it_installs_only_what_is_hashed(checkout: Checkout) -> None:
    checkout.python("python3.12", FITS)
    assert "Python 3.12.9" in checkout.run()
    build, locked, project = checkout.new_calls()
    assert "--require-hashes -r requirements-build.lock" in build
    assert "--require-hashes" in locked and locked.endswith("-r requirements.lock")
    assert project.endswith("--editable .")
    assert all("--no-build-isolation" in call and "--no-deps" in call for call in (build, locked, project))


def test_it_does_nothing_when_nothing_changed(checkout: Checkout) -> None:
    checkout.python("python3.12", FITS)
    checkout.run("--dev")
    assert any(call.endswith("-r requirements-dev.lock") for call in checkout.new_calls())
    assert checkout.run("--dev") == checkout.run() == ""
    assert not checkout.new_calls()


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-build.lock", "pyproject.toml"])
def test_it_installs_again_when_a_file_changed(checkout: Checkout, name: str) -> None:
    checkout.python("python3.12", FITS)
    checkout.run()
    checkout.new_calls()
    with (checkout.root / name).open("a", encoding="ascii") as file:
        file.write("# changed\n")
    assert "-> .venv" not in checkout.run(), "the environment itself can stay"
    assert len(checkout.new_calls()) == 3


def test_development_needs_more_than_running(checkout: Checkout) -> None:
    checkout.python("python3.12", FITS)
    checkout.run()
    checkout.new_calls()
    checkout.run("--dev")
    assert len(checkout.new_calls()) == 3


def test_a_failed_installation_is_mended_by_the_next(checkout: Checkout) -> None:
    checkout.python("python3.12", FITS)
    err = checkout.run(status=1, MUSTER_TEST_PIP_STATUS="3")
    assert "error: pip failed" in err and "hint:" in err
    assert "-> .venv" in checkout.run(), "what pip left half-written is thrown away"
    assert checkout.run() == ""


def test_a_moved_checkout_gets_a_new_environment(checkout: Checkout) -> None:
    checkout.python("python3.12", FITS)
    checkout.run()
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    assert "-> .venv" in checkout.run()


def test_an_environment_whose_python_is_gone_is_made_anew(checkout: Checkout) -> None:
    checkout.python("python3.12", FITS)
    checkout.run()
    (checkout.root / ".venv" / "bin" / "python").unlink()
    assert "-> .venv" in checkout.run()


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"python3.12": FITS, "python3": TOO_OLD}, "python3.12"),
        ({"python3": FITS}, "python3"),
        ({"python3.14": FITS, "python3": TOO_OLD}, "python3.14"),
        ({"python3.12": DOES_NOT_RUN, "python3.13": FITS}, "python3.13"),
        (
            {"python3.12": DOES_NOT_RUN, "python3": TOO_OLD, "../pyenv/versions/3.13.0/bin/python": FITS},
            "3.13.0",
        ),
    ],
)
def test_the_first_python_that_fits_is_taken(
    checkout: Checkout, pythons: dict[str, str], chosen: str
) -> None:
    for name, behaviour in pythons.items():
        checkout.python(name, behaviour)
    first_line = checkout.run().splitlines()[0]
    assert f"{chosen})" in first_line or f"{chosen}/" in first_line


def test_no_python_fits(checkout: Checkout) -> None:
    assert "nothing, there is no python3 on PATH" in checkout.run(status=1)
    checkout.python("python3", TOO_OLD)
    checkout.python("python3.12", DOES_NOT_RUN)
    err = checkout.run(status=1)
    assert "python3.12 does not run" in err and "python3 is Python 3.11.7" in err and "hint:" in err
    assert not (checkout.root / ".venv").exists()


def test_a_named_python_is_taken_or_refused(checkout: Checkout) -> None:
    checkout.python("python3.12", FITS)
    old = checkout.python("old", TOO_OLD)
    assert f"error: MUSTER_PYTHON={old} is Python 3.11.7" in checkout.run(status=1, MUSTER_PYTHON=str(old))
    named = checkout.python("named", "echo 3.13.1")
    assert f"Python 3.13.1 ({named})" in checkout.run(MUSTER_PYTHON=str(named))


def test_unknown_arguments_are_refused(checkout: Checkout) -> None:
    assert "does not know the arguments: --prod" in checkout.run("--prod", status=1)


def wait_for_pip(checkout: Checkout) -> None:
    deadline = time.monotonic() + 30
    while not checkout.calls_file.exists():
        assert time.monotonic() < deadline, "bootstrap did not get as far as pip"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("signal_number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_it_and_pip(checkout: Checkout, signal_number: signal.Signals, status: int) -> None:
    checkout.python("python3.12", FITS)
    process = checkout.start(MUSTER_TEST_HANG="1")
    wait_for_pip(checkout)
    process.send_signal(signal_number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == status and "run this again" in err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert "cut off" in checkout.run()


def test_two_do_not_install_at_once(checkout: Checkout) -> None:
    checkout.python("python3.12", FITS)
    process = checkout.start(MUSTER_TEST_HANG="1")
    wait_for_pip(checkout)
    try:
        assert "is already installing into .venv" in checkout.run(status=1)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
    assert "cut off" in checkout.run()
