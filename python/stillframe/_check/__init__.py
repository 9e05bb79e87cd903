"""Checks of checkpoints: their kind, whether they are whole, and which one is the newest."""
