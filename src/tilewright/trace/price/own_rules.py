"""What a recorded call of tilewright's own operators reads and writes where their kernels run, on a GPU.

One that is several kernels, some of them PyTorch's (`linear_cross_entropy`), or writes only where it must
(`scale_gradient_`), has no rule. The profiler does not write text: which activation it was, and whether a loss is
one number, is not known, and the one that takes fewest FLOPs and bytes is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod

from tilewright.cost.own import ARITHMETIC
from tilewright.trace.price.pricing_rules import Rule, Traffic
from tilewright.trace.price.recorded_call import Call, Tensor, dense

_ARGUMENTS = {
    "activation": "x kind",
    "activation_backward": "dy x kind",
    "add_norm": "x residual weight bias eps centered",
    "attention": "q k v mask slopes starts_q starts_k scale left right softcap dropout longest_q longest_k "
    "deterministic impl",
    "attention_backward": "dout dlse q k v out lse lse64 state mask slopes starts_q starts_k scale left right softcap "
    "dropout longest_q longest_k deterministic impl",
    "cross_entropy": "logits target ignored smoothing z_loss reduction wide impl",
    "cross_entropy_backward": "gradient logits target statistics weight ignored smoothing z_loss impl",
    "dropout_add": "x residual p kind alignment",
    "dropout_add_backward": "dout x state p kind alignment",
    "embedding": "indices weight padding",
    "embedding_backward": "dout indices entries padding",
    "gated_activation": "gate up kind",
    "gated_activation_backward": "dy gate up kind",
    "linear_dropout_add": "x weight bias residual p",
    "linear_gelu": "x weight bias approximate keep",
    "norm": "x weight bias eps centered",
    "norm_backward": "dy x dsum weight has_bias mean rstd centered",
    "rotary": "q k cos sin interleaved backward",
    "softmax": "x log impl",
    "softmax_backward": "y dy log impl",
    "weighted_sum": "x w",
    "weighted_sum_backward": "dy x w want_dx want_dw",
}
ARGUMENTS: Mapping[str, tuple[str, ...]] = {f"tilewright::{n}": tuple(text.split()) for n, text in _ARGUMENTS.items()}
"""Names of the arguments, in the order of the schemas in `kernels/`."""
Write = Callable[["_Named"], list[Tensor]]


class _Named:
    """A call with its operands by name."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.places = {name: place for place, name in enumerate(ARGUMENTS[call.name])}

    def tensor(self, name: str) -> Tensor:
        found = self.find(name)
        if found is None:
            raise ValueError(f"{self.call.name} without {name}")
        return found

    def find(self, name: str) -> Tensor | None:
        operand = self.call.operands[self.places[name]]
        return operand if isinstance(operand, Tensor) else None

    def says(self, name: str) -> object:
        return self.call.value(self.places[name])


def _statistic(shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
    return Tensor(shape, prod(shape), 8 if dtype in ("int64", "float64") else 4, dtype)


STATE = _statistic((2,), "int64")
"""Of a dropout mask, where it is drawn again."""


def _like(*names: str) -> Write:
    return lambda named: [dense(named.tensor(name).shape, named.tensor(name)) for name in names]


def _norm(named: _Named, *, copies: int) -> list[Tensor]:
    rows = (prod(named.tensor("x").shape[:-1]),)
    return [*_like("x")(named) * copies, *[_statistic(rows)] * (2 if named.says("centered") is True else 1)]


def _norm_backward(named: _Named) -> list[Tensor]:
    weight = named.find("weight")
    vectors = 0 if weight is None else 1 + (named.says("has_bias") is True)
    return [*_like("x")(named), *([] if weight is None else [dense(weight.shape, weight)] * vectors)]


def _cross_entropy(named: _Named) -> list[Tensor]:
    logits = named.tensor("logits")
    return [dense((), logits), _statistic((2, logits.shape[0])), _statistic(())]


def _linear(named: _Named, *kept: Tensor) -> list[Tensor]:
    x, weight = named.tensor("x"), named.tensor("weight")
    return [dense((x.shape[0], weight.shape[0]), x), *kept]


def _linear_gelu(named: _Named) -> list[Tensor]:
    return _linear(named) * (2 if named.says("keep") is True else 1)


def _weighted_sum_backward(named: _Named) -> list[Tensor]:
    wanted = [name for name in ("x", "w") if named.says(f"want_d{name}") is True]
    return _like(*wanted)(named)


def _embedding(named: _Named) -> list[Tensor]:
    weight = named.tensor("weight")
    return [dense((*named.tensor("indices").shape, weight.shape[1]), weight)]


def _embedding_backward(named: _Named) -> list[Tensor]:
    dout, entries = named.tensor("dout"), named.says("entries")
    if not isinstance(entries, int):
        raise ValueError("an embedding without the entries of its table")
    return [dense((entries, dout.shape[-1]), dout)]


def _attention(named: _Named) -> list[Tensor]:
    q, _, v = (named.tensor(name) for name in ("q", "k", "v"))
    rows = q.shape[:-1]
    exact = [_statistic(rows, "float64")] if q.dtype == "float32" else []
    return [dense((*rows, v.shape[-1]), q), _statistic(rows), *exact, *([STATE] if named.says("dropout") else [])]


WRITES: Mapping[str, Write] = {
    **dict.fromkeys(("activation", "activation_backward", "softmax"), _like("x")),
    "softmax_backward": _like("y"),
    "gated_activation": _like("gate"),
    "gated_activation_backward": _like("gate", "up"),
    "dropout_add": lambda named: [*_like("x")(named), STATE],
    "dropout_add_backward": _like("dout"),
    "norm": partial(_norm, copies=1),
    "add_norm": partial(_norm, copies=2),
    "norm_backward": _norm_backward,
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _like("logits"),
    "linear_gelu": _linear_gelu,
    "linear_dropout_add": lambda named: _linear(named, STATE),
    "weighted_sum": lambda named: [dense(named.tensor("x").shape[:-1], named.tensor("x"))],
    "weighted_sum_backward": _weighted_sum_backward,
    "embedding": _embedding,
    "embedding_backward": _embedding_backward,
    "rotary": _like("q", "k"),
    "attention": _attention,
    "attention_backward": _like("q", "k", "v"),
}


def _rule(name: str) -> Rule:
    def rule(call: Call, _: bool) -> Traffic | None:
        named = _Named(call)
        if "starts_q" in named.places and named.find("starts_q") is not None:
            # How long packed sequences are is in a tensor.
            return None
        return Traffic(_reads(named), WRITES[name](named), ARITHMETIC[f"tilewright.{name}"])

    return rule


def _reads(named: _Named) -> list[Tensor]:
    if named.call.name != "tilewright::embedding":
        return named.call.tensors
    weight, (result,) = named.tensor("weight"), _embedding(named)
    return [named.tensor("indices"), Tensor(result.shape, min(result.own, weight.own), weight.itemsize, weight.dtype)]


RULES: Mapping[str, Rule] = {f"tilewright::{name}": _rule(name) for name in WRITES}
UNTOLD: Mapping[tuple[str, str], object] = {
    ("tilewright::dropout_add", "kind"): "none",
    ("tilewright::dropout_add_backward", "kind"): "none",
}
"""What is taken for text that is not recorded, where the formulas' own default is not it."""
