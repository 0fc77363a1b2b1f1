"""The errors that a user is meant to read: what happened, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recipes.contract import ExitCode


class UserError(Exception):
    """One mistake that its user can mend.

    The command line prints ``error: <message>`` and ``hint: <hint>`` and exits with ``exit_code``;
    no traceback is shown.
    """

    def __init__(self, message: str, *, hint: str = "", exit_code: int = ExitCode.BAD_INPUT) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong with a recipe."""

    key: str
    """Dotted key, for example ``mesh.fsdp``."""
    value: object
    """The value found; None when the key is missing."""
    reason: str
    """Why it cannot be, as a clause without a full stop."""
    fix: str
    """What would be right, as an imperative clause without a full stop."""
    origin: str = ""
    """Where the value came from (``file.yaml:3`` or ``override``); empty when unknown."""


def problem_of(key: str, value: object, reason: str, fix: str) -> Problem:
    """As rules write it, one after another."""
    return Problem(key=key, value=value, reason=reason, fix=fix)


class RecipeError(UserError):
    """Every problem of one recipe, reported at once."""

    def __init__(self, recipe: str, problems: Sequence[Problem]) -> None:
        count = len(problems)
        noun = "problem" if count == 1 else "problems"
        super().__init__(f"recipe {recipe}: {count} {noun}\n" + "\n".join(map(_render, problems)))
        self.recipe = recipe
        self.problems = tuple(problems)


def _render(problem: Problem) -> str:
    where = f" ({problem.origin})" if problem.origin else ""
    value = "" if problem.value is None else f"={_short(str(problem.value))}"
    return f"  {_short(problem.key)}{value}{where}: {problem.reason}\n    fix: {problem.fix}"


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
