"""Optimizers as saves see them: their storages, what only their steps change, and the gate."""
