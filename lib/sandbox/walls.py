"""Walls around a process, which the Linux kernel provides.

At level "namespaces" a process gets new namespaces (mount, pid, network, ipc, uts, user). Their root
holds only the interpreter's libraries, read only, and a /tmp. "landlock" and "rlimits" are for machines
that refuse namespaces, as most containers do: a program can start no process and send no signals; with
landlock it can open the same files only. At every level seccomp closes the network."""

import contextlib
import ctypes
import errno
import functools
import os
import resource
import struct
import sys
import tempfile
from pathlib import Path

DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
NOBODY = 65534
NEW_USER, NEW_OTHERS, NEW_ANY = 0x10000000, 0x6C020000, 0x7E020000  # CLONE_NEW*; mount, pid, net, ipc, uts
BIND, PRIVATE, DETACH = 0x1000 | 0x4000, 0x40000 | 0x4000, 2  # MS_*, recursive; MNT_DETACH
# The system calls that a program can make; all others fail as if they did not exist (ENOSYS). Left out:
# network, other processes' memory, limits and scheduling, namespaces, mounts, memory that no limit counts.
ALLOWED = """
access alarm arch_prctl brk chdir clock_getres clock_gettime clock_nanosleep close close_range copy_file_range creat
dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 exit
exit_group faccessat faccessat2 fadvise64 fallocate fchdir fdatasync fgetxattr flistxattr flock fstat fstatfs fsync
ftruncate futex futex_waitv getcpu getcwd getdents getdents64 getegid geteuid getgid getgroups getitimer getpeername
getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid getsockname
getsockopt gettid gettimeofday getuid getxattr lgetxattr link linkat listxattr llistxattr lseek lstat madvise
membarrier mincore mkdir mkdirat mlock mmap mprotect mremap msync munlock munmap nanosleep newfstatat open openat
openat2 pause pipe pipe2 poll ppoll pread64 preadv preadv2 pselect6 pwrite64 pwritev pwritev2 read readahead readlink
readlinkat readv recvfrom recvmsg rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending
rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait sched_get_priority_max sched_get_priority_min
sched_getaffinity sched_getparam sched_getscheduler sched_yield select sendfile sendmsg sendto set_robust_list
set_tid_address setitimer setrlimit setsockopt shutdown sigaltstack signalfd signalfd4 splice stat statfs statx
symlink symlinkat sysinfo tee time timer_create timer_delete timer_getoverrun timer_gettime timer_settime
timerfd_create timerfd_gettime timerfd_settime times truncate umask uname unlink unlinkat wait4 waitid write writev"""
# In namespaces a program can also make these; elsewhere they would reach the user's processes and files.
ALLOWED_INSIDE = """
chmod chown execve execveat fchmod fchmodat fchmodat2 fchown fchownat fork futimesat kill lchown pidfd_open
pidfd_send_signal rt_sigqueueinfo rt_tgsigqueueinfo setpgid setsid tgkill tkill utime utimensat utimes vfork"""
THREAD = 0x10000  # CLONE_THREAD
# (call, index of its argument, bits, value): allowed if these bits of the argument have this value
CONDITIONS = [
    ("prlimit64", 0, 2**64 - 1, 0),  # limits of this process only
    ("sched_setaffinity", 0, 2**64 - 1, 0),
    ("socketpair", 1, 0xF, 1),  # SOCK_STREAM: a datagram socket could send to others
    *(("fcntl", 1, 2**32 - 1, n) for n in (*range(8), 9, 36, 37, 38, 1030, 1032)),  # no signals to owners, no leases
    *(("ioctl", 1, 2**32 - 1, n) for n in (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # of terminals, TCGETS
    *(("prctl", 0, 2**32 - 1, n) for n in (1, 2, 3, 15, 16, 22, 23, 0x53564D41)),  # death signal, names, queries
]
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


@functools.cache
def processes_can_be_limited() -> bool:
    """Whether RLIMIT_NPROC holds: not for root, nor for a user that a user namespace makes of root."""
    pid = os.fork()
    if pid == 0:
        limit(NPROC=0)
        with contextlib.suppress(OSError):
            os.fork()
            os._exit(1)  # in both processes
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def enter_namespaces(spec: dict) -> bool:
    """Enters new namespaces. Returns whether the number of a program's processes is limited there."""
    if os.geteuid() == 0 and libc.unshare(NEW_OTHERS) == 0:
        limited = True  # the process becomes user nobody
    else:  # a user, or root without CAP_SYS_ADMIN, as in Docker
        limited, user, group = processes_can_be_limited(), os.geteuid(), os.getegid()
        check(libc.unshare(NEW_USER | NEW_OTHERS), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user or NOBODY} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group or NOBODY} {group} 1")

    def mount(source, target, kind, flags, options=None):
        args = [x.encode() if x else None for x in (source, target, kind)]
        data = options and options.encode()
        check(libc.mount(*args, ctypes.c_ulong(flags), data), f"mount {target}")

    root = "/sys"  # the new root is built here, because no library lies in /sys
    mount(None, "/", None, PRIVATE)
    mount("tmpfs", root, "tmpfs", 0, "size=1m,mode=755")
    Path(f"{root}/dev").mkdir()
    for path in DEVICES:
        Path(root + path).touch()
        mount(path, root + path, None, BIND)
    for link in map(Path, ("/bin", "/lib", "/lib64")):
        if link.is_symlink():
            Path(f"{root}{link}").symlink_to(link.readlink())
    for name in spec["links"]:
        Path(f"{root}/{name}").symlink_to(f"/tmp/{name}")
    Path(f"{root}/tmp").mkdir()
    # /tmp comes before the libraries, since some of them may lie in it
    size = f"size={spec['folder_mb']}m"
    mount("tmpfs", root + "/tmp", "tmpfs", 2 | 4, f"{size},nr_inodes=10000,mode=777")
    for path in [*spec["readable"], *spec["hidden"], *spec["packages"]]:  # the order matters
        Path(root + path).mkdir(parents=True, exist_ok=True)
        if path in spec["hidden"]:
            mount("tmpfs", root + path, "tmpfs", 0, "size=1m,mode=755")
        else:
            mount(path, root + path, None, BIND)
    read_only = (ctypes.c_uint64 * 4)(1 | 2)  # MOUNT_ATTR_RDONLY | NOSUID
    check(libc.syscall(442, -100, root.encode(), 0x8000, read_only, 32), "mount_setattr")
    writable = (ctypes.c_uint64 * 4)(0, 1)
    check(libc.syscall(442, -100, f"{root}/tmp".encode(), 0, writable, 32), "mount_setattr /tmp")
    os.chdir(root)
    check(libc.pivot_root(b".", b"."), "pivot_root")
    check(libc.umount2(b".", DETACH), "umount")
    return limited


def drop_privileges(level: str) -> None:
    if level == "namespaces" and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        check(libc.unshare(NEW_USER), "unshare user")  # RLIMIT_NPROC then counts only this sandbox
    check(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    check(libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()), "capset")
    check(libc.prctl(4, 0, 0, 0, 0), "dumpable")  # nobody may trace init or read its memory


def limit(**limits: int) -> None:
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def landlock(spec: dict, folder: str) -> None:
    """Leaves only `folder`, the libraries (read only) and a few devices; from Linux 6.12 on, no signals."""
    version = check(libc.syscall(444, None, 0, 1), "landlock")
    if version < 3:
        raise OSError("Landlock before Linux 6.2 lets programs empty files")
    handled = (1 << 15) - 1 | (version >= 5) << 15
    attributes = (ctypes.c_uint64 * 3)(handled, 0, 3 if version >= 6 else 0)
    ruleset = check(libc.syscall(444, attributes, 24 if version >= 6 else 8, 0), "landlock")

    def allow(path, access):
        fd = os.open(path, os.O_PATH)
        check(libc.syscall(445, ruleset, 1, struct.pack("=Qi", access, fd), 0), f"landlock {path}")
        os.close(fd)

    def allow_but_hidden(path):
        inside = [hidden for hidden in spec["hidden"] if f"{hidden}/".startswith(f"{path}/")]
        if not inside:
            allow(path, 13 if Path(path).is_dir() else 4)  # execute, read file, read folder
        elif path not in inside:
            allow(path, 8)
            for entry in os.scandir(path):
                if not entry.is_symlink():
                    allow_but_hidden(entry.path)

    for path in spec["readable"]:
        allow_but_hidden(path)
    for path in spec["packages"]:
        allow(Path(path).parent, 8)
        allow(path, 13)
    for path in DEVICES:
        allow(path, 2 | 4)
    allow(folder, handled)
    check(libc.syscall(446, ruleset, 0), "landlock")
    os.close(ruleset)


@functools.cache
def seccomp_filter(level: str) -> bytes:
    """The filter that libseccomp makes of the names above. Raises OSError without the library."""
    try:
        lib = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        how = "install libseccomp2 (Debian, Ubuntu) or libseccomp"
        raise OSError(f"libseccomp.so.2 is not there: {how}") from None
    lib.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(lib.seccomp_init(0x50000 | errno.ENOSYS))
    inside = level == "namespaces"
    names = ALLOWED + ALLOWED_INSIDE if inside else ALLOWED
    clone = ("clone", 0, NEW_ANY, 0) if inside else ("clone", 0, NEW_ANY | THREAD, THREAD)
    allowed: list[tuple] = [*((name,) for name in names.split()), *CONDITIONS, clone]
    for name, *condition in allowed:
        number = lib.seccomp_syscall_resolve_name(name.encode())
        argument = None
        if condition:
            argument = struct.pack("IiQQ", condition[0], 7, *condition[1:])  # MASKED_EQ
        if number >= 0:  # this machine has the call
            rules = len(condition) // 3, argument
            if lib.seccomp_rule_add_array(context, 0x7FFF0000, number, *rules) < 0:
                raise OSError(f"libseccomp does not take {name}")
    with open(os.memfd_create("filter"), "r+b") as file:
        lib.seccomp_export_bpf(context, file.fileno())
        lib.seccomp_release(context)
        file.seek(0)
        return file.read()


def seccomp(level: str) -> None:
    code = seccomp_filter(level)
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(buffer))
    check(libc.prctl(22, 2, program, 0, 0), "seccomp")


def put_up(spec: dict, folder: str) -> None:
    """Puts this process behind the walls, for good."""
    if spec["level"] == "landlock":
        landlock(spec, folder)
    seccomp("alone" if spec["alone"] else "namespaces")
    sys.path[:] = [path for path in sys.path if path not in spec["hidden"]] + spec["sys_path"]


def become_program(spec: dict, folder: str, files: list[int]) -> None:
    """In a fresh child of init: `files` become descriptors 0, 1, 2 ..., all others close, the walls go up."""
    for i, fd in enumerate([os.dup(fd) for fd in files]):
        os.dup2(fd, i)
    os.closerange(len(files), 1 << 20)
    os.chdir(folder)
    tempfile.tempdir = os.environ["HOME"] = os.environ["TMPDIR"] = folder
    limit(CPU=int(spec["total_timeout"]) + 1, CORE=0)
    limit(FSIZE=spec["output_mb"] << 20, NOFILE=spec["open_files"])
    if spec["level"] == "namespaces":
        limit(NPROC=spec["processes"] + 2)
    put_up(spec, folder)
