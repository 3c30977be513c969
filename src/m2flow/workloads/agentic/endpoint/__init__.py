"""An endpoint that speaks OpenAI's chat completions, so that any agent framework can use a policy.

What the framework sends as text is kept as the tokens that the policy saw and drew: a trajectory of
it trains as one of the loop does.
"""
