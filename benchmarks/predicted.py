"""Predicted and published step times: ``python -m benchmarks.predicted [--compiled] [--fit] [--markdown]``.

Every published row that a recipe can be made of is predicted with constants that were fitted without its
model, and again without its generation. Beside it stands what one MFU for a generation and precision, the
median of other models, would have said. From sizes alone it takes minutes. ``--compiled`` compiles every
row first, which takes hours, keeps what was compiled, and shows the rows that compile and fit. ``--fit``
prints the constants of `launcher/preflight/rates.json`, fitted to all rows.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.published_steps import Published, published, recipe_of
from launcher.preflight.compiled import analyze
from launcher.preflight.compiler import GIB, Limits, compile_step
from launcher.preflight.outline import outline
from launcher.preflight.prediction import COMPILED, OUTLINE, program_step_s
from launcher.preflight.program import Op, program_of
from launcher.preflight.rates import Constants, fitted_constants, rates_of
from launcher.preflight.torus import Torus
from recipes.errors import UserError
from recipes.flops import peak_flops_per_s, step_flops
from recipes.hardware import slice_shape

LIMITS = Limits(time_s=7200, memory_bytes=16 * GIB)
_STRAY_WEIGHT = 0.3
"""Of a constant that strays from where it began, beside errors: it keeps those in place that rows say little
of."""
_UNLIKE_WEIGHT = {COMPILED: 2.0, OUTLINE: 20.0}
"""Of generations' constants that differ: efficiency of matmuls is much the same everywhere; how a compiler
counts cycles is its own affair on each."""
_HALVINGS = 4
_FIRST_STRIDE = 0.1


AT_PEAK = {"v5e": 0.876, "v5p": 0.902, "v6e": 0.704, "tpu7x": 0.641}
"""The cycle_scale at which one 8192 x 8192 x 8192 matmul would run at the peak: nothing is faster. Compiled
for one device it has 9.56, 4.65, 2.98 and 2.60 million cycles by the compiler's estimate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published step, and the programs that are timed for it."""

    published: Published
    outline: Sequence[Op]
    compiled: Sequence[Op] = ()
    """Empty where it was not."""


type Parameters = Mapping[tuple[str, str], float]
"""Constants by name and, where they differ by it, generation or precision."""

FREE: Mapping[str, tuple[float, float, float]] = {
    "cycle_scale": (0.9, 0.5, 1.5),
    "matmul_share": (0.8, 0.4, 0.98),
    "attention_share": (0.8, 0.3, 1.0),
    "grouped_matmul_share": (0.6, 0.2, 0.95),
    "hbm_share": (0.8, 0.3, 1.0),
    "beside_share": (0.3, 0.05, 1.0),
    "dcn_share": (0.5, 0.1, 1.0),
    "slice_wait_share": (0.024, 0.005, 0.06),
    "quantized_speed": (1.5, 1.0, 2.0),
}
"""Where each begins, and its bounds."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    rows = [read_row(each, compiles=options.compiled) for each in published()]
    if options.fit:
        print(json.dumps(dataclasses.asdict(fitted_to(rows)), indent=2))
    found = {
        "by other models": left_out(rows, lambda row: row.published.model),
        "by other generations": left_out(rows, lambda row: row.published.chip),
        "one MFU": baseline(rows),
    }
    # Constants come from all rows, the table is of what was asked for.
    shown = [row for row in rows if row.compiled or not options.compiled]
    errors = {name: _of(shown, each) for name, each in found.items()}
    print(f"{len(shown)} rows of {len({row.published.model for row in shown})} models", file=sys.stderr)
    rows = shown
    print("\n".join(_table(rows, errors, is_markdown=options.markdown)))
    print("\n".join(_summary(rows, errors, is_markdown=options.markdown)))
    print("\n".join(_scaling(rows, is_markdown=options.markdown)))
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predicted", description=__doc__)
    parser.add_argument("--compiled", action="store_true", help="compile every row (hours)")
    parser.add_argument("--fit", action="store_true", help="print constants fitted to all rows")
    parser.add_argument("--markdown", action="store_true", help="tables for docs/prediction.md")
    return parser.parse_args(argv)


def _of(rows: Sequence[Row], errors: Mapping[Published, float]) -> Mapping[Published, float]:
    return {row.published: errors[row.published] for row in rows if row.published in errors}


def read_row(each: Published, *, compiles: bool) -> Row:
    compiled = _compiled(each) if compiles else ()
    return Row(published=each, outline=outline(recipe_of(each)), compiled=compiled)


def _compiled(row: Published) -> Sequence[Op]:
    """Nothing, and a line, where the row's step does not compile or fit."""
    recipe = recipe_of(row)
    print(f"compiling: {row.name}", file=sys.stderr)
    try:
        step = compile_step(recipe, limits=LIMITS)
        module = analyze(step).schedule.module
    except UserError as error:
        print(f"  {error.message}", file=sys.stderr)
        return ()
    return program_of(module, step.mesh, Torus.of(slice_shape(recipe.hardware)))


def predicted_s(row: Row, constants: Constants) -> float:
    """As :func:`launcher.preflight.prediction.predict` does."""
    outlined_s = program_s(row, row.outline, constants)
    return math.sqrt(outlined_s * program_s(row, row.compiled, constants)) if row.compiled else outlined_s


def program_s(row: Row, program: Sequence[Op], constants: Constants) -> float:
    rates = rates_of(row.published.chip, row.published.quantization, constants)
    return program_step_s(recipe_of(row.published), program, rates)


def left_out(rows: Sequence[Row], kind: Callable[[Row], str]) -> Mapping[Published, float]:
    """Relative error of each row, by constants fitted to the rows of all other kinds."""
    errors = {}
    for name in dict.fromkeys(map(kind, rows)):
        constants = fitted_to([row for row in rows if kind(row) != name])
        for row in rows:
            if kind(row) == name:
                errors[row.published] = predicted_s(row, constants) / row.published.step_s - 1
    return errors


def fitted_to(rows: Sequence[Row]) -> Constants:
    """First what outlines need, by all rows; then what compiled programs need besides, by those compiled."""
    constants = fit(rows, OUTLINE, fitted_constants())
    compiled = [row for row in rows if row.compiled]
    return fit(compiled, COMPILED, constants) if compiled else constants


def baseline(rows: Sequence[Row]) -> Mapping[Published, float]:
    """Relative error of the median MFU of other models on the same generation in the same precision."""
    errors = {}
    for row in rows:
        mine = row.published
        others = [
            mfu(other.published)
            for other in rows
            if other.published.chip == mine.chip
            and other.published.quantization == mine.quantization
            and other.published.model != mine.model
        ]
        if others:
            errors[mine] = mfu(mine) / statistics.median(others) - 1
    return errors


def mfu(row: Published) -> float:
    recipe = recipe_of(row)
    peak = peak_flops_per_s(recipe)
    assert peak is not None
    return step_flops(recipe) / row.step_s / (peak * row.num_chips)


def fit(rows: Sequence[Row], method: str, base: Constants) -> Constants:
    """The constants with the least absolute logarithmic error; rows of one model weigh less, the more.

    Coordinate descent from fixed starts, so the same rows give the same constants.
    """
    rows = [row for row in rows if _is_like_ours(row.published, method)]
    alike = collections.Counter((row.published.chip, row.published.model) for row in rows)
    free = _free(rows, method)

    def loss(parameters: Parameters) -> float:
        constants = _constants(parameters, base)
        errors = 0.0
        for row in rows:
            program = row.compiled if method == COMPILED else row.outline
            error = math.log(program_s(row, program, constants) / row.published.step_s)
            errors += abs(error) / math.sqrt(alike[row.published.chip, row.published.model])
        return errors + _strayed(parameters, method)

    found = {key: FREE[key[0]][0] for key in free}
    least, stride = loss(found), _FIRST_STRIDE
    for _ in range(_HALVINGS):
        for key in free:
            for factor in (1 + stride, 1 / (1 + stride)):
                found, least = _descend(found, least, key, factor, loss)
        stride /= 2
    return _constants(found, base)


def _strayed(parameters: Parameters, method: str) -> float:
    """How far constants are from where they began, and those of generations from their median: with few
    models of a generation its own constant says little."""
    total = _STRAY_WEIGHT * sum(
        math.log(value / FREE[name][0]) ** 2 for (name, _), value in parameters.items()
    )
    for name in ("cycle_scale", "matmul_share"):
        values = [value for (own, _), value in parameters.items() if own == name]
        if values:
            middle = statistics.median(values)
            total += _UNLIKE_WEIGHT[method] * sum(math.log(value / middle) ** 2 for value in values)
    return total


def _is_like_ours(row: Published, method: str) -> bool:
    """Whether the constants may be fitted to it. Rows without tuned flags are of compilers of then, and what
    quantization compiles to is another program in each library."""
    return recipe_of(row).hardware.tuned_flags and (method == OUTLINE or row.quantization == "none")


def _descend(
    found: Parameters, least: float, key: tuple[str, str], factor: float, loss: Callable[[Parameters], float]
) -> tuple[dict[tuple[str, str], float], float]:
    """Steps along one constant while it helps."""
    _, low, high = FREE[key[0]]
    low = AT_PEAK.get(key[1], low) if key[0] == "cycle_scale" else low
    best = dict(found)
    while True:
        tried = {**best, key: min(high, max(low, best[key] * factor))}
        error = loss(tried)
        if error >= least - 1e-9:
            return best, least
        best, least = tried, error


def _free(rows: Sequence[Row], method: str) -> Sequence[tuple[str, str]]:
    """The constants that the rows say anything of."""
    chips = list(dict.fromkeys(row.published.chip for row in rows))
    if method == COMPILED:
        return [("cycle_scale", chip) for chip in chips]
    names = ["attention_share", "grouped_matmul_share", "beside_share", "dcn_share", "slice_wait_share"]
    precisions = dict.fromkeys(row.published.quantization for row in rows)
    return [
        *(("matmul_share", chip) for chip in chips),
        *((name, "") for name in (*names, "hbm_share")),
        *(("quantized_speed", name) for name in precisions if name != "none"),
    ]


def _constants(parameters: Parameters, base: Constants) -> Constants:
    """Those that are free, and the others of ``base``."""
    by_name: dict[str, dict[str, float]] = {}
    for (name, kind), value in parameters.items():
        by_name.setdefault(name, {})[kind] = value
    changes = {name: values.get("", values) for name, values in by_name.items()}
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def _table(
    rows: Sequence[Row], errors: Mapping[str, Mapping[Published, float]], *, is_markdown: bool
) -> Iterator[str]:
    if is_markdown:
        yield f"| step | tier | published, s | {' | '.join(errors)} |"
        yield "|---|---|---:|" + "---:|" * len(errors)
    for row in rows:
        each = row.published
        found = [errors[kind].get(each) for kind in errors]
        texts = ["" if error is None else f"{100 * error:+.0f} %" for error in found]
        if is_markdown:
            yield f"| {each.name} | {each.tier} | {each.step_s:.2f} | {' | '.join(texts)} |"
        else:
            yield f"{each.name:<36} {each.step_s:8.2f} s  {'  '.join(f'{text:>7}' for text in texts)}"


def _summary(
    rows: Sequence[Row], errors: Mapping[str, Mapping[Published, float]], *, is_markdown: bool
) -> Iterator[str]:
    """Median and 90th percentile of the absolute error, of all and by generation."""
    chips = list(dict.fromkeys(row.published.chip for row in rows))
    if is_markdown:
        yield ""
        yield f"| | rows | {' | '.join(errors)} |"
        yield "|---|---:|" + "---:|" * len(errors)
    for chip in ("all", *chips):
        texts = []
        for kind in errors.values():
            sizes = sorted(abs(error) for row, error in kind.items() if chip in ("all", row.chip))
            texts.append(
                f"{100 * quantile(sizes, 0.5):.1f} / {100 * quantile(sizes, 0.9):.1f} %" if sizes else ""
            )
        count = sum(chip in ("all", row.published.chip) for row in rows)
        line = f"| {chip} | {count} | {' | '.join(texts)} |"
        yield line if is_markdown else line.replace("|", " ")


def _scaling(rows: Sequence[Row], *, is_markdown: bool) -> Iterator[str]:
    """Steps on more slices over those on one, and in bfloat16 over quantized, published and predicted."""
    constants = fitted_constants()
    by_model: dict[tuple[str, str, int, int], list[Row]] = {}
    for row in rows:
        each, length = row.published, recipe_of(row.published).train.sequence_length
        key = (each.chip, each.model, each.num_chips // each.num_slices, length)
        by_model.setdefault(key, []).append(row)
    if is_markdown:
        yield "\n| step over step | published | predicted |\n|---|---:|---:|"
    for same in by_model.values():
        first = same[0]
        for row in same[1:]:
            more, less = (row, first) if row.published.num_slices > 1 else (first, row)
            is_pair = row.published.quantization != first.published.quantization
            if not (is_pair or row.published.num_slices > first.published.num_slices):
                continue
            told = more.published.step_s / less.published.step_s
            found = predicted_s(more, constants) / predicted_s(less, constants)
            name = f"{more.published.name} over {less.published.name}"
            yield (
                f"| {name} | {told:.3f} | {found:.3f} |"
                if is_markdown
                else f"{name}: {told:.3f}, {found:.3f}"
            )


def quantile(values: Sequence[float], share: float) -> float:
    """With linear interpolation between the two nearest."""
    place = share * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


if __name__ == "__main__":
    sys.exit(main())
