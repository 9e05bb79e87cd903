"""Uses an installed wheel: saves, loads, snapshots, the shell. Needs torch alone."""

import subprocess
import sys

import stillframe
import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
state = {
    "model": model.state_dict(),
    "optim": optimizer.state_dict(),
    "tied": [torch.arange(5)] * 2,
}
wanted = {name: tensor.clone() for name, tensor in state["model"].items()}

handle = stillframe.async_save(state, "a.pt")
model(torch.randn(8, 64)).square().mean().backward()
optimizer.step()
report = handle.result()
assert report is not None and report.deferred_nbytes > 0, report
for loaded in (stillframe.load("a.pt"), torch.load("a.pt")):
    assert loaded["tied"][0] is loaded["tied"][1]
    for name, tensor in wanted.items():
        assert torch.equal(loaded["model"][name], tensor), name
with stillframe.snapshot(state) as snap:
    weight = snap.tree["model"]["0.weight"]
    assert torch.equal(weight, model[0].weight) and weight.data_ptr() != model[0].weight.data_ptr()
subprocess.run([sys.executable, "-m", "stillframe", "verify", "a.pt"], check=True, stdout=-3)
stillframe.wait_all()
print("saves, loads and snapshots as it should, in", torch.__version__)
