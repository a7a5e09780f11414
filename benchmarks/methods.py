"""The training methods that benchmarks compare: their names, and which of them each benchmark compares by default.

A method is written as a text, the same in all benchmarks: [adamw | sgd | muon] NAME[;key=value ...]. docs/links.md says
what the names are; here are also

textbook topk        attach with top-k: the method that papers start from
thinwire 8-bit       attach with 8 bits, which is safe there
thinwire             thinwire's optimizer with the compressor that it chooses by itself

Options behind the name are those of the optimizer, for thinwire also `compressor` and `algorithm`, and for local steps
also those of LocalSteps. This module does not load torch. `training` builds what a method needs.
"""

import ast
import re
from dataclasses import dataclass, field

TOPK, EIGHT_BITS = "topk:ratio=1/64,bits=2", "quantize:bits=8"
NO_COMMUNICATION = "no communication"
"""The method whose time the others are compared with."""
TORCH = (NO_COMMUNICATION, "dense", "fp16 hook", "bf16", "powersgd rank 1", "powersgd rank 4")
"""Methods without thinwire."""
COMPRESSING = ("attach", "thinwire.AdamW", "thinwire.SGD")
"""Methods that are followed by the spec of a compressor."""
LOCAL = "local steps"
FAMILIES = ("adamw", "sgd", "muon")
_SHORT = {"textbook topk": f"attach {TOPK}", "thinwire 8-bit": f"attach {EIGHT_BITS}"}

BY_LINK = (
    *TORCH, f"attach {EIGHT_BITS}", f"attach {TOPK}", f"thinwire.AdamW {TOPK}", "thinwire.AdamW default",
)  # fmt: skip
BY_ROUND_TRIP = (f"{LOCAL} 8 {TOPK}", f"{LOCAL} 8 {TOPK};delay=4", f"{LOCAL} 32 {TOPK};delay=4")
"""Methods that `link` compares in addition, if links have a round-trip time."""
BY_LOSS = (
    "adamw dense", "adamw fp16 hook", "adamw powersgd rank 1", "adamw powersgd rank 4", "adamw textbook topk",
    "adamw thinwire 8-bit", "adamw thinwire", "sgd dense", "sgd textbook topk", "sgd thinwire",
)  # fmt: skip


@dataclass(frozen=True)
class Method:
    """A method to train."""

    text: str
    """As it was written."""
    family: str
    """One of `FAMILIES`."""
    name: str
    """Name without the optimizer and without a compressor."""
    spec: str = ""
    """The compressor of `COMPRESSING` and of local steps."""
    options: dict[str, object] = field(default_factory=dict)
    every: int = 1
    """Number of steps in a round of local steps; 1 for all other methods."""

    @property
    def is_ours(self) -> bool:
        return self.name in COMPRESSING or self.is_local

    @property
    def is_hook(self) -> bool:
        return self.name in TORCH and self.name != "dense"

    @property
    def is_local(self) -> bool:
        return self.name == LOCAL

    def whole_rounds(self, steps: int) -> int:
        """Return the number of steps, rounded up to whole rounds of local steps."""
        return -(-steps // self.every) * self.every

    @property
    def in_optimizer(self) -> bool:
        return self.name.startswith("thinwire.")

    def warmup(self, steps: int) -> int:
        """Return the number of steps at the start that are sent otherwise, if `steps` are asked for."""
        if self.in_optimizer:
            given = self.options.get("warmup_steps", steps)
            return given if isinstance(given, int) else steps
        if self.name.startswith("powersgd rank"):
            return max(2, steps)  # fewer are an error in torch's hook
        return steps if self.text.partition(";")[0].strip().endswith("textbook topk") else 0


def parse(text: str) -> Method:
    """Return the method that a text stands for. Raises ValueError for an unknown name.

    >>> parse("adamw dense;lr=2e-3;betas=0.8,0.99").options
    {'lr': 0.002, 'betas': (0.8, 0.99)}
    >>> parse("sgd thinwire").name, parse("textbook topk").spec
    ('thinwire.SGD', 'topk:ratio=1/64,bits=2')
    >>> parse("muon local steps 8 quantize:bits=2;delay=4").every
    8
    """
    head, *given = (part.strip() for part in text.split(";"))
    first, _, rest = head.partition(" ")
    family, name = (first, rest) if first in FAMILIES else ("adamw", head)
    if name == "thinwire" and family != "muon":
        name = f"thinwire.{'AdamW' if family == 'adamw' else 'SGD'} default"
    kind, _, spec = _SHORT.get(name, name).partition(" ")
    if kind == "thinwire.SGD":
        family = "sgd"
    options = {}
    for part in given:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ValueError(f"option {part!r} of method {head!r}, expected key=value")
        options[key] = _value(value)
    if local := re.fullmatch(rf"{LOCAL} ([1-9]\d*)(?: (\S+))?", name):
        spec = str(options.pop("compressor", local[2] or TOPK))
        return Method(text=text, family=family, name=LOCAL, spec=spec, options=options, every=int(local[1]))
    if kind in COMPRESSING and spec and (family != "muon" or kind == "attach"):
        return Method(text=text, family=family, name=kind, spec=str(options.pop("compressor", spec)), options=options)
    if name not in TORCH:
        raise ValueError(
            f"method {head!r} is unknown, expected one of: {', '.join((*TORCH, *_SHORT))}, thinwire, or one of "
            f"{', '.join(COMPRESSING)} with a compressor, such as 'attach {EIGHT_BITS}', or '{LOCAL} 8 {TOPK}'; before "
            "it adamw or sgd, or muon if thinwire's optimizers do not follow"
        )
    return Method(text=text, family=family, name=name, spec="", options=options)


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
