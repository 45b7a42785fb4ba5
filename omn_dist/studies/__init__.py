"""Studies: plans and predicted step times of a model over numbers of ranks, before any run.

Models are lists of shapes; no process group is needed. The results are tables and pictures.
"""
