"""The end of a process that a scheduler takes away: what it saves, when it stops, how it ends."""
