"""Replaces PyTorch's writer and stager by stillframe's, and runs GPU tests on the CPU.

Every interpreter that theirs_dcp.py or its tests start imports this module."""

import os
import sys
from typing import Any


def run_on_the_cpu() -> None:
    """Run on the CPU, as PyTorch does for some of its tests."""
    import torch.distributed
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.testing._internal.common_distributed import skip_if_lt_x_gpu

    options = skip_if_lt_x_gpu.__kwdefaults__ or {}
    if "allow_cpu" in options:  # since torch 2.11
        options["allow_cpu"] = True
    init, shard = torch.distributed.init_process_group, FullyShardedDataParallel.__init__

    def init_process_group(backend: object = None, *given: Any, **named: Any) -> None:
        """Replace the pair of CPU and device backends, which PyTorch's tests name, by gloo."""
        init("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *given, **named)

    def shard_on_the_cpu(self: FullyShardedDataParallel, *given: Any, **named: Any) -> None:
        shard(self, *given, **{"device_id": torch.device("cpu"), **named})

    torch.distributed.init_process_group = init_process_group
    FullyShardedDataParallel.__init__ = shard_on_the_cpu


def put_ours_in_place() -> None:
    import stillframe.dcp as ours
    import torch.distributed.checkpoint as stock
    from torch.distributed.checkpoint import staging

    class DefaultStager(ours.PinnedStager):
        """Accepts the arguments of PyTorch's stager and ignores those about copying."""

        def __init__(self, config: object = None) -> None:
            super().__init__()

    in_place_of = {
        stock.FileSystemWriter: ours.FileSystemWriter,
        staging.DefaultStager: DefaultStager,
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.checkpoint"):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, type) and value in in_place_of:
                    setattr(module, attribute, in_place_of[value])


if "THEIRS_WITH" in os.environ:
    import torch

    if not torch.cuda.is_available():
        run_on_the_cpu()
    if os.environ["THEIRS_WITH"] == "ours":
        put_ours_in_place()
