"""Agents that use tools over several turns: the workload `agentic`, on that of reasoning."""
