"""The notice board of a group, on a store whose `set` returns before the text is there, as torch's TCPStore does."""

from typing import Any

import torch.distributed as dist

from thinwire.collectives.transport.board import Board


class Connection(dist.Store):  # type: ignore[name-defined, misc]
    """A connection to a store that handles its requests in their order, and waits for answers where there are some."""

    def __init__(self, texts: dict[str, bytes]) -> None:
        super().__init__()
        self._texts, self._under_way = texts, dict[str, bytes]()

    def set(self, key: str, value: bytes) -> None:
        self._under_way[key] = value

    def check(self, keys: list[str]) -> bool:
        self._texts.update(self._under_way)
        return all(key in self._texts for key in keys)

    def get(self, key: str) -> bytes:
        assert self.check([key])
        return self._texts[key]


def test_what_is_written_can_be_read_by_all_ranks() -> None:
    texts: dict[str, Any] = {}
    writer, reader = (Board("group", None, Connection(texts)) for _ in range(2))
    assert reader.read("saved") is None
    writer.write("saved", "5")
    assert reader.read("saved") == "5"
    assert (writer.lost, reader.lost) == (None, None)
