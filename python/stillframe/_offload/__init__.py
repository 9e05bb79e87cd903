"""Moves tensors from a device into the pool's memory and back."""
