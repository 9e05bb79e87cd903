"""Trains a transformer that lives on the CPU; two of its 16 blocks are on the device at a time."""

import stillframe
import torch
from stillframe.offload import offload_activations, offload_layers
from torch import nn

WIDTH, TOKENS, BLOCKS = 32, 16, 16

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(BLOCKS)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each token's successor."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = nn.functional.linear(self.norm(x), self.embedding.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
weights = sum(p.nbytes for p in model.blocks.parameters())  # in bytes

with offload_layers(model.blocks, device=device) as offloaded:
    model.to(device)  # moves everything but the offloaded layers
    activations = offload_activations(min_bytes=1 << 13, device=device)
    for step in range(1, 7):
        first = torch.randint(TOKENS, (8, 1), device=device)
        # In each row, every token is the number after the previous one.
        tokens = (first + torch.arange(9, device=device)) % TOKENS
        with activations:
            loss = model(tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == 1:
            first_loss = loss.item()
        if step == 3:
            handle = stillframe.async_save(model.state_dict(), "step3.pt")
    stats = offloaded.stats()

handle.result()
slot_bytes = stats["slots"] * weights // BLOCKS
print(f"weights of the blocks: {weights / slot_bytes:.0f} times what the slots hold")
print(f"brought ahead of need: {stats['groups_prefetched'] / stats['groups_onloaded']:.0%}")
print("the loss falls:", loss.item() < first_loss)
