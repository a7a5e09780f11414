"""What compressors guarantee beyond the table: two halves, keys that do not collide, buffers apart, counters, a log."""

import copy
import logging
import pickle
import threading

import pytest
import torch

import thinwire
from support.cases import BACKENDS, KEY, SPECS, make_input
from support.oracle import same_bits
from support.pairwise import pairwise
from thinwire import Statistics, kernels
from thinwire.compressors.spec import mix_key
from thinwire.kernels.updates import AdamUpdate, MomentumUpdate, Update


def test_topk_rounds_the_number_of_elements_up(backend: str) -> None:
    """1 % of 4,096 is 40.96, and of the 904 that are left 9.04."""
    sent = thinwire.TopK(ratio="1%").compress(torch.arange(1.0, 5001.0)).decompress()
    assert sent[:4096].count_nonzero() == 41
    assert sent[4096:].count_nonzero() == 10


def test_of_equal_magnitudes_the_first_are_sent(backend: str) -> None:
    """Also if larger ones come after them."""
    tensor = torch.ones(4096)
    tensor[::2] = -1.0
    tensor[4000:4010] = 2.0
    positions = thinwire.TopK(ratio="1/64", bits=2).compress(tensor).decompress().nonzero().view(-1)
    assert positions.tolist() == [*range(54), *range(4000, 4010)]


def test_what_would_need_a_denormal_scale_is_kept(backend: str) -> None:
    """1 / scale would be infinite. Such a payload is refused by those who read it."""
    for spec in ("quantize:bits=1", "quantize:bits=2", "topk:ratio=1/64,bits=2"):
        tensor, residual = torch.full((4096,), 5e-39), torch.zeros(4096)
        sent = thinwire.compressor(spec).compress(tensor, residual)
        assert not thinwire.CompressedTensor.from_bytes(sent.to_bytes()).decompress().any(), spec
        assert torch.equal(residual, tensor), spec


OPTIMIZERS = ["none", "adam", "adam frozen", "sgd", "nesterov", "no momentum"]


def make_update(optimizer: str, m: torch.Tensor, v: torch.Tensor) -> Update | None:
    weights = torch.linspace(-1, 1, m.numel())
    half = m.numel() // 2
    parameters = ((0, half, weights[:half]), (half, m.numel(), weights[half:]))
    return {
        "none": None,
        "adam": AdamUpdate(m, v, 0.5, 0.9, 1.3, 1e-8, 10.0, 0.5, beta2=0.9),
        "adam frozen": AdamUpdate(m, v, 0.5, 1.0, 1.3, 1e-8, 10.0, 0.5),
        "sgd": MomentumUpdate(m, 0.5, rate=2.0),
        "nesterov": MomentumUpdate(m, 0.5, 0.9, nesterov=True, rate=2.0, decay=0.1, parameters=parameters),
        "no momentum": MomentumUpdate(None, 0.0, decay=0.1, parameters=parameters),
    }[optimizer]


@pytest.mark.parametrize("name", SPECS)
def test_apply_is_commit_and_decode(name: str) -> None:
    """In one pass where a kernel can, and bit by bit the same as one after the other; over the gradient, or apart."""
    numel, dtypes, twice = 150_001, (torch.float32, torch.float64, torch.bfloat16), (True, False)
    columns = (SPECS[name], OPTIMIZERS, dtypes, twice, twice, BACKENDS)
    for spec, optimizer, dtype, over, has_residual, backend in pairwise(*columns):
        what = f"{spec}, {optimizer}, {dtype}, over {over}, residual {has_residual}, {backend}"
        compressor, (tensor, residual) = thinwire.compressor(spec), make_input("normal", numel, dtype)
        m, v = torch.randn_like(residual), torch.rand_like(residual) + 0.5
        results = []
        for in_one in (False, True):
            gradient, momentum, second = tensor.clone(), m.clone(), v.clone()
            kept = residual.clone() if has_residual else None
            out = gradient if over else torch.full((numel,), torch.nan)
            update, encoded = make_update(optimizer, momentum, second), gradient.clone()
            with kernels.force(backend):
                if update is not None:
                    encoded = torch.empty_like(m)
                    update.write(gradient, encoded)
                ct, other = compressor.encode(encoded, kept, key=KEY), compressor.encode(encoded.flip(0), key=KEY)
                assert kept is None or same_bits(kept, residual), f"{what}: encode wrote the residual"
                payloads = torch.stack([other.payload, ct.payload])
                if in_one:
                    compressor.apply(ct, gradient, kept, payloads, 1, 0.5, update, None if over else out)
                else:
                    if update is not None:
                        update.advance(gradient, None)
                    if kept is not None:
                        compressor.commit(ct, encoded, kept)
                    compressor.decompress(ct, out, 0.5, payloads=payloads)
            assert over or same_bits(gradient, tensor), f"{what}: the gradient was written"
            results.append([out, momentum, second] if kept is None else [out, momentum, second, kept])
        for part, apart, together in zip(["sum", "m", "v", "residual"], *results, strict=False):
            assert same_bits(apart, together), f"{what}: {part}"


def test_apply_refuses_tensors_that_do_not_fit() -> None:
    compressor, gradient, residual = thinwire.TopK("1/64", bits=2), torch.randn(5000), torch.zeros(5000)
    ct, memory = compressor.encode(gradient, residual), torch.randn(5001)
    rows, other = ct.payload.unsqueeze(0), torch.empty(5000)
    for message, given, kept, out in (
        ("gradient holds 4999 elements, expected 5000", gradient[:4999], residual, other),
        ("residual holds 4999 elements, expected 5000", gradient, residual[:4999], None),
        (r"residual has shape .*, torch.float64", gradient, residual.double(), None),
        ("gradient is not contiguous", gradient.repeat(2)[::2], residual, other),
        ("out holds", gradient, residual, torch.empty(4999)),
        ("out shares the residual's memory", gradient, residual, residual),
        ("out shares the gradient's memory", memory[:5000], residual, memory[1:]),
    ):
        with pytest.raises(ValueError, match=message):
            compressor.apply(ct, given, kept, rows, 0, 1.0, out=out)
    for own in (-1, 1, 1 << 40):
        with pytest.raises(ValueError, match=f"own {own}, expected the place of this rank's payload, 0 to 0"):
            compressor.apply(ct, gradient, residual, rows, own, 1.0)
    assert same_bits(residual, torch.zeros(5000)), "a refused call has written the residual"


def test_commit_does_nothing_for_another_tensor_or_what_is_not_finite() -> None:
    compressor, tensor, residual = thinwire.TopK("1/64", bits=2), torch.ones(5000), torch.ones(5000)
    spoilt = torch.full((5000,), torch.inf)
    compressor.commit(compressor.encode(spoilt, residual), spoilt, residual)
    ct = compressor.encode(tensor)
    with pytest.raises(ValueError, match=r"tensor of 4000 x torch.float32, expected 5000 x torch.float32"):
        compressor.commit(ct, tensor[:4000], residual[:4000])
    with pytest.raises(ValueError, match="made by topk"):
        thinwire.Quantize(8).commit(ct, tensor, residual)
    assert same_bits(residual, torch.ones(5000))


def test_seeds_and_keys_do_not_collide() -> None:
    """A seed for each rank and a key for each step: no rank may draw what another drew a step before."""
    assert len({mix_key(seed, key) for seed in range(60) for key in range(60)}) == 3600


def test_damaged_positions_are_passed_over_alike_by_every_backend() -> None:
    """Collectives decode payloads that were not checked: too many ones, too few, and positions outside."""
    compressor = thinwire.TopK("1/64", bits=2)
    ct = compressor.compress(torch.randn(3 * 4096 + 100))
    for seed in range(20):
        damaged = torch.randint(0, 256, ct.payload.shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
        damaged[: 84 * 3].view(3, 84)[:, :4] = torch.tensor([0xC0, 0x3F, 0x40, 0x40], dtype=torch.uint8)  # scales
        damaged[252:256] = torch.tensor([0xC0, 0x3F, 0x40, 0x40], dtype=torch.uint8)
        results = []
        for backend in ("cpu", "reference"):
            with kernels.force(backend):
                results.append(compressor.accumulate(ct, torch.zeros(ct.numel), payloads=damaged.unsqueeze(0)))
        assert same_bits(*results), f"seed {seed}"


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
