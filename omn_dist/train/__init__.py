"""The training system: loop, data, token clock, precision policy, metrics, run record and checkpoints."""
