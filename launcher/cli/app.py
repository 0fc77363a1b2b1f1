"""The verbs of ``muster``, each in its own module and imported only when it is used.

Every failure is one ``error:`` line, mostly with a ``hint:``, and an exit code of docs/exit-codes.md.
"""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from launcher import waiting
from launcher.cli import output
from launcher.cli.interrupts import INTERRUPTED, ended_by_ctrl_c
from launcher.cli.quick import quick_start
from recipes.contract import ExitCode
from recipes.errors import UserError

VERBS = {
    "recipes": "List the recipes, or the options of a group.",
    "show": "Show a recipe's values and where each comes from.",
    "hardware": "List TPU generations and slices; explain an alias such as v6e-8.",
    "plan": "Show what a launch would do, touching nothing.",
    "preflight": "Say whether a recipe fits, how fast and how dear it is, without a TPU.",
    "tune": "Find a faster way to run the same experiment, without a TPU.",
    "dryrun": "Rehearse a recipe here: plan, manifest, preflight, a run in miniature.",
    "doctor": "Check a recipe against its cluster, changing nothing.",
    "launch": "Run a recipe to its end, or resume it.",
    "supervise": "Keep runs going that were launched onto TPU VMs or a cluster.",
    "replay": "Launch a run again as a new one, from what it recorded.",
    "ls": "List the runs.",
    "status": "Show how a run is doing.",
    "logs": "Show the logs of a run's hosts.",
    "stacks": "Show where the processes of a run are: the stacks of every host.",
    "stop": "Stop a run cleanly; it can be resumed.",
    "gc": "Clear away what is left of runs in a cluster or a zone, after asking.",
    "completion": "Print the completion script of a shell.",
}
"""Short help by verb; the module ``launcher.cli.VERB`` has the click command as ``command``."""

PIPE_CLOSED = 141


class _Verbs(click.Group):
    """A group whose commands are imported on use, so that help and completion stay fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        with quick_start(), ended_by_ctrl_c():
            command = importlib.import_module(f"launcher.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        verb = args[0]
        if verb not in VERBS and not verb.startswith("-") and not ctx.resilient_parsing:
            from recipes.load import nearest

            guess = nearest(verb, VERBS)
            hint = f"did you mean `muster {guess}`?" if guess else "`muster --help` lists the verbs"
            raise UserError(f"no verb {verb!r}", hint=hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [
            CompletionItem(verb, help=text) for verb, text in VERBS.items() if verb.startswith(incomplete)
        ]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Not for Click to see, which would exit with 1.
            raise click.exceptions.Exit(PIPE_CLOSED) from None


def _print_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            output.data(f"muster {version('muster-tpu')}")
        except PackageNotFoundError:
            output.data("muster, from a source tree that is not installed")
        ctx.exit()


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version.",
)
def muster() -> None:
    """Take a JAX training experiment from one line to a finished, resumable run on TPUs.

    \b
      muster launch quickstart            train a small model on this machine
      muster plan llama3-8b-v5e-16x16     see what a launch would do
      muster show llama3-8b-v5e-16x16     see every value and where it comes from
    """


def run(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    waiting.say_by(output.say)
    code = _call(argv)
    try:
        output.flush()
    except BrokenPipeError:
        return code or PIPE_CLOSED
    except OSError as failure:
        return code or _explained(failure)
    return code


def _call(argv: Sequence[str]) -> int:
    if "_MUSTER_COMPLETE" in os.environ:
        import launcher.cli.completion  # noqa: F401  # registers how words are split and offered
    try:
        result = muster.main([*argv], prog_name="muster", standalone_mode=False)
    except UserError as failure:
        output.user_error(failure)
        return failure.exit_code
    except click.UsageError as failure:
        output.error(*_usage(failure))
        return ExitCode.BAD_INPUT
    except click.ClickException as failure:
        output.error(failure.format_message())
        return ExitCode.BAD_INPUT
    except click.Abort:
        output.say("interrupted")
        return INTERRUPTED
    except OSError as failure:
        return _explained(failure)
    return result if isinstance(result, int) else ExitCode.COMPLETE


def _usage(failure: click.UsageError) -> tuple[str, str]:
    verb = failure.ctx.command_path if failure.ctx else "muster"
    message = failure.format_message().rstrip(".")
    return message[:1].lower() + message[1:], f"`{verb} --help` describes it"


def _explained(failure: OSError) -> int:
    """The exit code for what any verb can meet, after telling the user; else raises it again."""
    if isinstance(failure, FileNotFoundError) and not _has_folder():
        output.error(
            "the working directory does not exist any more", "cd to a folder that exists, then try again"
        )
        return ExitCode.BAD_INPUT
    if isinstance(failure, output.StdoutError) or failure.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" {failure.filename}" if failure.filename else ""
        output.error(f"cannot write{where}: {failure.strerror}", "make room, or write elsewhere")
        return ExitCode.INFRASTRUCTURE
    raise failure


def _has_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
