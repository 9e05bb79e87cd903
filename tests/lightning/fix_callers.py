"""What a save or a remove has done on return, seen by its caller."""

import stillframe
from fix_holds import held_until_awaited
from stillframe._lightning.rotation import Rotation


def save_and_look(trainer, path, seen):
    """Saves on a disk that stands still until it is waited for; notes whether the file is there on
    return."""
    with held_until_awaited("fdatasync"):
        trainer.save_checkpoint(path)
        seen.append(path.exists())
        stillframe.wait_all()


def waits(monkeypatch):
    """A list, longer with each wait for removes and links from now on."""
    made, wait = [], Rotation.wait

    def noted(self):
        made.append(True)
        wait(self)

    monkeypatch.setattr(Rotation, "wait", noted)
    return made
