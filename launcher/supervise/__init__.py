"""Keeping a run going: what is there, what to do about it, and doing it, over and over."""
