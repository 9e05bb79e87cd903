"""Stager, writer and reader for `torch.distributed.checkpoint`, and one call that uses them."""
