"""A rank that computes nothing: `python -m headwater.bench._null_rank FD`.

It unpacks each step like a real rank, and answers it.
"""

import socket
import sys

from headwater.device.parallel.channel import ChannelClosed, RankChannel, RankMessage
from headwater.device.parallel.step_message import StepUnpacker
from headwater.launch.rank_process import SPIN_S


def main(descriptor: int) -> int:
    """Answer steps until the other end closes the connection."""
    sock = socket.socket(fileno=descriptor)
    channel = RankChannel(sock, send_timeout_s=10.0, spin_s=SPIN_S)
    unpacker = StepUnpacker()
    try:
        while True:
            unpacker.unpack(channel.receive().payload)
            channel.send(RankMessage.READY)
    except ChannelClosed:
        return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
