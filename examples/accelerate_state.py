"""Trains with Accelerate: saves every 20 steps without a pause, keeps one checkpoint, resumes."""

import stillframe
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from stillframe.accelerate import load_state, save_state

torch.manual_seed(0)
config = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=1)
accelerator = Accelerator(cpu=True, project_config=config)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

for step in range(1, 61):
    inputs = torch.randn(32, 256)
    loss = (model(inputs) - inputs.mean(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()  # waits, if a save still has to copy what the step changes
    scheduler.step()
    if step % 20 == 0:
        handle = save_state(accelerator)  # the old checkpoint is removed when this is durable

print(f"{handle.path}: {handle.result().nbytes / 1e6:.1f} MB, durable")
stillframe.wait_all()  # the removes too
print("checkpoint_1 is there:", stillframe.exists("run/checkpoints/checkpoint_1"))
load_state(accelerator)  # the newest complete one
print("resumes at step", scheduler.scheduler.last_epoch)
