"""Where each value of a composed recipe came from: a file and line, an override, or the schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.overrides import Override
from launcher.recipe_yaml import RecipeFile
from recipes.load import free_form, free_form_node, keys

OVERRIDE = "override"
DEFAULT = "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One file as it was merged: where its keys go."""

    path: Path
    package: str
    """Dotted path that the file's keys are put under; empty for the root."""
    contents: RecipeFile

    def lines(self) -> Mapping[str, int]:
        """Line of each key, by its path in the recipe."""
        prefix = f"{self.package}." if self.package else ""
        return {f"{prefix}{key}": line for key, line in self.contents.lines.items()}


def origins_of(layers: Sequence[Layer], overridden: Sequence[str]) -> dict[str, str]:
    """Origin by dotted key, sections included, for all that a file or an override gave."""
    origins: dict[str, str] = {}
    for layer in layers:
        for key, line in layer.lines().items():
            origins[key] = f"{layer.contents.label}:{line}"
    return origins | dict.fromkeys(overridden, OVERRIDE)


def ignored_choices(
    layers: Sequence[Layer], parsed: Sequence[Override], origins: Mapping[str, str]
) -> tuple[str, ...]:
    """A note for each value of an option chosen by override that a recipe's own value hides."""
    notes = []
    for override in parsed:
        if not override.is_choice:
            continue
        for layer in layers:
            if layer.package != override.key:
                continue
            for key, line in layer.lines().items():
                mine = f"{layer.contents.label}:{line}"
                if _is_leaf(key) and origins[key] not in (mine, OVERRIDE):
                    notes.append(f"{origins[key]} sets {key} over {override.text}")
    return tuple(notes)


def _is_leaf(key: str) -> bool:
    """Whether one value can hide another there; free-form keys are merged entry by entry."""
    return free_form_node(key) is not None or (key in keys() and key not in free_form())
