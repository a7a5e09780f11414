"""What a compressor says about itself: counters and a debug log."""

import copy
import logging
import pickle
import threading

import pytest
import torch

import thinwire
from thinwire import Statistics


def test_counts_and_ratio(backend: str) -> None:
    """Of what is compressed; reading is not counted."""
    compressor = thinwire.compressor("topk:ratio=1/64,bits=2")
    assert (compressor.stats.calls, compressor.stats.reduction) == (0, 1.0)
    ct = compressor.compress(torch.randn(8192))
    compressor.accumulate(ct, ct.decompress())
    compressor.compress(torch.randn(4096, dtype=torch.float64), torch.zeros(4096, dtype=torch.float64))
    stats = compressor.stats
    sent = compressor.nbytes(8192) + compressor.nbytes(4096, torch.float64)
    assert (stats.calls, stats.bytes_before, stats.bytes_sent) == (2, 8192 * 4 + 4096 * 8, sent)
    assert stats.reduction == stats.bytes_before / sent
    assert stats.seconds > 0
    assert (stats.nonfinite, stats.kernels) == (0, {backend: 2})


def test_copies_are_equal_and_count_on_their_own() -> None:
    """To a worker process, or into a checkpoint: no lock may get in the way."""
    compressor = thinwire.TopK("1/64", bits=2)
    compressor.stats.add(100, 10, seconds=0.5, finite=True, kernels="cpu")
    for twin in (pickle.loads(pickle.dumps(compressor)), copy.deepcopy(compressor)):
        assert twin.stats == compressor.stats
        twin.stats.add(100, 10, seconds=0.5, finite=True, kernels="cpu")
        assert compressor.stats.calls == 1
        assert (twin, hash(twin), repr(twin)) == (compressor, hash(compressor), repr(compressor))


def test_threads_lose_no_count() -> None:
    stats, start = Statistics(), threading.Barrier(8)

    def work() -> None:
        start.wait(timeout=60)
        for _ in range(2000):
            stats.add(8, 2, seconds=0.5, finite=False, kernels="cpu")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert stats == Statistics(16_000, 128_000, 32_000, 8000.0, {"cpu": 16_000}, 16_000)
    assert stats.nonfinite == 16_000


def test_debug_log_if_asked(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    compressor = thinwire.compressor("topk:ratio=1/64,bits=2")
    with caplog.at_level(logging.INFO, logger="thinwire"):
        compressor.compress(torch.ones(8192))
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, logger="thinwire"):
        compressor.compress(torch.ones(8192))
        compressor.compress(torch.full((8192,), torch.nan))
    lines = [record.getMessage() for record in caplog.records if record.name == "thinwire"]
    start = "compress topk:ratio=1/64,bits=2,chunk=4096: 8192 x torch.float32, 32768 -> 168 bytes, "
    assert all(line.startswith(start) and f"kernels {backend}" in line for line in lines), lines
    assert ["NOT FINITE: residual left as it was" in line for line in lines] == [False, True]
