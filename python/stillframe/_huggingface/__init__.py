"""Checkpoints of Hugging Face's Trainer and Accelerate."""
