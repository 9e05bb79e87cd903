"""Trains in a plain loop: saves every 20 steps without a pause and keeps the newest file."""

import stillframe
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
saves: list[stillframe.SaveHandle] = []

for step in range(1, 61):
    inputs = torch.randn(32, 256)
    loss = (model(inputs) - inputs.mean(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # waits, if a save still has to copy what the step changes
    if step % 20 == 0:
        state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": step}
        saves.append(stillframe.async_save(state, f"step{step}.pt"))
        if len(saves) > 1:
            stillframe.remove(saves[-2].path)  # takes effect once step{step}.pt is durable

report = saves[-1].result()  # waits until the file is durable; raises the save's error
stillframe.wait_all()
print(f"{report.path}: {report.nbytes / 1e6:.1f} MB, durable")
for name in ("step40.pt", "step60.pt"):
    print(f"{name} is there: {stillframe.exists(name)}")
print("resumes at step", stillframe.load(report.path)["step"])
