"""Cases for the tests of the plan: round numbers, so that what comes out can be worked out by hand."""

from dataclasses import replace

import torch

from thinwire.compressors import Compressor, compressor
from thinwire.tools.plan.costs import Costs, Speeds, buckets
from thinwire.tools.plan.methods import methods_for
from thinwire.tools.plan.model import Case, Prediction
from thinwire.tools.plan.options import Cluster

TOPK, EIGHT = "topk:ratio=1/64,bits=2", "quantize:bits=8"
MADE: dict[str, Compressor] = {spec: compressor(spec) for spec in (EIGHT, TOPK)}
FREE = Speeds(
    origin="nothing", codecs=dict.fromkeys(MADE.values(), Costs()),
    operation=0, transfer=0, message=0, round=0, ring_byte=0, fp16_byte=0, spread_byte=0,
)  # fmt: skip
COSTLY = Speeds(
    origin="something", codecs=dict.fromkeys(MADE.values(), Costs(5e-10, 5e-10, 2e-10, 1e-10)), operation=5e-4,
    transfer=3e-4, message=2e-5, round=1e-4, ring_byte=8e-10, fp16_byte=1.7e-9, spread_byte=1e-9,
)  # fmt: skip
PLAIN = Cluster(8, 1e9, 0.0, share=1.0)


def case(params: int = 50_000_000, seconds: float = 0.3, speeds: Speeds = FREE, **changes: object) -> Case:
    """8 ranks on accelerators, links of 1 Gbit/s without latency. `changes` are to the cluster."""
    return Case(buckets(params, 4), seconds, replace(PLAIN, **changes), speeds)  # type: ignore[arg-type]


def slower(factor: float) -> Speeds:
    """COSTLY with a codec that takes `factor` times as long."""
    costs = {given: Costs(*(factor * seconds for seconds in each)) for given, each in COSTLY.codecs.items()}
    return replace(COSTLY, codecs=costs)


def predictions(given: Case) -> list[Prediction]:
    methods = methods_for(MADE, given.cluster, torch.float32, given.shard)
    return [given.predict(method) for method in methods]
