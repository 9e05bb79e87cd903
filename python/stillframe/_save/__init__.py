"""A save, from the call to its report: engines, handles, options, and the order of the log."""
