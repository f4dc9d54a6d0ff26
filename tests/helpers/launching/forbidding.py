"""System calls that Linux refuses to a process."""

import ctypes
import struct

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
PIDFD_OPEN = 434
EPERM = 1


def forbid(call: int) -> None:
    """Have Linux refuse a system call to this thread, as containers with old filters do."""
    load, compare, give = 0x20, 0x15, 0x06
    refuse, allow = 0x00050000 | EPERM, 0x7FFF0000
    lines = [
        (load, 0, 0, 0),
        (compare, 0, 1, call),
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    filtered = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(program))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filtered) == 0
