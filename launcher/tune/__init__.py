"""Finds a faster way to run the same experiment: candidates, trials, and the winner as a recipe."""
