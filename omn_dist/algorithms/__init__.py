"""The mathematics of the update rules.

Functions of tensors alone, without a process group. A function that writes into its arguments says
so.
"""
