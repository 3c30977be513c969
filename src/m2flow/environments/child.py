"""The process of some environments: makes them, obeys commands, writes observations where told.

Started by `processes.py` with two descriptors: a connection for commands and replies, and, on
standard input, a pipe that ends with the parent. It imports the simulator and NumPy, not torch.

    ("make", name, options, count) -> ("made", EnvironmentSpec)
    ("attach", descriptor, spec of all, processes, own number, first environment) -> ("attached",)
    ("step", slots, shape, dtype, bytes of the actions) -> as of any other method, which is
    (method of Slots, arguments)   -> ("done", result, new failures, instructions)
    whatever goes wrong outside a simulator's own call -> ("error", exception)
"""

from __future__ import annotations

import os
import pickle
import select
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from m2flow.environments.memory import ObservationMemory
from m2flow.environments.registry import maker
from m2flow.environments.slots import Slots
from m2flow.errors import M2FlowError, RunFailed
from m2flow.signals import end_with_pipe, leave_the_end_to_the_parent

SOON = 0.005
"""Seconds for which a command is awaited awake: more than a small policy takes to act."""


class _Child:
    """Answers commands until the connection ends."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.slots: Slots | None = None
        self.memory: ObservationMemory | None = None
        self.number = 0
        self.has_core = False  # to itself: there are as many cores as processes
        self.comes_soon = False  # the next command, as the last one did
        self.has_come = select.poll()
        self.has_come.register(connection.fileno(), select.POLLIN)

    def run(self) -> None:
        while True:
            try:
                command, *arguments = self.next_command()
            except EOFError:
                break
            try:
                reply = self.obey(command, arguments)
            except M2FlowError as error:
                reply = ("error", error)
            except Exception:
                reply = ("error", RunFailed(f"{command} failed:\n{traceback.format_exc()}"))
            self.connection.send_bytes(pickle.dumps(reply))
        if self.slots is not None:
            self.slots.close()

    def next_command(self) -> tuple[Any, ...]:
        """The next command; awaited awake for `SOON`, where the last one did not take longer.

        A core that has slept works slower for milliseconds: its clock and its caches are cold. The
        core is left to whoever else can use it.

        Raises:
            EOFError: the connection has ended.
        """
        begun = time.monotonic()
        if self.comes_soon and self.has_core:
            while not self.has_come.poll(0) and time.monotonic() - begun < SOON:
                os.sched_yield()
        command: tuple[Any, ...] = self.connection.recv()
        self.comes_soon = time.monotonic() - begun < SOON
        return command

    def obey(self, command: str, arguments: list[Any]) -> tuple[Any, ...]:
        if command == "make":
            name, options, count = arguments
            self.slots = Slots(maker(name, options), count, self.moved_on)
            return "made", self.slots.spec
        assert self.slots is not None, "made first"
        if command == "attach":
            descriptor, spec, processes, self.number, first = arguments
            self.has_core = processes <= len(os.sched_getaffinity(0))
            self.memory = ObservationMemory(spec, processes, descriptor)
            mine = slice(first, first + len(self.slots.instructions))
            self.slots.memory = {name: rows[mine] for name, rows in self.memory.rows.items()}
            return ("attached",)
        if command == "step":
            slots, shape, dtype, figures = arguments
            arguments = [slots, np.frombuffer(bytearray(figures), dtype).reshape(shape)]
        result = getattr(self.slots, command)(*arguments)
        if command == "step":
            result = result.tobytes()  # which are read and written faster than an array
        failures, self.slots.new_failures = self.slots.new_failures, []
        return "done", result, failures, self.slots.instructions

    def moved_on(self) -> None:
        if self.memory is not None:
            self.memory.progress[self.number] += 1


def _leave_the_parent_its_core() -> None:
    """Have this process take no core from another one in the moment in which it wakes up.

    The parent sends commands to one process after the other. Where the first of them began to work
    on the parent's own core at once, the others were sent theirs when it had finished.
    """
    with suppress(OSError):  # a container may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main(descriptor: int) -> None:
    """Serve the connection of that descriptor; the process ends with its parent."""
    leave_the_end_to_the_parent()
    _leave_the_parent_its_core()
    end_with_pipe(sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # simulators talk; the log has it all
    _Child(Connection(descriptor)).run()
