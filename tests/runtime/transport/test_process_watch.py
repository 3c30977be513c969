"""The end of a process is seen where processes have no descriptors, or none is left."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from m2flow.runtime.driver import processes
from m2flow.runtime.transport.process_watch import ProcessWatch
from tests.patience import SOON
from tests.runtime.transport.no_descriptors import DescriptorsFail, descriptors_fail

__all__ = ["descriptors_fail"]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as started:
        yield started
        started.kill()


@pytest.mark.parametrize("why", [None, errno.ENOSYS, errno.EPERM, errno.EMFILE])
def test_an_end_is_seen_without_a_descriptor(
    why: int | None, process: subprocess.Popen[bytes], descriptors_fail: DescriptorsFail
) -> None:
    descriptors_fail(why)
    watch = ProcessWatch(process.pid)
    assert not watch.ended()
    process.kill()
    assert watch.ended(SOON), "though nobody has waited for it"
    process.wait()
    assert watch.ended()
    assert ProcessWatch(process.pid).ended(), "it was not there"


def test_a_process_that_cannot_be_looked_at_for_want_of_descriptors_counts_as_running(
    process: subprocess.Popen[bytes],
    descriptors_fail: DescriptorsFail,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    descriptors_fail(errno.EMFILE)

    def refused(number: int) -> psutil.Process:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(psutil, "Process", refused)
        watch = ProcessWatch(process.pid)
        assert not watch.ended()
    assert not watch.ended()
    process.kill()
    assert watch.ended(SOON)


@pytest.mark.parametrize("why", [None, errno.EMFILE])
def test_the_ends_of_lanes_are_awaited_without_descriptors(
    why: int | None,
    process: subprocess.Popen[bytes],
    descriptors_fail: DescriptorsFail,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pool that was closed raised an AttributeError. It goes on when they have ended, long before
    the wait is over."""
    descriptors_fail(why)
    monkeypatch.setattr(processes, "GONE_SECONDS", 3600.0)
    process.kill()
    processes._await_ends([process.pid])
    assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
