"""Policies that act in simulators, trained by PPO or GRPO."""
