"""A copy of a tree in the pool's memory."""
