"""Training loops of other libraries around a sharded model."""
