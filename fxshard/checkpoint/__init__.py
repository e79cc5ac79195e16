"""State dicts of sharded models and of their optimizers, as torch.distributed.checkpoint takes them."""
