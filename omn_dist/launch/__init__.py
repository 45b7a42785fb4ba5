"""Starts a run on one machine or many: machines and ranks, their meeting point, checks."""
