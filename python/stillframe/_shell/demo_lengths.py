"""How long the trainings of the demo are."""

SAVES = 6  # in a run
MOST_STEPS = 96
LEAST_STEPS = 4 * SAVES  # a few before the first save: what is deferred was observed over steps
