"""The records that a run directory is made of, and how each becomes JSON and comes back.

Every record is a frozen dataclass and one JSON object; reading is strict, so a damaged object gives
one error that names it. Unknown keys are ignored: a newer Muster may have written more.
Times are finite; only metrics may be NaN or infinite.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.storage_types import Storage, StorageError
from launcher.text import one_line
from recipes.contract import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """``heartbeat/<host>.json``: the newest sign of life of one host."""

    host: str
    attempt: int
    progress: Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptStart:
    """``attempts/NNNN/start.json``: what an attempt set out to do."""

    attempt: int
    started_s: float
    hosts: Sequence[str]
    from_step: int
    """Newest committed step when it started; -1 when there was none."""
    lock: Mapping[str, Any]
    """Versions and code of this attempt; the run's own lock.json may be older."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRecord:
    """``attempts/NNNN/hosts/<host>.json``: one process of an attempt; written at its start and its end."""

    host: str
    hostname: str
    pid: int
    start_s: float
    end_s: float | None = None
    exit_code: int | None = None
    """The agent's; null while the process runs."""
    status: int | None = None
    """The trainer's own exit status as a shell shows it: 128 + signal for a signal."""
    reason: str = ""
    """How the agent classified the end."""
    hint: str = ""
    collateral: bool = False
    """It died of another host's absence."""
    hung: bool = False
    """The agent ended it because nothing moved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """``attempts/NNNN/end.json``: how an attempt ended, seen over all its hosts."""

    end_s: float
    exit_code: int
    first_failing_host: str | None
    message: str
    """Of the first failing host; empty when none failed."""
    hint: str
    from_step: int
    to_step: int
    """Newest committed step at the end; -1 when none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequest:
    """``stop.json``: somebody asked the run to stop cleanly."""

    requested_s: float
    by: str
    resumes: bool = False
    """The supervisor asked, to go on with other machines: no end of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StacksRequest:
    """``stacks.json``: somebody wants the stacks of an attempt's trainers."""

    id: str
    """Lower case letters and digits; names the folder of the answers."""
    attempt: int
    hosts: Sequence[str]
    """Whose; empty: everybody's."""
    requested_s: float
    by: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HostStacks:
    """``attempts/NNNN/stacks/REQUEST/<host>.json``: what one trainer was doing."""

    host: str
    time_s: float
    phase: str
    """Empty before its first report."""
    step: int
    threads: Sequence[Sequence[str]]
    """Frames of each thread, the innermost first; the main thread is the last."""
    problem: str = ""
    """Why there are no threads."""


class Damaged(StorageError):
    """An object is not what Muster writes there."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(
            f"{where} is damaged: {one_line(reason)}",
            hint="it is damaged or was not written by Muster; move it away, then try again",
        )


def encode(record: object) -> bytes:
    """A record as JSON, one key a line, ending in a newline."""
    data = dataclasses.asdict(typing.cast(Any, record)) if dataclasses.is_dataclass(record) else record
    return (json.dumps(data, indent=1, ensure_ascii=True, allow_nan=True) + "\n").encode()


def read_record[T](storage: Storage, path: str, cls: type[T]) -> T:
    """The record at ``path``.

    Raises:
      NotFound: there is none.
      Damaged: it is not JSON or does not have the shape of ``cls``; the message names the object.
    """
    return decode(storage.read(path), cls, f"{storage.url}/{path}")


def decode[T](data: bytes, cls: type[T], where: str) -> T:
    """Bytes of JSON as ``cls``, strictly."""
    return from_plain(parse_json(data, where), cls, where)


def from_plain[T](data: object, cls: type[T], where: str) -> T:
    """Plain data as ``cls``, strictly."""
    record = _typed(data, cls)
    if isinstance(record, _Mismatch):
        raise Damaged(where, str(record))
    return typing.cast(T, record)


def parse_json(data: bytes, where: str) -> object:
    """Bytes of JSON as plain data."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(where, f"not JSON ({error})") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mismatch:
    path: str
    wanted: str

    def __str__(self) -> str:
        return f"{self.path or 'the whole'} is not {self.wanted}"

    def below(self, name: str) -> _Mismatch:
        return _Mismatch(path=f"{name}.{self.path}".rstrip("."), wanted=self.wanted)


def _typed(value: object, hint: Any) -> object:
    """``value`` as ``hint``, or the first _Mismatch."""
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return _record(value, typing.cast(type[Any], hint))
    if isinstance(hint, types.UnionType):
        inner = next(option for option in typing.get_args(hint) if option is not types.NoneType)
        return None if value is None else _typed(value, inner)
    if typing.get_origin(hint) is Sequence:
        return _sequence(value, typing.get_args(hint)[0])
    if typing.get_origin(hint) is Mapping:
        return _mapping(value, typing.get_args(hint)[1])
    return _scalar(value, hint)


def _record(value: object, cls: type[Any]) -> object:
    if not isinstance(value, dict):
        return _Mismatch(path="", wanted="an object")
    hints = typing.get_type_hints(cls)
    values: dict[str, object] = {}
    for field in dataclasses.fields(cls):
        if field.name not in value and field.default is not dataclasses.MISSING:
            continue
        item = _typed(value.get(field.name), hints[field.name])
        if isinstance(item, float) and not math.isfinite(item):
            item = _Mismatch(path="", wanted="a finite number")
        if isinstance(item, _Mismatch):
            return item.below(field.name)
        values[field.name] = item
    return cls(**values)


def _sequence(value: object, inner: Any) -> object:
    if not isinstance(value, list):
        return _Mismatch(path="", wanted="a list")
    items = [_typed(item, inner) for item in value]
    return next((item for item in items if isinstance(item, _Mismatch)), tuple(items))


def _mapping(value: object, inner: Any) -> object:
    if not isinstance(value, dict):
        return _Mismatch(path="", wanted="an object")
    items = {str(name): _typed(item, inner) for name, item in value.items()}
    wrong = next(((name, item) for name, item in items.items() if isinstance(item, _Mismatch)), None)
    return wrong[1].below(wrong[0]) if wrong else items


def _scalar(value: object, hint: type[Any]) -> object:
    if issubclass(hint, enum.Enum):
        wanted = f"one of {', '.join(member.value for member in hint)}"
        known = [member for member in hint if member.value == value]
        return known[0] if known else _Mismatch(path="", wanted=wanted)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if type(value) is hint:
        return value
    return _Mismatch(
        path="", wanted={str: "a text", int: "a whole number", float: "a number"}.get(hint, hint.__name__)
    )
