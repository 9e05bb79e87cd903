"""CPUOffloadCallback on a device: one batch of copies and one wait for their end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import stillframe
import torch


@pytest.mark.filterwarnings("ignore")
def test_callback_copies_in_one_batch_and_never_synchronises(fake):
    from stillframe.lightning import CPUOffloadCallback

    state = {f"{number}": torch.full((100,), float(number)) for number in range(300)}
    wanted = {name: tensor.clone() for name, tensor in state.items()}
    checkpoint: dict[str, Any] = {"state_dict": state}
    callback: Any = CPUOffloadCallback()
    stillframe.default_engine().warm_up(1 << 20)
    batches, copies = fake.calls("cuMemcpyBatchAsync_v2"), fake.calls("cuMemcpyDtoHAsync_v2")
    callback.on_save_checkpoint(SimpleNamespace(global_rank=0, strategy=None), None, checkpoint)
    assert fake.calls("cuMemcpyBatchAsync_v2") == batches + 1
    assert fake.calls("cuMemcpyDtoHAsync_v2") == copies
    for tensor in state.values():
        tensor.zero_()
    new = checkpoint["state_dict"]
    assert all(new[name].equal(wanted[name]) for name in wanted)
    assert callback.state_dict()["checkpoint_count"] == 1
    # The fixture checks that nothing synchronised.
    del new
    checkpoint.clear()
    stillframe.default_engine().trim()
