"""How many rows a merge on the host takes at once. No torch: plans reckon its scratch from these."""

MERGE_ROWS = 256
"""Rows of one product of a merge on the host. Larger means fewer kernels, smaller means less scratch and less waste at
the edges of a rectangle.
"""
ROUNDED_ROWS = 32
"""Rows that are rounded at once on the host."""
