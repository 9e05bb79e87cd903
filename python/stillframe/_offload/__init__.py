"""Tensors that leave a device for the pool's memory, and come back."""
