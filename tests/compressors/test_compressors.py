"""What compressors guarantee beyond the table: two halves, keys that do not collide, buffers kept apart."""

import pytest
import torch

import thinwire
from support.cases import ALL_SPECS, BACKENDS, KEY, SPECS, make_input
from support.oracle import same_bits
from support.pairwise import pairwise
from thinwire import kernels
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


def test_encode_and_commit_are_compress() -> None:
    for spec in ALL_SPECS:
        compressor = thinwire.compressor(spec)
        tensor, residual = make_input("normal", 10_000, torch.float32)
        whole, halves = residual.clone(), residual.clone()
        expected = compressor.compress(tensor, whole, key=KEY)
        ct = compressor.encode(tensor, halves, key=KEY)
        assert same_bits(halves, residual), f"{spec}: encode wrote the residual"
        assert same_bits(ct.payload, expected.payload), spec
        compressor.commit(ct, tensor, halves)
        assert same_bits(halves, whole), spec


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


def encoded_of(update: Update | None, gradient: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """What an optimizer compresses: its update, or the gradient."""
    if update is None:
        return gradient.clone()
    written = torch.empty_like(m)
    update.write(gradient, written)
    return written


@pytest.mark.parametrize("name", SPECS)
def test_apply_is_commit_and_decode(name: str) -> None:
    """In one pass where a kernel can, and bit by bit the same as one after the other; over the gradient, or apart."""
    numel, dtypes = 150_001, (torch.float32, torch.float64, torch.bfloat16)
    for spec, optimizer, dtype, over in pairwise(SPECS[name], OPTIMIZERS, dtypes, (True, False)):
        compressor, (tensor, residual) = thinwire.compressor(spec), make_input("normal", numel, dtype)
        m, v = torch.randn_like(residual), torch.rand_like(residual) + 0.5
        results = []
        for in_one in (False, True):
            gradient, kept, momentum, second = tensor.clone(), residual.clone(), m.clone(), v.clone()
            out = gradient if over else torch.full((numel,), torch.nan)
            update = make_update(optimizer, momentum, second)
            encoded = encoded_of(update, gradient, m)
            ct = compressor.encode(encoded, kept, key=KEY)
            other = compressor.encode(encoded.flip(0), key=KEY)
            payloads = torch.stack([other.payload, ct.payload])
            if in_one:
                compressor.apply(ct, gradient, kept, payloads, 1, 0.5, update, None if over else out)
            else:
                if update is not None:
                    update.advance(gradient, None)
                compressor.commit(ct, encoded, kept)
                compressor.decompress(ct, out, 0.5, payloads=payloads)
            assert over or same_bits(gradient, tensor), f"{spec}, {optimizer}, {dtype}: the gradient was written"
            results.append([out, kept, momentum, second])
        for part, apart, in_one in zip(["sum", "residual", "m", "v"], *results, strict=True):
            assert same_bits(apart, in_one), f"{spec}, {optimizer}, {dtype}, over {over}: {part}"


def test_nothing_is_lost_over_some_steps() -> None:
    """All that was decoded, and what the residual still has, is the sum of all updates."""
    numel, specs = 20_000, ("topk:ratio=1/64,bits=2", "topk:ratio=1/64,bits=32", "quantize:bits=4")
    dtypes = (torch.float32, torch.bfloat16)
    for backend, spec, optimizer, dtype, over in pairwise(BACKENDS, specs, OPTIMIZERS, dtypes, (False, True)):
        what, compressor = f"{backend}, {spec}, {optimizer}, {dtype}, over {over}", thinwire.compressor(spec)
        residual, m, v = torch.zeros(numel), torch.zeros(numel), torch.rand(numel) + 0.5
        sent, came = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
        with kernels.force(backend):
            for step in range(5):
                gradient = torch.randn(numel, generator=torch.Generator().manual_seed(step)).to(dtype)
                before, out = gradient.clone(), gradient if over else torch.empty(numel)
                update = make_update(optimizer, m, v)
                encoded = encoded_of(update, gradient, m)
                assert same_bits(gradient, before), f"{what}: the gradient was written"
                ct = compressor.encode(encoded, residual)
                compressor.apply(ct, gradient, residual, ct.payload.unsqueeze(0), 0, 1.0, update, None if over else out)
                assert over or same_bits(gradient, before), f"{what}: the gradient was written"
                assert same_bits(out, compressor.decompress(ct, torch.empty_like(out))), what
                sent += compressor.decompress(ct, torch.empty(numel))
                came += encoded
        torch.testing.assert_close(sent + residual, came, rtol=1e-5, atol=1e-5, msg=lambda m, what=what: f"{what}: {m}")


def test_apply_without_a_residual_advances_the_moments() -> None:
    compressor, gradient = thinwire.TopK("1/64", bits=2), torch.randn(5000)
    m, v = torch.zeros(5000), torch.ones(5000)
    update = make_update("adam", m, v)
    ct = compressor.encode(encoded_of(update, gradient, m))
    out = torch.empty(5000)
    compressor.apply(ct, gradient, None, ct.payload.unsqueeze(0), 0, 1.0, update, out)
    torch.testing.assert_close(m, 0.5 * 0.9 * gradient)
    assert same_bits(out, compressor.decompress(ct))


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


def test_decoding_over_the_payload_is_refused() -> None:
    for spec in ALL_SPECS:
        compressor, memory = thinwire.compressor(spec), torch.zeros(1 << 16, dtype=torch.uint8)
        ct = compressor.compress(torch.randn(4096), key=KEY, out=memory[: compressor.nbytes(4096)])
        with pytest.raises(ValueError, match="out shares the payload's memory"):
            compressor.decompress(ct, memory[: 4 * 4096].view(torch.float32))


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


def test_forces_of_overlapping_threads_do_not_outlive_them() -> None:
    first, second = kernels.force("reference"), kernels.force("cpu")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert thinwire.NoCompression().compress(torch.ones(3)).kernels == "cpu"
    second.__exit__(None, None, None)
    with kernels.force("reference"):
        assert thinwire.NoCompression().compress(torch.ones(3)).kernels == "reference"


def test_neither_spec_nor_compressor() -> None:
    for given in (None, 64, b"topk"):
        with pytest.raises(ValueError, match="expected a Compressor or a spec"):
            thinwire.compressor(given)
