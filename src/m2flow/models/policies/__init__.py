"""Policies of embodied agents: what turns an observation into a chunk of actions.

`protocol` is the contract; `actor_critic` holds small networks, `vla` the vision-language-action
models that load published checkpoints, `flow_matching` the ones that denoise their actions.
"""
