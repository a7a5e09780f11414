"""Parse `--host`, which describes a node and the network between nodes as key=value,..."""

from dataclasses import dataclass, fields

from thinwire.tools.bench.link.settings import parse_rate

from .units import parse_count, parse_share

KEYS = "ranks, cores, inside, per_switch, oversubscription, jitter"


@dataclass(frozen=True)
class Host:
    """Properties of a node; all nodes are identical.

    `per_switch`, `oversubscription` and `jitter` are for the simulation, which runs if one of them is given.
    """

    ranks: int = 1
    """Ranks that share the link and the cores of the node."""
    cores: int | None = None
    """CPU cores of the node; None if the model, and with it the codec, runs on an accelerator."""
    inside: float = 100e9
    """Bits per second between two ranks of the node."""
    per_switch: int | None = None
    """Nodes per switch; another switch connects all switches. None if all nodes are at one switch."""
    oversubscription: float = 1.0
    """Rate of all nodes of a switch together, divided by the rate of the link from that switch to the others."""
    jitter: float = 0.0
    """Standard deviation of the compute time over ranks, as a share of the compute time."""

    @property
    def simulated(self) -> bool:
        """Return whether one of the options of the simulation is given."""
        return self.per_switch is not None or self.oversubscription != 1.0 or self.jitter != 0.0


def parse_host(text: str) -> Host:
    """Parse the value of `--host`; raise ValueError if it is invalid.

    >>> parse_host("ranks=8,inside=300gbit")
    Host(ranks=8, cores=None, inside=300000000000.0, per_switch=None, oversubscription=1.0, jitter=0.0)
    """
    given: dict[str, int | float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key in given:
            raise ValueError(f"--host {text!r} says {key} twice: say it once")
        given[key] = _value(key, value, part, text)
    if given.get("oversubscription", 1.0) != 1.0 and "per_switch" not in given:
        raise ValueError(f"--host {text!r} has an oversubscription but one switch for all; add per_switch=32")
    assert set(given) <= {field.name for field in fields(Host)}
    return Host(**given)  # type: ignore[arg-type]


def _value(key: str, value: str, part: str, text: str) -> int | float:
    name = f"{key} in --host"
    if key in ("ranks", "cores", "per_switch"):
        return parse_count(name, value, 1e6)
    if key == "inside":
        return parse_rate(value)
    if key == "jitter":
        return parse_share(name, value)
    if key == "oversubscription":
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if not 1 <= number <= 1e3:
            raise ValueError(f"{name} {value!r}, expected a number from 1 to 1000")
        return number
    raise ValueError(f"{part!r} in --host {text!r}, expected key=value with one of {KEYS}")
