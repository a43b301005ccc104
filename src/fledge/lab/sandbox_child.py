"""Runs a program that a model wrote, in a process that can do nothing but compute.

Started by `sandbox.py` as a script of its own; it imports nothing of fledge. Before the program
runs the process gives up for good: memory, processor time and files beyond its limits, opening
anything for writing, changing names on the disk, sockets, other processes, signals to them, and
raising the limits again. The system calls are refused by a seccomp filter, which needs no
privileges and which nothing in the process can take back.

The secret that it prints after the program's last line says that the program came to its end.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import struct
import sys

_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER_MODE = 38, 22, 2
_CLONE_THREAD = 0x10000
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | 0o20000000

_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_OPENS = {"x86_64": ((2, 1), (257, 2)), "aarch64": ((56, 2),)}
"""open and openat, with the place of their flags."""

_CLONES = {"x86_64": (56, 435), "aarch64": (220, 435)}
"""clone, and clone3, for which the C library falls back to clone."""

# fmt: off
_REFUSED = {
    "x86_64": (
        41, 42, 49, 50, 425,  # socket, connect, bind, listen, io_uring_setup
        57, 58, 59, 322,  # fork, vfork, execve, execveat
        62, 129, 200, 234, 297, 424, 434,  # kill and its kin, pidfd_open
        101, 310, 311,  # ptrace, reading and writing the memory of others
        82, 264, 316, 83, 258, 84, 86, 265, 87, 263, 88, 266,  # names on the disk
        85, 437, 76, 133, 259,  # creat, openat2, truncate, mknod
        90, 91, 268, 452, 92, 93, 94, 260,  # modes and owners
        132, 235, 261, 280, 188, 189, 190,  # times and attributes
        165, 166, 272, 308, 161, 155,  # mounts, namespaces, roots
        109, 112, 160, 302, 321, 248, 249, 250,  # groups, sessions, limits, bpf, keys
        29, 30, 68, 64,  # memory, messages and semaphores that outlive a process
    ),
    "aarch64": (
        198, 203, 200, 201, 425,
        221, 281,
        129, 138, 130, 131, 240, 424, 434,
        117, 270, 271,
        38, 276, 34, 37, 35, 36,
        437, 45, 33,
        52, 53, 452, 55, 54,
        88, 5, 6, 7,
        40, 39, 97, 268, 51, 41,
        154, 157, 164, 261, 280, 217, 218, 219,
        194, 196, 186, 190,
    ),
}
# fmt: on
"""In both the same calls, by line; the second table has no calls that the newer machine lacks."""


def _filter(machine: str) -> bytes:
    """The filter's program: what is not named is allowed."""
    refused = _REFUSE | errno.EACCES
    lines = [(_LOAD, 0, 0, _MACHINE_AT), (_IF_EQUAL, 1, 0, _MACHINES[machine])]
    lines += [(_RETURN, 0, 0, refused), (_LOAD, 0, 0, _NUMBER_AT)]
    # Numbers of another calling convention of the same machine.
    lines += [(_IF_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, refused)]
    for number in _REFUSED[machine]:
        lines += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, refused)]
    clone, clone3 = _CLONES[machine]
    lines += [(_IF_EQUAL, 0, 1, clone3), (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)]
    for number, place, bits, is_wanted in [
        (clone, 0, _CLONE_THREAD, True),
        *((number, place, _WRITES, False) for number, place in _OPENS[machine]),
    ]:
        set_, unset = (_ALLOW, refused) if is_wanted else (refused, _ALLOW)
        lines += [(_IF_EQUAL, 0, 4, number), (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * place)]
        lines += [(_IF_BITS, 0, 1, bits), (_RETURN, 0, 0, set_), (_RETURN, 0, 0, unset)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _lock_up() -> None:
    """From here on only what the filter allows; raises OSError where there is no such filter."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _MACHINES:
        raise OSError(f"there is no sandbox for {sys.platform} on {machine}")
    program = _filter(machine)
    lines = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(lines))
    library = ctypes.CDLL(None, use_errno=True)
    address = ctypes.create_string_buffer(header, len(header))
    for arguments in (
        (_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0),
        (_SET_SECCOMP, _FILTER_MODE, ctypes.addressof(address), 0, 0),
    ):
        if library.prctl(*(ctypes.c_ulong(one) for one in arguments)) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"the kernel refuses the filter: {os.strerror(code)}")


def _limit(memory_bytes: int, cpu_s: int) -> None:
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    report = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    try:
        program = compile(job["program"], "answer.py", "exec")
    except (SyntaxError, ValueError):
        return
    _limit(job["memory_bytes"], job["cpu_s"])
    try:
        _lock_up()
    except OSError as error:
        os.write(report, f"unsafe {error}".encode())
        return
    exec(program, {"__name__": "answer"})
    # A program that leaves by itself, with any exit code, does not come here.
    os.write(report, job["secret"].encode())


if __name__ == "__main__":
    main()
