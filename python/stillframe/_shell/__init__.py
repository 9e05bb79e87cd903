"""The command `stillframe`."""
