"""Hydra's Compose API -> Recipe: strict, with where each value came from. The only file that imports Hydra.

Hydra alone lets ``+step=5`` and ``++model.n_layer=3`` through and skips a missing ``optional`` group; here
overrides are checked against the schema first, files are read by ``launcher.recipe_yaml``, and what Hydra
composed is read into the typed schema, which refuses everything it does not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra import version as hydra_version
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.structured_config_source import StructuredConfigSource
from hydra._internal.hydra import Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher import free_form
from launcher.origins import DEFAULT, OVERRIDE, Layer, ignored_choices, origins_of
from launcher.overrides import GrammarError, Override, read_overrides
from launcher.recipe_path import GROUPS, describe, find, label, locate, names, not_a_file
from launcher.recipe_yaml import RecipeFile, read_recipe_file
from recipes.check import check
from recipes.errors import Problem, RecipeError, UserError
from recipes.load import (
    defaults,
    flatten,
    free_form_node,
    keys,
    nearest,
    nest,
    recipe_from_dict,
    recipe_to_dict,
)
from recipes.schema import Recipe

_SCHEMA = "_schema_"
_PRIMARY = "_primary_"
_IS_1_3 = hydra.__version__.startswith("1.3")


@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    """A recipe that passed every check."""

    recipe: Recipe
    origins: Mapping[str, str]
    """For every key, in schema order: ``recipes/model/llama3-8b.yaml:7``, ``override`` or ``default``;
    after each free-form key, for its entries."""
    notes: tuple[str, ...]
    """What the user should hear, though nothing is wrong."""


def compose(name: str, overrides: Sequence[str], *, search: Sequence[Path] = ()) -> Composed:
    """Composes the recipe ``name`` (or the one in the file ``name``) with ``key=value`` overrides.

    Args:
      search: folders to search before all others.

    Raises:
      RecipeError: problems of the recipe, all that can be known together.
      UserError: no such recipe, or a file of it cannot be read.
    """
    name, folders = locate(name, search)
    parsed = read_overrides(overrides, folders, _grammar)
    with _hydra(folders):
        try:
            data, layers = _compose(name, parsed.overrides, folders)
        except (HydraException, OmegaConfBaseException, RecursionError) as error:
            refused = parsed.problems
            raise RecipeError(name, refused) if refused else _explain(name, error, folders) from None
    merged = free_form.merge(layers, parsed.entries)
    overridden = [override.key for override in parsed.overrides if not override.is_choice]
    origins = {entry.node: OVERRIDE for entry in parsed.entries}
    origins |= origins_of(layers, [*overridden, *(entry.key for entry in parsed.entries)])
    data = free_form.put({**data, "name": name}, merged.values)
    recipe = _checked(data, origins, [*parsed.problems, *merged.problems])
    complete = {path: origins.get(path, DEFAULT) for path in _leaves(recipe)}
    return Composed(
        recipe=recipe,
        origins=complete | {"name": label(layers[-1].path)},
        notes=ignored_choices(layers, parsed.overrides, origins),
    )


def recompose(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """A complete recipe with ``key=value`` overrides; it has no groups any more.

    Raises:
      RecipeError: all problems.
    """
    parsed = read_overrides(overrides, (), _grammar)
    flat = flatten(recipe_to_dict(recipe)) | {each.key: each.value for each in parsed.overrides}
    for entry in parsed.entries:
        others = {} if entry.name is None else {**flat[entry.node]}
        if entry.name is not None and entry.value is not None:
            others[entry.name] = entry.value
        elif entry.name is not None:
            others.pop(entry.name, None)
        flat[entry.node] = others
    changed = [*(each.key for each in parsed.overrides), *(each.key for each in parsed.entries)]
    origins = dict.fromkeys(changed, OVERRIDE)
    return _checked(nest(flat), origins, parsed.problems)


def _leaves(recipe: Recipe) -> Iterator[str]:
    """Every key in schema order; after a free-form key, its entries."""
    for path, value in flatten(recipe_to_dict(recipe)).items():
        yield path
        if isinstance(value, Mapping):
            yield from (f"{path}.{name}" for name in value)


def _grammar(text: str) -> Any:
    """The value of one override by Hydra's grammar."""
    try:
        parsed = OverridesParser.create().parse_override(text)
        if parsed.is_sweep_override():
            raise GrammarError("is a sweep, but a run has one value for each key")
        return parsed.value()
    except (HydraException, RecursionError, ValueError):
        raise GrammarError("is not a value by Hydra's grammar") from None


def _checked(data: Mapping[str, Any], origins: Mapping[str, str], refused: Sequence[Problem]) -> Recipe:
    """The recipe, if nothing at all is wrong with it.

    Raises:
      RecipeError: ``refused`` and every other problem that can be known beside it.
    """
    name, problems = str(data["name"]), list(refused)
    try:
        recipe = recipe_from_dict(data, origins=origins)
    except RecipeError as error:
        problems += error.problems
    if problems:
        raise RecipeError(name, [*problems, *_beside(data, problems, origins)])
    if found := check(recipe, origins=origins):
        raise RecipeError(name, found)
    return recipe


def _beside(
    data: Mapping[str, Any], problems: Sequence[Problem], origins: Mapping[str, str]
) -> Sequence[Problem]:
    """Problems across fields, in sections that have no other problem: there they are no mere consequence."""
    bad = {free_form_node(problem.key) or problem.key for problem in problems}
    flat = {path: value for path, value in flatten(data).items() if path in keys()}
    flat |= {path: keys()[path].default for path in bad if path in keys()}
    try:
        recipe = recipe_from_dict(nest(flat))
    except RecipeError:
        return []
    sections = {key.split(".", 1)[0] for key in bad}
    return [p for p in check(recipe, origins=origins) if p.key.split(".", 1)[0] not in sections]


class _RecipeSource(ConfigSource):
    """One folder of recipes, for Hydra: only complete recipes and the known groups, read strictly."""

    @staticmethod
    def scheme() -> str:
        return "muster"

    def load_config(self, config_path: str) -> ConfigResult:
        path = self._file(config_path)
        assert path is not None
        group = config_path.rpartition("/")[0]
        contents = read_recipe_file(path, label(path), group=group)
        _check_defaults(contents)
        header = {"package": contents.package}
        data = free_form.without(contents.data, "" if contents.package else group)
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=OmegaConf.create(data),
            header=header,
        )

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", *GROUPS) and (Path(self.path) / config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        return self._file(config_path) is not None

    def available(self) -> bool:
        return self.is_group("")

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        folder = Path(self.path)
        groups = [group for group in GROUPS if not config_path and (folder / group).is_dir()]
        configs = names([folder], config_path or None) if config_path in ("", *GROUPS) else []
        wanted = {ObjectType.GROUP: groups, ObjectType.CONFIG: configs}
        return sorted(groups + configs if results_filter is None else wanted[results_filter])

    def _file(self, config_path: str) -> Path | None:
        return _config_file([Path(self.path)], config_path)


def _config_file(folders: Sequence[Path], config_path: str) -> Path | None:
    group, _, name = config_path.rpartition("/")
    return find(folders, name, group) if group in ("", *GROUPS) else None


def _check_defaults(contents: RecipeFile) -> None:
    """Refuses what Hydra would allow in a defaults list but a recipe does not need."""
    listed = contents.data.get("defaults", [])
    if not isinstance(listed, list):
        fix = f"write `defaults:` and below it a line `- {listed}`"
        origin = f"{contents.label}:{contents.lines.get('defaults', 1)}"
        problem = Problem(key="defaults", value=str(listed), reason="is not a list", fix=fix, origin=origin)
        raise RecipeError(Path(contents.label).stem, [problem])
    problems = [
        Problem(
            key="defaults",
            value=str(item),
            reason=reason,
            fix="write `- group: option`, the name of another recipe, or _self_",
            origin=f"{contents.label}:{contents.lines.get(f'defaults[{index}]', 1)}",
        )
        for index, item in enumerate(listed)
        if (reason := _defaults_reason(item))
    ]
    if problems:
        raise RecipeError(Path(contents.label).stem, problems)


def _defaults_reason(item: object) -> str:
    if not isinstance(item, (str, dict)) or (isinstance(item, dict) and len(item) != 1):
        return "is not an entry of a defaults list"
    key, option = next(iter(item.items())) if isinstance(item, dict) else (item, "")
    if key.startswith("optional "):
        return "is optional, so a misspelt option would be skipped in silence"
    if not isinstance(option, (str, type(None))):
        return "does not name an option"
    if isinstance(item, dict) and key.removeprefix("override ").lstrip("/") not in GROUPS:
        guess = nearest(key, GROUPS)
        return "does not name a group" + (f"; did you mean {guess}?" if guess else "")
    return "names more than a recipe, group or option" if any(c in f"{key}{option}" for c in "@$:") else ""


@contextmanager
def _hydra(folders: Sequence[Path]) -> Iterator[None]:
    """Hydra, initialised on ``folders`` and no plug-in's search path, and cleared afterwards."""
    # From 1.4 on, passing a version base at all is deprecated; before, leaving it out selects 1.1.
    if _IS_1_3:
        hydra_version.setbase("1.3")
    # Not Plugins.instance(): it imports every installed hydra_plugins package, which costs time and trust.
    for source in (_RecipeSource, StructuredConfigSource):
        SourcesRegistry.instance().register(source)
    # Hydra's own settings (output folders, logging, launchers) serve only its own entry point.
    _store("config", HydraConf(defaults=[]), group="hydra")
    _store(_SCHEMA, defaults())
    path = ConfigSearchPathImpl()
    for folder in folders:
        path.append("main", f"{_RecipeSource.scheme()}://{folder}")
    path.append("schema", "structured://")
    GlobalHydra.instance().clear()
    Hydra.create_main_hydra2("muster", path)
    try:
        yield
    finally:
        GlobalHydra.instance().clear()


def _store(name: str, node: Any, **where: Any) -> None:
    """Offers ``node`` to Hydra as a config, in place of any earlier one."""
    replace: dict[str, Any] = {} if _IS_1_3 else {"replace": True}
    ConfigStore.instance().store(name=name, node=node, **where, **replace)


def _compose(
    name: str, parsed: Sequence[Override], folders: Sequence[Path]
) -> tuple[dict[str, Any], Sequence[Layer]]:
    _store(_PRIMARY, {"defaults": [_SCHEMA, name, "_self_"]})
    choices = [override.text for override in parsed if override.is_choice]
    if choices:
        chosen = _defaults_list([]).overrides.known_choices
        added = [{o.key: o.value} for o in parsed if o.is_choice and o.key not in chosen]
        choices = [override.text for override in parsed if override.is_choice and override.key in chosen]
        _store(_PRIMARY, {"defaults": [_SCHEMA, *added, name, "_self_"]})
    values = [override.text for override in parsed if not override.is_choice]
    composed = hydra.compose(_PRIMARY, overrides=[*choices, *values])
    data = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}, list(_layers(choices, folders))


def _defaults_list(choices: Sequence[str]) -> Any:
    loader = GlobalHydra.instance().config_loader()
    return loader.compute_defaults_list(_PRIMARY, list(choices), RunMode.RUN)


def _layers(choices: Sequence[str], folders: Sequence[Path]) -> Iterable[Layer]:
    """The files that were merged, first to last."""
    for entry in _defaults_list(choices).defaults:
        config_path = entry.config_path or ""
        path = _config_file(folders, config_path)
        if path is not None:
            contents = read_recipe_file(path, label(path), group=config_path.rpartition("/")[0])
            yield Layer(path=path, package=entry.package or "", contents=contents)


def _explain(name: str, error: Exception, folders: Sequence[Path]) -> UserError:
    """What Hydra refused, in one line and without its advice to add ``+``."""
    if isinstance(error, RecursionError):
        return UserError(
            f"recipe {name} includes itself",
            hint="rename a file that has the name of the recipe it extends, or mend the defaults lists",
        )
    wanted = error.missing_cfg_file if isinstance(error, MissingConfigException) else None
    if wanted:
        group, _, option = wanted.rpartition("/")
        if there := not_a_file(folders, option, group):
            return UserError(f"recipe {name}: {there} is not a file", hint="make it a file, or move it away")
        guess = nearest(option, names(folders, group or None))
        what = f"group {group} has no option" if group else "no recipe"
        return UserError(
            f"recipe {name}: {what} {option!r} (searched {describe(folders)})",
            hint=f"did you mean {guess}?" if guess else "`muster recipes` lists what there is",
        )
    cause = error.__cause__ if error.__cause__ and not str(error) else error
    lines = [line.strip() for line in str(cause).splitlines() if not line.endswith("composing config:")]
    reason = lines[0] if lines else type(cause).__name__
    return UserError(
        f"recipe {name} cannot be composed: {reason}", hint="docs/recipes.md says how recipes are written"
    )


__all__ = ["DEFAULT", "OVERRIDE", "Composed", "compose"]
