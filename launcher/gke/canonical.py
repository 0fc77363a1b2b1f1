"""Canonical YAML: one text for one value, read alike by every YAML reader.

YAML 1.1 and 1.2 disagree on what ``on``, ``y``, ``1e3``, ``0o17`` or ``~`` mean, and readers disagree with
both. So a string is left bare only where no reader takes it for anything else; everything else is in
double quotes, with escapes for what is not ASCII. Keys keep their order; there are no aliases or folds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

_BARE = re.compile(r"[A-Za-z/][-A-Za-z0-9_./]*", re.ASCII)
_MEANINGFUL = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, _data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, indentless=False)


def _string(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    bare = _BARE.fullmatch(text) is not None and text.lower() not in _MEANINGFUL
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if bare else '"')


_Dumper.add_representer(str, _string)
_Dumper.add_multi_representer(str, _string)


def canonical_yaml(value: Mapping[str, Any]) -> bytes:
    """The value as ASCII YAML that ends with a newline; keys in the order given."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=2**31)
    return text.encode("ascii")
