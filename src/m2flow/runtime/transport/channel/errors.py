"""What a `Channel` raises. Each says which channel and key, what it held, and how long was waited.

All are `ChannelError`s and survive pickling. `ChannelFull` and `ChannelEmpty` are what a deadline
that has passed (or a call that does not wait) raises; their base, `ChannelTimeout`, alone means
that the channel's host did not answer.
"""

from __future__ import annotations

from m2flow.errors import M2FlowError


class ChannelError(M2FlowError):
    """Base of what a channel raises at run time."""


class ChannelTimeout(ChannelError, TimeoutError):
    """A deadline has passed."""


class ChannelFull(ChannelTimeout):
    """There was no room for the item until the deadline; it was not put."""


class ChannelEmpty(ChannelTimeout):
    """There was nothing to get until the deadline, or less than the batch asked for."""


class ChannelClosed(ChannelError):
    """The channel is closed; a getter is told so only when all stored items have been taken."""


class ChannelLost(ChannelError, ConnectionError):
    """The process that hosts the channel cannot be reached: it has ended, or a network is down."""
