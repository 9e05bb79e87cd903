"""Helpers that show what a save or a remove has done when it returns."""

import stillframe
from fix_holds import held_until_awaited
from stillframe._lightning.rotation import Rotation


def save_and_compare(trainer, path, seen):
    """Save on a disk that stops until something waits for it; record whether the file exists on
    return."""
    with held_until_awaited("fdatasync"):
        trainer.save_checkpoint(path)
        seen.append(path.exists())
        stillframe.wait_all()


def waits(monkeypatch):
    """Return a list that grows with each wait for removes and links."""
    made, wait = [], Rotation.wait

    def noted(self):
        made.append(True)
        wait(self)

    monkeypatch.setattr(Rotation, "wait", noted)
    return made
