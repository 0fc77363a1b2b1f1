"""Writes the golden files anew: the plan of every shipped recipe, as JSON and as text.

    python -m tests.golden.update

Review the difference like code before committing it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from launcher.compose import compose
from launcher.plan import make_plan, render_plan

PLAN_DIR = Path(__file__).parent / "plan"
RECIPES_DIR = Path(__file__).resolve().parents[2] / "recipes"


def plan_files(recipe: str) -> Mapping[str, str]:
    """File name -> contents of the golden files of one shipped recipe."""
    plan = make_plan(compose(recipe, [], search=[RECIPES_DIR]).recipe)
    return {f"{recipe}.json": plan.to_json(), f"{recipe}.txt": render_plan(plan)}


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with the project."""
    return sorted(path.stem for path in RECIPES_DIR.glob("*.yaml"))


def main() -> None:
    PLAN_DIR.mkdir(exist_ok=True)
    for stale in (*PLAN_DIR.glob("*.json"), *PLAN_DIR.glob("*.txt")):
        stale.unlink()
    for recipe in shipped_recipes():
        for name, text in plan_files(recipe).items():
            (PLAN_DIR / name).write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()
