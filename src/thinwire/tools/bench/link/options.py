"""The options of `thinwire bench link`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

RATES = ("100mbit", "1gbit", "10gbit")


@dataclass(frozen=True)
class Options:
    """Time and bytes of a training step over slow links, beside every peer."""

    rates: Annotated[tuple[str, ...], arg(metavar="RATE ...")] = RATES
    """Of each rank's link, each way: a number of bits a second, with kbit, mbit or gbit."""
    worlds: Annotated[tuple[int, ...], arg(metavar="INT ...")] = (2,)
    """Numbers of ranks, such as 2 4 8."""
    ways: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ("all",)
    """all, or some, such as "fp16 hook" "thinwire.AdamW topk:ratio=1%" "attach auto"; --ways help lists them."""
    model: Literal["gpt", "cnn"] = "gpt"
    """Linear layers with the shapes of a GPT's, or convolutions."""
    parameters: float = 7.35e6
    """About so many."""
    batch: int = 32
    """Samples for each rank and step."""
    steps: int = 20
    """Timed steps, in rounds of 5; fewer where they are slow, down to 5. Three go before, in each round."""
    relay: bool = False
    """Links by a relay in place of network namespaces: for where neither root nor a user namespace can make these."""
    timeline: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Write an HTML page: when rank 0 computed, compressed, exchanged and decoded in one step, for thinwire's ways."""
    out: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Write JSON lines to this file: the conditions, then a row for each rate, world and way."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> "Options":
        """Return the defaults. With --relay they leave out the highest rate, for which a relay is too slow."""
        return cls(rates=RATES[:2]) if "--relay" in arguments else cls()
