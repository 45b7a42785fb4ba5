"""Layouts, views and matrices, and the bytes and FLOPs that follow from them."""
