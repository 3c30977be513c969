"""Calls to the kernel that the sandbox refuses: a filter (seccomp) that no program can take off.

A process's limits count its address space. They do not count memory that lives without it (System
V's, that of a file without a name, of a pipe, of a network connection), nor a file system that a
program mounts in a user namespace of its own. What makes such things is refused: EPERM, and ENOSYS
where that has the C library take an older call. Of sockets, those between processes are left:
others would be no use without a network, and some kinds know nothing of network namespaces.

A filter knows calls by their numbers, which are another machine's others: there are numbers for
x86-64 and aarch64. On other machines there is no filter, and the above can be had.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass

REFUSED = {
    # Memory outside of any address space.
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
    # Namespaces, in which a program would have privileges again.
    "unshare": (272, 97),
    "setns": (308, 268),
    # Memory of the kernel's, and calls that pass by this filter.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "landlock_create_ruleset": (444, 444),
}
"""Name to its numbers on x86-64 and on aarch64."""

PARTLY = {
    "prctl": (157, 167),  # to live on without its parent
    "clone": (56, 220),  # a user namespace
    "clone3": (435, 435),  # as clone, but its arguments lie in memory
    "socket": (41, 198),
    "socketpair": (53, 199),
}
"""Refused where an argument is wrong, or where the arguments cannot be seen."""


@dataclass(frozen=True)
class Machine:
    """A machine of which the numbers are known.

    Attributes:
        column: of its numbers in the tables.
        audit: what the kernel calls its instruction set.
        foreign: numbers from this on are those of another set of calls, with other meanings.
    """

    column: int
    audit: int
    foreign: int


MACHINES: Mapping[str, Machine] = {
    "x86_64": Machine(0, 0xC000003E, 0x4000_0000),  # x32: pointers of 32 bits
    "aarch64": Machine(1, 0xC00000B7, 0x4000_0000),
}

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _AUDIT, _FIRST = 0, 4, 16  # where they lie: of the first argument its lower half
_ALLOW, _ERROR, _KILL = 0x7FFF_0000, 0x0005_0000, 0x8000_0000
_NEW_USER, _UNIX, _SIGNAL_OF_PARENT = 0x1000_0000, 1, 1


def refusals(machine: str = platform.machine()) -> bytes:
    """The filter's instructions for a machine, as the kernel reads them; b"" for one not known."""
    if (known := MACHINES.get(machine)) is None:
        return b""
    allow, refuse = _one(_RETURN, _ALLOW), _one(_RETURN, _ERROR | errno.EPERM)
    numbers = {name: pair[known.column] for name, pair in (REFUSED | PARTLY).items()}
    code = _one(_LOAD, _AUDIT) + _one(_EQUAL, known.audit, no=0, yes=1) + _one(_RETURN, _KILL)
    code += _one(_LOAD, _NUMBER) + _one(_AT_LEAST, known.foreign, no=1) + refuse
    for name in REFUSED:
        code += _one(_EQUAL, numbers[name], no=1) + refuse
    code += _one(_EQUAL, numbers["clone3"], no=1) + _one(_RETURN, _ERROR | errno.ENOSYS)
    code += _one(_EQUAL, numbers["prctl"], no=4)
    code += _one(_LOAD, _FIRST) + _one(_EQUAL, _SIGNAL_OF_PARENT, no=1) + refuse + allow
    code += _one(_EQUAL, numbers["clone"], no=4)
    code += _one(_LOAD, _FIRST) + _one(_ANY_BIT, _NEW_USER, no=1) + refuse + allow
    code += _one(_EQUAL, numbers["socket"], yes=1)
    code += _one(_EQUAL, numbers["socketpair"], no=3)
    code += _one(_LOAD, _FIRST) + _one(_EQUAL, _UNIX, yes=1) + refuse
    return code + allow


def _one(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """An instruction; `yes` and `no`: how many to pass over where a comparison holds or not."""
    return struct.pack("=HBBI", code, yes, no, value)
