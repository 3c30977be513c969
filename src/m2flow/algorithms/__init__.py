"""Algorithms as pure functions of tensors: advantages, losses, aggregation, sampling."""
