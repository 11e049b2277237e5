"""The far side of client.py, run as a script. It runs programs behind walls that the Linux kernel provides.

    scorer -- zygote -- supervisor -- init [-- program]     one supervisor per sample; `|` below is the wall
                            |          |         |
         waits for the end, kills   runs the tests, holds what is expected | holds no test, no expected value

Each scorer's process has one zygote, a warmed-up process that forks a supervisor for every socket it is sent. At level
"namespaces" the supervisor makes new namespaces (mount, pid, network, ipc, uts, user). Their root holds only the
interpreter's libraries, read only, and a /tmp of its own. init is their process 1, so that everything dies with it.
"landlock" and "rlimits" are for machines that refuse namespaces, as most containers do: the program can start no
process and send no signals, and with landlock opens the same files only. At every level seccomp closes the network.

A test sees a Remote, which sends plain values (JSON) to the program's process and gets plain values back. So the
program's __eq__, patched builtins, frames and exit codes cannot change a verdict."""

import ast
import builtins
import contextlib
import ctypes
import errno
import functools
import gc
import importlib
import json
import math
import operator
import os
import random
import re
import resource
import select
import shutil
import signal
import site
import socket
import struct
import sys
import tempfile
import time
import types
from pathlib import Path

MAX_FRAME = 1 << 26  # bytes of one message
LONGEST_OUTPUT = 1 << 16  # bytes that are kept of a shell command's output: its beginning and its end
NUMERIC = re.compile(r"[<>|=][biufc]\d{1,2}")  # numpy's dtypes of arrays that are sent as arrays
# what LeetCode imports for every program
PRELUDE = "import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys\n"
for _name in ("bisect", "collections", "functools", "heapq", "itertools", "math", "typing"):
    PRELUDE += f"from {_name} import *\n"
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
NOBODY = 65534
NEW_USER, NEW_OTHERS, NEW_ANY = 0x10000000, 0x6C020000, 0x7E020000  # CLONE_NEW*; mount, pid, net, ipc, uts
BIND, PRIVATE, DETACH = 0x1000 | 0x4000, 0x40000 | 0x4000, 2  # MS_*, recursive; MNT_DETACH
# The system calls that a program can make; all others fail as if they did not exist (ENOSYS). Left out: network, other
# processes' memory, limits and scheduling, namespaces, mounts, memory that no limit counts.
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
# (call, index of its argument, bits, value): the call is allowed if these bits of the argument have this value
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


# ---- messages: the length in four bytes, then JSON ----
def send(sock, message) -> None:
    data = json.dumps(message).encode()
    sock.sendall(struct.pack("!I", len(data)) + data)


def receive(sock, deadline: float | None = None):
    """The next message. Raises TimeoutError after `deadline` (time.monotonic), EOFError if there is none."""

    def exactly(size):
        data = bytearray()
        while len(data) < size:
            sock.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
            part = sock.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    (size,) = struct.unpack("!I", exactly(4))
    if size > MAX_FRAME:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(exactly(size))


def pack(value, ref):
    """JSON for a value of the builtin types, nested to any depth. `ref(value)` numbers an object of any other type."""
    if value is None or isinstance(value, bool):
        return value
    for plain, exact in ((int, int.__int__), (float, float.__float__), (str, str.__str__)):
        if isinstance(value, plain):
            return exact(value)  # type: ignore[arg-type]  # value is of this kind
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    if isinstance(value, list):
        return [pack(item, ref) for item in value]
    if isinstance(value, dict):
        return {"dict": [[pack(key, ref), pack(item, ref)] for key, item in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [pack(item, ref) for item in value]}
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # a numpy value
        if getattr(value, "ndim", 0) and NUMERIC.fullmatch(value.dtype.str):
            return {"array": [value.dtype.str, list(value.shape), [pack(item, ref) for item in value.ravel().tolist()]]}
        return pack(value.tolist(), ref)
    if hasattr(value, "__index__"):
        return operator.index(value)
    return {"object": ref(value)}


def has_nan(packed) -> bool:
    if isinstance(packed, list):
        return any(map(has_nan, packed))
    if isinstance(packed, dict):
        return any(map(has_nan, packed.values()))
    return isinstance(packed, float) and packed != packed


def unpack(value, deref):
    """The inverse of pack."""
    if isinstance(value, list):
        return [unpack(item, deref) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, item),) = value.items()
    if kind == "object":
        return deref(item)
    if kind == "complex":
        return complex(*item)
    if kind == "bytes":
        return item.encode("latin-1")
    if kind == "array":
        dtype, shape, items = item
        if not NUMERIC.fullmatch(dtype):
            raise ValueError(f"an array of {dtype[:20]!r}")
        numpy = importlib.import_module("numpy")
        return numpy.array([unpack(part, deref) for part in items], dtype).reshape(shape)
    if kind == "dict":
        return {unpack(key, deref): unpack(entry, deref) for key, entry in item}
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](unpack(entry, deref) for entry in item)


# ---- the program's side ----
def load(program: str, name: str, prelude: str = "") -> None:
    """Runs the program as module `name`."""
    module = sys.modules[name] = types.ModuleType(name)
    exec(prelude, module.__dict__)
    exec(compile(program, f"<{name}>", "exec"), module.__dict__)


class Program:
    """Answers what a Remote asks. An object that is no plain value stays here, and only its number is sent."""

    def __init__(self, program: str, prelude: str):
        self.objects: list = []
        self.numbers: dict[int, int] = {}  # by id()
        with contextlib.suppress(SystemExit):  # a script's end; what it has defined by then can be called
            load(program, "solution", prelude)
        self.namespace = vars(sys.modules["solution"])

    def names(self) -> list[list]:
        """[name, the module's own name if it is a module], for everything that the program defines or imports."""
        own = {name: value for name, value in self.namespace.items() if not name.startswith("__")}
        return [[name, x.__name__ if isinstance(x, types.ModuleType) else None] for name, x in own.items()]

    def ref(self, value) -> int:
        """The object's number; the same object always gets the same number."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]

    def find(self, ref):
        if isinstance(ref, int):
            return self.objects[ref]
        if ref not in self.namespace and "Solution" in self.namespace:  # LeetCode's form
            return getattr(self.namespace["Solution"](), ref)
        return self.namespace[ref]

    def answer(self, request: list) -> dict:
        operation, ref, args = request
        try:
            target = self.find(ref)
            if operation == "call":
                args, kwargs = (unpack(part, self.find) for part in args)
                value = target(*args, **kwargs)
            elif operation == "list":
                value = list(target)
            elif operation == "get":
                value = getattr(target, args)
            else:
                value = None
                setattr(target, args[0], unpack(args[1], self.find))
            return {"value": pack(value, self.ref)}
        except BaseException as error:  # noqa: BLE001 the program may raise anything
            return {"error": [type(error).__name__, str(error)[:500]]}


def serve(channel, program: str, prelude: str) -> None:
    solution = Program(program, prelude)
    send(channel, solution.names())
    while True:
        send(channel, solution.answer(receive(channel)))


def answer_once(program: str, prelude: str) -> None:
    """Answers one request, for a server that runs scripts (SandboxFusion): from stdin, in the last line of stdout."""
    out = os.fdopen(os.dup(1), "w")
    request = json.loads(sys.stdin.readline())
    out.write("\n" + json.dumps(Program(program, prelude).answer(request)) + "\n")
    out.close()
    os._exit(0)


# ---- the tests' side ----
class Died(BaseException):
    """The program's process is gone or sends nonsense. A BaseException: a test's own `except` must not swallow it."""


class Wrong(BaseException):
    """The program's answer can pass no test, whatever this test would make of it."""


class Remote:
    """A name or an object of the program, in the tests. Equals itself, not None; any other comparison raises Wrong."""

    def __init__(self, ask, ref):
        vars(self).update(_ask=ask, _ref=ref)

    def __call__(self, *args, **kwargs):
        return self._ask("call", self._ref, [pack(list(args), _remote_ref), pack(kwargs, _remote_ref)])

    def __getattr__(self, name):
        return self._ask("get", self._ref, name)

    def __setattr__(self, name, value):
        self._ask("set", self._ref, [name, pack(value, _remote_ref)])

    def __iter__(self):
        return iter(self._ask("list", self._ref, None))

    def __eq__(self, other):
        if other is None or (isinstance(other, Remote) and other._ref == self._ref):
            return other is not None
        raise Wrong

    def __hash__(self):
        return hash(self._ref)


def _remote_ref(value):
    if isinstance(value, Remote):
        return vars(value)["_ref"]
    raise TypeError(f"a test gives the program a {type(value).__name__}: only plain values reach another process")


def asker(channel, nan_is_wrong: bool):
    def ask(operation, ref, args):
        try:
            send(channel, [operation, ref, args])
            reply = receive(channel)
            if "error" not in reply:
                if nan_is_wrong and has_nan(reply["value"]):
                    raise Wrong
                return unpack(reply["value"], lambda number: Remote(ask, int(number)))
            name, text = map(str, reply["error"])
        except Exception as error:  # noqa: BLE001 the program may send anything
            raise Died(str(error)) from None
        cls = getattr(builtins, name, None)  # for tests with `except ValueError`
        ends = StopIteration | StopAsyncIteration  # a test's all(map(...)) would end as if all had passed
        if not (isinstance(cls, type) and issubclass(cls, Exception)) or issubclass(cls, ends):
            cls = RuntimeError
        raise cls(text)

    return ask


def same(got, expected) -> bool:
    """Equality as JSON values: tuples and arrays are lists, keys are text, floats are equal to 1e-6, True is not 1."""
    got = got.tolist() if hasattr(got, "tolist") else got
    if isinstance(got, list | tuple) and isinstance(expected, list):
        return len(got) == len(expected) and all(map(same, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        got = {str(key): value for key, value in got.items()}
        return got.keys() == expected.keys() and all(same(got[key], expected[key]) for key in expected)
    if {type(got), type(expected)} == {int, float} or type(got) is type(expected) is float:
        return got == expected or math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-6)
    return type(got) is type(expected) and got == expected


def right(got, expected) -> bool:
    """Whether a call returned what the row expects. APPS writes some answers as [answer]."""
    wrapped = isinstance(expected, list) and len(expected) == 1
    return same(got, expected) or (wrapped and same(got, expected[0]))


def tools(names: list[list], texts: list[str], packages: list[str]) -> dict:
    """Modules that the tests use but only the program imports: this process's own of these names."""
    used = {node.id for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    found = {}
    for name, module in names:
        trusted = module == name if name in sys.stdlib_module_names else module
        if name in used and trusted and module.partition(".")[0] in {*sys.stdlib_module_names, *packages}:
            with contextlib.suppress(Exception):
                found[name] = importlib.import_module(module)
    return found


def run_tests(conn, channel, names: list[list], packages: list[str]) -> None:
    """Runs the next message's tests on the program behind `channel`. Sends the verdicts of the setup and each case."""
    tests = receive(conn)
    texts = [tests["setup"], *tests["cases"]]
    # a NaN passes `not (error > 1e-6)` and `!=`
    ask = asker(channel, nan_is_wrong="nan" not in "".join(texts).lower())
    trusted = vars(builtins).keys() | sys.stdlib_module_names  # names that a program may not redefine for the tests
    namespace: dict = {name: Remote(ask, name) for name, _ in names if name not in trusted} | {"__name__": "tests"}
    namespace |= tools(names, texts, packages)
    entries = {name: Remote(ask, name) for name in tests["entries"]}
    for case in texts:
        try:
            exec(compile(case, "<test>", "exec"), namespace)
            namespace |= entries | {"_right": right, "_loads": json.loads}
            verdict = "passed"
        except (AssertionError, Wrong):
            verdict = "wrong"
        except Died:
            verdict = "crash"
        except Exception:  # noqa: BLE001 from the program, or from a test of what it returned
            verdict = "error"
        send(conn, {"verdict": verdict})
        if verdict == "crash":
            return


# ---- walls ----
@functools.cache
def processes_can_be_limited() -> bool:
    """Whether RLIMIT_NPROC holds. It does not hold for root, nor for a user that a user namespace makes of root."""
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
        check(libc.mount(*args, ctypes.c_ulong(flags), options and options.encode()), f"mount {target}")

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
    mount("tmpfs", root + "/tmp", "tmpfs", 2 | 4, f"size={spec['folder_mb']}m,nr_inodes=10000,mode=777")
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
    """Leaves only `folder`, the libraries (read only) and a few devices. From Linux 6.12 on also stops signals out."""
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
    """The filter that libseccomp makes of the names above, for the kernel. Raises OSError without the library."""
    try:
        lib = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        raise OSError("libseccomp.so.2 is not there: install libseccomp2 (Debian, Ubuntu) or libseccomp") from None
    lib.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(lib.seccomp_init(0x50000 | errno.ENOSYS))
    inside = level == "namespaces"
    names = ALLOWED + ALLOWED_INSIDE if inside else ALLOWED
    clone = ("clone", 0, NEW_ANY, 0) if inside else ("clone", 0, NEW_ANY | THREAD, THREAD)
    allowed: list[tuple] = [*((name,) for name in names.split()), *CONDITIONS, clone]
    for name, *condition in allowed:
        number = lib.seccomp_syscall_resolve_name(name.encode())
        argument = struct.pack("IiQQ", condition[0], 7, *condition[1:]) if condition else None  # MASKED_EQ
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
    check(libc.prctl(22, 2, struct.pack("HP", len(code) // 8, ctypes.addressof(buffer)), 0, 0), "seccomp")


def put_up_walls(spec: dict, folder: str) -> None:
    """Puts this process behind the walls, for good."""
    if spec["level"] == "landlock":
        landlock(spec, folder)
    seccomp("alone" if spec["alone"] else "namespaces")
    sys.path[:] = [path for path in sys.path if path not in spec["hidden"]] + spec["sys_path"]


def become_program(spec: dict, folder: str, files: list[int]) -> None:
    """In a fresh child of init: `files` become descriptors 0, 1, 2 ..., all others are closed, the walls go up."""
    for i, fd in enumerate([os.dup(fd) for fd in files]):
        os.dup2(fd, i)
    os.closerange(len(files), 1 << 20)
    os.chdir(folder)
    tempfile.tempdir = os.environ["HOME"] = os.environ["TMPDIR"] = folder
    limit(CPU=int(spec["total_timeout"]) + 1, FSIZE=spec["output_mb"] << 20, NOFILE=spec["open_files"], CORE=0)
    if spec["level"] == "namespaces":
        limit(NPROC=spec["processes"] + 2)
    put_up_walls(spec, folder)


# ---- the processes ----
def run_program(spec: dict, folder: str, files: list[int], body) -> int:
    """Forks the program's process, which runs body() and exits. Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        become_program(spec, folder, files)
        random.seed(0)  # a fork seeds it from the kernel; a verdict must not depend on that
        # by lines: what a program has printed before os._exit or a crash counts, as on a terminal
        streams = (os.fdopen(fd, mode, 1, errors="replace") for fd, mode in enumerate("rww"))
        sys.stdin, sys.stdout, sys.stderr = streams
        body()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    finally:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # waits for threads that the program has not joined
        sys.stdout.flush()
        os._exit(code & 255)


def end_program(pid: int) -> int:
    """Kills what the program left behind and returns its exit code, negative for a signal."""
    _, status = os.waitpid(pid, 0)
    if os.getpid() == 1:  # in a pid namespace; elsewhere a program has no children
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(-1, signal.SIGKILL)
            while True:
                os.wait()
    return os.waitstatus_to_exitcode(status)


def run_scripts(conn, spec: dict, folder: str, null: int) -> None:
    """Runs the program once for every message, which is its standard input. Answers with exit code and output."""
    while True:
        files = [os.memfd_create("stdin"), os.memfd_create("stdout"), null]
        with open(files[0], "wb", closefd=False) as f:
            f.write(receive(conn).encode(errors="replace"))
        os.lseek(files[0], 0, os.SEEK_SET)
        pid = run_program(spec, folder, files, lambda: load(spec["program"], "__main__"))
        code = end_program(pid)
        with open(files[1], "rb") as f:
            f.seek(0)
            send(conn, {"exit": code, "stdout": f.read(spec["output_mb"] << 20).decode(errors="replace")})
        os.close(files[0])


def run_calls(conn, spec: dict, folder: str, null: int) -> None:
    """Runs tests that call functions. The program's process is forked before the tests are read from `conn`."""
    channel, theirs = socket.socketpair()
    body = lambda: serve(socket.socket(fileno=3), spec["program"], spec["prelude"])  # noqa: E731
    pid = run_program(spec, folder, [null, null, null, theirs.fileno()], body)
    theirs.close()
    try:
        names = [[str(name), module and str(module)] for name, module in receive(channel)]
    except (EOFError, OSError, ValueError, TypeError):
        send(conn, {"verdict": "error" if end_program(pid) > 0 else "crash"})
    else:
        put_up_walls(spec, folder)  # the tests are behind walls, too
        run_tests(conn, channel, names, spec["importable"])


def run_functions(conn, spec: dict, folder: str, null: int) -> None:
    """Answers every message with [function(message)], or [] if that fails. Each runs in a process of its own."""
    function = getattr(sys.modules[spec["module"]], spec["name"])
    while True:
        argument = receive(conn)
        channel, theirs = socket.socketpair()
        files = [null, null, null, theirs.fileno()]
        pid = run_program(spec, folder, files, lambda: send(socket.socket(fileno=3), function(argument)))  # noqa: B023
        theirs.close()
        with channel:
            try:
                answer = [receive(channel)]
            except (EOFError, OSError, ValueError):
                answer = []
        end_program(pid)
        send(conn, answer)


def run_shell(conn, spec: dict, folder: str, null: int) -> None:
    """Runs [command, seconds] in bash. Answers with [exit code, as bash says it, or 124 after its time; output]. What
    a command leaves running ends with it; its files stay."""

    def bash() -> None:
        try:
            os.execve("/bin/bash", ["bash", "-c", command], os.environ | spec["environment"])
        except (OSError, ValueError) as error:  # it is longer than the kernel takes, or has a NUL
            print(f"bash: {error}")
            raise SystemExit(126) from None

    for name in spec["links"]:
        Path(f"/tmp/{name}").mkdir()
    while True:
        command, seconds = receive(conn)
        output = os.memfd_create("output")
        pid = run_program(spec, folder, [null, output, output], bash)
        ended = os.pidfd_open(pid)
        in_time = select.select([ended], [], [], seconds)[0]
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        code = end_program(pid)
        size, half = os.fstat(output).st_size, LONGEST_OUTPUT // 2
        text = os.pread(output, size if size <= 2 * half else half, 0)
        if size > 2 * half:
            text += b"\n[... %d bytes left out ...]\n" % (size - 2 * half) + os.pread(output, half, size - half)
        send(conn, [124 if not in_time else code if code >= 0 else 128 - code, text.decode(errors="replace")])
        os.close(ended)
        os.close(output)


def init(conn, spec: dict, folder: str) -> None:
    os.setpgid(0, 0)
    if spec["form"] == "shell" and spec["alone"]:
        raise OSError("commands need namespaces in which the number of processes can be limited")
    drop_privileges(spec["level"])
    limit(AS=spec["memory_mb"] << 20)
    random.seed(0)  # for the tests, see run_program
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    send(conn, "ready")
    with contextlib.suppress(Exception):  # the scorer hung up, or the program crashed this process
        if spec["form"] == "remote":  # a server runs the program; the scorer passes calls on
            put_up_walls(spec, folder)
            run_tests(conn, conn, spec["names"], spec["importable"])
        else:
            forms = {"stdin": run_scripts, "calls": run_calls, "function": run_functions, "shell": run_shell}
            forms[spec["form"]](conn, spec, folder, null)


def supervise(conn) -> None:
    """Runs one sample until init ends or the scorer hangs up. When this process ends, nothing of the sample is left."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    spec = receive(conn)
    alone = spec["level"] != "namespaces"
    folder = tempfile.mkdtemp(prefix="plainrl-") if alone else "/tmp"
    try:
        spec["alone"] = alone or not enter_namespaces(spec)
        check(libc.prctl(36, 1, 0, 0, 0), "subreaper")  # an orphaned program becomes a child of this process
        pid = os.fork()
        if pid == 0:
            try:
                init(conn, spec, folder)
            except OSError as error:
                send(conn, str(error))
            os._exit(0)
        end = select.poll()
        end.register(conn, select.POLLRDHUP)
        end.register(os.pidfd_open(pid), select.POLLIN)
        end.poll()
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        while True:
            os.wait()
    except ChildProcessError:
        pass
    except Exception as error:  # noqa: BLE001 it is sent to the scorer, which raises it
        send(conn, f"{type(error).__name__}: {error}")
    if alone:
        shutil.rmtree(folder, ignore_errors=True)


def zygote(module: str = "", *folders: str) -> None:
    """Imports the module and calls its warm(). Then forks a supervisor for each socket that standard input brings."""
    control = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)  # a supervisor that outlives this process must not keep the socket open
    os.close(null)
    sys.set_int_max_str_digits(0)
    exec(PRELUDE, {})  # warms up the imports
    site.setquit()  # exit() and quit(), which -S leaves out
    processes_can_be_limited()
    for level in ("namespaces", "alone"):
        with contextlib.suppress(OSError):  # the sandbox reports the error later
            seccomp_filter(level)
    if module:
        sys.path += folders
        importlib.import_module(module).warm()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            return
        if os.fork() == 0:
            control.close()
            supervise(socket.socket(fileno=fds[0]))
            os._exit(0)
        os.close(fds[0])


if __name__ == "__main__":
    zygote(*sys.argv[1:])
