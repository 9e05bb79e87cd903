"""`torch.distributed.checkpoint` (DCP) with stillframe's staging and writing.

    from stillframe import dcp

    response = dcp.async_save(state, "step100")   # on every rank
    ...                                           # keep training; the next step waits by itself
    response.upload_completion.result()

PyTorch still does plans, resharding, collectives and metadata. Its `dcp.load` reads the checkpoint.
`PinnedStager` and `FileSystemWriter` do the staging and the writing for PyTorch's own `async_save`.
"""

from stillframe._dcp.api import SaveResponse, async_save, save
from stillframe._dcp.forked import forked
from stillframe._dcp.reader import Reader
from stillframe._dcp.stager import PinnedStager
from stillframe._dcp.writer import FileSystemWriter

__all__ = [
    "FileSystemWriter",
    "PinnedStager",
    "Reader",
    "SaveResponse",
    "async_save",
    "forked",
    "save",
]
