"""The `muster` command: one file a verb, loaded when it is called."""
