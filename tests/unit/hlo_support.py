"""Where the scheduled HLO of small programs lies; `hlo_programs.py` makes it. Imports no JAX."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("hlo")
