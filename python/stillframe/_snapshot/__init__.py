"""Snapshots: copies of a tree's tensors in the pool's memory."""
