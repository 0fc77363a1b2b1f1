"""What `muster preflight` says of a recipe: whether its step fits, what fills the memory, how fast and dear
it will be.

Pure: a compiled step in, a report out, as text or as JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.preflight.buffers import Buffer
from launcher.preflight.collectives import traffic
from launcher.preflight.compiled import Analysis, Compiled
from launcher.preflight.estimate import Part, estimate
from launcher.preflight.outline import outline
from launcher.preflight.prediction import COMPILED, OUTLINE, Prediction, predict
from launcher.preflight.program import program_of
from launcher.preflight.torus import Torus
from launcher.text import one_line, size_text, time_text
from recipes.contract import CompileProblem
from recipes.hardware import slice_shape
from recipes.schema import Recipe

_SHOWN_BUFFERS = 10
_SHOWN_SHARES = 8
_SOURCE_WIDTH = 70


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Collectives of one kind over the same mesh axes."""

    axes: str
    """``fsdp+tensor``; across slices ``dcn:data``."""
    kind: str
    count: int
    total_bytes: int
    waiting_bytes: int
    """Of them while nothing else runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What is known of a step that compiled."""

    argument_bytes: int
    host_bytes: int
    """Offloaded to the host's memory."""
    largest_buffers: Sequence[Buffer]
    """At the moment with most in use, largest first."""
    matmul_flops: int
    """Recomputation included, kernels not."""
    estimated_cycles: int
    """By the compiler; without kernels and collectives."""
    collectives: Sequence[Traffic]
    compile_s: float
    compiler_memory_bytes: int
    compiler_flags: str
    libtpu_version: str
    jax_version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """Changes with which the step fits, by what the report itself is by: the compiler, or an estimate."""

    overrides: Sequence[str]
    """As they are written on the command line."""
    hbm_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All sizes are of one device, and all work is that of one step."""

    recipe: str
    generation: str
    topology: str
    num_slices: int
    num_devices: int
    is_estimate: bool
    """From sizes alone, without the compiler."""
    fits: bool
    hbm_bytes: int
    """What it needs."""
    parts: Sequence[Part]
    """What an estimate is made of."""
    usable_hbm_bytes: int | None
    """What the compiler lets a program use; None when it does not say."""
    hint: str
    """What could make it fit, where it does not."""
    remedy: Remedy | None
    """The cheapest changes found that make it fit."""
    step: Step | None
    """None where it does not fit, of which the compiler says no more, and of an estimate."""
    prediction: Prediction | None
    """Of time and cost; None where it does not fit by the compiler."""

    def to_json(self) -> dict[str, Any]:
        """All but the timeline, which is a file of its own."""
        bare = None if self.prediction is None else self.prediction.to_json()
        return {**dataclasses.asdict(dataclasses.replace(self, prediction=None)), "prediction": bare}


def fitting(recipe: Recipe, compiled: Compiled, analysis: Analysis) -> Report:
    """Of a step that compiled, and so fits."""
    memory, cost = compiled.memory, analysis.cost
    step = Step(
        argument_bytes=memory.argument_bytes,
        host_bytes=memory.host_bytes,
        largest_buffers=tuple(analysis.peak.buffers[:_SHOWN_BUFFERS]),
        matmul_flops=cost.matmul_flops,
        estimated_cycles=cost.estimated_cycles,
        collectives=tuple(_collectives(analysis)),
        compile_s=compiled.lower_s + compiled.compile_s,
        compiler_memory_bytes=compiled.peak_rss_bytes,
        compiler_flags=compiled.compiler_flags,
        libtpu_version=compiled.libtpu_version,
        jax_version=compiled.jax_version,
    )
    program = program_of(analysis.schedule.module, compiled.mesh, Torus.of(slice_shape(recipe.hardware)))
    prediction = predict(recipe, program, method=COMPILED)
    return _report(
        recipe, analysis.hbm_bytes, memory.usable_hbm_bytes, fits=True, step=step, prediction=prediction
    )


def not_fitting(recipe: Recipe, problem: CompileProblem) -> Report:
    """Of a step that the compiler refused because it needs more HBM than there is."""
    assert problem.needed_bytes is not None
    return _report(recipe, problem.needed_bytes, problem.usable_bytes, fits=False, hint=problem.hint)


def estimated(recipe: Recipe) -> Report:
    """Of a step that is not compiled."""
    found = estimate(recipe)
    fits = found.hbm_bytes <= found.usable_hbm_bytes
    hint = "" if fits else "use more shards, train.remat_policy=full, or a smaller train.global_batch_size"
    return _report(
        recipe,
        found.hbm_bytes,
        found.usable_hbm_bytes,
        fits=fits,
        hint=hint,
        parts=tuple(found.parts),
        prediction=predict(recipe, outline(recipe), method=OUTLINE),
    )


def _report(
    recipe: Recipe,
    hbm_bytes: int,
    usable_hbm_bytes: int | None,
    *,
    fits: bool,
    step: Step | None = None,
    hint: str = "",
    parts: Sequence[Part] = (),
    prediction: Prediction | None = None,
) -> Report:
    num_slices = recipe.multislice.num_slices
    return Report(
        recipe=recipe.name,
        generation=recipe.hardware.generation,
        topology=recipe.hardware.topology,
        num_slices=num_slices,
        num_devices=slice_shape(recipe.hardware).num_devices * num_slices,
        is_estimate=bool(parts),
        fits=fits,
        hbm_bytes=hbm_bytes,
        parts=parts,
        usable_hbm_bytes=usable_hbm_bytes,
        hint=hint,
        remedy=None,
        step=step,
        prediction=prediction,
    )


def _collectives(analysis: Analysis) -> Iterator[Traffic]:
    for (axes, kind), each in traffic(analysis.collectives).items():
        yield Traffic(
            axes=axes,
            kind=kind,
            count=each.count,
            total_bytes=each.total_bytes,
            waiting_bytes=each.sync_bytes,
        )


def render(report: Report) -> str:
    """As lines of text."""
    rows = list(_head(report))
    if report.step:
        rows += _memory_rows(report.step)
    if report.prediction:
        rows += _time_rows(report.prediction)
    if report.step:
        rows += _work_rows(report.step)
    if report.remedy:
        remedy = report.remedy
        rows.append(("to fit", f"{' '.join(remedy.overrides)}: {size_text(remedy.hbm_bytes)}"))
    elif report.hint:
        rows.append(("to fit", report.hint))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in rows)


def _head(report: Report) -> Iterator[tuple[str, str]]:
    slices = f" x {report.num_slices} slices" if report.num_slices > 1 else ""
    yield "recipe", report.recipe
    devices = f"{report.num_devices} device{'s' if report.num_devices > 1 else ''}"
    yield "hardware", f"{report.generation} {report.topology}{slices}: {devices}"
    usable = report.usable_hbm_bytes
    need = (
        f"{size_text(report.hbm_bytes)}{f' of {size_text(usable)}' if usable else ''} of HBM on each device"
    )
    verdict = "fits" if report.fits else "does not fit"
    over = f", {size_text(report.hbm_bytes - usable)} too much" if usable and not report.fits else ""
    yield "memory", f"{verdict}: {need}{over}"
    if report.is_estimate:
        yield "", "estimated from sizes, up to a fifth off; libtpu, the compiler, was not asked"
    for part in report.parts:
        yield "", f"{size_text(part.size_bytes):>10}  {part.name}"


def _time_rows(prediction: Prediction) -> Iterator[tuple[str, str]]:
    speed = f"{prediction.tokens_per_s_per_chip:,.0f} tokens/s/chip"
    mfu = f", MFU {100 * prediction.mfu:.1f} %" if prediction.mfu is not None else ""
    band = f"{time_text(prediction.low_s)} to {time_text(prediction.high_s)}"
    yield "step", f"{time_text(prediction.step_s)} ({band}), {speed}{mfu}"
    source = "from sizes alone, an estimate"
    if prediction.method == COMPILED:
        alone, outlined = time_text(prediction.program_s), time_text(prediction.outline_s)
        source = f"between the compiled program's {alone} and {outlined} from sizes alone"
    yield "", f"predicted {source}; nine of ten published steps were within such a band"
    for label, shares in (("busy with", prediction.work), ("waits for", prediction.waits)):
        for number, share in enumerate(shares[:_SHOWN_SHARES]):
            what = f"{share.category} {share.axes}".strip()
            part = 100 * share.time_s / prediction.step_s
            yield "" if number else label, f"{time_text(share.time_s):>8}  {part:4.1f} %  {what}"
    days = prediction.run_days
    lasts = f"{days:.3g} days" if days >= 1 else f"{24 * days:.2g} hours"
    cost = "no price is known: set hardware.price_per_chip_hour"
    if prediction.run_cost_usd is not None:
        cost = f"USD {prediction.run_cost_usd:,.0f} ({prediction.price_source})"
    yield "run", f"{lasts} without saves and restarts, {cost}"


def _memory_rows(step: Step) -> Iterator[tuple[str, str]]:
    yield "", f"{size_text(step.argument_bytes)} of it arguments: weights, optimizer state, batch"
    if step.host_bytes:
        yield "", f"{size_text(step.host_bytes)} in the host's memory"
    for number, buffer in enumerate(step.largest_buffers):
        where = one_line((buffer.op_name or buffer.name).replace("\\'", "'"))[-_SOURCE_WIDTH:]
        yield "" if number else "largest", f"{size_text(buffer.size_bytes):>10}  {buffer.shape}  {where}"


def _work_rows(step: Step) -> Iterator[tuple[str, str]]:
    yield "work", f"{step.matmul_flops:.3g} FLOP of matmuls, kernels not counted"
    yield "", f"{step.estimated_cycles:.3g} cycles by the compiler, without kernels and exchanges"
    for number, each in enumerate(step.collectives):
        waiting = f", {size_text(each.waiting_bytes)} while nothing else runs" if each.waiting_bytes else ""
        text = f"{each.axes} {each.kind}: {each.count} x, {size_text(each.total_bytes)}{waiting}"
        yield "" if number else "exchanged", text
    took = f"in {step.compile_s:.0f} s with {size_text(step.compiler_memory_bytes)}"
    yield "compiled", f"{took} by libtpu {step.libtpu_version}"
