"""Generation engines: one protocol, several ways to turn prompts into sampled tokens."""
