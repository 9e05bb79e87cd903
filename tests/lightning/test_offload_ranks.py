"""CPUOffloadCallback under DDP with two ranks: rank 0 offloads, and the file is correct."""

import json
import sys
from pathlib import Path

import pytest
from fix_lightning import assert_same, load
from fix_processes import LIGHTNING, run_program

HERE = Path(__file__).parent


def main(name, directory):
    """Fit on two forked ranks; each writes its callback's state."""
    import torch
    from fix_lightning import VERSION, every_steps, loader, package, trainer
    from fix_offload import lightning_async, recorder

    pkg = package(name)
    callback = __import__(f"stillframe.{name}", fromlist=["_"]).CPUOffloadCallback()

    class Notes(pkg.Callback):
        def on_train_end(self, trainer, module):
            note = {"state": callback.state_dict(), "strategy": type(trainer.strategy).__name__}
            (directory / f"rank{trainer.global_rank}.json").write_text(json.dumps(note))
            if trainer.global_rank == 0:
                torch.save(seen, directory / "seen.pt")

    seen = []
    trainer(
        pkg,
        directory,
        # Lightning 2.4's own callback is torn down before a launched rank saves its result.
        plugin=lightning_async(pkg)() if VERSION >= (2, 5) else pkg.TorchCheckpointIO(),
        strategy="ddp_fork",
        devices=2,
        callbacks=[
            recorder(pkg, seen),
            callback,
            Notes(),
            every_steps(pkg, directory, 2, save_top_k=-1),
        ],
        max_steps=4,
    ).fit(pkg.Model(), loader())


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
def test_only_rank_0_of_ddp_offloads(name, tmp_path):
    run_program(Path(__file__), name, tmp_path, imported=LIGHTNING)
    notes = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [note["strategy"] for note in notes] == ["DDPStrategy", "DDPStrategy"]
    assert [note["state"]["is_enabled"] for note in notes] == [True, True]
    assert [note["state"]["checkpoint_count"] for note in notes] == [2, 0]
    assert notes[0]["state"]["total_time_saved"] > notes[1]["state"]["total_time_saved"] == 0
    for number, expected in enumerate(load(tmp_path / "seen.pt")):
        found = load(tmp_path / f"step={2 * number + 2}.ckpt")
        assert_same({key: found[key] for key in expected}, expected)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
