"""The rehearsal of `muster dryrun`: what can be asked of a recipe without a TPU, and a run in miniature."""
