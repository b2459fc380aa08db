"""A filter of system calls for code of unknown origin: what could hide memory, reach the kernel's depths or the host.

Owns the list and its form as a BPF program for seccomp(2). Does not own namespaces and limits (`cell.py`), which do the
separating: the filter closes what they leave open. Memory that belongs to no process (memfd, System V segments) would
escape the count of memory, and sockets of other families than INET and UNIX (vsock) would escape the network namespace.
Refused calls fail with EPERM, as without the right to them; clone3 with ENOSYS, so that libc calls clone, whose flags a
filter can read. Numbers: the kernel's arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
"""

import ctypes
import errno
import platform
import struct

_X86_64 = {
    "ptrace": 101, "syslog": 103, "pivot_root": 155, "chroot": 161, "acct": 163, "mount": 165, "umount2": 166,
    "swapon": 167, "init_module": 175, "delete_module": 176, "quotactl": 179, "mq_open": 240, "kexec_load": 246,
    "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "fanotify_init": 300,
    "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
    "finit_module": 313, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "shmget": 29,
    "semget": 64, "msgget": 68,
}  # fmt: skip
_AARCH64 = {
    "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "quotactl": 60, "acct": 89, "unshare": 97,
    "kexec_load": 104, "init_module": 105, "delete_module": 106, "syslog": 116, "ptrace": 117, "mq_open": 180,
    "msgget": 186, "semget": 190, "shmget": 194, "add_key": 217, "request_key": 218, "keyctl": 219, "swapon": 224,
    "perf_event_open": 241, "fanotify_init": 262, "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270,
    "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "memfd_create": 279, "bpf": 280, "userfaultfd": 282,
    "kexec_file_load": 294,
}  # fmt: skip
_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442,
    "memfd_secret": 447,
}  # fmt: skip
_CLONE3 = 435
_MACHINES = {"x86_64": (0xC000003E, 56, 41, _X86_64), "aarch64": (0xC00000B7, 220, 198, _AARCH64)}
"""Machine -> its AUDIT_ARCH, its clone and socket, and what is refused there."""
_NAMESPACES = 0x7E020080
"""CLONE_NEW* flags of clone, all of them."""
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""

# One instruction is (operation, jump if true, jump if false, operand); offsets are those of struct seccomp_data.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_X32 = 0x40000000
"""Bit of x86-64's calls with 32-bit pointers, a second numbering of all calls."""

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2


def program() -> bytes:
    """The filter for this machine. Raises OSError: the numbers of this machine's calls are not known here."""
    machine = platform.machine()
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}; known: {', '.join(_MACHINES)}")
    arch, clone, socket, refused = _MACHINES[machine]
    eperm = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    code = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        eperm,
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for number in sorted([*refused.values(), *_EVERYWHERE.values()]):
        code += [(_EQUAL, 0, 1, number), eperm]
    code += [(_EQUAL, 0, 4, clone), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, 0, 1, _NAMESPACES), eperm]
    code += [(_RETURN, 0, 0, _ALLOW)]
    code += [(_EQUAL, 0, 2 + len(_FAMILIES), socket), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    code += [(_EQUAL, len(_FAMILIES) - place, 0, family) for place, family in enumerate(_FAMILIES)]
    code += [eperm, (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def install(libc: ctypes.CDLL, filter_program: bytes) -> None:
    """Put this process and all that it starts under the filter, and let no program gain rights when it is started.
    Raises OSError: the kernel has no seccomp filters, or refuses this one."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    asked = Program(len(filter_program) // 8, filter_program)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(asked), 0, 0),
    ):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl(seccomp)")
