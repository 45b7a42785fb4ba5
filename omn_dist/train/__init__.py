"""The training system: loop, data, token clock, precision, metrics, run record, checkpoints."""
