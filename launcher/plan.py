"""Recipe -> Plan: what will run where, on how many chips, and what an hour of it costs. Pure.

The same recipe gives the same bytes on every machine: no clock, environment, file or network is read.

    muster plan quickstart --json
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.text import size_text
from recipes.contract import Env
from recipes.elastic import with_slices
from recipes.fingerprint import fingerprint
from recipes.flags import libtpu_env
from recipes.hardware import CPU, Generation, SliceShape, generation, slice_shape
from recipes.kubernetes_names import ACCELERATOR, SPOT, TOPOLOGY
from recipes.options import Choice, choices
from recipes.parallelism import MeshShape, mesh_shape
from recipes.parameters import count_active_parameters, count_parameters, state_bytes, state_bytes_per_device
from recipes.schema import Recipe

_GKE_SPOT_NOTICE_S = 15
"""cloud.google.com/kubernetes-engine/docs/concepts/spot-vms: half of 30 s is for system pods."""
_LARGEST_DOCUMENTED_JOB_CHIPS = {"v5p": 6144}
"""docs.cloud.google.com/tpu/docs/v5p-training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwarePlan:
    """Machines of the whole job."""

    target: str
    capacity: str
    generation: str
    topology: str
    machine_type: str
    accelerator_type: str | None
    """As the Cloud TPU API names one slice."""
    node_labels: Mapping[str, str]
    """GKE node selector; empty for other targets."""
    num_slices: int
    hosts_per_slice: int
    chips_per_host: int
    devices_per_host: int
    num_hosts: int
    num_chips: int
    num_devices: int
    wrap: tuple[bool, ...]
    hbm_bytes_per_device: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """Sequences and tokens."""

    global_batch_size: int
    grad_accum_steps: int
    sequences_per_device: int
    """At a time: of one accumulation step, on one shard of the batch."""
    sequences_per_host: int
    """Read by one host for one optimizer step."""
    sequence_length: int
    tokens_per_step: int
    num_steps: int
    total_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlan:
    """Parameters, exactly; bytes by arithmetic: weights and two moments, no activations."""

    num_parameters: int
    num_active_parameters: int
    """That one token meets; fewer than all with experts."""
    state_bytes: int
    state_bytes_per_device: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPlan:
    """When a checkpoint is saved and what it takes."""

    save_interval_steps: int | None
    save_interval_minutes: float | None
    keep: int
    checkpoint_bytes: int
    kept_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PricePlan:
    """USD; list price or the user's own."""

    usd_per_chip_hour: float
    usd_per_hour: float
    source: str
    """Whose price: docs/hardware.md names the list."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionPlan:
    """One of the ways in which the machines are asked for, best first."""

    zone: str | None
    """Of TPU VMs."""
    capacity: str
    num_slices: int
    grad_accum_steps: int
    """With so many slices; the global batch is always the same."""
    num_chips: int
    usd_per_hour: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that a recipe decides before anything is touched."""

    recipe: str
    run_name: str
    run_dir: str
    fingerprint: str
    hardware: HardwarePlan
    mesh: MeshShape
    batch: BatchPlan
    model: ModelPlan
    environment: Mapping[str, str]
    """Of every host; ``{name}`` stands for what is known only when it starts."""
    checkpoint: CheckpointPlan
    price: PricePlan | None
    """None when no price is known."""
    options: tuple[OptionPlan, ...]
    """Where there is more than one."""
    deadline: str | None
    max_cost_usd: float | None
    notes: tuple[str, ...]

    def to_json(self) -> str:
        """Canonical JSON, with a newline at its end."""
        data: dict[str, Any] = dataclasses.asdict(self)
        data["mesh"]["total"] = dict(self.mesh.total)
        return json.dumps(data, sort_keys=True, indent=2, allow_nan=False) + "\n"


def make_plan(recipe: Recipe) -> Plan:
    """The plan of a recipe that :func:`recipes.check.check` finds nothing wrong with.

    Raises:
      ValueError: the recipe's hardware or mesh does not exist.
    """
    shape, chip = slice_shape(recipe.hardware), generation(recipe.hardware.generation)
    mesh = mesh_shape(recipe.mesh, recipe.multislice, devices_per_slice=shape.num_devices)
    hardware = _hardware(recipe, shape, chip)
    return Plan(
        recipe=recipe.name,
        run_name=recipe.run_name,
        run_dir=recipe.run_dir,
        fingerprint=fingerprint(recipe),
        hardware=hardware,
        mesh=mesh,
        batch=_batch(recipe, mesh, hardware),
        model=_model(recipe, mesh),
        environment=_environment(recipe, hardware),
        checkpoint=_checkpoint(recipe),
        price=_price(recipe, hardware, chip),
        options=_options(recipe),
        deadline=recipe.run.deadline,
        max_cost_usd=recipe.run.max_cost,
        notes=tuple(_notes(recipe, hardware, chip, shape)),
    )


def _hardware(recipe: Recipe, shape: SliceShape, chip: Generation) -> HardwarePlan:
    num_slices = recipe.multislice.num_slices
    return HardwarePlan(
        target=recipe.target.kind,
        capacity=recipe.target.capacity,
        generation=shape.generation,
        topology=shape.topology_name,
        machine_type=shape.machine_type,
        accelerator_type=shape.accelerator_type,
        node_labels=_node_labels(recipe, shape),
        num_slices=num_slices,
        hosts_per_slice=shape.num_hosts,
        chips_per_host=shape.chips_per_host,
        devices_per_host=shape.devices_per_host,
        num_hosts=num_slices * shape.num_hosts,
        num_chips=num_slices * shape.num_chips,
        num_devices=num_slices * shape.num_devices,
        wrap=shape.wrap,
        hbm_bytes_per_device=chip.hbm_bytes // chip.devices_per_chip if chip.hbm_bytes else None,
    )


def _node_labels(recipe: Recipe, shape: SliceShape) -> Mapping[str, str]:
    if recipe.target.kind != "gke" or shape.gke_accelerator is None:
        return {}
    labels = {ACCELERATOR: shape.gke_accelerator, TOPOLOGY: shape.topology_name}
    return labels | ({SPOT: "true"} if recipe.target.capacity == "spot" else {})


def _batch(recipe: Recipe, mesh: MeshShape, hardware: HardwarePlan) -> BatchPlan:
    train = recipe.train
    sequences_per_shard = train.global_batch_size // mesh.batch_shards
    devices_per_shard = mesh.num_devices // mesh.batch_shards
    tokens_per_step = train.global_batch_size * train.sequence_length
    return BatchPlan(
        global_batch_size=train.global_batch_size,
        grad_accum_steps=train.grad_accum_steps,
        sequences_per_device=sequences_per_shard // train.grad_accum_steps,
        sequences_per_host=sequences_per_shard * max(1, hardware.devices_per_host // devices_per_shard),
        sequence_length=train.sequence_length,
        tokens_per_step=tokens_per_step,
        num_steps=train.num_steps,
        total_tokens=tokens_per_step * train.num_steps,
    )


def _model(recipe: Recipe, mesh: MeshShape) -> ModelPlan:
    return ModelPlan(
        num_parameters=count_parameters(recipe.model),
        num_active_parameters=count_active_parameters(recipe.model),
        state_bytes=state_bytes(recipe),
        state_bytes_per_device=state_bytes_per_device(recipe, mesh),
    )


def _environment(recipe: Recipe, hardware: HardwarePlan) -> Mapping[str, str]:
    return {
        Env.RUN_DIR.value: recipe.run_dir,
        Env.ATTEMPT.value: "{attempt}",
        Env.SLICE_ID.value: "{slice_id}",
        Env.NUM_SLICES.value: str(hardware.num_slices),
        Env.HOST_ID.value: "{host_id}",
        Env.HOSTS_PER_SLICE.value: str(hardware.hosts_per_slice),
        Env.COORDINATOR.value: "{coordinator}",
        Env.GRACE_PERIOD_S.value: str(recipe.target.grace_period_s),
        Env.SCRATCH_DIR.value: "{scratch_dir}",
        **libtpu_env(recipe),
    }


def _checkpoint(recipe: Recipe) -> CheckpointPlan:
    saving = recipe.checkpoint
    checkpoint_bytes = state_bytes(recipe)
    return CheckpointPlan(
        save_interval_steps=saving.save_interval_steps,
        save_interval_minutes=saving.save_interval_minutes,
        keep=saving.keep,
        checkpoint_bytes=checkpoint_bytes,
        kept_bytes=checkpoint_bytes * saving.keep,
    )


def _options(recipe: Recipe) -> tuple[OptionPlan, ...]:
    if recipe.target.kind == "local":
        return ()
    found = choices(recipe)
    return tuple(option_plan(recipe, each) for each in found) if len(found) > 1 else ()


def option_plan(recipe: Recipe, choice: Choice) -> OptionPlan:
    """What one way to get machines means in chips and dollars."""
    effective = with_slices(recipe, choice.num_slices)
    target = dataclasses.replace(effective.target, capacity=choice.capacity)
    price = price_of(dataclasses.replace(effective, target=target))
    return OptionPlan(
        zone=choice.zone or None,
        capacity=choice.capacity,
        num_slices=choice.num_slices,
        grad_accum_steps=effective.train.grad_accum_steps,
        num_chips=choice.num_slices * slice_shape(recipe.hardware).num_chips,
        usd_per_hour=price.usd_per_hour if price else None,
    )


def price_of(recipe: Recipe) -> PricePlan | None:
    """What an hour of all its machines costs; None when no price is known."""
    shape, chip = slice_shape(recipe.hardware), generation(recipe.hardware.generation)
    return _price(recipe, _hardware(recipe, shape, chip), chip)


def _price(recipe: Recipe, hardware: HardwarePlan, chip: Generation) -> PricePlan | None:
    own, listed = recipe.hardware.price_per_chip_hour, chip.price
    if own is not None:
        per_chip_hour, source = own, "hardware.price_per_chip_hour"
    elif listed is None:
        return None
    else:
        by_capacity = {"on_demand": listed.on_demand, "spot": listed.spot}
        found = by_capacity.get(recipe.target.capacity)
        if found is None:
            return None
        per_chip_hour, source = found, f"list price, {listed.region}, {listed.date}"
    total = round(per_chip_hour * hardware.num_chips, 2)
    return PricePlan(usd_per_chip_hour=per_chip_hour, usd_per_hour=total, source=source)


def _notes(recipe: Recipe, hardware: HardwarePlan, chip: Generation, shape: SliceShape) -> Iterator[str]:
    remote = hardware.target != "local"
    if remote and not recipe.run.root.startswith("gs://"):
        yield f"run.root={recipe.run.root} is on this machine: set run.root=gs://BUCKET/PREFIX to launch"
    short_notice = recipe.target.grace_period_s > _GKE_SPOT_NOTICE_S
    if hardware.target == "gke" and hardware.capacity == "spot" and short_notice:
        yield (
            f"GKE gives pods on spot nodes {_GKE_SPOT_NOTICE_S} s unless the node pool extends it;"
            f" target.grace_period_s={recipe.target.grace_period_s:g} may not be granted"
        )
    if hardware.target == "gke" and shape.requires_workload_policy:
        yield f"{shape.generation} node pools of several hosts need a workload policy"
    if shape.devices_per_chip > 1:
        yield f"{shape.generation} has {shape.devices_per_chip} JAX devices on each chip"
    largest = _LARGEST_DOCUMENTED_JOB_CHIPS.get(shape.generation, shape.num_chips)
    if shape.num_chips > largest:
        yield f"the largest {shape.generation} slice that Google documents as schedulable has {largest} chips"
    if remote and hardware.generation != CPU and _price(recipe, hardware, chip) is None:
        kind = f"{shape.generation} {hardware.capacity}"
        yield f"no public price is known for {kind}: set hardware.price_per_chip_hour to your own"
    if hardware.generation != CPU and not any(hardware.wrap) and hardware.hosts_per_slice > 1:
        yield f"{hardware.topology} has no wrap-around links, which makes collectives slower"


def render_plan(plan: Plan) -> str:
    """The plan for people: plain text, a line for each thing they decide by."""
    rows = [
        ("recipe", plan.recipe),
        ("run", plan.run_dir),
        ("fingerprint", plan.fingerprint[:16]),
        *_hardware_rows(plan),
        *_mesh_rows(plan.mesh),
        *_training_rows(plan),
        ("environment", "of every host ({...} is known at its start)"),
        *(("", f"{name}={value}") for name, value in plan.environment.items()),
        ("price", _price_text(plan)),
        *_option_rows(plan),
        *(("note", note) for note in plan.notes),
    ]
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}  {text}\n" for name, text in rows)


def _hardware_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    hardware = plan.hardware
    sizes = (
        _counted(hardware.num_slices, "slice"),
        _counted(hardware.hosts_per_slice, "host"),
        _counted(hardware.chips_per_host, "device" if hardware.generation == CPU else "chip"),
    )
    chips = "" if hardware.generation == CPU else f"{_counted(hardware.num_chips, 'chip')}, "
    total = f"{chips}{_counted(hardware.num_devices, 'device')}"
    yield "target", f"{hardware.target}, {hardware.capacity}"
    yield "hardware", f"{hardware.generation} {hardware.topology}: {' x '.join(sizes)} = {total}"
    if hardware.generation != CPU:
        also = f", Cloud TPU API {hardware.accelerator_type}" if hardware.accelerator_type else ""
        yield "machine", f"{hardware.machine_type}{also}"
        yield "wrap-around", ", ".join("yes" if side else "no" for side in hardware.wrap)
    for name, value in hardware.node_labels.items():
        yield "node label", f"{name}={value}"


def _mesh_rows(mesh: MeshShape) -> Iterator[tuple[str, str]]:
    for name, degrees in (("mesh over ICI", mesh.ici), ("mesh over DCN", mesh.dcn)):
        used = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
        yield name, " x ".join(used) or "1"


def _training_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    batch, model, saving = plan.batch, plan.model, plan.checkpoint
    parts = f" in {batch.grad_accum_steps} parts" if batch.grad_accum_steps > 1 else ""
    yield "batch", f"{batch.global_batch_size} sequences of {batch.sequence_length} tokens a step{parts}"
    yield "", f"{batch.sequences_per_device} at a time on a device, {batch.sequences_per_host} read by a host"
    yield "tokens", f"{batch.tokens_per_step:,} a step, {batch.total_tokens:,} in {batch.num_steps:,} steps"
    active = model.num_active_parameters
    of_experts = f", {active:,} for each token" if active != model.num_parameters else ""
    yield "parameters", f"{model.num_parameters:,}{of_experts}"
    hbm = plan.hardware.hbm_bytes_per_device
    available = f" of {size_text(hbm)} HBM" if hbm else ""
    yield "state", f"{size_text(model.state_bytes_per_device)} a device{available} (weights, 2 moments)"
    intervals = [
        f"{saving.save_interval_steps} steps" if saving.save_interval_steps else "",
        f"{saving.save_interval_minutes:g} minutes" if saving.save_interval_minutes else "",
    ]
    every = " or ".join(filter(None, intervals))
    sizes = f"{size_text(saving.checkpoint_bytes)} each, {size_text(saving.kept_bytes)} kept"
    yield "checkpoint", f"every {every}, the newest {saving.keep}: {sizes}"


def _price_text(plan: Plan) -> str:
    if plan.hardware.generation == CPU and plan.price is None:
        return "none: this machine" if plan.hardware.target == "local" else "unknown: what the nodes cost"
    if plan.price is None:
        return "unknown"
    price = plan.price
    return f"USD {price.usd_per_hour:,.2f} an hour ({price.usd_per_chip_hour:g} a chip; {price.source})"


def _option_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    for number, each in enumerate(plan.options):
        where = f"{each.zone} " if each.zone else ""
        parts = f", in {each.grad_accum_steps} parts" if each.grad_accum_steps > 1 else ""
        cost = "price unknown" if each.usd_per_hour is None else f"USD {each.usd_per_hour:,.2f} an hour"
        slices = _counted(each.num_slices, "slice")
        yield "" if number else "tried in turn", f"{where}{each.capacity}, {slices}{parts}: {cost}"
    if plan.deadline is not None:
        yield "deadline", f"{plan.deadline}: stopped with a checkpoint"
    if plan.max_cost_usd is not None:
        yield "budget", f"USD {plan.max_cost_usd:,.2f} in all: stopped with a checkpoint"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
