"""Figures that are NaN or infinite are refused where they come in, under their name.

Shapes: T tokens or rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from m2flow.errors import UserError


def check_finite(columns: Mapping[str, Tensor | None]) -> None:
    """Refuse a column [T] with a value that is NaN or infinite; its name is the key."""
    for name, column_T in columns.items():
        if column_T is None or bool(torch.isfinite(column_T).all()):
            continue
        bad_T = ~torch.isfinite(column_T)
        first = int(bad_T.nonzero()[0])
        raise UserError(
            f"{int(bad_T.sum())} of {bad_T.numel()} values are not finite, the first at {first}",
            key=name,
            value=float(column_T[first]),
            expected="finite numbers",
        )
