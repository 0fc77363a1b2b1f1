"""Rules across the keys of a recipe and against the hardware: every problem at once.

What one value may be by itself is in `schema.py` and is refused by `load.py`; here is what values may
be together. No rule touches a file, a network or a clock.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from recipes.check_execution import check_execution
from recipes.check_flags import check_flags
from recipes.check_mesh import check_mesh
from recipes.check_target import check_target
from recipes.contract import RUN_NAME_PATTERN, is_run_name
from recipes.errors import Problem, problem_of
from recipes.schema import Recipe

_BUCKET = re.compile(r"[a-z0-9][-a-z0-9_.]{1,220}[a-z0-9]", re.ASCII)
_IP_ADDRESS = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3}){3}", re.ASCII)
_SCHEME = re.compile(r"[a-zA-Z][-+.a-zA-Z0-9]*:/", re.ASCII)
_SOURCES_WITH_PATH = ("text_files", "token_file", "array_record")
_SOURCES_OF_TEXT = ("python_stdlib", "text_files")
_BYTE_VALUES = 256
_MAX_TOKENS = {"uint16": 2**16, "uint32": 2**32}


def check(recipe: Recipe, *, origins: Mapping[str, str] | None = None) -> list[Problem]:
    """Everything that is wrong with ``recipe``; empty when it can run.

    Args:
      recipe: as read by :func:`recipes.load.recipe_from_dict`.
      origins: where each dotted key came from, for messages.
    """
    rules = (
        _check_run,
        check_target,
        check_flags,
        check_mesh,
        check_execution,
        _check_data,
        _check_length,
        _check_profile,
    )
    found = [problem for rule in rules for problem in rule(recipe)]
    known = origins or {}
    return [dataclasses.replace(problem, origin=known.get(problem.key, "")) for problem in found]


def _check_run(recipe: Recipe) -> Iterator[Problem]:
    name, root = recipe.run_name, recipe.run.root
    if not is_run_name(name):
        yield problem_of(
            "run.name",
            name,
            "is not a run name (at most 40 of a-z, 0-9 and hyphens, from a letter to a letter or digit)",
            f"set run.name, for example run.name={_slug(name)}",
        )
    fault = _root_fault(root)
    if fault is not None:
        reason, fix = fault
        yield problem_of("run.root", root, reason, fix)
    if recipe.run.peer_timeout_s >= recipe.target.grace_period_s:
        yield problem_of(
            "run.peer_timeout_s",
            recipe.run.peer_timeout_s,
            f"is not below target.grace_period_s={recipe.target.grace_period_s:g}, so a lost host would be"
            " noticed only after everything is killed",
            f"use at most {recipe.target.grace_period_s / 2:g}, or a longer target.grace_period_s",
        )


def _slug(text: str) -> str:
    """The valid run name nearest to ``text``."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    candidate = (words if words[:1].isalpha() else f"run-{words}")[:40].strip("-")
    return candidate if RUN_NAME_PATTERN.fullmatch(candidate) else "my-run"


def _root_fault(root: str) -> tuple[str, str] | None:
    """Reason and fix, or None when ``root`` may be the folder of all runs."""
    example = "give a local folder such as runs, or gs://BUCKET/PREFIX"
    if not root.strip():
        return "is empty", example
    if not root.isprintable() or root != root.strip():
        return "has control characters or blanks at an end", "remove them"
    if root.startswith("gs://"):
        bucket, _, prefix = root.removeprefix("gs://").partition("/")
        if not _is_bucket(bucket):
            return f"{bucket!r} is not a bucket name", "give gs://BUCKET/PREFIX with an existing bucket"
        return _component_fault(f"/{prefix}", (".", ".."))
    if _SCHEME.match(root):
        return "is neither a local path nor gs://", example
    if root.startswith("~"):
        return "begins with ~, which only a shell expands", "write the whole path"
    return _component_fault(root, ("..",))


def _component_fault(path: str, refused: tuple[str, ...]) -> tuple[str, str] | None:
    if "//" in path:
        return "has an empty component (//)", "write single slashes"
    found = next((part for part in path.split("/") if part in refused), None)
    return None if found is None else (f"has the component {found!r}", "write the path without it")


def _is_bucket(name: str) -> bool:
    parts_fit = all(1 <= len(part) <= 63 for part in name.split("."))
    length_fits = 3 <= len(name) <= (222 if "." in name else 63)
    named_by_google = name.startswith("goog") or "google" in name
    well_formed = _BUCKET.fullmatch(name) is not None and _IP_ADDRESS.fullmatch(name) is None
    return well_formed and parts_fit and length_fits and not named_by_google


def _check_data(recipe: Recipe) -> Iterator[Problem]:
    data = recipe.data
    takes_path = data.source in _SOURCES_WITH_PATH
    if takes_path and not data.path:
        yield problem_of(
            "data.path", data.path, f"must be given for data.source={data.source}", "set data.path"
        )
    for key in ("path", "eval_path"):
        value = getattr(data, key)
        if value is None:
            continue
        if not takes_path:
            fix = f"remove it, or use data.source={' or '.join(_SOURCES_WITH_PATH)}"
            yield problem_of(f"data.{key}", value, f"is not used by data.source={data.source}", fix)
        elif not value.isprintable():
            yield problem_of(f"data.{key}", value, "has control characters", "remove them")
    yield from _check_tokens(recipe)


def _check_tokens(recipe: Recipe) -> Iterator[Problem]:
    data, vocab_size = recipe.data, recipe.model.vocab_size
    if data.tokenizer == "huggingface" and not data.tokenizer_path:
        yield problem_of(
            "data.tokenizer_path",
            data.tokenizer_path,
            "must be given for data.tokenizer=huggingface",
            "set it to a tokenizer.json file",
        )
    if data.tokenizer == "byte" and data.tokenizer_path is not None:
        fix = "remove it, or use data.tokenizer=huggingface"
        yield problem_of(
            "data.tokenizer_path", data.tokenizer_path, "is not used by data.tokenizer=byte", fix
        )
    if data.tokenizer == "byte" and data.source in _SOURCES_OF_TEXT and vocab_size < _BYTE_VALUES:
        yield problem_of(
            "model.vocab_size",
            vocab_size,
            f"is below the {_BYTE_VALUES} tokens of data.tokenizer=byte",
            f"use at least {_BYTE_VALUES}",
        )
    if data.source == "token_file" and vocab_size > _MAX_TOKENS[data.token_dtype]:
        yield problem_of(
            "data.token_dtype",
            data.token_dtype,
            f"cannot hold the tokens of model.vocab_size={vocab_size}",
            "use data.token_dtype=uint32 and a token file written so",
        )


def _check_length(recipe: Recipe) -> Iterator[Problem]:
    num_steps, warmup_steps = recipe.train.num_steps, recipe.optimizer.warmup_steps
    if warmup_steps >= num_steps:
        yield problem_of(
            "optimizer.warmup_steps",
            warmup_steps,
            f"is not below train.num_steps={num_steps}: the learning rate would never reach its peak",
            f"use at most {num_steps - 1}, for example {num_steps // 10}",
        )
    saving = recipe.checkpoint
    if saving.save_interval_steps is None and saving.save_interval_minutes is None:
        yield problem_of(
            "checkpoint.save_interval_steps",
            None,
            "and checkpoint.save_interval_minutes are both null: a crash would lose the whole run",
            "set one of them, for example checkpoint.save_interval_minutes=10",
        )


def _check_profile(recipe: Recipe) -> Iterator[Problem]:
    train = recipe.train
    start, count, interval = train.profile_start_step, train.profile_num_steps, train.profile_interval_steps
    if start is None:
        if interval is not None:
            fix = "set train.profile_start_step, the first step of the first trace"
            yield problem_of("train.profile_interval_steps", interval, "is set without a first step", fix)
        return
    if start + count - 1 > train.num_steps:
        yield problem_of(
            "train.profile_start_step",
            start,
            f"and train.profile_num_steps={count} end after train.num_steps={train.num_steps}",
            f"use at most {train.num_steps - count + 1}"
            if train.num_steps >= count
            else f"use train.profile_num_steps={train.num_steps} and train.profile_start_step=1",
        )
    if interval is not None and interval < count:
        yield problem_of(
            "train.profile_interval_steps",
            interval,
            f"is below train.profile_num_steps={count}: a trace would begin before the last one ends",
            f"use at least {count}",
        )
