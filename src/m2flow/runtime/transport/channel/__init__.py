"""A bounded queue between threads, processes and machines: `Channel`, and what it raises."""

from __future__ import annotations

from m2flow.runtime.transport.channel.channel import Channel
from m2flow.runtime.transport.channel.errors import (
    ChannelClosed,
    ChannelEmpty,
    ChannelError,
    ChannelFull,
    ChannelLost,
    ChannelTimeout,
)
from m2flow.runtime.transport.channel.state import ChannelStats

__all__ = [
    "Channel",
    "ChannelClosed",
    "ChannelEmpty",
    "ChannelError",
    "ChannelFull",
    "ChannelLost",
    "ChannelStats",
    "ChannelTimeout",
]
