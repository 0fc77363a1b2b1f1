"""ls, status, logs and stop over run directories made by hand, through the command's own entry."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from launcher import lease
from launcher.cli import main
from launcher.cli.launch_local import _complete
from launcher.cli.logs import Extra, LogReader, Wanted
from launcher.cli.runs import learned
from launcher.cli.stop import stop
from launcher.ledger import AttemptEnd
from launcher.lookout import Lookout
from launcher.rundir import RunDir
from launcher.summary import SHOWN_HOSTS, summary
from launcher.text import one_line, printable
from recipes.errors import UserError
from tests.unit.rundir_support import commit_checkpoint, make_recipe, make_run
from tests.unit.test_rundir_summary import beat, make_end


def start(run: RunDir, logs: dict[str, bytes], *, silent: Sequence[str] = ()) -> int:
    """An attempt; ``silent`` hosts of it have shipped nothing yet."""
    attempt = run.next_attempt(1.0, recipe=make_recipe(), hosts=sorted([*logs, *silent]))
    for host, data in logs.items():
        run.storage.write_log(run.log_path(attempt, host), 0, data)
    return attempt


def test_ls_shows_runs_and_names_damaged_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, "good")
    beat(run, "s0-h0", attempt=start(run, {"s0-h0": b""}), step=7, time_s=109.0, loss=2.5)
    make_run(tmp_path, "bad").storage.replace("recipe.yaml", b"{")
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "file").write_text("")
    assert main(["ls", "--root", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].split() == ["RUN", "STATE", "STEP", "SAVED", "LOSS", "ATTEMPTS", "SEEN"]
    assert lines[1].split() == ["bad", "damaged", "-", "-", "-", "-", "-"]
    assert lines[2].split()[:6] == ["good", "stale", "7/20", "-", "2.5", "1"]
    assert len(lines) == 3
    assert "bad/recipe.yaml is damaged" in captured.err


def test_status_shows_few_of_many_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    attempt = start(run, {})
    for index in range(SHOWN_HOSTS + 5):
        beat(run, f"s0-h{index}", attempt=attempt, step=7, time_s=100.0 + index)
    assert main(["status", run.url]) == 0
    few = capsys.readouterr().out
    assert few.count("\ns0-h") == SHOWN_HOSTS
    assert few.endswith(f"{SHOWN_HOSTS} of {SHOWN_HOSTS + 5} hosts; --all-hosts shows all\n")
    assert main(["status", run.url, "--all-hosts"]) == 0
    every = capsys.readouterr().out
    assert (every.count("\ns0-h"), "--all-hosts" in every) == (SHOWN_HOSTS + 5, False)


def test_ls_json_is_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    beat(run, "s0-h0", attempt=start(run, {"s0-h0": b""}), step=7, time_s=109.0, loss=float("nan"))
    assert main(["ls", "--root", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert document["root"] == str(tmp_path)
    assert [(entry["name"], entry["state"], entry["loss"]) for entry in document["runs"]] == [
        ("tiny", "stale", None)
    ]


def test_ls_of_nothing_is_empty_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MUSTER_ROOT", raising=False)
    for arguments in (["--root", str(tmp_path)], []):
        assert main(["ls", *arguments]) == 0
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "no runs in" in captured.err


@pytest.mark.parametrize(("name", "why"), [("none", ""), ("file", ": that is a file")])
def test_ls_of_what_is_no_folder(
    name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for more in ([], ["--json"]):
        assert main(["ls", "--root", str(tmp_path / name), *more]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert f"there is no folder {tmp_path / name}{why}\n" in captured.err
        assert "MUSTER_ROOT" in captured.err


def test_status_shows_failure_hosts_and_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    attempt = start(run, {"s0-h0": b""})
    beat(run, "s0-h0", attempt=attempt, step=7, time_s=109.0, loss=2.5)
    commit_checkpoint(run.storage, 5)
    run.write_attempt_end(attempt, make_end(2))
    assert main(["status", "tiny", "--root", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tiny: failed, step 7 of 20\n")
    for expected in (
        "step 5",
        "s1-h0: out of memory",
        "lower the batch",
        "train loss 2.50",
        "0.5 s a step",
        f"{run.url}/attempts/0001/logs",
        "training",
    ):
        assert expected in out


@pytest.mark.parametrize(
    ("loss", "eval_loss", "entropy", "text"),
    [
        (None, None, None, ""),
        (None, None, 3.22, ""),
        (2.5, None, 3.22, "train loss 2.50"),
        (2.5, 1.8, None, "held-out loss 1.80 nats per token, train loss 2.50"),
        (
            1.746,
            1.8,
            3.2188,
            "held-out loss 1.80 nats per token (unigram entropy 3.22), train loss 1.75",
        ),
    ],
)
def test_what_was_learned(
    loss: float | None, eval_loss: float | None, entropy: float | None, text: str, tmp_path: Path
) -> None:
    seen = dataclasses.replace(
        summary(make_run(tmp_path), 1.0), loss=loss, eval_loss=eval_loss, eval_unigram_entropy_nats=entropy
    )
    assert learned(seen) == text


@pytest.mark.parametrize(
    ("run", "message", "hint"),
    [
        ("tinny", "there is no run tinny", "did you mean tiny?"),
        ("zzz", "there is no run zzz", "`muster ls`"),
        ("Not_A_Name", "'Not_A_Name' is not a run name", "./PATH"),
        ("..", "'..' is not a run name", "./PATH"),
        ("./nowhere", "there is no run at", "`muster ls"),
    ],
)
def test_a_run_that_is_not_there(
    run: str, message: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path)
    for verb in ("status", "logs", "stop"):
        assert main([verb, run, "--root", str(tmp_path)]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert hint in captured.err
        assert captured.out == ""


def test_the_root_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    monkeypatch.setenv("MUSTER_ROOT", str(tmp_path))
    assert main(["status", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "created"
    monkeypatch.setenv("MUSTER_ROOT", "elsewhere")
    assert main(["status", run.url, "--json"]) == 0


def test_damage_is_one_error_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path).storage.create("lease.json", b'{"owner": "\x1b[31m')
    assert main(["status", "tiny", "--root", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "lease.json is damaged" in captured.err
    assert "\x1b[31m" not in captured.err
    assert "Traceback" not in captured.err


LOG = b"".join(b"line %d\n" % index for index in range(1000))


@pytest.mark.parametrize(
    ("data", "tail", "expected"),
    [
        (LOG, 2, ["line 998", "line 999"]),
        (LOG, 0, []),
        (LOG, 5000, [f"line {index}" for index in range(1000)]),
        (b"", 3, []),
        (b"a\nb", 1, ["b"]),
        (b"a\nb", 2, ["a", "b"]),
        (b"a\n\n\n", 2, ["", ""]),
        (b"x" * 5000 + b"\nend\n", 1, ["end"]),
        (b"begin\n" + b"x" * 5000 + b"\n", 1, ["x" * 5000]),
        (b"begin\n" + b"x" * 3_000_000 + b"\nend", 1, ["end"]),
        (b"a\nb\n" + b"c\n" * 1_200_000, 1_200_001, ["b", *["c"] * 1_200_000]),
        (b"\n" * 400_000, 300_000, [""] * 300_000),
        (b"\xff\n", 1, ["\ufffd"]),
    ],
)
def test_tail(data: bytes, tail: int, expected: Sequence[str], tmp_path: Path) -> None:
    run = make_run(tmp_path)
    start(run, {"s0-h0": data})
    assert [line.text for line in LogReader(run, Wanted(tail=tail)).lines()] == expected


def test_logs_name_the_host_only_where_there_are_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    start(run, {"s0-h0": b"one\n"})
    start(run, {"s0-h0": b"two\n", "s0-h1": b"2026-11-30T21:00:00.120Z four\n", "s1-h0": b"three\n"})
    three = {"attempt": 2, "host": "s1-h0", "time": None, "text": "three"}
    four = {"attempt": 2, "host": "s0-h1", "time": "2026-11-30T21:00:00.120Z", "text": "four"}
    for arguments, expected in (
        ([], "s0-h0: two\ns1-h0: three\ns0-h1: four\n"),
        (["--timestamps"], "- s0-h0: two\n- s1-h0: three\n2026-11-30T21:00:00.120Z s0-h1: four\n"),
        (["--attempt", "1"], "one\n"),
        (["--previous"], "one\n"),
        (["--host", "s1-h0"], "three\n"),
        (["--slice", "1"], "three\n"),
        (["--slice", "0", "--host", "1"], "four\n"),
        (["--slice", "0", "--host", "s0-h1"], "four\n"),
        (["--host", "0"], "s0-h0: two\ns1-h0: three\n"),
        (["--host", "s1-h0", "--json"], json.dumps(three) + "\n"),
        (["--host", "1", "--json"], json.dumps(four) + "\n"),
    ):
        assert main(["logs", "tiny", "--root", str(tmp_path), *arguments]) == 0
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["--attempt", "3"], "has no attempt 3", "attempts 1 to 1"),
        (["--host", "s0-h1"], "no log of host s0-h1", "did you mean s0-h0?"),
        (["--slice", "0", "--host", "1"], "no log of host s0-h1", "did you mean s0-h0?"),
        (["--slice", "2", "--host", "s0-h0"], "no log of host s0-h0 in slice 2", "did you mean s0-h0?"),
        (["--slice", "2"], "no log of slice 2", "slices 0 to 1"),
        (["--host", "7"], "no log of a host 7", "did you mean s0-h0?"),
        (["--host", "x"], "no log of host x", "hosts: s0-h0, s1-h0"),
        (["--attempt", "0"], "0 is not in the range", "--help"),
        (["--slice", "-1"], "-1 is not in the range", "--help"),
        (["--previous"], "no attempt before attempt 1", "--previous"),
        (["--previous", "--attempt", "1"], "exclude each other", "one of them"),
    ],
)
def test_logs_that_are_not_there(
    arguments: Sequence[str], message: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(make_run(tmp_path), {"s0-h0": b"one\n", "s1-h0": b"two\n"})
    assert main(["logs", "tiny", "--root", str(tmp_path), *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert hint in captured.err


def test_a_host_of_the_attempt_that_is_still_silent_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    attempt = run.next_attempt(1.0, recipe=make_recipe(), hosts=["s0-h0", "s0-h1"])
    assert main(["logs", "tiny", "--root", str(tmp_path)]) == 0
    run.storage.write_log(run.log_path(attempt, "s0-h0"), 0, b"one\n")
    assert main(["logs", "tiny", "--root", str(tmp_path), "--host", "s0-h1"]) == 0
    assert capsys.readouterr().out == ""


def test_previous_passes_over_attempts_without_logs(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert [*LogReader(run, Wanted()).lines()] == []
    with pytest.raises(UserError, match="has not started yet"):
        LogReader(run, Wanted(previous=True))
    start(run, {"s0-h0": b"first\n"})
    for _ in range(2):
        start(run, {})
    start(run, {"s0-h0": b"newest\n"})
    start(run, {})
    assert [line.text for line in LogReader(run, Wanted()).lines()] == ["newest"]
    held = run.acquire(lease.this_process("muster launch"), 1.0)
    reader = LogReader(run, Wanted(previous=True))
    # It has no end.json, yet a newer one exists: nothing will be added.
    assert [line.text for line in reader.follow(lambda _: pytest.fail("slept"), lambda: 2.0)] == ["first"]
    run.release(held)


def of_pods(pods: Mapping[str, Sequence[bytes]]) -> Extra:
    return lambda wants: {host: chunks for host, chunks in pods.items() if wants(host)}


def test_lines_of_hosts_without_a_log_come_from_elsewhere_and_only_once(tmp_path: Path) -> None:
    """What the run directory has of a host replaces the other source, from the line that was shown last."""
    run = make_run(tmp_path)
    held = run.acquire(lease.this_process("muster launch"), 1.0)
    stamps = [f"2026-11-30T21:00:0{second}.000".encode() for second in range(6)]
    pods = {"s0-h1": [stamps[0] + b"123456Z boot\n" + stamps[1], b"123456Z a\n" + stamps[3] + b"Z ha"]}

    def open_attempt() -> None:
        start(run, {"s0-h0": stamps[2] + b"Z other\n"}, silent=["s0-h1"])

    def ship() -> None:
        lines = stamps[1] + b"Z a\n" + stamps[3] + b"Z half\n" + stamps[4] + b"Z end\n"
        run.storage.write_log(run.log_path(1, "s0-h1"), 0, lines)
        run.release(held)

    events = iter([open_attempt, lambda: None, ship])
    reader = LogReader(run, Wanted(), extra=of_pods(pods))
    lines = [(line.host, line.text) for line in reader.follow(lambda _: next(events)(), lambda: 2.0)]
    assert lines == [
        ("s0-h1", "boot"),
        ("s0-h1", "a"),
        ("s0-h0", "other"),
        ("s0-h1", "half"),
        ("s0-h1", "end"),
    ]


def test_other_sources_are_not_asked_once_every_host_has_a_log(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    start(run, {"s0-h0": b"a\n", "s1-h0": b"b\n"})

    def never(wants: Callable[[str], bool]) -> Mapping[str, Sequence[bytes]]:
        raise AssertionError([host for host in ("s0-h0", "s1-h0") if wants(host)])

    assert [line.text for line in LogReader(run, Wanted(tail=1), extra=never).lines()] == ["a", "b"]


def test_other_sources_are_for_the_newest_attempt_and_follow_the_choice(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    start(run, {"s0-h0": b"old\n"})
    start(run, {"s0-h0": b"new\n"}, silent=["s1-h0", "s1-h1"])
    pods = {"s0-h0": [b"never\n"], "s1-h0": [b"1\n2\n", b"3"], "s1-h1": [b"4\n"]}

    def texts(wanted: Wanted) -> Sequence[str]:
        return [line.text for line in LogReader(run, wanted, extra=of_pods(pods)).lines()]

    assert texts(Wanted(tail=2)) == ["new", "2", "3", "4"]
    assert texts(Wanted(slice_id=1, host="0")) == ["1", "2", "3"]
    assert texts(Wanted(previous=True)) == ["old"]
    # An attempt of which nothing has been shipped yet counts as soon as its hosts say something.
    start(run, {})
    assert texts(Wanted(tail=1)) == ["never", "3", "4"]
    with pytest.raises(UserError, match="no log of host s1-h7"):
        start(run, {"s0-h0": b""})
        texts(Wanted(host="s1-h7"))


def test_follow_goes_on_to_the_next_attempt_and_ends_with_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    held = run.acquire(lease.this_process("muster launch"), 1.0)
    first = start(run, {"s0-h0": b"a\nb"})
    path = run.log_path(first, "s0-h0")

    def end_first() -> None:
        run.storage.write_log(path, 3, b"c\nd\n")
        run.write_attempt_end(first, make_end(75))
        start(run, {"s0-h0": b"e\n"})

    def end_run() -> None:
        run.storage.write_log(run.log_path(2, "s0-h0"), 2, b"f")
        run.release(held)

    events = iter([lambda: None, end_first, lambda: None, end_run])
    reader = LogReader(run, Wanted())
    lines = [(line.attempt, line.text) for line in reader.follow(lambda _: next(events)(), lambda: 2.0)]
    assert lines == [(1, "a"), (1, "bc"), (1, "d"), (2, "e"), (2, "f")]


def test_stop_waits_until_the_lease_is_let_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    held = run.acquire(lease.this_process("muster launch"), 1.0)
    beat(run, "s0-h0", attempt=start(run, {}), step=7, time_s=2.0)
    clock = iter(range(2, 100))
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        assert run.stop_request() is not None
        if len(sleeps) == 3:
            run.release(held)

    assert stop(run, 60.0, sleep, lambda: float(next(clock)))
    assert len(sleeps) == 3
    err = capsys.readouterr().err
    assert "asked muster launch" in err
    assert err.count("s0-h0: training, step 7") == 1


def test_stop_gives_up_but_leaves_the_request(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.acquire(lease.this_process("muster launch"), 1.0)
    run.request_stop(0.5, "somebody before")
    clock = iter(range(2, 100))
    with pytest.raises(UserError, match="still runs after 5 s") as caught:
        stop(run, 5.0, lambda _: None, lambda: float(next(clock)))
    assert caught.value.exit_code == 75
    request = run.stop_request()
    assert request is not None
    assert request.by == "somebody before"


JUNK = (
    "heartbeat/s0-h9.json",
    "attempts/0001/hosts/s0-h9.json",
    "attempts/0001/end.json",
    "attempts/0002/end.json",
)


def test_damaged_records_are_passed_over_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    held = run.acquire(lease.this_process("muster launch"), 1.0)
    beat(run, "s0-h0", attempt=start(run, {}), step=7, time_s=2.0)
    for path in JUNK:
        run.storage.create(path, b"\x80")
    # A leftover of an earlier attempt is no better.
    run.storage.create("heartbeat/s9-h9.json", b"{}")
    with Lookout(run) as lookout:
        lookout.look()
        assert [seen.host for seen in lookout.seen().beats] == ["s0-h0"]
        assert lookout.seen().stop is None
        assert stop(run, 60.0, lambda _: run.release(held), lambda: 2.0)
        lookout.look()
        assert lookout.seen().stop is not None
    assert "s0-h0: training, step 7" in capsys.readouterr().err
    assert main(["status", "tiny", "--root", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("unreadable ") == 3
    assert "heartbeat/s0-h9.json is damaged" in out
    assert main(["status", "tiny", "--root", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["damaged"]) == 3


def test_a_look_sees_the_stop_whatever_happens_to_the_heartbeats(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    lookout = Lookout(run)
    beat(run, "s0-h0", attempt=1, step=7, time_s=2.0)
    lookout.look()
    (tmp_path / "tiny" / "heartbeat").rename(tmp_path / "elsewhere")
    (tmp_path / "tiny" / "heartbeat").symlink_to(tmp_path / "elsewhere")
    run.request_stop(3.0, "me")
    lookout.look()
    assert [seen.host for seen in lookout.seen().beats] == ["s0-h0"]
    assert lookout.seen().stop is not None


def test_stop_asks_even_when_nobody_can_tell_who_runs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    run.storage.create("lease.json", b"{")
    assert main(["stop", "tiny", "--root", str(tmp_path)]) == 2
    assert "lease.json away" in capsys.readouterr().err
    assert run.stop_request() is not None


def test_a_damaged_end_does_not_keep_a_run_from_going_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    run.storage.create("attempts/0001/end.json", b"{")
    run.storage.create("attempts/0002/end.json", b"[]")
    assert _complete(run) is None
    err = capsys.readouterr().err
    assert "attempts/0001/end.json is damaged" in err
    assert err.count("how that attempt ended is unknown") == 2
    run.write_attempt_end(3, make_end(0))
    done = _complete(run)
    assert done is not None
    assert (done.exit_code, done.attempt) == (0, 3)


def test_stop_of_a_run_that_does_not_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    run.write_attempt_end(
        start(run, {}),
        AttemptEnd(
            end_s=1.0, exit_code=0, first_failing_host=None, message="", hint="", from_step=-1, to_step=20
        ),
    )
    for _ in range(2):
        assert main(["stop", "tiny", "--root", str(tmp_path)]) == 0
        captured = capsys.readouterr()
        assert "tiny is not running: it is complete" in captured.err
        assert captured.out == ""
    assert run.stop_request() is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("caf\u00e9 \u4f60\n\t", "caf\u00e9 \u4f60\n\t"),
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("a\rb", r"a\rb"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        ("\u202eevil", r"\u202eevil"),
        ("\udc80", r"\udc80"),
    ],
)
def test_text_from_elsewhere_cannot_steer_a_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_one_line_is_one_short_line() -> None:
    assert one_line("a\n b\t c") == "a b c"
    assert len(one_line("x" * 1000)) == 300
