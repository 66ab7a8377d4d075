"""The text of `--inputs`: `"f32[B=16,D=768], ids=i64[B]<32000"`; `docs/inputs.md` has its grammar."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from tilewright.records.case import DTYPES, InputSpec
from tilewright.records.errors import UsageError

_TOKEN = re.compile(r"\s*([^\W\d]\w*|[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|>=|\S)")
_SIZE = re.compile("[0-9]+")
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "none": None}
_END = ""
_INTEGERS = ("int", "uint")


def parse_arguments(
    text: str, value_of: Callable[[str], Any] | None = None
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The positional and the named arguments; `value_of` gives the value of `@name`. UsageError says what is wrong.

    >>> parse_arguments("f32[N=4], mask=bool[N]")[1]
    {'mask': InputSpec(dtype='bool', shape=(4,), names=('N',), bounds=None)}
    """
    return _Parser(text, value_of).arguments()


class _Parser:
    def __init__(self, text: str, value_of: Callable[[str], Any] | None) -> None:
        self.text = text
        self.value_of = value_of
        self.tokens: list[str] = [*_TOKEN.findall(text), _END]
        self.sizes = self._sizes()

    def arguments(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        if self.next == _END:
            raise self._error("is empty; e.g. fp32[N=4000,M=5000]")
        if re.fullmatch(r"\d+(x\d+)+", self.text):
            raise self._error(f"is sizes without a dtype: write fp32[{self.text.replace('x', ',')}]")
        while True:
            if self.tokens[1:2] == ["="]:
                self._named(keywords)
            elif keywords:
                raise self._error(f"has {self.next!r} without a name after the named {next(reversed(keywords))!r}")
            else:
                positional.append(self._value())
            if self.next == _END:
                return tuple(positional), keywords
            if self.next not in (",", ";"):
                raise self._error(f"has {self.next!r} where a comma or the end belongs")
            self._take()

    # -- values -------------------------------------------------------------------------------

    def _named(self, found: dict[str, Any]) -> None:
        name = self._word("a name")
        self._expect("=", f"after the name {name!r}")
        if name in found:
            raise self._error(f"gives {name!r} twice")
        found[name] = self._value()

    def _value(self) -> Any:
        if self.next in ("(", "{"):
            return self._nested()
        if self.next == "@":
            self._take()
            name = self._word("the name of a value of the target's file after @")
            if self.value_of is None:
                raise self._error(f"has @{name}, which only a target's file can hold")
            return self.value_of(name)
        if self.next == "[":
            raise self._error("has sizes without a dtype before the [: write fp32[...]")
        word = self._take()
        if word in _CONSTANTS and self.next != "[":
            return _CONSTANTS[word]
        if (number := _number(word)) is not None:
            return number
        if word == _END or not word.isidentifier():
            raise self._error(f"has {word!r} where an input belongs" if word else "ends where an input belongs")
        return self._tensor(word)

    def _nested(self) -> Any:
        opening = self._take()
        closing = {"(": ")", "{": "}"}[opening]
        found: dict[str, Any] = {}
        values: list[Any] = []
        while self.next != closing:
            if self.next == _END:
                raise self._error(f"lacks the {closing} of its {opening}")
            if opening == "{":
                self._named(found)
            else:
                values.append(self._value())
            if self.next == ",":
                self._take()
            elif self.next not in (closing, _END):
                raise self._error(f"has {self.next!r} where a comma or {closing} belongs")
        self._take()
        return found if opening == "{" else tuple(values)

    def _tensor(self, dtype: str) -> InputSpec:
        if dtype not in DTYPES:
            near = get_close_matches(dtype, DTYPES, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise self._error(f"has no dtype {dtype!r}; {hint}dtypes: {', '.join(DTYPES)}")
        if self.next != "[":
            raise self._error(f"lacks the sizes of {dtype}: write {dtype}[N=4000,M=5000], or {dtype}[] for one number")
        self._take()
        axes: list[tuple[str | None, int]] = []
        while self.next != "]":
            axes.append(self._axis(dtype))
            if self.next == ",":
                self._take()
            elif self.next != "]":
                seen = f"has {self.next!r} among" if self.next else "ends within"
                raise self._error(f"lacks the bracket ] of {dtype}[: it {seen} the sizes")
        self._take()
        names, shape = tuple(name for name, _ in axes), tuple(size for _, size in axes)
        return InputSpec(DTYPES[dtype], shape, names, self._bounds(dtype))

    def _axis(self, dtype: str) -> tuple[str | None, int]:
        word = self._take()
        if not word.isidentifier():
            return None, self._size(word, dtype)
        if self.next == "=":
            self._take()
            return word, self._size(self._take(), dtype)
        if word not in self.sizes:
            raise self._error(f"gives {word} no size: write {word}=16 where it is named first")
        return word, self.sizes[word]

    def _size(self, word: str, dtype: str) -> int:
        if word == _END:
            raise self._error(f"lacks the bracket ] of {dtype}[: it ends within the sizes")
        if not _SIZE.fullmatch(word):
            raise self._error(f"has {word!r} as a size of {dtype}: a size is a whole number from 0 on")
        return int(word)

    def _bounds(self, dtype: str) -> tuple[int, int] | None:
        low, bounded = 0, self.next in (">=", "<")
        if not bounded:
            return None
        if not DTYPES[dtype].startswith(_INTEGERS):
            raise self._error(f"gives {dtype} a range, which only integers have")
        if self.next == ">=":
            self._take()
            low = self._integer(">=")
        self._expect("<", "after a range's first value")
        high = self._integer("<")
        if high <= low:
            raise self._error(f"has an empty range: no integer is at least {low} and below {high}")
        signed, bits = DTYPES[dtype].startswith("int"), int(DTYPES[dtype].rpartition("int")[2])
        least, end = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
        if low < least or high > end:
            raise self._error(f"has a range that {dtype} does not hold: it holds {least} to {end - 1}")
        return low, high

    def _integer(self, behind: str) -> int:
        word = self._take()
        if not re.fullmatch("[+-]?[0-9]+", word):
            raise self._error(f"has {word!r} behind {behind}, where a whole number belongs")
        return int(word)

    # -- tokens -------------------------------------------------------------------------------

    @property
    def next(self) -> str:
        return self.tokens[0]

    def _take(self) -> str:
        return self.tokens.pop(0) if len(self.tokens) > 1 else _END

    def _expect(self, token: str, place: str) -> None:
        if self._take() != token:
            raise self._error(f"lacks {token} {place}")

    def _word(self, what: str) -> str:
        word = self._take()
        if not word.isidentifier():
            raise self._error(f"has {word!r} instead of {what}" if word else f"ends instead of {what}")
        return word

    def _sizes(self) -> dict[str, int]:
        """The size of each named axis, which may be named again without it."""
        sizes: dict[str, int] = {}
        depth = 0
        for token, sign, size in zip(self.tokens, self.tokens[1:], self.tokens[2:], strict=False):
            depth += (token == "[") - (token == "]")
            is_size = depth and sign == "=" and token.isidentifier() and _SIZE.fullmatch(size)
            if is_size and sizes.setdefault(token, int(size)) != int(size):
                raise self._error(f"gives {token} two sizes, {sizes[token]} and {size}")
        return sizes

    def _error(self, what: str) -> UsageError:
        return UsageError(f"input {self.text!r} {what}")


def _number(word: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(word) if word[:1] not in "nifNIF" else None
        except ValueError:
            continue
    return None
