"""Worker processes that read long request bodies for one event loop.

Parsing holds the interpreter lock, so a thread would not help: a body of 15 MB stops an event loop
for seconds. A worker is `python -m MODULE`, whose main calls `serve_requests`. It ends when its
input ends, so it does not outlive the server.

    request   length (8 bytes), length of the task's name (1), name, limit (8), body
    response  length (8 bytes), result
"""

import asyncio
import contextlib
import ctypes
import gc
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from headwater.server.errors import RequestRefused

_MAX_WORKERS = 2
_TIMEOUT_S = 30.0
_MAX_MEMORY_BYTES = 4 << 30

Task = Callable[[str, bytes, int], bytes]
"""The work of a worker: takes the name of a task, a body and a limit, and returns the
result."""


class WorkerPool:
    """Sends tasks to workers; `close` ends them."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._threads = ThreadPoolExecutor(_MAX_WORKERS, thread_name_prefix="body")
        self._slots = asyncio.Semaphore(_MAX_WORKERS)

    async def ask(self, task: str, body: bytes, limit: int) -> bytes:
        """The result of one task. Raises RequestRefused (413) when the worker fails.

        The worker of a cancelled request finishes its task. Otherwise a client that sends
        bodies and disconnects would make the server start one process after another.
        """
        await self._slots.acquire()
        worker = self._idle.pop() if self._idle else _Worker(self._module)
        self._all.add(worker)
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._threads, worker.ask, task.encode(), body, limit)
        deadline = loop.call_later(_TIMEOUT_S, _end_in_thread, worker)

        def finished(call: "asyncio.Future[bytes]") -> None:
            deadline.cancel()
            self._slots.release()
            if call.cancelled() or call.exception() is not None:
                # The pipe may contain half a result, so this worker is not used again.
                self._all.discard(worker)
                _end_in_thread(worker)
            else:
                self._idle.append(worker)

        call.add_done_callback(finished)
        try:
            return await asyncio.shield(call)
        except (OSError, EOFError, ValueError) as exc:
            raise RequestRefused(
                f"the body takes more than {_TIMEOUT_S:.0f} s or too much memory to parse; send "
                "a smaller one",
                status=413,
            ) from exc

    def close(self) -> None:
        """End the workers. Calling it twice is safe."""
        for worker in self._all:
            worker.end()
        self._all.clear()
        self._idle.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _end_in_thread(worker: "_Worker") -> None:
    """End `worker` in a thread, because the memory of a large process takes long to free."""
    threading.Thread(target=worker.end, name="worker-end", daemon=True).start()


class _Worker:
    """One worker process, started by the first `ask`. `ask` and `end` block their thread, but
    release the interpreter lock while they wait."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = False
        self._lock = threading.Lock()

    def ask(self, task: bytes, body: bytes, limit: int) -> bytes:
        """Send a body and wait for the result. Raises OSError or EOFError when the worker
        died."""
        process = self._started()
        source, sink = process.stdout, process.stdin
        assert source is not None, "the process has pipes"
        assert sink is not None, "the process has pipes"
        head = len(task).to_bytes(1, "big") + task + limit.to_bytes(8, "big")
        sink.write((len(head) + len(body)).to_bytes(8, "big") + head)
        sink.write(body)
        sink.flush()
        size = int.from_bytes(source.read(8), "big")
        result = source.read(size)
        if not size or len(result) < size:
            raise EOFError("the worker ended")
        return result

    def end(self) -> None:
        """Kill the process; a thread that waits for a result gets EOFError. Calling it twice is
        safe."""
        with self._lock:
            self._has_ended = True
            process = self._process
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # a part of a body is left in its buffer
                    pipe.close()

    def _started(self) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._has_ended:
                raise EOFError("the worker has ended")
            if self._process is None:
                # In a session of its own, because Ctrl-C in a terminal must reach only the
                # server, which then ends the worker.
                self._process = subprocess.Popen(
                    [sys.executable, "-m", self._module],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                )
            return self._process


def serve_requests(work: Task) -> None:
    """The main of a worker: run `work` for each request until its input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    # A body is a tree, freed by reference counts. The cycle collector would traverse it again
    # and again while it grows, which takes longer than parsing.
    gc.disable()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while size := int.from_bytes(source.read(8), "big"):
        message = source.read(size)
        end = 1 + message[0]
        limit = int.from_bytes(message[end : end + 8], "big")
        try:
            result = work(message[1:end].decode(), message[end + 8 :], limit)
        except MemoryError:
            sys.exit(1)  # the server answers 413 and starts another worker
        sink.write(len(result).to_bytes(8, "big") + result)
        sink.flush()
        gc.collect()
        _give_back()


def _give_back() -> None:
    """Return free memory to the system. Otherwise a worker would keep as much as its largest
    body took."""
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)
