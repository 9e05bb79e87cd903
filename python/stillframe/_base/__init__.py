"""Helpers for all other packages: paths, calls, devices, the timeline."""
