"""Checkpoints on the disk: what they are, whether they are whole, which is the newest."""
