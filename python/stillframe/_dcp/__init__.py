"""torch.distributed.checkpoint over the engine: stager, writer, reader, and one call for all."""
