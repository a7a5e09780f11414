"""Hostile frames with right checksums, many in a case: each is refused, or packs to the same bytes and decodes."""

from functools import cache
from random import Random

import torch

from soak.campaign import Tried
from support.cases import DTYPES
from support.framing import FORGERIES, Fields, take_apart
from support.samples import SMALL, accept_or_refuse, sample

FRAMES, DECODED = 10_000, 50
"""Frames in a case, and how many accepted ones come before one that is decoded by every backend, too."""


@cache
def good_frames() -> list[tuple[Fields, bytes, bytes]]:
    """Return (header fields, spec, payload) of small frames of every compressor and dtype, marked ones too."""
    cases = [(spec, numel, dtype) for spec in SMALL for numel in (0, 1, 7, 33, 100, 300) for dtype in DTYPES]
    made = [sample(*case) for case in cases] + [sample(spec, 4097, torch.float32) for spec in SMALL]
    made += [sample(spec, 100, torch.float32, marked=True) for spec in SMALL]
    return [take_apart(one.to_bytes()) for one in made]


def frames(draw: Random) -> Tried:
    accepted = 0
    good = good_frames()
    for number in range(FRAMES):
        data = draw.choice(FORGERIES)(draw, *draw.choice(good))
        try:
            accepted += accept_or_refuse(data, decodes=accepted % DECODED == 0) is not None
        except Exception as error:
            error.add_note(f"frame {number} of the case, in hex: {data.hex()}")
            raise
    assert 0 < accepted < FRAMES, f"{accepted} of {FRAMES} were accepted"
    return Tried(f"{FRAMES:,} frames, {accepted:,} of them accepted", {"frames": FRAMES})
