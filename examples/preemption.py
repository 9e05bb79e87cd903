"""Trains until a scheduler's signal, saves the last step, and goes on there when it runs again."""

import os
import pathlib
import signal

import stillframe
import torch

CHECKPOINT = pathlib.Path("last.pt")


def train(steps: int, signal_at: int = 0) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if CHECKPOINT.exists():
        state = stillframe.load(CHECKPOINT)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])
        step = state["step"]
    print("continues after step", step)

    def make_state() -> dict[str, object]:
        return {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": step}

    with stillframe.preemption(deadline=25) as p:
        p.save(make_state, CHECKPOINT)  # registers the save, which a signal starts
        while step < steps:
            inputs = torch.randn(32, 64)
            loss = (model(inputs) - inputs.mean(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)  # what the scheduler does
            if p.should_stop():
                break  # the block ends the process with status 143
    print("done at step", step)


try:
    train(60, signal_at=25)
except SystemExit as end:  # only so that one program can show both runs
    print("exit status", end.code)
train(60)
