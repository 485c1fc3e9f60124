"""Fork notebook runs from one process that has imported what they import.

Most of a short run is imports: papermill in the worker, torch and the CuTe DSL in the kernel, 4 s of CPU time in all.
A fork server imports them once and forks a run in milliseconds:

    runner --socket--> fork server --fork--> worker (papermill) --fork--> Jupyter kernel

- The server has one thread and no GPU context whenever it forks, else it refuses, says why, and the runner starts
  fresh processes instead. It never computes: it only imports.
- A server serves one environment. Only variables in `LATE`, which nothing reads at import, may differ between it and
  its runs; any other difference gets another server.
- A run owns its session, environment, stdio, paths, seeds and mark. The mark stands where /proc shows the environment
  (`processes.MARK`), so that everything a run starts is found, as with a fresh process.
- The server ends with its runner (end of file on the socket), and its runs with it.

Only imports of packages in `PACKAGES` are made ahead, those that a notebook's own cells name, before it is forked.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv4lib import env
from dsv4lib.errors import DSV4Error
from dsv4lib.lab.run import processes

PACKAGES = ("cutlass", "dsv4lib", "ipywidgets", "matplotlib", "numpy", "torch", "transformers")
# What those import only when they compile, launch or draw.
LATER = {
    "cutlass": (
        "dsv4lib.ops.common.compile_cache", "dsv4lib.emulator.driver.dsl", "dsv4lib.emulator.driver.cuda_api",
        "dsv4lib.emulator.driver.torch_shims", "dsv4lib.emulator.machine.grid", "dsv4lib.emulator.isa.implementations",
    ),
    "matplotlib": ("matplotlib.pyplot", "matplotlib.backends.backend_agg"),
}  # fmt: skip
KERNEL = (  # what a kernel imports as it starts
    "ipykernel.kernelapp", "ipykernel.debugger", "ipykernel.kernelspec", "tornado.platform.asyncio", "faulthandler",
    "IPython.core.completerlib", "IPython.core.logger", "IPython.extensions.storemagic", "sqlite3",
    "IPython.core.debugger", "IPython.core.oinspect", "dsv4lib.lab.notebook.notebook_api",
)  # fmt: skip
LATE = ("DSV4_", "JUPYTER_", "PYTEST_")  # prefixes of variables that nothing reads at import
LATE_NAMES = ("IPYTHONDIR", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "COLUMNS", "LINES", "PWD", "OLDPWD", "_", "SHLVL")
MARK_BYTES = 512  # room for a run's mark
PATIENCE_S = 600.0  # for the imports of a run on a busy machine
KEPT = 2  # servers at a time


class Refused(DSV4Error):
    """A fork server that cannot fork this run; the message says why."""


class Worker:
    """A forked run, as `subprocess.Popen` shows a started one."""

    def __init__(self, server: Server, pid: int):
        self.server, self.pid, self.returncode = server, pid, None

    def poll(self) -> int | None:
        """Return exit code (negative: the signal that ended it), or None while it runs."""
        if self.returncode is None:
            self.returncode = self.server.ended(self.pid)
        return self.returncode


class Server:
    """The runner's side of one fork server."""

    def __init__(self, environment: Mapping[str, str]):
        self.early = _early(environment)
        ours, theirs = socket.socketpair()
        self.socket = ours
        self._forked: set[int] = set()
        self._codes: dict[int, int] = {}
        self._buffer = b""
        self._gone = False
        self._said = tempfile.TemporaryFile()
        started_with = {
            **self.early, processes.MARK: "x" * MARK_BYTES, "PYTHONPATH": str(env.package().parent),
            "JUPYTER_PLATFORM_DIRS": "1",
        }  # fmt: skip
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dsv4lib.lab.run.forkserver", str(theirs.fileno())], env=started_with,
                cwd=env.root(), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=self._said, start_new_session=True,
            )  # fmt: skip

    def fork(
        self, private: Path, environment: Mapping[str, str], cwd: Path, log: Path, imports: Sequence[str]
    ) -> Worker:
        """Fork the run of ``private``/job.json.

        Args:
            private: folder of the run.
            environment: of the run, whole.
            cwd: its working directory.
            log: file for its stdout and stderr.
            imports: what to import before (`imports_of`).

        Raises:
            Refused: the server has more than one thread or a GPU context, has ended, or did not answer in time.
        """
        task = {"private": str(private), "environment": dict(environment), "cwd": str(cwd), "log": str(log)}
        try:
            self.socket.sendall(json.dumps({**task, "imports": list(imports)}).encode() + b"\n")
            while not self._gone:
                for message in self._read(PATIENCE_S):
                    if "pid" in message:
                        self._forked.add(message["pid"])
                        return Worker(self, message["pid"])
                    if "refused" in message:
                        raise Refused(message["refused"])
        except OSError as error:
            self.close()
            raise Refused(f"the fork server does not answer ({error})") from error
        self._said.seek(0)
        raise Refused(f"the fork server has ended: {self._said.read()[-500:].decode(errors='replace').strip()}")

    def ended(self, pid: int) -> int | None:
        """Return the exit code of the run ``pid``, None while it runs. Runs of a killed server are killed with it."""
        if pid not in self._codes and not self._gone:
            list(self._read(0.0))
        code = self._codes.get(pid, -signal.SIGKILL if self._gone else None)
        if code is not None:
            self._forked.discard(pid)
        return code

    def close(self) -> None:
        """End the server and every run that it still has."""
        self._gone = True
        self.socket.close()
        self.process.kill()
        self.process.wait()

    @property
    def usable(self) -> bool:
        """Tell whether it answers."""
        return not self._gone and self.process.poll() is None

    @property
    def busy(self) -> bool:
        """Tell whether a run of it may not have ended."""
        return any([self.ended(pid) is None for pid in list(self._forked)])

    def _read(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Messages that arrive within ``seconds``; exit codes are kept on the way."""
        if not select.select([self.socket], [], [], seconds)[0]:
            if seconds:
                raise TimeoutError(f"no answer in {seconds:g} s")
            return
        try:
            got = self.socket.recv(1 << 16)
        except ConnectionError:
            got = b""
        if not got:
            self._gone = True
        *lines, self._buffer = (self._buffer + got).split(b"\n")
        messages = [json.loads(line) for line in lines]
        self._codes.update({message["ended"]: message["code"] for message in messages if "ended" in message})
        yield from messages


_servers: list[Server] = []  # the last is the one used last
_lock = threading.Lock()


def fork(private: Path, environment: Mapping[str, str], cwd: Path, log: Path, imports: Sequence[str]) -> Worker:
    """Fork a run (see `Server.fork`) from the server of its environment. It is started if there is none.

    Raises:
        Refused: it cannot be forked; fresh processes can be started instead.
    """
    if sys.platform != "linux":
        raise Refused(f"runs are forked on Linux only, and this is {sys.platform}")
    with _lock:
        server = next((s for s in _servers if s.usable and s.early == _early(environment)), None)
        if server is None:
            server = Server(environment)
            atexit.register(server.close)
        for one in [s for s in _servers[:-KEPT] if not s.busy]:
            one.close()
        _servers[:] = [*(s for s in _servers if s.usable and s is not server), server]
        return server.fork(private, environment, cwd, log, imports)


def imports_of(notebook: Path) -> list[str]:
    """List what a notebook's cells import at their top from `PACKAGES`, in order. ``module`` or ``module:name``."""
    found: dict[str, None] = {}
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        with contextlib.suppress(SyntaxError):  # magics, or a cell that will say so itself
            for node in ast.parse("".join(cell["source"])).body:
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [f"{node.module}:{alias.name}" for alias in node.names]
                found |= dict.fromkeys(n for n in names if n.partition(":")[0].partition(".")[0] in PACKAGES)
    return list(found)


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``environment`` that a server must share with its runs."""
    return {k: v for k, v in environment.items() if not k.startswith(LATE) and k not in LATE_NAMES}


# ---- the server's side -----------------------------------------------------------------------------------------------


def serve(control: socket.socket, at_start: Mapping[str, str]) -> dict[str, Any] | None:
    """Answer until the runner is gone (None). In a forked child, return what it has to run.

    ``at_start`` is the environment before any import.
    """
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = b""
    while True:
        ready = select.select([control, wake], [], [])[0]
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 1 << 12)
            _reap(control)
        if control not in ready:
            continue
        got = control.recv(1 << 16)
        if not got:
            return None
        *lines, waiting = (waiting + got).split(b"\n")
        for line in lines:
            task = json.loads(line)
            _import_ahead(task["imports"])
            if why := why_not():
                _tell(control, {"refused": why})
                continue
            gc.freeze()  # a child's collector leaves these pages alone, so that they stay shared
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (wake, woken):
                    os.close(end)
                control.close()
                _become(task, at_start)
                return task
            _tell(control, {"pid": pid})


def _tell(control: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(ConnectionError):  # the runner is gone: the next read says so
        control.sendall(json.dumps(message).encode() + b"\n")


def _reap(control: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            _tell(control, {"ended": found[0], "code": os.waitstatus_to_exitcode(found[1])})


def _import_ahead(names: Sequence[str]) -> None:
    """Import modules, or of ``module:name`` also the submodule; one that fails is left to the cell that asks for it."""
    for module, _, name in (text.partition(":") for text in names):
        with contextlib.suppress(Exception):
            found = importlib.import_module(module)
            if name and not hasattr(found, name):
                importlib.import_module(f"{module}.{name}")
    for package, more in LATER.items():
        if package in sys.modules:
            for module in more:
                with contextlib.suppress(Exception):
                    importlib.import_module(module)
    if instructions := sys.modules.get("dsv4lib.emulator.isa.implementations"):
        instructions.load()


def why_not() -> str:
    """Say why this process must not fork; empty if it may. Other threads, which a child would lack, or an open GPU."""
    threads = [Path("/proc/self/task", name, "comm").read_text().strip() for name in os.listdir("/proc/self/task")]
    if len(threads) != 1:
        return f"the fork server has {len(threads)} threads ({', '.join(sorted(set(threads)))}), where one may fork"
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("/dev/nvidia"):
                return "an import has opened a GPU, which a forked process cannot use"
    return ""


def _become(task: Mapping[str, Any], at_start: Mapping[str, str]) -> None:
    """Make this forked process what a started one would be: session, stdio, environment, mark, paths, seeds."""
    os.setsid()
    processes.die_with_parent()
    log = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    by_imports = {name: value for name, value in os.environ.items() if at_start.get(name) != value}
    set_environment({**by_imports, **task["environment"]})
    write_mark(task["environment"][processes.MARK])
    os.chdir(task["cwd"])


def set_environment(environment: Mapping[str, str]) -> None:
    """Replace this process's environment, and what Python made of it when it started.

    PYTHONPATH stands where it would in ``sys.path``; what .pth files put before it stays before it.
    """
    own = _python_path(os.environ)
    at = next((number for number, folder in enumerate(sys.path) if folder in own), 0)
    rest = [[folder for folder in part if folder not in own] for part in (sys.path[:at], sys.path[at:])]
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = dict.fromkeys([*rest[0], *_python_path(environment), *rest[1]])
    sys.path_importer_cache.clear()
    tempfile.tempdir = None
    if numpy := sys.modules.get("numpy"):  # seeded at random when they are imported, as is `random`, which sees a fork
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()


def _python_path(environment: Mapping[str, str]) -> list[str]:
    return [os.path.abspath(p) for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]


def write_mark(token: str) -> None:
    """Write ``token`` where /proc shows this process's environment. That does not follow ``os.environ``.

    Raises:
        DSV4Error: there is no room that the process was started with (a variable `processes.MARK`).
    """
    import ctypes

    start, end = (int(word) for word in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    block, name = ctypes.string_at(start, end - start), f"{processes.MARK}=".encode()
    at = 0 if block.startswith(name) else block.find(b"\0" + name) + 1
    room = block.find(b"\0", at) - at - len(name)
    text = token.encode()
    if not block.startswith(name, at) or len(text) > room:
        raise DSV4Error(f"no room for the mark {token!r} in the environment that this process was started with")
    ctypes.memmove(start + at + len(name), text.ljust(room, b"\0"), room)


class IdleKernel:
    """A child forked before anything runs here. It becomes the notebook's kernel when papermill starts one."""

    def __init__(self) -> None:
        self.arguments: list[str] | None = None  # in the child: the kernel's command line, once it is requested
        self.returncode: int | None = None
        self.stdin = self.stdout = self.stderr = None
        wait, self._go = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid:
            os.close(wait)
            return
        os.close(self._go)
        os.setsid()
        processes.die_with_parent()
        with os.fdopen(wait) as pipe:
            message = pipe.read()
        if not message:  # no kernel was wanted
            os._exit(0)
        task = json.loads(message)
        set_environment(task["environment"])
        os.chdir(task["cwd"])
        self.arguments = task["arguments"]

    def launch(self, cmd: list[str], env: Mapping[str, str] | None = None, cwd: str | None = None, **other: Any) -> Any:
        """Stand in for ``jupyter_client.launcher.launch_kernel``. It is this child, if ``cmd`` is the lab's kernel."""
        from dsv4lib.lab.run import kernel

        if cmd[: len(kernel.COMMAND)] != kernel.COMMAND or self._go is None:
            from jupyter_client.launcher import launch_kernel

            return launch_kernel(cmd, env=env, cwd=cwd, **other)
        environment = {**(os.environ if env is None else env), "JPY_PARENT_PID": str(os.getpid())}
        task = {"arguments": cmd[len(kernel.COMMAND) :], "environment": environment, "cwd": cwd or os.getcwd()}
        with os.fdopen(self._go, "w") as pipe:
            pipe.write(json.dumps(task))
        self._go = None
        return self

    def poll(self) -> int | None:
        """Act as `subprocess.Popen`'s."""
        if self.returncode is None:
            try:
                found, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                found, status = self.pid, 0
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. ``timeout`` is not used by the Jupyter client, which polls first."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Act as `subprocess.Popen`'s."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Act as `subprocess.Popen`'s."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Act as `subprocess.Popen`'s."""
        self.send_signal(signal.SIGTERM)


def main(control: int) -> None:
    """Serve on the socket ``control``; in children, run a worker or its kernel."""
    from dsv4lib.lab.run import kernel

    at_start = dict(os.environ)
    kernel.prepare()
    if sys.path[0] == os.getcwd():
        del sys.path[0]
    absent = ("pyarrow", "rfc3987_syntax")  # papermill's way to Hadoop (0.5 s, and threads); see quick_nbformat
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    import papermill  # noqa: F401

    from dsv4lib.lab.run import worker

    _import_ahead(KERNEL)

    for name in absent:
        del sys.modules[name]
    server = socket.socket(fileno=control)
    server.set_inheritable(False)
    task = serve(server, at_start)
    if task is None:
        os._exit(0)
    idle = IdleKernel()
    if idle.arguments is not None:
        sys.argv = [str(kernel.__file__), *idle.arguments]
        kernel.run()
    else:
        worker.run(task["private"], idle)
        kernel.end_quickly()


if __name__ == "__main__":
    from dsv4lib.lab.run import forkserver  # not as __main__: a child's cells have a __main__ of their own

    forkserver.main(int(sys.argv[1]))
