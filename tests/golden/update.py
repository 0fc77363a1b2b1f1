"""Writes the golden files anew: the plan of every shipped recipe, and the table of docs/hardware.md.

    python -m tests.golden.update

Review the difference like code before committing it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from launcher.compose import compose
from launcher.plan import make_plan, render_plan
from recipes.hardware import CPU, Generation, generations, max_chips

REPO = Path(__file__).resolve().parents[2]
PLAN_DIR = Path(__file__).parent / "plan"
RECIPES_DIR = REPO / "recipes"
HARDWARE_DOC = REPO / "docs" / "hardware.md"


def plan_files(recipe: str) -> Mapping[str, str]:
    """File name -> contents of the golden files of one shipped recipe."""
    plan = make_plan(compose(recipe, [], search=[RECIPES_DIR]).recipe)
    return {f"{recipe}.json": plan.to_json(), f"{recipe}.txt": render_plan(plan)}


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with the project."""
    return sorted(path.stem for path in RECIPES_DIR.glob("*.yaml"))


def hardware_doc(text: str) -> str:
    """docs/hardware.md with its table of generations made anew."""
    begin, end = "tests.golden.update -->\n", "<!-- end of generations -->"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{_generation_table()}{end}{rest.partition(end)[2]}"


def _generation_table() -> str:
    columns = (
        "",
        "largest",
        "HBM GiB",
        "HBM GB/s",
        "bf16",
        "8-bit",
        "ICI",
        "DCN",
        "USD",
        "USD spot",
        "region",
    )
    rows = [columns, tuple("---" for _ in columns)]
    rows += [_generation_row(chip) for chip in generations().values() if chip.name != CPU]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _generation_row(chip: Generation) -> tuple[str, ...]:
    peak = chip.peak_flops_per_s
    (eight_bit,) = set(peak) - {"bf16"}
    price = chip.price
    money = (str(price.on_demand), str(price.spot), price.region) if price else ("unknown", "unknown", "")
    return (
        chip.name,
        f"{max_chips(chip)} chips",
        f"{(chip.hbm_bytes or 0) / 2**30:g}",
        f"{(chip.hbm_bytes_per_s or 0) / 1e9:g}",
        f"{peak['bf16'] / 1e12:g}",
        f"{peak[eight_bit] / 1e12:g} {eight_bit}",
        f"{chip.ici_links} x {(chip.ici_link_bytes_per_s or 0) / 1e9:g} GB/s",
        f"{(chip.dcn_bytes_per_s or 0) / 1e9:g} GB/s",
        *money,
    )


def main() -> None:
    HARDWARE_DOC.write_text(hardware_doc(HARDWARE_DOC.read_text(encoding="ascii")), encoding="ascii")
    PLAN_DIR.mkdir(exist_ok=True)
    for stale in (*PLAN_DIR.glob("*.json"), *PLAN_DIR.glob("*.txt")):
        stale.unlink()
    for recipe in shipped_recipes():
        for name, text in plan_files(recipe).items():
            (PLAN_DIR / name).write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()
