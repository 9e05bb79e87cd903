"""Imported by every interpreter that theirs_dcp.py starts, and by those that the tests start: puts
stillframe's writer and stager where PyTorch's are."""

import os
import sys

if os.environ.get("THEIRS_WITH") == "ours":
    import stillframe.dcp as ours
    import torch.distributed.checkpoint as stock
    from torch.distributed.checkpoint import staging

    class DefaultStager(ours.PinnedStager):
        """Takes what PyTorch's takes: how it copies is its own affair."""

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
