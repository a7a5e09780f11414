"""Which parameters are compressed, how, and from which step on."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from itertools import pairwise
from math import sqrt

import torch

from ..compressors import Compressor, NoCompression, TopK, format_spec
from ..compressors import compressor as parsed
from ..compressors.topk import UNION

DENSE = NoCompression()
AUTO = "auto"
"""In place of a spec: what sends each bucket is measured, and chosen then."""
DEFAULT = "default"
"""In place of a spec: `default_compressor` of the number of ranks."""

LARGEST_DEFAULT_CHUNK = 1 << 14
"""What the GPU kernels select from in one pass."""

FIRST_RATIO = Fraction(1, 96)
"""Of each rank, under "default"."""
_FIRST_STEPS = 128
"""In which it has that; then twice as many with half of it, and so on."""

Spec = Compressor | str
Warmup = Sequence[tuple[int, Spec]]


@dataclass(frozen=True)
class Policy:
    """The compressor of each parameter at each step.

    compressor   for everything that is compressed and not named in `overrides`; "default": `default_compressor` of the
                 number of ranks; "auto": what the first steps show to be quickest, for each bucket.
    min_numel    parameters with fewer elements, such as biases and norms, are sent together, by `small_compressor`:
                 they cost little, and matter much.
    small_compressor  "quantize:bits=8", with a residual; "none" sends them as they are.
    include      patterns, as in a shell, of the names that may be compressed.
    exclude      patterns of those that may not, and go dense.
    overrides    a compressor by pattern; the first that fits counts.
    warmup       (steps, compressor) one after the other, before all that: for example `[(100, "none"),
                 (900, "quantize:bits=8"), *ramp("topk:ratio=1/64,bits=2", 500)]`.
    adapt_every  share the bytes of `compressor`, a topk, anew every so many steps: layers that owe more get a larger
                 ratio, others a smaller one. 0: never.

    >>> import thinwire
    >>> policy = Policy("topk:ratio=1/64,bits=2", overrides={"head.*": "quantize:bits=8"}, warmup=[(10, "none")])
    >>> [thinwire.format_spec(policy.compressor_of("head.weight", 10_000, step)) for step in (9, 10)]
    ['none', 'quantize:bits=8,block=256,rounding=nearest,seed=0']
    """

    compressor: Spec
    min_numel: int = 4096
    small_compressor: Spec = "quantize:bits=8"
    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    overrides: Mapping[str, Spec] = field(default_factory=dict)
    warmup: Warmup = ()
    adapt_every: int = 0
    ranks: int | None = None
    """For which "default" stands; set by the synchronizer, and no part of a checkpoint."""

    def __post_init__(self) -> None:
        def set_(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        set_("compressor", self.compressor if self.auto or self.by_ranks else parsed(self.compressor))
        set_("small_compressor", parsed(self.small_compressor))
        if parsed(self.small_compressor).sparse:
            given = format_spec(parsed(self.small_compressor))
            raise ValueError(f"small_compressor {given}, expected quantize or none: small tensors are sent whole")
        set_("include", _patterns("include", self.include))
        set_("exclude", _patterns("exclude", self.exclude))
        if not isinstance(self.overrides, Mapping):
            raise ValueError(f"overrides {self.overrides!r}, expected a dict from patterns to compressors")
        _patterns("overrides", tuple(self.overrides))
        set_("overrides", {pattern: parsed(given) for pattern, given in self.overrides.items()})
        set_("warmup", _phases(self.warmup))
        for name in ("min_numel", "adapt_every"):
            given = getattr(self, name)
            if type(given) is not int or given < 0:
                raise ValueError(f"{name} {given!r}, expected a whole number, 0 or more")
        if self.adapt_every and not isinstance(self.final, TopK):
            given = AUTO if self.auto else format_spec(self.final)
            raise ValueError(f"adapt_every with {given}, expected a topk: it is ratios that are shared")

    @property
    def auto(self) -> bool:
        """Whether what compresses is chosen by measuring."""
        return self.compressor == AUTO

    @property
    def by_ranks(self) -> bool:
        """Whether the compressor is chosen by the number of ranks."""
        return self.compressor == DEFAULT

    def for_ranks(self, ranks: int) -> "Policy":
        """Return the policy of so many ranks."""
        return replace(self, ranks=ranks) if self.by_ranks else self

    @property
    def final(self) -> Compressor:
        """What compresses after the warm-up; with "auto" `DENSE`, where nothing else has been chosen."""
        if self.by_ranks:
            return default_compressor(self.ranks or 2)
        return DENSE if self.auto else parsed(self.compressor)

    @property
    def warmup_steps(self) -> int:
        return sum(steps for steps, _ in self.warmup)

    def phase(self, step: int) -> int:
        """Which part of the warm-up a step is in; their number, or more, when it is over.

        All steps of a phase are sent alike, but for what is chosen by measuring.
        """
        end = 0
        for index, (steps, _) in enumerate(self.warmup):
            end += steps
            if step < end:
                return index
        return len(self.warmup) + (halvings(self.ranks or 2, step - end) if self.by_ranks else 0)

    def is_dense(self, step: int, shared: Mapping[str, Compressor] | None = None) -> bool:
        """Whether nothing at all is compressed at this step."""
        phase = self.phase(step)
        if phase < len(self.warmup):
            return isinstance(self.warmup[phase][1], NoCompression)
        given = (self.final, *(shared or {}).values(), *self.overrides.values())
        return all(isinstance(one, NoCompression) for one in given)

    def goes_dense(self, name: str) -> bool:
        """Whether this parameter is never compressed, in the warm-up neither."""
        return (
            not _fits(name, self.include)
            or _fits(name, self.exclude)
            or isinstance(self._of_layer(name), NoCompression)
        )

    def is_small(self, name: str, numel: int) -> bool:
        """Whether this parameter is sent together with other small ones, and never by an optimizer's update."""
        return numel < self.min_numel and not self.goes_dense(name)

    def _of_layer(self, name: str) -> Compressor | None:
        return next((parsed(given) for pattern, given in self.overrides.items() if fnmatchcase(name, pattern)), None)

    def compressor_of(
        self, name: str, numel: int, step: int, shared: Mapping[str, Compressor] | None = None
    ) -> Compressor:
        """`DENSE`, or what compresses this parameter at this step; `shared` is what `share_bytes` or auto gave it."""
        if self.goes_dense(name):
            return DENSE
        if self.is_small(name, numel):
            compresses = not self.is_dense(step, shared) and not self.is_dense(self.warmup_steps, shared)
            return parsed(self.small_compressor) if compresses else DENSE
        phase = self.phase(step)
        if phase < len(self.warmup):
            return parsed(self.warmup[phase][1])
        given = self._of_layer(name) or (shared or {}).get(name)
        if given is None and self.by_ranks:
            return default_compressor(self.ranks or 2, step - self.warmup_steps)
        return given or self.final

    def adapts(self, name: str, numel: int) -> bool:
        """Whether this parameter takes part when bytes are shared anew."""
        compressed = not self.goes_dense(name) and not self.is_small(name, numel)
        return bool(self.adapt_every) and compressed and self._of_layer(name) is None

    def check_order(self) -> None:
        """ValueError if residuals would be left behind. (What auto leaves dense is sent its residual first.)"""
        order = [given for _, given in self.warmup] + ([] if self.auto else [self.final])
        compressed = [not isinstance(given, NoCompression) for given in order]
        if True in compressed and not all(compressed[compressed.index(True) :]):
            raise ValueError("a phase of none after one that compresses: what is owed by then would never be sent")

    def check_patterns(self, names: Collection[str]) -> None:
        """ValueError for a pattern that fits no parameter, which is a mistake in most cases."""
        for pattern in (*self.include, *self.exclude, *self.overrides):
            if not any(fnmatchcase(name, pattern) for name in names):
                some = ", ".join(sorted(names)[:5])
                raise ValueError(f"the pattern {pattern!r} of the policy fits no parameter; there are {some} ...")

    def describe(self) -> dict[str, object]:
        """What a checkpoint records, and a resumed run must have again."""
        return {
            "compressor": self.compressor if self.auto or self.by_ranks else format_spec(self.final),
            "small": self.min_numel,
            "small_compressor": format_spec(parsed(self.small_compressor)),
            "include": list(self.include),
            "exclude": list(self.exclude),
            "layers": {pattern: format_spec(parsed(given)) for pattern, given in self.overrides.items()},
            "warmup": [[steps, format_spec(parsed(given))] for steps, given in self.warmup],
            "adapt_every": self.adapt_every,
        }


def default_compressor(ranks: int, step: int | None = None) -> TopK:
    """Return what thinwire's optimizers compress with by default: the more ranks, the fewer elements of each.

    step   counted from the end of the warm-up: in the first ones, more than two ranks send more; None: what stays.

    What moves the weights is the union of what all ranks send, one element in 48 whatever the number of ranks, so each
    can send less. The chunk grows with the ranks, so that a chunk's scales are shared by as many elements.

    But an element of a rank waits for as many steps as there are elements to one that is sent, and a young training
    cannot wait: so each rank begins with one in 96, and halves that after 128 steps, after 256 more, and so on.

    >>> for ranks in (2, 4, 8, 32):
    ...     print(format_spec(default_compressor(ranks)), *(default_compressor(ranks, s).ratio for s in (0, 128, 384)))
    topk:ratio=1/96,bits=2,chunk=4096 1/96 1/96 1/96
    topk:ratio=1/192,bits=2,chunk=8192 1/96 1/192 1/192
    topk:ratio=1/384,bits=2,chunk=16384 1/96 1/192 1/384
    topk:ratio=1/1536,bits=2,chunk=16384 1/96 1/192 1/384
    """
    ranks = max(2, ranks)
    chunk = min(LARGEST_DEFAULT_CHUNK, 2048 << (ranks - 1).bit_length())
    least = UNION / ranks
    ratio = least if step is None else max(least, FIRST_RATIO / 2 ** halvings(ranks, step))
    return TopK(ratio=ratio, bits=2, chunk=chunk)


def halvings(ranks: int, step: int) -> int:
    """How often the first ratio of the default compressor was halved, at a step after the warm-up.

    >>> [halvings(8, step) for step in (0, 127, 128, 383, 384, 10_000)], halvings(2, 10_000)
    ([0, 0, 1, 1, 2, 2], 0)
    """
    until_now = (step // _FIRST_STEPS + 1).bit_length() - 1
    return min(until_now, (FIRST_RATIO * max(2, ranks) / UNION - 1).__ceil__().bit_length())


def ramp(final: Spec, steps: int, start: object = "1/4") -> list[tuple[int, Compressor]]:
    """A warm-up whose ratio is halved from `start` to that of `final`, in `steps` steps altogether.

    >>> [(steps, str(made.ratio)) for steps, made in ramp("topk:ratio=1/16,bits=2", 100)]
    [(50, '1/4'), (50, '1/8')]
    """
    last = parsed(final)
    if not isinstance(last, TopK):
        raise ValueError(f"a ramp to {format_spec(last)}, expected a topk: it is the ratio that falls")
    ratio = Fraction(TopK(ratio=start).ratio)  # type: ignore[arg-type]
    ratios = []
    while ratio > Fraction(last.ratio):
        ratios.append(ratio)
        ratio /= 2
    if not ratios or type(steps) is not int or steps < len(ratios):
        raise ValueError(
            f"a ramp of {steps} steps from {start} to {last.ratio}, expected a start above the end and at least "
            f"{max(1, len(ratios))} steps"
        )
    cuts = [steps * index // len(ratios) for index in range(len(ratios) + 1)]
    return [
        (stop - start, replace(last, ratio=ratio)) for (start, stop), ratio in zip(pairwise(cuts), ratios, strict=True)
    ]


def share_bytes(base: TopK, sizes: Mapping[str, int], energies: Mapping[str, float]) -> dict[str, TopK]:
    """The bytes that `base` would take for all layers, shared among them by what their residuals owe.

    sizes      entries of each layer.
    energies   sum of squares of its residual.

    A layer's share grows with the root mean square of what it owes: sending the most from where entries are largest
    is what top-k does inside a layer too. Ratios are those of `base` times a power of two from 1/4 to 4, so that
    neighbours often stay in one run and nobody starves.

    >>> base = TopK(ratio="1/64", bits=2)
    >>> made = share_bytes(base, {"a": 40960, "b": 40960}, {"a": 16.0, "b": 1.0})
    >>> [str(made[name].ratio) for name in "ab"]
    ['1/64', '1/256']
    """
    rms = {name: sqrt(max(0.0, energies[name]) / max(1, size)) for name, size in sizes.items()}
    mean = sum(rms[name] * size for name, size in sizes.items()) / max(1, sum(sizes.values()))
    budget = sum(base.nbytes(size, torch.float32) for size in sizes.values())
    steps = (4, 2, 1, Fraction(1, 2), Fraction(1, 4))
    for lower in range(24):  # eighths of a factor of two: as much as the budget holds
        factor = 2 ** ((12 - lower) / 4)
        made: dict[str, TopK] = {}
        for name in sizes:
            wanted = factor * rms[name] / mean if mean else 1.0
            times = next((step for step in steps if step <= wanted), steps[-1])
            made[name] = replace(base, ratio=min(Fraction(1), Fraction(base.ratio) * times))
        if sum(made[name].nbytes(size, torch.float32) for name, size in sizes.items()) <= budget:
            return made
    return dict.fromkeys(sizes, base)


def _phases(given: Warmup) -> tuple[tuple[int, Compressor], ...]:
    phases = []
    for phase in given if isinstance(given, Sequence) and not isinstance(given, str) else [given]:
        if not isinstance(phase, Sequence) or isinstance(phase, str) or len(phase) != 2:
            raise ValueError(f"warmup {given!r}, expected a list of (steps, compressor)")
        steps, compressor = phase
        if type(steps) is not int or steps <= 0:
            raise ValueError(f"a warm-up of {steps!r} steps, expected whole numbers above 0")
        phases.append((steps, parsed(compressor)))
    return tuple(phases)


def _patterns(name: str, given: Sequence[str]) -> tuple[str, ...]:
    if (
        isinstance(given, str)
        or not isinstance(given, Sequence)
        or not all(isinstance(pattern, str) for pattern in given)
    ):
        raise ValueError(f"{name} {given!r}, expected a list of patterns")
    return tuple(given)


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
