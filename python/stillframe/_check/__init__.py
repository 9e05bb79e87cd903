"""Checks of checkpoints: of which kind they are, whether they are whole, which is the newest."""
