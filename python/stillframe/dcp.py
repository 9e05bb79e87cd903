"""`torch.distributed.checkpoint` (DCP) with stillframe's staging and writing.

    import torch.distributed.checkpoint as dcp
    from stillframe.dcp import PinnedStager

    stager = PinnedStager()
    response = dcp.async_save(state, checkpoint_id="step100", async_stager=stager)
    ...                                   # keep training; the next optimizer step waits by itself
    response.upload_completion.result()

Plans, resharding, collectives and metadata stay PyTorch's.
"""

from stillframe._dcp.reader import Reader
from stillframe._dcp.stager import PinnedStager
from stillframe._dcp.writer import FileSystemWriter

__all__ = ["FileSystemWriter", "PinnedStager", "Reader"]
