"""A KV event consumer that knows only the format, and no code of Headwater."""

import msgspec
import zmq


class Consumer:
    """Follows one instance; `blocks` is what it believes to be cached, by medium.

    `lose` messages are read but not applied, as if they had been lost.
    """

    def __init__(self, endpoint, replay_endpoint, topic=b""):
        self.blocks: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        self.next = 0
        self.token_ids = []
        self.snapshots = 0
        self._context = zmq.Context()
        self._replay_endpoint = replay_endpoint
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic)
        self._sub.connect(endpoint)

    def lose(self, count):
        for _ in range(count):
            assert self._sub.poll(5000), "a message to lose did not come"
            self._sub.recv_multipart()

    def hear(self):
        """Apply published messages; request missing ones first."""
        while self._sub.poll(20):
            _topic, sequence, payload = self._sub.recv_multipart()
            number = int.from_bytes(sequence, "big")
            if number > self.next:
                self.ask()
            if number == self.next:
                self.apply(payload)
                self.next = number + 1

    def ask(self, start=None):
        """Request a replay from `start`; afterwards every batch up to now is applied."""
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.connect(self._replay_endpoint)
            start = self.next if start is None else start
            dealer.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                assert dealer.poll(5000), "no replay"
                empty, _topic, sequence, payload = dealer.recv_multipart()
                assert empty == b""
                if sequence == b"\xff" * 8:
                    assert payload == b""
                    return
                number = int.from_bytes(sequence, "big")
                if number != self.next:
                    self.snapshots += 1
                self.apply(payload)
                self.next = number + 1

    def apply(self, payload):
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert ts > 1.6e9
        assert rank == 0
        for event in events:
            getattr(self, event.pop("type"))(**event)

    def BlockStored(
        self, block_hashes, parent_block_hash, token_ids, block_size, medium, **more
    ):
        assert set(more) == {"lora_id", "lora_name", "extra_keys"}
        assert token_ids == [] or len(token_ids) == len(block_hashes) * block_size
        known = set().union(*self.blocks.values())
        assert parent_block_hash is None or parent_block_hash in known
        self.blocks[medium] |= set(block_hashes)
        self.token_ids += token_ids

    def BlockRemoved(self, block_hashes, medium):
        assert set(block_hashes) <= self.blocks[medium]
        self.blocks[medium] -= set(block_hashes)

    def AllBlocksCleared(self):
        for medium in self.blocks.values():
            medium.clear()

    def close(self):
        self._context.destroy(linger=0)
