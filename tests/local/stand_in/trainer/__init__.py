"""A stand-in for the trainer: put its folder on PYTHONPATH before the real one."""
