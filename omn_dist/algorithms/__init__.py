"""The mathematics of the update rules.

Functions of tensors alone: no process group and no global switch. A function that writes into its
arguments says so.
"""
