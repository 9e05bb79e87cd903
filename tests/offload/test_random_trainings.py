"""Random offloaded trainings equal plain ones bit for bit, and saves hold the state at the call.

STILLFRAME_TRAININGS=2000         the number of trainings, 12 by default
STILLFRAME_FIRST_TRAINING=4711    the first seed, to repeat a training
STILLFRAME_TRAININGS_S=600        start no training after that time
"""

import gc
import os
import shutil
import time

from fix_trainings import differences, plan

TRAININGS = int(os.environ.get("STILLFRAME_TRAININGS", "12"))
FIRST = int(os.environ.get("STILLFRAME_FIRST_TRAINING", "1"))
SECONDS = float(os.environ.get("STILLFRAME_TRAININGS_S", "600"))


def test_random_trainings_agree_with_plain_ones(fake, tmp_path):
    wrong, end, nr = [], time.monotonic() + SECONDS, 0
    for seed in range(FIRST, FIRST + TRAININGS):
        if time.monotonic() > end or len(wrong) > 5:
            break
        nr += 1
        wrong += [f"{each} in {plan(seed)}" for each in differences(seed, tmp_path / "s", fake)]
        shutil.rmtree(tmp_path / "s")
        if seed % 20 == 0:
            gc.collect()
    if TRAININGS > 12:
        print(f"{nr} trainings, {len(wrong)} wrong")
    assert not wrong, "\n".join(wrong)
