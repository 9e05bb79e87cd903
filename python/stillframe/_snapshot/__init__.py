"""Copies trees into the pool's memory."""
