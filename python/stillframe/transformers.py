"""transformers' Trainer with asynchronous checkpoints that are never half written.

    from stillframe.transformers import Trainer

The Trainer has transformers' arguments, methods and files. For other Trainers:

    from stillframe.transformers import AsyncCheckpointMixin

    class MyTrainer(AsyncCheckpointMixin, trl.SFTTrainer): ...
"""

from __future__ import annotations

# isort: off
from stillframe._base import support

support.refuse_unsupported_framework("transformers")
# isort: on

import transformers

from stillframe._huggingface.trainer import AsyncCheckpointMixin

__all__ = ["AsyncCheckpointMixin", "Trainer"]


class Trainer(AsyncCheckpointMixin, transformers.Trainer):
    __doc__ = AsyncCheckpointMixin.__doc__
