"""How a cluster and a namespace are given on the command line: refused before any request."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli import main


@pytest.mark.parametrize("verb", ["ls", "gc"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("-n", value) for value in ("", "..", "a/b", "Upper", "-a", "a.b", "x" * 64, "a b", "a?b", "a\n")),
        *(("--cluster", value) for value in ("", " a", "a\x1b[31m", "x" * 254)),
    ],
)
def test_what_cannot_be_a_name_is_refused(
    verb: str,
    option: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert main([verb, option, value]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "is not a namespace" in captured.err or "is not a cluster" in captured.err
    assert captured.err.count("\n") == 2 and "\x1b" not in captured.err
