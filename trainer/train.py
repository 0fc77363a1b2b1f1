"""The training loop, from connecting the hosts to the last checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from recipes.contract import ExitCode, HostContext, Phase, cache_dir
from recipes.errors import UserError
from recipes.fingerprint import fingerprint
from recipes.schema import Recipe
from trainer.checkpoints import Checkpoints
from trainer.coordination import Peers
from trainer.data import Data, open_data
from trainer.devices import configure_platform, connect, make_mesh
from trainer.feed import Feed
from trainer.lockstep import Lockstep
from trainer.metrics import Reporter
from trainer.profiling import Profiler
from trainer.program import Params, build_program


def train(recipe: Recipe, context: HostContext, reporter: Reporter) -> ExitCode:
    """Trains from the newest checkpoint, or from the start, to the recipe's last step.

    Returns COMPLETE, or PREEMPTED after a notice with everything committed. Raises UserError for
    what the user can mend; the runtime's own errors pass through (see :mod:`trainer.exits`).
    """
    data = open_data(recipe, cache_dir=cache_dir(os.environ) / "data")
    reporter.describe_data(eval_unigram_entropy_nats=data.eval_unigram_entropy_nats)
    reporter.phase(Phase.CONNECTING)
    configure_platform(recipe, context.num_processes)
    connect(context, peer_timeout_s=recipe.run.peer_timeout_s)
    _check_same_data(data)
    mesh = make_mesh(recipe)
    reporter.phase(Phase.COMPILING)
    program, peers = build_program(recipe, mesh), Peers("programs")
    peers.meet("train_step")
    init, eval_step = (
        Lockstep("init", program.init, peers),
        Lockstep("eval_step", program.eval_step, peers),
    )
    feed = Feed(program.batch)
    profiler = Profiler(recipe.train, context)
    checkpoints = Checkpoints(
        context.run_dir,
        recipe.checkpoint,
        recipe_fingerprint=fingerprint(recipe),
        data_fingerprint=data.fingerprint,
        attempt=context.attempt,
        before_save=reporter.flush,
    )
    with contextlib.closing(checkpoints), jax.set_mesh(mesh):
        reporter.phase(Phase.RESTORING)
        state = checkpoints.restore(program.state)
        if state is None:
            state = init(jnp.int32(recipe.train.seed))
        start, num_steps = int(state.step), recipe.train.num_steps
        reporter.resumed(start, checkpoints.committed_step)
        with contextlib.closing(data.train_batches(start, feed.rows)) as batches:
            for done in range(start + 1, num_steps + 1):
                profiler.before_step(done, state)
                with jax.profiler.StepTraceAnnotation("train", step_num=done):
                    state, metrics = program.train_step(state, feed.place(next(batches)))
                profiler.after_step(done, state)
                reporter.record(done, metrics)
                if _evaluation_is_due(recipe, done):
                    reporter.flush()
                    reporter.phase(Phase.EVALUATING)
                    reporter.record_eval(done, evaluate(eval_step, state.params, data, feed))
                preempted = checkpoints.after_step(done, state, last=done == num_steps)
                reporter.committed(checkpoints.committed_step)
                if preempted:
                    reporter.flush()
                    return ExitCode.PREEMPTED
    reporter.committed(checkpoints.committed_step)
    reporter.finish()
    return ExitCode.COMPLETE


def evaluate(eval_step: Lockstep, params: Params, data: Data, feed: Feed) -> float:
    """Mean held-out loss in nats per token over the recipe's fixed evaluation batches."""
    with contextlib.closing(data.eval_batches(feed.rows)) as batches:
        losses = [eval_step(params, feed.place(batch)) for batch in batches]
    return _mean(jax.device_get(losses))


def _mean(losses: Iterable[np.ndarray]) -> float:
    return float(np.mean(np.array(list(losses), np.float64)))


def _evaluation_is_due(recipe: Recipe, done: int) -> bool:
    if recipe.train.eval_num_batches == 0:
        return False
    interval = recipe.train.eval_interval_steps
    return done == recipe.train.num_steps or (interval is not None and done % interval == 0)


def _check_same_data(data: Data) -> None:
    """Every host must see the same data, or the batches would not be what the recipe says."""
    digest = int(hashlib.sha256(data.fingerprint.encode()).hexdigest()[:7], 16)
    everyone = np.asarray(multihost_utils.process_allgather(np.int32(digest)))
    if np.any(everyone != digest):
        raise UserError(
            "the hosts do not see the same data",
            hint="give every host the same files at data.path (and the same Python for python_stdlib)",
        )
