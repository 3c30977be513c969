"""Training: packed forward and backward passes, optimizer steps, checkpoints."""
