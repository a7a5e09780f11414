"""One of two ranks: rank 0 ends while a handle is under way, rank 1 waits until its input is closed.

python -m support.leaving_rank STORE RANK WHEN     WHEN: "inside" of the encoding, or "after" it; in tests/
"""

import sys
from typing import Any

import torch
import torch.distributed as dist

import thinwire
from thinwire.collectives.transport.operation import watch


def main(path: str, rank: int, when: str) -> None:
    store: Any = dist.FileStore(path, 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    thinwire.all_reduce_compressed(torch.ones(5000), "quantize:bits=8")
    if rank == 1:
        sys.stdin.read()
        return
    if when == "inside":  # Python's own end waits for the encoding, after which the exchange must not begin
        encode = thinwire.Quantize.encode

        def end_and_encode(*args: Any, **options: Any) -> Any:
            watch.end_all()
            return encode(*args, **options)

        thinwire.Quantize.encode = end_and_encode  # type: ignore[method-assign]
    global work
    work = thinwire.all_reduce_compressed(torch.ones(5000), "quantize:bits=8", async_op=True)
    print("left")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
