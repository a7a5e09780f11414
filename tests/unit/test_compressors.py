"""What compressors promise beyond the table: two halves, keys that do not collide, buffers kept apart."""

import pytest
import torch

import thinwire
from cases import ALL_SPECS, KEY, WITH_RESIDUAL, make_input
from oracle import same_bits
from thinwire import kernels
from thinwire.compressors.spec import mix_key
from thinwire.kernels.updates import AdamUpdate, MomentumUpdate, Update


@pytest.mark.parametrize("spec", WITH_RESIDUAL)
def test_encode_and_commit_are_compress(spec: str) -> None:
    compressor = thinwire.compressor(spec)
    tensor, residual = make_input("normal", 10_000, torch.float32)
    whole, halves = residual.clone(), residual.clone()
    expected = compressor.compress(tensor, whole, key=KEY)
    ct = compressor.encode(tensor, halves, key=KEY)
    assert same_bits(halves, residual), "encode wrote the residual"
    assert same_bits(ct.payload, expected.payload)
    compressor.commit(ct, tensor, halves)
    assert same_bits(halves, whole)


@pytest.mark.parametrize("spec", [*WITH_RESIDUAL, "topk:ratio=1/64,bits=2,chunk=none"])
@pytest.mark.parametrize("optimizer", ["none", "adam", "adam frozen", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_settle_is_commit_and_decode(spec: str, optimizer: str, dtype: torch.dtype) -> None:
    """In one pass where a kernel can, and bit by bit the same as one after the other."""
    compressor, numel = thinwire.compressor(spec), 150_001
    tensor, residual = make_input("normal", numel, dtype)
    m, v = torch.randn_like(residual), torch.rand_like(residual) + 0.5
    results = []
    for in_one in (False, True):
        sum_, kept, momentum, second = tensor.clone(), residual.clone(), m.clone(), v.clone()
        update: Update | None = {
            "none": None,
            "adam": AdamUpdate(momentum, second, 0.5, 1.0, 1.3, 1e-8, 10.0, 0.5, beta2=0.9),
            "adam frozen": AdamUpdate(momentum, second, 0.5, 1.0, 1.3, 1e-8, 10.0, 0.5),
            "sgd": MomentumUpdate(momentum, 1.0, 0.5, 2.0, divisor=2.0),
        }[optimizer]
        ct = compressor.encode(sum_, kept, key=KEY, update=update)
        other = compressor.encode(tensor, key=KEY)
        payloads = torch.stack([other.payload, ct.payload])
        if in_one:
            compressor.settle(ct, sum_, kept, payloads, 1, 0.5, update)
        else:
            if update is not None:
                update.commit(sum_)
            compressor.commit(ct, sum_, kept)
            compressor.decompress(ct, sum_, 0.5, payloads=payloads)
        results.append([sum_, kept, momentum, second])
    for name, apart, in_one in zip(["sum", "residual", "m", "v"], *results, strict=True):
        assert same_bits(apart, in_one), name


def test_commit_of_what_is_not_finite_does_nothing() -> None:
    compressor = thinwire.TopK("1/64", bits=2)
    tensor, residual = torch.full((5000,), torch.inf), torch.ones(5000)
    compressor.commit(compressor.encode(tensor, residual), tensor, residual)
    assert same_bits(residual, torch.ones(5000))


def test_commit_refuses_another_tensor_or_compressor() -> None:
    compressor, tensor = thinwire.TopK("1/64", bits=2), torch.ones(5000)
    ct = compressor.encode(tensor)
    with pytest.raises(ValueError, match=r"tensor of 4000 x torch.float32, expected 5000 x torch.float32"):
        compressor.commit(ct, tensor[:4000], torch.zeros(4000))
    with pytest.raises(ValueError, match="made by topk"):
        thinwire.Quantize(8).commit(ct, tensor, torch.zeros(5000))


def test_seeds_and_keys_do_not_collide() -> None:
    """A seed for each rank and a key for each step: no rank may draw what another drew a step before."""
    assert len({mix_key(seed, key) for seed in range(60) for key in range(60)}) == 3600


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_decoding_over_the_payload_is_refused(spec: str) -> None:
    compressor, memory = thinwire.compressor(spec), torch.zeros(1 << 16, dtype=torch.uint8)
    ct = compressor.compress(torch.randn(4096), key=KEY, out=memory[: compressor.nbytes(4096)])
    with pytest.raises(ValueError, match="out shares the payload's memory"):
        compressor.decompress(ct, memory[: 4 * 4096].view(torch.float32))


def test_damaged_positions_are_passed_over_alike_by_every_backend() -> None:
    """Collectives decode payloads that nobody has checked: too many ones, too few, and positions outside."""
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


def test_forces_of_overlapping_threads_do_not_outlive_them() -> None:
    first, second = kernels.force("reference"), kernels.force("cpu")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert thinwire.NoCompression().compress(torch.ones(3)).kernels == "cpu"
    second.__exit__(None, None, None)
    with kernels.force("reference"):
        assert thinwire.NoCompression().compress(torch.ones(3)).kernels == "reference"


@pytest.mark.parametrize("given", [None, 64, b"topk"])
def test_neither_spec_nor_compressor(given: object) -> None:
    with pytest.raises(ValueError, match="expected a Compressor or a spec"):
        thinwire.compressor(given)
