"""What copies of blocks between two instances could reach at most, on this machine in this run.

Links within the device are compared with one copy there. Links through main memory are compared
with pinned copies, and `tcp` also with what bare sockets of the kernel carry.
"""

import socket
from threading import Thread

import torch

from headwater.bench._gpu_ceilings import time_ms
from headwater.bench._gpu_engine import DEVICE
from headwater.bench._gpu_handoff_process import Far
from headwater.clock import SystemClock

_NUM_CONNECTIONS = (1, 4)
_CONNECTION_BYTES = 1 << 30
_CALL_BYTES = 8 << 20


def measure_copies() -> dict[str, float]:
    """GB/s of one copy of a prompt's KV: within the device, and from and to pinned memory."""
    num_bytes, host_bytes = 4 << 30, 1 << 30
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)
    target = torch.zeros_like(source)
    host = torch.empty(host_bytes, dtype=torch.uint8, pin_memory=True)
    part = source[:host_bytes]
    inside_ms = time_ms(lambda: target.copy_(source), 9)
    up_ms = time_ms(lambda: part.copy_(host, non_blocking=True))
    down_ms = time_ms(lambda: host.copy_(part, non_blocking=True))
    return {
        "device_copy_gb_s": num_bytes / inside_ms / 1e6,
        "host_to_device_gb_s": host_bytes / up_ms / 1e6,
        "device_to_host_gb_s": host_bytes / down_ms / 1e6,
    }


def measure_loopback(far: Far) -> dict[str, float]:
    """GB/s that the other process sends through bare TCP connections of this machine."""
    return {f"loopback_{count}_gb_s": _loopback_gb_s(far, count) for count in _NUM_CONNECTIONS}


def _loopback_gb_s(far: Far, count: int) -> float:
    clock = SystemClock()
    with socket.create_server(("127.0.0.1", 0), backlog=count) as listener:
        far.tell({"port": listener.getsockname()[1], "count": count})
        connected = [listener.accept()[0] for _ in range(count)]
        threads = [Thread(target=_receive_all, args=(each,)) for each in connected]
        began_s = clock.now()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = clock.now() - began_s
    far.listen()
    return count * _CONNECTION_BYTES / seconds / 1e9


def send_loopback(port: int, count: int) -> None:
    """The other end: send through this many connections at once."""
    threads = []
    for _ in range(count):
        connected = socket.create_connection(("127.0.0.1", port))
        threads.append(Thread(target=_send_all, args=(connected,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _receive_all(connected: socket.socket) -> None:
    buffer = bytearray(_CALL_BYTES)
    with connected:
        while connected.recv_into(buffer, 0, socket.MSG_WAITALL):
            pass


def _send_all(connected: socket.socket) -> None:
    block = bytes(_CALL_BYTES)
    with connected:
        for _ in range(_CONNECTION_BYTES // _CALL_BYTES):
            connected.sendall(block)
