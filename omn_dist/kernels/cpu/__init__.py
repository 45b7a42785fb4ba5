"""Kernels in C for ranks on CPUs.

They are built with the package where there is a C compiler, and never needed.
"""
