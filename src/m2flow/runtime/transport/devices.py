"""Links between the memories of GPUs: what such a link is, and which one a payload takes.

Both sides say where they stand: on which machine, and on which GPU by its UUID, because lanes see
only their own one and call it `cuda:0`. The side that answers chooses, as for host memory, among
the links that exist between the two places, and host memory itself (`staged`), which always does. A
link that turns out not to work for a pair is refused once by the asker, which remembers it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from m2flow.errors import M2FlowError
from m2flow.runtime.transport.peering import LinkUnavailable
from m2flow.runtime.transport.table import LinkTable, Scope

STAGED = "staged"
"""Through host memory, as whatever way the host part takes."""

ALL = sys.maxsize
"""Says of an offer that all of its pieces have been taken, or will never be asked for again."""


class LinkRefused(M2FlowError):
    """A link that should exist does not work between these two: use another.

    Attributes:
        taken: so many pieces had been taken over before it failed.
    """

    def __init__(self, reason: str, taken: int = 0) -> None:
        super().__init__(reason)
        self.taken = taken

    def __reduce__(self) -> Any:
        return LinkRefused, (str(self), self.taken)


class LinkStalled(M2FlowError):
    """A transfer that both sides had entered did not end in time."""


class Standing(NamedTuple):
    """Where a process stands.

    Attributes:
        name: what people call it, such as "lane 3".
        node: the name of its machine.
        gpu: UUID of its GPU; None without one.
    """

    name: str
    node: str
    gpu: str | None = None


class Talk(Protocol):
    """The asker's line to the side that answered, while it takes pieces over."""

    def ask(self, message: Any) -> Any:
        """Say something to the link's `proceed` there; what it replies."""

    def seconds(self) -> float:
        """What is left until the deadline; not below 0."""

    def check(self) -> None:
        """Raise PeerLost if the other side is gone, LinkRefused if it has failed."""


Finish: TypeAlias = Callable[[Callable[[], None]], None]
"""The rest of a transfer on the holder's side; what it is given raises if the taker is gone."""


class DeviceLink(Protocol):
    """A way to hand flat uint8 tensors on a device to another process."""

    @property
    def scopes(self) -> Collection[Scope]:
        """Between which places it exists."""

    def offer(self, pieces: Sequence[Tensor], asker: Standing) -> Any:
        """A small picklable token for the pieces; LinkRefused if they cannot be offered."""

    def withdraw(self, token: Any, taken: int) -> None:
        """An offer is not taken, but for the first pieces. May be told of ALL at any time."""

    def take(self, token: Any, sizes: Sequence[int], holder: Standing, talk: Talk) -> list[Tensor]:
        """The pieces on this side's device; LinkRefused if this does not work here."""

    def proceed(self, token: Any, message: Any) -> tuple[Any, Finish]:
        """Where the taker has something to say: the reply, and what to do once it is sent."""

    def close(self) -> None:
        """Let go of what is held for others."""


@dataclass(frozen=True)
class Devices:
    """What a process has of its GPU.

    Attributes:
        gpu: its UUID.
        device: how this process calls it.
        on_device: whether a tensor lies on it.
        links: by name.
    """

    gpu: str
    device: str
    on_device: Callable[[Tensor], bool]
    links: Mapping[str, DeviceLink]

    def test_piece(self, nbytes: int) -> Tensor:
        """Something to transfer."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def close(self) -> None:
        """Close the links."""
        for link in self.links.values():
            link.close()


def scope_between(one: Standing, other: Standing) -> Scope | None:
    """How near two GPUs are; None where one of the two has none."""
    if one.gpu is None or other.gpu is None:
        return None
    if one.node != other.node:
        return "gpu_cluster"
    return "gpu" if one.gpu == other.gpu else "gpus"


def choose_way(
    table: LinkTable,
    asker: Standing,
    holder: Standing,
    nbytes: int,
    links: Mapping[str, DeviceLink],
    *,
    without: Mapping[str, str],
    demanded: str | None = None,
) -> str | None:
    """The link that device memory takes; None for host memory.

    Args:
        nbytes: how much of it there is.
        links: those that the holder has.
        without: links that the asker has found not to work, and why.
        demanded: the one way that is wanted; a way of host memory is one too.

    Raises:
        LinkUnavailable: the demanded link does not exist between the two.
    """
    scope = scope_between(asker, holder)
    if scope is None:
        if demanded in links:
            raise LinkUnavailable(f"{asker.name} stands on no GPU: there is no link {demanded!r}")
        return None
    here = {kind for kind, link in links.items() if scope in link.scopes}
    ways = here - without.keys()
    if demanded is not None and demanded in links:
        if demanded not in ways:
            why = without.get(demanded, "none between these two places")
            raise LinkUnavailable(
                f"there is no link {demanded!r} from {holder.name} to {asker.name}: {why}"
            )
        return demanded
    if demanded is not None:
        return None
    best = table.choose(scope, nbytes, {*ways, STAGED})
    return best if best in ways else None
