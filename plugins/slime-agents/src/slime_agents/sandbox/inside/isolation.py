"""Isolation of a process by the Linux kernel, without privileges: seccomp for system calls, Landlock for files.

Uses only the standard library: the fork server has no other packages.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat
import struct
import sys
from collections.abc import Iterable, Sequence

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000
CLONE_THREAD = 0x00010000

# Numbers on x86_64 and aarch64; None where the call is missing.
REFUSED = {
    # Network.
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    # Other programs and processes.
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    # Other views of the system.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "chroot": (161, 51),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # Landlock does not look at these.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
}
CLONE = (56, 220)
CLONE3 = (435, 435)
TO_ITSELF = {"kill": (62, 129), "tgkill": (234, 131)}
PRLIMIT = (302, 261)
PRCTL = (157, 167)

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCH, FIRST_ARGUMENT = 0, 4, 16
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2
CAPSET = {"x86_64": 126, "aarch64": 91}
CAPABILITY_VERSION_3 = 0x20080522

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ_FILE, READ_DIR, WRITE_FILE, TRUNCATE = 1 << 2, 1 << 3, 1 << 1, 1 << 14
ALL_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}

libc = ctypes.CDLL(None, use_errno=True)


class WallError(OSError):
    """The kernel refused to set up a wall."""


def check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise WallError(number, f"{what}: {os.strerror(number)}")
    return result


def seccomp_program(pid: int, machine: str) -> bytes:
    """The seccomp filter as BPF code. It refuses calls that reach other processes or machines, and allows threads, and signals
    to the process itself."""
    column = list(AUDIT_ARCH).index(machine)
    code: list[tuple[int, int, int, int]] = []

    def block(number: int | None, *body: tuple[int, int, int, int]) -> None:
        if number is not None:
            code.append((EQUAL, 0, len(body), number))
            code.extend(body)

    refuse = (RETURN, 0, 0, FAIL | errno.EPERM)
    allow = (RETURN, 0, 0, ALLOW)
    code += [(LOAD, 0, 0, ARCH), (EQUAL, 1, 0, AUDIT_ARCH[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if machine == "x86_64":
        code += [(AT_LEAST, 0, 1, X32_BIT), refuse]
    for numbers in REFUSED.values():
        block(numbers[column], refuse)
    # Without clone3 the C library calls clone, whose flags a filter can read.
    block(CLONE3[column], (RETURN, 0, 0, FAIL | errno.ENOSYS))
    first = (LOAD, 0, 0, FIRST_ARGUMENT)
    block(CLONE[column], first, (ANY_BIT, 0, 1, CLONE_THREAD), allow, refuse)
    for numbers in TO_ITSELF.values():
        block(numbers[column], first, (EQUAL, 0, 1, pid), allow, refuse)
    block(PRLIMIT[column], first, (EQUAL, 1, 0, 0), (EQUAL, 0, 1, pid), allow, refuse)
    # Otherwise the process could outlive the server.
    block(PRCTL[column], first, (EQUAL, 0, 1, PR_SET_PDEATHSIG), refuse, allow)
    code.append(allow)
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_char_p)]


def refuse_calls() -> None:
    """Refuses sockets, processes, programs and signals to others, permanently and also for threads started later."""
    machine = platform.machine()
    if machine not in AUDIT_ARCH:
        raise WallError(errno.ENOSYS, f"no filter for {machine}")
    program = seccomp_program(os.getpid(), machine)
    filled = Filter(len(program) // 8, program)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filled), 0, 0), "seccomp")


def drop_capabilities() -> None:
    """Drops all capabilities; root keeps only its user id."""
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    check(libc.syscall(CAPSET[platform.machine()], header, bytes(24)), "capset")


def only_files(readable: Iterable[str], writable: Sequence[str]) -> None:
    """Restricts the process to these paths: it cannot open, list, make or remove any other."""
    abi = check(libc.syscall(LANDLOCK_CREATE, None, 0, 1), "landlock")
    rights = ALL_FILE_RIGHTS[max(known for known in ALL_FILE_RIGHTS if known <= abi)]
    # Files; TCP from version 4, abstract sockets and signals from 6.
    attributes = struct.pack("QQQ", rights, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = check(libc.syscall(LANDLOCK_CREATE, attributes, len(attributes), 0), "landlock")
    try:
        for path, allowed in [
            *((path, READ_FILE | READ_DIR) for path in readable),
            *((path, rights) for path in writable),
        ]:
            try:
                parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                if not stat.S_ISDIR(os.fstat(parent).st_mode):
                    allowed &= READ_FILE | WRITE_FILE | TRUNCATE
                rule = struct.pack("=Qi", allowed & rights, parent)
                check(libc.syscall(LANDLOCK_ADD, rules, 1, rule, 0), f"landlock for {path}")
            finally:
                os.close(parent)
        check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        check(libc.syscall(LANDLOCK_RESTRICT, rules, 0), "landlock")
    finally:
        os.close(rules)


def end_with_parent(signal_number: int) -> None:
    if sys.platform == "linux":
        check(libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "parent death signal")
