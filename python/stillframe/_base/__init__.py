"""What everything else stands on: paths, calls, devices, the timeline."""
