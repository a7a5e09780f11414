"""How each parameter is sent at each step: the policy says it, and its assignment for the buckets of a run."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch

from ..compressors import Compressor, NoCompression, TopK, format_spec
from ..compressors import compressor as parsed
from ..compressors.by_ranks import default_compressor, halvings
from .auto import Choice
from .buckets import BucketPlan, Together, plan_bucket
from .peers import Peers

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

    def is_dense(self, step: int, chosen: Compressor | None = None) -> bool:
        """Return whether no parameter is compressed at this step; `chosen` as for `compressor_of`."""
        phase = self.phase(step)
        if phase < len(self.warmup):
            return isinstance(self.warmup[phase][1], NoCompression)
        return all(isinstance(one, NoCompression) for one in (chosen or self.final, *self.overrides.values()))

    def is_excluded(self, name: str) -> bool:
        is_dense = isinstance(self._of_layer(name), NoCompression)
        return is_dense or not _fits(name, self.include) or _fits(name, self.exclude)

    def is_small(self, name: str, numel: int) -> bool:
        """Return whether this parameter is packed with other small ones; optimizers send its gradient, no update."""
        return numel < self.min_numel and not self.is_excluded(name)

    def _of_layer(self, name: str) -> Compressor | None:
        return next((parsed(given) for pattern, given in self.overrides.items() if fnmatchcase(name, pattern)), None)

    def compressor_of(self, name: str, numel: int, step: int, chosen: Compressor | None = None) -> Compressor:
        """Return the compressor at this step, `DENSE` if it has none; `chosen` by "auto" replaces `final`."""
        if self.is_excluded(name):
            return DENSE
        if self.is_small(name, numel):
            compresses = not self.is_dense(step, chosen) and not self.is_dense(self.warmup_steps, chosen)
            return parsed(self.small_compressor) if compresses else DENSE
        phase = self.phase(step)
        if phase < len(self.warmup):
            return parsed(self.warmup[phase][1])
        given = self._of_layer(name) or chosen
        if given is None and self.by_ranks:
            return default_compressor(self.ranks or 2, step - self.warmup_steps)
        return given or self.final

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


class Assignment:
    """Assigns the compressors of the policy. With `families`, by parameter, it is that of an optimizer."""

    choice: Choice | None = None

    def __init__(self, policy: Policy, families: Mapping[str, int] | None) -> None:
        self.policy, self._families = policy, families
        self.sizes: Mapping[str, int] = {}  # numels of known parameters, over all shards
        self.dense: frozenset[str] = frozenset()
        self._chosen: Compressor | None = None  # in place of the policy's final one in the current step
        self._plans: dict[Hashable, BucketPlan] = {}

    def begin(self, peers: Peers, step: int, device: torch.device) -> None:
        """Choose the compressor of the step that begins; the base class does nothing."""

    def plan(self, bucket: Together, step: int, mode: Hashable) -> BucketPlan:
        """Return how a bucket is cut into slices and packed parameters; with another mode, slices are other objects."""
        policy = self.policy
        families = tuple(None if self._families is None else self._families[name] for name in bucket.names)
        key = bucket.names, families, policy.phase(step), mode, self.dense
        made = self._plans.get(key)
        if made is None:
            # A policy goes by the size of the whole parameter, so that it is the same for all shards.
            sized = [(name, self.sizes.get(name, size)) for name, size in zip(bucket.names, bucket.sizes, strict=True)]
            compressors = [self._compressor_of(name, size, step, self._chosen) for name, size in sized]
            small = {
                name
                for (name, size), given in zip(sized, compressors, strict=True)
                if policy.is_small(name, size) and (self._families is not None or given != policy.final)
            }
            made = self._plans[key] = plan_bucket(
                bucket.names, sizes=bucket.sizes, compressors=compressors, families=families, small=small
            )
        return made

    def is_dense(self, step: int) -> bool:
        return self.policy.is_dense(step, self._chosen)

    def sends_dense(self, name: str, numel: int, step: int) -> bool:
        return isinstance(self._compressor_of(name, numel, step, self._chosen_at(step)), NoCompression)

    def _compressor_of(self, name: str, numel: int, step: int, chosen: Compressor | None) -> Compressor:
        if name in self.dense:
            return DENSE
        return self.policy.compressor_of(name, numel=numel, step=step, chosen=chosen)

    def tries_gradients(self, step: int) -> bool:
        """Return whether this step is a trial in which an optimizer sends gradients instead of updates."""
        return False

    def choose_if_due(self, peers: Peers, step: int, device: torch.device) -> None:
        """Make the choice if the trials are over; the base class does nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], *, same_world: bool) -> None:
        self._plans = {}

    def _chosen_at(self, step: int) -> Compressor | None:
        return self._chosen

    def _choose(self, chosen: Compressor | None) -> None:
        if chosen != self._chosen:
            self._chosen, self._plans = chosen, {}
