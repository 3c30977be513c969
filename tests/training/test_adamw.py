"""AdamW's step by itself is that of torch's own optimizer, to the bit."""

from __future__ import annotations

import torch

from m2flow.training.adamw import MOMENTS, AdamWStep


def test_the_step_is_that_of_torchs_optimizer() -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in ((3, 5), (5,), (1,))]
    ours, theirs = ([value.clone() for value in values] for _ in range(2))
    settings = {"betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.1}
    step = AdamWStep(ours, **settings)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(theirs, fused=True, **settings)  # type: ignore[arg-type]
    for number in range(1, 6):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        optimizer.param_groups[0]["lr"] = 0.1 / number
        step.step({0: 0.1 / number}.__getitem__, number)
        optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        for name in MOMENTS:
            assert torch.equal(step.state[one][name], optimizer.state[other][name])
