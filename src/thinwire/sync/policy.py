"""How each parameter is sent at each step: the policy says it, and a `Way` is its answer for some steps."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from itertools import pairwise

from ..compressors import Compressor, NoCompression, TopK, format_spec
from ..compressors import compressor as parsed
from ..compressors.by_ranks import default_compressor, halvings
from .buckets import BucketPlan, plan_bucket

DENSE = NoCompression()
AUTO, DEFAULT = "auto", "default"
"""Take the place of a spec: chosen by measurement, or `default_compressor` for the number of ranks."""

Spec = Compressor | str
Warmup = Sequence[tuple[int, Spec]]


@dataclass(frozen=True)
class Policy:
    """The compressor of each parameter at each step.

    compressor        for all compressed parameters without an override. "default" is `default_compressor` for the
                      number of ranks. "auto" chooses the fastest compressor, by the times of the first steps.
    min_numel         parameters with fewer elements, such as biases and norms, are sent together, by
                      `small_compressor`: they cost few bytes, and matter much.
    small_compressor  "quantize:bits=8", with a residual; "none" sends small parameters uncompressed.
    include           shell patterns of the parameter names that may be compressed.
    exclude           patterns of the parameter names that are sent dense.
    overrides         compressors by pattern; the first pattern that fits is used.
    warmup            (steps, compressor) phases, one after the other, before `compressor` and `overrides` are used: for
                      example `[(100, "none"), (900, "quantize:bits=8"), *ramp("topk:ratio=1/64,bits=2", 500)]`.

    >>> import thinwire
    >>> policy = Policy("topk:ratio=1/64,bits=2", overrides={"head.*": "quantize:bits=8"}, warmup=[(10, "none")])
    >>> [thinwire.format_spec(policy.compressor_of("head.weight", 10_000, step)) for step in (9, 10)]
    ['none', 'quantize:bits=8,block=256']
    """

    compressor: Spec
    min_numel: int = 4096
    small_compressor: Spec = "quantize:bits=8"
    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    overrides: Mapping[str, Spec] = field(default_factory=dict)
    warmup: Warmup = ()
    adapt_every: InitVar[None] = None
    ranks: int | None = None  # for "default", set by the synchronizer

    def __post_init__(self, adapt_every: None) -> None:
        if adapt_every is not None:
            raise ValueError(f"adapt_every={adapt_every!r} is gone: give a layer its own ratio by overrides")

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
        if type(self.min_numel) is not int or self.min_numel < 0:
            raise ValueError(f"min_numel {self.min_numel!r}, expected a whole number, 0 or more")

    @property
    def auto(self) -> bool:
        return self.compressor == AUTO

    @property
    def by_ranks(self) -> bool:
        return self.compressor == DEFAULT

    def for_ranks(self, ranks: int) -> "Policy":
        return replace(self, ranks=ranks) if self.by_ranks else self

    @property
    def final(self) -> Compressor:
        """Return the compressor after the warm-up; with "auto" it is `DENSE`, used where nothing was chosen."""
        if self.by_ranks:
            return default_compressor(self.ranks or 2)
        return DENSE if self.auto else parsed(self.compressor)

    @property
    def warmup_steps(self) -> int:
        return sum(steps for steps, _ in self.warmup)

    def phase(self, step: int) -> int:
        """Return the number of a step's phase: of the warm-up, or after it, where "default" halves its ratio."""
        end = 0
        for index, (steps, _) in enumerate(self.warmup):
            end += steps
            if step < end:
                return index
        return len(self.warmup) + (halvings(self.ranks or 2, step - end) if self.by_ranks else 0)

    def way(self, step: int, chosen: Compressor | None = None, *, is_trial: bool = False) -> "Way":
        """Return how parameters are sent at a step. With "auto", `chosen` is what is chosen, or tried if `is_trial`."""
        after = step - self.warmup_steps
        by_ranks = default_compressor(self.ranks or 2, max(0, after)) if self.by_ranks else None
        final, overrides = chosen or by_ranks or self.final, {key: parsed(one) for key, one in self.overrides.items()}
        compresses_finally = _compresses(final, overrides)
        by_gradients = is_trial and chosen is not None and not chosen.sparse
        if after < 0:
            final, overrides = parsed(self.warmup[self.phase(step)][1]), {}
            by_gradients = not final.sparse
        compresses = _compresses(final, overrides)
        small = parsed(self.small_compressor) if compresses and compresses_finally and not is_trial else DENSE
        return Way(self, final, small, overrides, is_dense=not compresses, by_gradients=by_gradients)

    def compressor_of(self, name: str, numel: int, step: int) -> Compressor:
        """Return the compressor of a parameter at a step, `DENSE` if it has none."""
        return self.way(step).compressor_of(name, numel)

    def is_excluded(self, name: str) -> bool:
        is_dense = isinstance(_override(name, self.overrides), NoCompression)
        return is_dense or not _fits(name, self.include) or _fits(name, self.exclude)

    def is_small(self, name: str, numel: int) -> bool:
        """Return whether this parameter is packed with other small ones; optimizers send its gradient, no update."""
        return numel < self.min_numel and not self.is_excluded(name)

    def check_order(self) -> None:
        """Raise ValueError if a dense phase follows a compressed one: residuals would stay. "auto" sends them dense."""
        order = [given for _, given in self.warmup] + ([] if self.auto else [self.final])
        compressed = [not isinstance(given, NoCompression) for given in order]
        if True in compressed and not all(compressed[compressed.index(True) :]):
            raise ValueError("a dense warm-up phase follows a compressed one: residuals would never be sent")

    def check_patterns(self, names: Collection[str]) -> None:
        """Raise ValueError for a pattern that fits no parameter, because that is usually a mistake."""
        for pattern in (*self.include, *self.exclude, *self.overrides):
            if not any(fnmatchcase(name, pattern) for name in names):
                some = ", ".join(sorted(names)[:5])
                raise ValueError(f"the pattern {pattern!r} of the policy fits no parameter; there are {some} ...")

    def describe(self) -> dict[str, object]:
        """Return the settings that a checkpoint records, and that a resumed run must share."""
        return {
            "compressor": self.compressor if self.auto or self.by_ranks else format_spec(self.final),
            "small": self.min_numel,
            "small_compressor": format_spec(parsed(self.small_compressor)),
            "include": list(self.include),
            "exclude": list(self.exclude),
            "layers": {pattern: format_spec(parsed(given)) for pattern, given in self.overrides.items()},
            "warmup": [[steps, format_spec(parsed(given))] for steps, given in self.warmup],
        }


def ramp(final: Spec, steps: int, start: object = "1/4") -> list[tuple[int, Compressor]]:
    """Return a warm-up whose ratio is halved from `start` to that of `final`, in `steps` steps in total.

    >>> [(steps, str(made.ratio)) for steps, made in ramp("topk:ratio=1/16,bits=2", 100)]
    [(50, '1/4'), (50, '1/8')]
    """
    last = parsed(final)
    if not isinstance(last, TopK):
        raise ValueError(f"a ramp to {format_spec(last)}, expected a topk: a ramp lowers the ratio")
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
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):
        raise ValueError(f"{name} {given!r}, expected a list of patterns")
    return tuple(given)


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _override(name: str, overrides: Mapping[str, Spec]) -> Compressor | None:
    return next((parsed(given) for pattern, given in overrides.items() if fnmatchcase(name, pattern)), None)


def _compresses(given: Compressor, overrides: Mapping[str, Compressor]) -> bool:
    return not all(isinstance(one, NoCompression) for one in (given, *overrides.values()))


@dataclass(frozen=True, eq=False)
class Way:
    """How parameters are sent at the steps of a phase: every question about it is asked here.

    compressor     of parameters that are not small, excluded or overridden.
    is_dense       nothing is compressed.
    by_gradients   an optimizer sends all gradients, as torch's would: in the warm-up until it is sparse, and in trials.
    families       the number of each parameter's family, if an optimizer sends.
    sizes          numels of sharded parameters, over all shards.
    dense          parameters that are sent dense, whatever the policy says.
    """

    policy: Policy
    compressor: Compressor
    small: Compressor
    overrides: Mapping[str, Compressor]
    is_dense: bool
    by_gradients: bool
    families: Mapping[str, int] | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    dense: frozenset[str] = frozenset()
    _plans: dict[Hashable, BucketPlan] = field(default_factory=dict)

    def compressor_of(self, name: str, numel: int) -> Compressor:
        if name in self.dense or self.policy.is_excluded(name):
            return DENSE
        if numel < self.policy.min_numel:
            return self.small
        return _override(name, self.overrides) or self.compressor

    def sends_gradient(self, name: str, numel: int) -> bool:
        """Return whether a parameter's gradient is sent, beside updates of others."""
        return self.policy.is_small(name, numel) or isinstance(self.compressor_of(name, numel), NoCompression)

    def plan(self, names: tuple[str, ...], sizes: Sequence[int]) -> BucketPlan:
        """Return how a bucket is cut into slices and packed parameters: the same objects as long as it is the same."""
        families = tuple(None if self.families is None else self.families[name] for name in names)
        plan = self._plans.get((names, families))
        if plan is None:
            # A policy goes by the size of the whole parameter, so that it is the same for all shards.
            sized = [(name, self.sizes.get(name, size)) for name, size in zip(names, sizes, strict=True)]
            compressors = [self.compressor_of(name, size) for name, size in sized]
            small = {
                name
                for (name, size), given in zip(sized, compressors, strict=True)
                if self.policy.is_small(name, size) and (self.families is not None or given != self.policy.final)
            }
            plan = self._plans[names, families] = plan_bucket(names, sizes, compressors, families, small)
        return plan
