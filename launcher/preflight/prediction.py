"""How fast and how dear a recipe's step will be: one timeline, and what follows from it.

The program is a compiled one (`launcher/preflight/program.py`) or an outline of it
(`launcher/preflight/outline.py`); everything after it is the same for both. The compiled one knows flags,
layouts and the schedule, the outline what published steps of its shape took, so the time of a compiled step
is their geometric mean, which was nearer to published ones than the program alone (docs/prediction.md).
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.cost import HOUR_S
from launcher.plan import price_of
from launcher.preflight.outline import outline
from launcher.preflight.program import Op
from launcher.preflight.rates import Constants, Rates, error_bands, fitted_constants, rates_of, slowed
from launcher.preflight.timeline import Timeline, core_events, timeline
from recipes.flops import mean_keys, peak_flops_per_s, step_flops
from recipes.hardware import slice_shape
from recipes.schema import Recipe

_DAY_S = 86_400.0
COMPILED, OUTLINE = "compiled", "outline"


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What the TensorCore spends a part of the step on."""

    category: str
    """``matmul``, ``attention``, ``elementwise``; of exchanges their kind."""
    axes: str
    """Mesh axes that are waited for; empty for work."""
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One step of the whole job, and the run."""

    method: str
    """COMPILED, or OUTLINE from sizes alone."""
    step_s: float
    program_s: float
    """Of the program alone."""
    outline_s: float
    """Of its outline."""
    low_s: float
    """Nine of ten published steps of other models were between low and high, as predicted."""
    high_s: float
    work: Sequence[Share]
    """Largest first."""
    waits: Sequence[Share]
    """Exposed: nothing else runs meanwhile. Largest first."""
    mfu: float | None
    """Model FLOPs over the peak of the dtype of its matmuls; None where that is unknown."""
    tokens_per_s_per_chip: float
    run_days: float
    """Of all steps, without saves and restarts."""
    run_cost_usd: float | None
    """None where no price is known."""
    price_source: str | None
    timeline: Timeline

    @property
    def exposed_s(self) -> float:
        """Of the step, what is spent waiting."""
        return sum(share.time_s for share in self.waits)

    def to_json(self) -> dict[str, Any]:
        """All but the timeline."""
        values = {
            each.name: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if each.name not in ("timeline", "work", "waits")
        }
        shares = {
            name: [dataclasses.asdict(each) for each in getattr(self, name)] for name in ("work", "waits")
        }
        return {**values, "exposed_s": self.exposed_s, **shares}


def predict(
    recipe: Recipe, program: Sequence[Op], *, method: str, constants: Constants | None = None
) -> Prediction:
    """Of a recipe for TPUs."""
    constants = constants or fitted_constants()
    rates = rates_of(recipe.hardware.generation, recipe.model.quantization, constants)
    program_s = outline_s = program_step_s(recipe, program, rates)
    if method == COMPILED:
        outline_s = program_step_s(recipe, outline(recipe), rates)
        rates = slowed(rates, math.sqrt(outline_s / program_s))
    line = timeline(program, rates, attended_share=attended_share(recipe))
    waiting_s = slice_wait_s(line, rates, recipe.multislice.num_slices)
    step_s, p90 = line.duration_s + waiting_s, error_bands()[method].p90
    work, waits = _shares(line)
    if waiting_s:
        waits.append(Share(category="slowest slice", axes="dcn", time_s=waiting_s))
    num_chips = slice_shape(recipe.hardware).num_chips * recipe.multislice.num_slices
    tokens = recipe.train.global_batch_size * recipe.train.sequence_length
    peak = peak_flops_per_s(recipe)
    run_s, price = step_s * recipe.train.num_steps, price_of(recipe)
    return Prediction(
        method=method,
        step_s=step_s,
        program_s=program_s,
        outline_s=outline_s,
        low_s=step_s / (1 + p90),
        high_s=step_s * (1 + p90),
        work=work,
        waits=sorted(waits, key=lambda share: -share.time_s),
        mfu=step_flops(recipe) / step_s / (peak * num_chips) if peak else None,
        tokens_per_s_per_chip=tokens / step_s / num_chips,
        run_days=run_s / _DAY_S,
        run_cost_usd=run_s / HOUR_S * price.usd_per_hour if price else None,
        price_source=price.source if price else None,
        timeline=line,
    )


def program_step_s(recipe: Recipe, program: Sequence[Op], rates: Rates) -> float:
    """Seconds of one step under ``rates``, slices that wait for one another included."""
    line = timeline(program, rates, attended_share=attended_share(recipe))
    return line.duration_s + slice_wait_s(line, rates, recipe.multislice.num_slices)


def slice_wait_s(line: Timeline, rates: Rates, num_slices: int) -> float:
    """What slices wait for the slowest: published steps grow by the same share with each doubling."""
    return line.duration_s * rates.slice_wait_share * math.log2(num_slices)


def attended_share(recipe: Recipe) -> float:
    """Of a score matrix, what the kernel computes: the mask rounded up to blocks; all without a kernel."""
    model, length = recipe.model, recipe.train.sequence_length
    if model.attention != "splash":
        return 1.0
    block = min(model.attention_chunk, length)
    return min(1.0, (mean_keys(model.attention_window, length) + block / 2) / length)


def _shares(line: Timeline) -> tuple[list[Share], list[Share]]:
    sums: dict[tuple[bool, str, str], float] = collections.defaultdict(float)
    for event, time_s in core_events(line):
        sums[event.is_wait, event.category, event.axes] += time_s
    shares = [
        (is_wait, Share(category=category, axes=axes, time_s=time_s))
        for (is_wait, category, axes), time_s in sorted(sums.items(), key=lambda item: -item[1])
        if time_s > 0
    ]
    return [share for is_wait, share in shares if not is_wait], [each for is_wait, each in shares if is_wait]
