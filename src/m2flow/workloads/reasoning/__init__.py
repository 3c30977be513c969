"""Reasoning by language models: tasks, data and rule-based rewards."""
