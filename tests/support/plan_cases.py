"""Cases for the tests of the plan: round numbers, so that what comes out can be worked out by hand."""

from dataclasses import replace

from thinwire.compressors import Compressor, compressor
from thinwire.tools.plan.cluster import Cluster
from thinwire.tools.plan.costs import Bucket, Costs, Speeds, Work, of_count
from thinwire.tools.plan.model import Case

TOPK, EIGHT = "topk:ratio=1/64,bits=2", "quantize:bits=8"
MADE: dict[str, Compressor] = {spec: compressor(spec) for spec in (EIGHT, TOPK)}
FREE = Speeds(
    origin="free", codecs=dict.fromkeys(MADE.values(), Costs(0, 0, 0)), halves=Costs(0, 0, 0),
    operation=0, transfer=0, message=0, round=0, ring_byte=0, fp16_byte=0, spread_byte=0,
)  # fmt: skip
COSTLY = Speeds(
    origin="costly", codecs=dict.fromkeys(MADE.values(), Costs(5e-10, 5e-10, 2e-10, 1e-10)),
    halves=Costs(3e-10, 0, 2e-10), operation=5e-4, transfer=3e-4, message=2e-5, round=1e-4, ring_byte=8e-10,
    fp16_byte=1.7e-9, spread_byte=1e-9,
)  # fmt: skip
PLAIN = Cluster(8, 1e9, 0.0, peer_share=1.0, spread_share=1.0)


def case(
    params: int = 50_000_000, seconds: float = 0.3, speeds: Speeds = FREE, cluster: Cluster = PLAIN, **changes: object
) -> Case:
    """`changes` are to the cluster. No parameter is small."""
    work = Work.of_step(of_count(params), seconds)
    work = replace(work, buckets=tuple(Bucket(bucket.numel, bucket.numel) for bucket in work.buckets))
    return Case(work, replace(cluster, **changes), speeds)  # type: ignore[arg-type]
