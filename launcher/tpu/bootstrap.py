#!/usr/bin/env python3
"""Startup script of a TPU VM: fetches the code that was launched and an interpreter for it, then runs it."""

raise SystemExit("not written yet")
