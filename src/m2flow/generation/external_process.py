"""The process of an external engine: `external_process.py PACKAGE DESCRIPTOR FOLDER...`.

It has a connection to its owner on an open descriptor and does what it is told, by `serve` of
`m2flow.generation.PACKAGE_served`. A thread listens: so neither side waits for the other to read,
and when the connection closes, because the owner has let go or is dead, this process removes the
folders and ends at once, whatever the engine is doing. What is said on the connection:

  to it     ("start", settings, version)  ("submit", requests)  ("abort", ids)
            ("install", file, version)  ("sleep",)  ("wake",)
            ("start_update",)  ("update", piece)...  ("finish_update", version), of vLLM on a GPU
  from it   ("done",) for each of these but submit and abort   ("finished", completions)
            ("working",) now and then while it draws and nothing is finished
            ("failed", text), after which it ends: an update that fails leaves some weights new and
            some old, and nothing may be drawn with them

A request is (id, token ids, sampling parameters by the engine's names); a completion (id, token
ids, log-probabilities, the version that drew each token, "stop" or "length").
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from m2flow.signals import leave_the_end_to_the_parent

Orders = SimpleQueue[tuple[Any, ...]]

WORKING_SECONDS = 1.0
"""After so long without a word an engine that draws says that it works."""


def main(package: str, descriptor: int, folders: Sequence[str]) -> None:
    """Serve until the owner is gone; then remove the folders."""
    leave_the_end_to_the_parent()
    connection, orders = Connection(descriptor), Orders()
    listener = threading.Thread(target=_listen, args=(connection, orders, folders), daemon=True)
    listener.start()
    try:
        importlib.import_module(f"m2flow.generation.{package}_served").serve(connection, orders)
    except ConnectionError:
        listener.join()  # it ends this process
    except BaseException as error:
        traceback.print_exc()
        connection.send(("failed", f"{type(error).__name__}: {error}"))
        _end(1)


def _listen(connection: Connection, orders: Orders, folders: Sequence[str]) -> None:
    """Queue orders as they come, until the owner is gone; then end."""
    try:
        while True:
            orders.put(connection.recv())
    except (EOFError, ConnectionError):
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        _end(0)


def _end(code: int) -> None:
    """End without the interpreter's own end, which takes torch and an engine ten seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
