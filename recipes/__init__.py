"""What to run: the recipe vocabulary, the hardware catalogue and the contract.

Imports the standard library only, so that the launcher, the trainer and any tool can share it.
"""
