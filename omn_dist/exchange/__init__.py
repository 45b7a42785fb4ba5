"""Moves directions to their owners and updates back to the shards.

During a step, no other part of the package calls collectives.
"""
