"""Optimizers as saves see them: which storages they own, what only their steps change, and the
gate."""
