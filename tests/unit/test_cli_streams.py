"""The command line where its surroundings fail: no folder, a full disk, closed streams, Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import cli

REPO = str(Path(cli.__file__).parents[2])
MUSTER = f"{sys.executable} -W error -c 'import sys; from launcher.cli import main; sys.exit(main())'"
FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs ``line``, in which ``muster`` is the real command."""
    return subprocess.run(
        ["sh", "-c", line.replace("muster", MUSTER, 1)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": REPO},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("words", ["plan quickstart", "ls", "launch quickstart"])
def test_a_working_directory_that_was_deleted_is_one_error(words: str, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    done = shell(f"cd gone && rmdir ../gone && muster {words}", tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: the working directory does not exist any more\nhint: ")


@FULL
@pytest.mark.parametrize("words", ["plan quickstart", "hardware", "--help", "--version", "show --keys"])
def test_an_answer_that_finds_no_room_is_one_error(words: str, tmp_path: Path) -> None:
    done = shell(f"muster {words} > /dev/full", tmp_path)
    assert done.returncode == 75
    assert done.stderr == (
        "error: cannot write: No space left on device\nhint: make room, or write elsewhere\n"
    )


@FULL
def test_an_error_keeps_its_code_where_nobody_can_hear_it(tmp_path: Path) -> None:
    assert shell("muster plan no-such > /dev/full 2> /dev/full", tmp_path).returncode == 2


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-", "2>&-"])
@pytest.mark.parametrize(("words", "code"), [("hardware", 0), ("ls", 0), ("plan no-such", 2)])
def test_closed_streams_change_no_code(closed: str, words: str, code: int, tmp_path: Path) -> None:
    done = shell(f"muster {words} {closed}", tmp_path)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


PROLOGUE = """
import os, signal, sys
from launcher.cli import main

class Finder:
    '''Ctrl-C arrives, in a destructor, while a module is looked for.'''
    def find_spec(self, name, path=None, target=None):
        if name == NAME:
            class Dying:
                def __del__(self):
                    os.kill(os.getpid(), signal.SIGINT)
                    for _ in range(1000): pass
            Dying()

NAME = sys.argv.pop(1)
sys.meta_path.insert(0, Finder())
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["click", "launcher.cli.plan", "hydra", "omegaconf", "launcher.overrides"])
def test_ctrl_c_before_anything_was_done_ends_it(module: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE, module, "plan", "quickstart"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": REPO},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_in_the_middle_of_composition_ends_it(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from launcher.cli import main; import omegaconf.base as base;"
        "real = base.Node._get_flag;"
        "base.Node._get_flag = lambda *a: (os.kill(os.getpid(), signal.SIGINT), real(*a))[1];"
        "sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", "quickstart"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": REPO},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
