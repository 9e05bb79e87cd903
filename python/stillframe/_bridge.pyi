# What `_core` asks of many tensors in one call: see csrc/torch/bridge.h.

functions: object
