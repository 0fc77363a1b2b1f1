"""``muster completion SHELL``: the script that makes TAB offer verbs, recipes, groups, keys and values.

    eval "$(muster completion bash)"

On TAB the script runs ``muster`` itself; nothing on that way imports Hydra.
"""

from __future__ import annotations

import os
from typing import Any

import click
from click.shell_completion import CompletionItem, ShellComplete, add_completion_class, get_completion_class

from launcher.cli import output

VARIABLE = "_MUSTER_COMPLETE"

_BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' word words
    words="${COMP_WORDS[*]}"
    COMPREPLY=()
    while read -r word; do
        COMPREPLY+=("$word")
        [[ $word == *= ]] && compopt -o nospace
    done < <(COMP_WORDS="$words" COMP_CWORD=$COMP_CWORD %(complete_var)s=bash_complete "$1" 2>/dev/null)
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


@add_completion_class
class _Bash(ShellComplete):
    """Bash splits words at ``=``: ``model=lla`` arrives as three words, and is answered by the last."""

    name = "bash"
    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        typed = os.environ["COMP_WORDS"].split("\n")[: int(os.environ["COMP_CWORD"]) + 1]
        words: list[str] = []
        for word in typed[1:]:
            if words and (word == "=" or words[-1].endswith("=")):
                words[-1] += word
            else:
                words.append(word)
        return words[:-1], words[-1] if words else ""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        items = super().get_completions(args, incomplete)
        done = incomplete.rfind("=") + 1
        return [CompletionItem(item.value[done:]) for item in items]

    def format_completion(self, item: CompletionItem[Any]) -> str:
        return str(item.value)


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of a shell, for example for eval in its start-up file."""
    root = click.get_current_context().find_root().command
    completion = get_completion_class(shell)
    assert completion is not None
    # Not source(): for bash, click's own would start a bash to learn its version.
    instance = completion(root, {}, "muster", VARIABLE)
    output.data((instance.source_template % instance.source_vars()).rstrip("\n"))
