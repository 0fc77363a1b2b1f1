"""Where a plan can run: submit, observe, logs, stop."""
