"""Writes the figures in README.md and docs/ from the result files: `python -m benchmarks.tables [DIR]`.

A table stands between two comments that name it,

    <!-- table: norms -->
    <!-- /table -->

and everything between them is replaced. Shares of a copy are shares of the copy bandwidth measured beside the row
kernels; times against a peer are ratios of medians in one race. A figure of tilewright's that was measured from other
sources than today's has a mark (`todays.py`).
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.model_table import Line, lines
from benchmarks.second import second
from benchmarks.summary import (
    LARGE,
    ROOT,
    Results,
    elements,
    of,
    of_best_in_chunks,
    of_best_peer,
    of_copy,
    of_cublas,
    of_flash2,
    of_inductor,
    of_shipped_attention,
    portable,
    read_all,
    row_kernels,
)
from benchmarks.todays import mark, with_footnote
from benchmarks.versions import versions
from tilewright.bench.catalogue import suite
from tilewright.records.measurement import Direction, Measurement
from tilewright.report.quantity import duration

REPOSITORY = Path(__file__).parents[1]
DOCUMENTS = tuple(
    REPOSITORY / name
    for name in ("README.md", "docs/kernels.md", "docs/models.md", "docs/replay.md", "docs/training.md")
)
CHINESE = REPOSITORY / "README.zh-CN.md"
TABLE = re.compile(r"(<!-- table: (?P<name>[\w ]+) -->\n)(?P<body>.*?)(?P<end><!-- /table -->)", re.DOTALL)
NONE = "–"
GRID = (512, 1024, 2048, 4096, 8192, 16384)
"""Lengths of attention's sequences."""


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns of figures, which begin with a digit or are `NONE`, are flush right."""
    lines = [list(row) for row in rows]
    figures = [
        all(line[i] == NONE or line[i].lstrip("*")[:1].isdigit() for line in lines) for i in range(len(headings))
    ]
    rule = ["---:" if right else "---" for right in figures]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (headings, rule, *lines))


def share(figure: float | None) -> str:
    return NONE if figure is None else f"{figure:.2f}"


def implementations(name: str, case: str, directions: Sequence[Direction]) -> Callable[[Results], str]:
    """The implementations of one case, slowest first: time and share of a copy in each direction, and its limit."""

    def table(results: Results) -> str:
        notes = {variant.name: variant.note for variant in suite(name).variants}
        rows: dict[str, dict[Direction, Measurement]] = {}
        for row in results.rows:
            if (row.suite, row.case) == (name, case) and row.direction in directions:
                rows.setdefault(row.impl, {})[row.direction] = row
        slowest_first = sorted(rows, key=lambda impl: -rows[impl][directions[0]].median_us)
        headings = {"fwd": "forward", "bwd": "backward"}
        return markdown(
            ["impl", *(h for d in directions for h in (headings[d], "of copy")), "what limits it"],
            (
                [
                    f"`{impl}`{mark(rows[impl].values())}",
                    *_times_and_shares(results, rows[impl], directions),
                    notes.get(impl, ""),
                ]
                for impl in slowest_first
            ),
        )

    return table


def _times_and_shares(
    results: Results, rows: Mapping[Direction, Measurement], directions: Sequence[Direction]
) -> list[str]:
    found = [rows.get(direction) for direction in directions]
    return [
        cell
        for row in found
        for cell in ((NONE, NONE) if row is None else (duration(row.median_us), share(of_copy(results, row))))
    ]


def columns_of(row: Measurement) -> int:
    """The columns of a row kernel's case, `65536x8192 bf16`."""
    return int(row.case.split(" ")[0].split("x")[1])


def row_kernel(lines: Sequence[tuple[str, str, Direction, str, str]]) -> Callable[[Results], str]:
    """Shares of a copy over the columns of full-sized workloads; a line is (label, suite, direction, dtype, impl)."""

    def table(results: Results) -> str:
        shares: list[tuple[str, dict[int, str]]] = []
        for label, name, direction, dtype, impl in lines:
            found = [
                row
                for row in results.rows
                if (row.suite, row.direction, row.impl) == (name, direction, impl)
                and row.case.endswith(dtype)
                and elements(row.case) >= LARGE
            ]
            shares.append((label, {columns_of(row): share(of_copy(results, row)) + mark([row]) for row in found}))
        widths = sorted({columns for _, known in shares for columns in known})
        return markdown(
            ["columns", *(label for label, _ in shares)],
            ([f"{columns}", *(known.get(columns, NONE) for _, known in shares)] for columns in widths),
        )

    return table


def both_dtypes(
    names: Mapping[str, str], directions: Sequence[Direction]
) -> list[tuple[str, str, Direction, str, str]]:
    """Lines of `row_kernel` for our own kernels: every suite in both dtypes, direction after direction."""
    suffix = {"fwd": "", "bwd": ", backward"}
    return [
        (f"{label} {dtype}{suffix[direction]}".strip(), name, direction, dtype, "tilewright")
        for direction in directions
        for dtype in ("bf16", "fp32")
        for name, label in names.items()
    ]


def linear(results: Results) -> str:
    """The bare product in TFLOP/s, and each epilogue as a share of its speed in the same race."""
    suites = {"linear_gelu": "GELU erf", "linear_gelu_tanh": "GELU tanh"}
    bare: dict[str, list[float]] = {}
    shares: dict[tuple[str, str], str] = {}
    for name in suites:
        for row in results.of(name, direction="fwd"):
            (product,) = results.beside(row, ["cublas-bare"])
            bare.setdefault(row.case, []).append(product.TFLOPs or float("nan"))
            shares[row.case, name] = share(product.median_us / row.median_us) + mark([row])
    largest_first = sorted(bare, key=elements, reverse=True)
    return markdown(
        ["M×N×K", "cuBLAS alone, TFLOP/s", *suites.values()],
        (
            [
                case.split(" ")[0].replace("x", "×"),
                f"{statistics.median(bare[case]):.0f}",
                *(shares.get((case, name), NONE) for name in suites),
            ]
            for case in largest_first
        ),
    )


def linear_cross_entropy(results: Results) -> str:
    """Forward and backward of the last layer: time, rate, and memory beyond the gradients."""
    labels = {
        "tilewright": "tilewright",
        "eager": "PyTorch, all logits",
        "inductor": "chunks of 2048 under Inductor, gradients by hand",
        "liger": "Liger",
        "liger-cute": "Liger, CuTe",
        "quack": "QuACK",
    }
    rows = [row for row in results.rows if row.suite == "linear_cross_entropy"]
    tokens, hidden, vocabulary = (int(size) for size in rows[0].case.split(" ")[0].split("x"))
    gradients = 2 * hidden * (tokens + vocabulary)
    return markdown(
        ["forward + backward", "ms", "TFLOP/s of useful work", "MiB beyond inputs and gradients"],
        (
            [
                labels.get(row.impl, row.impl) + mark([row]),
                f"{row.median_us / 1e3:.1f}",
                f"{row.TFLOPs:.0f}",
                f"{((row.peak_bytes or 0) - gradients) / 2**20:.0f}",
            ]
            for row in sorted(rows, key=lambda row: row.median_us)
        ),
    )


def attention(direction: Direction) -> Callable[[Results], str]:
    """Times against the better of cuDNN and FlashAttention-2, over lengths."""

    def table(results: Results) -> str:
        rows = results.of("attention", direction=direction)
        times = {row.case: share(of_shipped_attention(results, row)) + mark([row]) for row in rows}
        return markdown(
            [{"fwd": "forward", "bwd": "backward"}[direction] + ", S", *(f"{length}" for length in GRID)],
            (
                [
                    f"d {size}{', causal' if kind == 'causal' else ''}",
                    *(times.get(f"d{size} S{s} {kind}", NONE) for s in GRID),
                ]
                for size in (64, 128, 256)
                for kind in ("full", "causal")
            ),
        )

    return table


def decode(results: Results) -> str:
    """One query against a long cache, in shares of a copy."""
    names = {"tilewright": "tilewright", "torch": "PyTorch"}
    rows = {(row.case, row.impl): row for row in results.rows if row.suite == "attention_decode"}
    sizes = sorted(
        {tuple(int(re.findall(rf"{letter}(\d+)", case)[0]) for letter in "BS"): case for case, _ in rows}.items()
    )
    return markdown(
        ["batch × keys", *(f"{batch} × {keys}" for (batch, keys), _ in sizes)],
        (
            [label, *(share(of_copy(results, row)) + mark([row]) for _, case in sizes for row in [rows[case, impl]])]
            for impl, label in names.items()
        ),
    )


@dataclass(frozen=True)
class Race:
    """Some rows and what they are held against, for the table that sums up."""

    what: str
    against: str
    rows: Callable[[Results], list[Measurement]]
    figure: Callable[[Results, Measurement], float | None]


def products_with_gelu(results: Results) -> list[Measurement]:
    return results.of("linear_gelu", "linear_gelu_tanh", direction="fwd")


PEERS = "best of PyTorch, Inductor, Liger"
SHIPPED = "better of cuDNN and FlashAttention-2"
RACES = (
    Race("softmax, norms, cross entropy", "a copy of as many bytes", row_kernels("fwd"), of_copy),
    Race("", PEERS, row_kernels("fwd"), of_best_peer),
    Race("… backward", "a copy of as many bytes", row_kernels("bwd"), of_copy),
    Race("", "Inductor", row_kernels("bwd"), of_inductor),
    Race("attention", SHIPPED, of("attention", "fwd"), of_shipped_attention),
    Race("… backward", SHIPPED, of("attention", "bwd"), of_shipped_attention),
    Race("… portable, in Triton", "FlashAttention-2", portable("fwd"), of_flash2),
    Race("… portable, backward", "FlashAttention-2", portable("bwd"), of_flash2),
    Race("… one query, long caches", "a copy of as many bytes", of("attention_decode", "fwd"), of_copy),
    Race("linear + GELU", "the bare cuBLAS product", products_with_gelu, of_cublas),
    Race("linear + cross entropy", "best in chunks", of("linear_cross_entropy", "fwd+bwd"), of_best_in_chunks),
)


def races(results: Results) -> str:
    """Every kernel against its limit or its best peers: how many races, the geometric mean, the worst."""
    lines = []
    for race in RACES:
        pairs = [(figure, row) for row in race.rows(results) if (figure := race.figure(results, row)) is not None]
        figures = [figure for figure, _ in pairs]
        worst, row = min(pairs, key=lambda pair: pair[0])
        together = share(statistics.geometric_mean(figures)) + mark(row for _, row in pairs)
        lines.append([race.what, race.against, f"{len(figures)}", together, share(worst), f"{row.suite} {row.case}"])
    return markdown(["kernel", "× the speed of", "races", "together", "worst", "which is"], lines)


@dataclass(frozen=True)
class FirstTableRow:
    """A line of the table that comes first: one race, and its peers by column."""

    label: str
    suite: str
    case: str
    direction: Direction
    torch: str
    """The implementation that stands for PyTorch; after a comma, what is to be said of it. As in `others`."""
    others: str = ""
    inductor: str = "inductor"
    limit: str = "of a copy"


SHOWN = (
    FirstTableRow("softmax 32768×8192", "softmax", "32768x8192 bf16", "fwd", "torch", "liger, Liger"),
    FirstTableRow(
        "cross entropy 65536×8192",
        "cross_entropy",
        "65536x8192 bf16",
        "fwd",
        "torch",
        "liger, Liger, gradient included",
    ),
    FirstTableRow("layer norm 32768×8192", "layer_norm", "32768x8192 bf16", "fwd", "torch", "liger, Liger"),
    FirstTableRow("RMS norm 32768×8192, backward", "rms_norm", "32768x8192 bf16", "bwd", "torch", "liger, Liger"),
    FirstTableRow("GELU 16384²", "gelu", "16384x16384 bf16", "fwd", "torch"),
    FirstTableRow(
        "GELU + dropout + residual 16384², eager's own mask",
        "dropout_add",
        "16384x16384 bf16",
        "fwd",
        "eager",
        inductor="inductor, another mask",
    ),
    FirstTableRow(
        "linear + GELU 16384×3072×768",
        "linear_gelu",
        "16384x3072x768 bf16",
        "fwd",
        "eager",
        "cublas-bare, bare product",
        limit="of cuBLAS",
    ),
    FirstTableRow(
        "linear + cross entropy, 8192 tokens to 131072 words, forward + backward",
        "linear_cross_entropy",
        "8192x4096x131072 bf16",
        "fwd+bwd",
        "eager",
        "liger, Liger",
        limit="TFLOP/s",
    ),
    FirstTableRow(
        "attention d 128, S 16384, causal",
        "attention",
        "d128 S16384 causal",
        "fwd",
        "flash2, FA2",
        "cudnn, cuDNN",
        limit="TFLOP/s",
    ),
    FirstTableRow(
        "attention d 256, S 16384, causal, backward",
        "attention",
        "d256 S16384 causal",
        "bwd",
        "flash2, FA2",
        "cudnn, cuDNN",
        limit="TFLOP/s",
    ),
)


def shown(results: Results) -> str:
    """Races that a newcomer knows, in times."""
    lines = []
    for line in SHOWN:
        rows = {
            row.impl: row
            for row in results.rows
            if (row.suite, row.case, row.direction) == (line.suite, line.case, line.direction)
        }

        def time(words: str, rows: Mapping[str, Measurement] = rows) -> str:
            impl, _, said = words.partition(", ")
            return duration(rows[impl].median_us) + (f" ({said})" if said else "") if impl in rows else NONE

        ours = rows["tilewright"]
        figures = {
            "of a copy": share(of_copy(results, ours)),
            "of cuBLAS": share(of_cublas(results, ours)),
            "TFLOP/s": f"{ours.TFLOPs or 0:.0f}",
        }
        peers = (time(words) for words in (line.torch, line.inductor, line.others))
        lines.append(
            [line.label, *peers, f"**{duration(ours.median_us)}**{mark([ours])}", f"{figures[line.limit]} {line.limit}"]
        )
    return markdown(["", "PyTorch", "Inductor", "others", "tilewright", "of the limit"], lines)


STEP = "B4 S512 D256 H8 float32"
"""The block of examples/transformer_block.py."""


def replayed(results: Results) -> str:
    """A training step of a small block by calls and as CUDA graphs, and what the host takes to ask for it."""
    rows = {row.impl: row for row in results.rows if (row.suite, row.case, row.direction) == ("block", STEP, "fwd+bwd")}
    found = {
        impl: (rows.get(impl), rows.get(f"{impl}-reduce-overhead")) for impl in ("eager", "inductor", "tilewright")
    }
    return markdown(
        ["a step of", "by calls", "its host", "as CUDA graphs", "its host"],
        (
            [
                impl + mark(filter(None, pair)),
                *(duration(us) if us else NONE for row in pair for us in _step_and_host(row)),
            ]
            for impl, pair in found.items()
        ),
    )


def _step_and_host(row: Measurement | None) -> tuple[float | None, float | None]:
    return (None, None) if row is None else (row.median_us, row.host_us)


FEW_MODELS = ("resnet50", "llama B8", "bert", "unet", "gpt2 B8", "llama decode B1 ")
"""Of each kind one: convolutions, decoders trained, an encoder, a diffusion model, a decoder that makes a token."""


def few_models(results: Results) -> str:
    return models_together(Results([row for row in results.rows if row.case.startswith(FEW_MODELS)]))


def models_together(results: Results) -> str:
    """Whole models, one row each: inference or a token, and training, by calls and as CUDA graphs; losers first."""
    found: dict[str, dict[tuple[bool, str], Line]] = {}
    for line in lines(row for row in results.rows if row.suite == "models"):
        found.setdefault(line.case, {})[line.kind == "train", line.by] = line
    headings = ["model"]
    for kind in ("inference", "training"):
        headings += [kind, "× eager", "× Inductor", "replayed"]
    return markdown(
        [*headings, "memory"],
        ([case.removesuffix(" bf16"), *_inference_and_training(of_case)] for case, of_case in found.items()),
    )


def _inference_and_training(found: Mapping[tuple[bool, str], Line]) -> list[str]:
    cells = []
    for trains in (False, True):
        called, replayed = found.get((trains, "calls")), found.get((trains, "replay"))
        cells += [
            duration(called.ours.median_us) + mark([called.ours]) if called else NONE,
            share(called.of_eager if called else None),
            share(called.ratio if called else None),
            share(replayed.ratio if replayed else None),
        ]
    trained = found.get((True, "calls"))
    return [*cells, share(trained.memory if trained else None)]


def models(suite: str) -> Callable[[Results], str]:
    """Whole models beside eager and Inductor, by calls and as CUDA graphs, the slowest beside Inductor first."""
    return lambda results: _models([row for row in results.rows if row.suite == suite])


def _models(rows: list[Measurement]) -> str:
    return markdown(
        ["model", "", "eager", "Inductor", "tilewright", "× Inductor", "× in GPU time", "of its memory"],
        (
            [
                line.case,
                {"infer": "inference", "train": "training", "decode": "a token"}[line.kind]
                + (", CUDA graphs" if line.by == "replay" else ""),
                duration(line.eager.median_us) if line.eager else NONE,
                duration(line.peer.median_us),
                duration(line.ours.median_us) + mark([line.ours]),
                *(NONE if ratio is None else f"{ratio:.2f}" for ratio in (line.ratio, line.gpu, line.memory)),
            ]
            for line in lines(rows)
        ),
    )


def ranks(_: Results) -> str:
    """A step of training on two GPUs beside eager's and Inductor's: of each way the run that came last."""
    rows = {(row.case, row.impl): row for row in read_all(ROOT / "h200x2").rows if row.suite == "distributed"}
    lines = []
    for case in dict.fromkeys(case for case, _ in rows):
        found = {impl: rows[case, impl] for impl in ("eager", "inductor", "tilewright")}
        ours, peer = found["tilewright"], found["inductor"]
        lines.append(
            [
                case,
                *(duration(row.median_us) + mark([row]) for row in found.values()),
                f"{peer.median_us / ours.median_us:.2f}",
                f"{ours.peak_bytes / peer.peak_bytes:.2f}" if ours.peak_bytes and peer.peak_bytes else NONE,
                f"{ours.error:.1e}",
                f"{ours.eager_error:.1e}",
            ]
        )
    headings = ["a step of", "eager", "Inductor", "tilewright", "× Inductor", "of its memory", "losses", "eager's"]
    return markdown(headings, lines)


TABLES: dict[str, Callable[[Results], str]] = {
    "gelu": implementations("gelu", "16384x16384 bf16", ("fwd", "bwd")),
    "small weighted sum": implementations("weighted_sum", "1000x512 fp32", ("fwd",)),
    "weighted sum": implementations("weighted_sum", "16384x16384 bf16", ("fwd", "bwd")),
    "dropout": implementations("dropout_add", "16384x16384 bf16", ("fwd", "bwd")),
    "norms": row_kernel(both_dtypes({"layer_norm": "layer_norm", "rms_norm": "rms_norm"}, ("fwd", "bwd"))),
    "softmax": row_kernel(both_dtypes({"softmax": ""}, ("fwd", "bwd"))),
    "cross entropy": row_kernel(
        [
            *both_dtypes({"cross_entropy": ""}, ("fwd", "bwd")),
            ("bf16, `torch`", "cross_entropy", "fwd", "bf16", "torch"),
            ("bf16, `inductor`", "cross_entropy", "fwd", "bf16", "inductor"),
            ("bf16, `liger`", "cross_entropy", "fwd", "bf16", "liger"),
        ]
    ),
    "linear": linear,
    "linear cross entropy": linear_cross_entropy,
    "attention forward": attention("fwd"),
    "attention backward": attention("bwd"),
    "decode": decode,
    "races": races,
    "replayed": replayed,
    "second": partial(second, markdown),
    "versions": lambda _: versions(markdown),
    "shown": shown,
    "models": models("models"),
    "models shown": few_models,
    "models together": models_together,
    "ranks": ranks,
    "wider models": models("wider_models"),
}


def rewritten(text: str, results: Results) -> str:
    """The text with each of its tables made anew; a name that no table has is a `KeyError`."""
    return TABLE.sub(lambda found: found[1] + with_footnote(TABLES[found["name"]](results)) + found["end"], text)


def in_chinese(text: str, original: str) -> str:
    """`text` with the tables of the English `original`, in the words of chinese.json."""
    words = json.loads((REPOSITORY / "benchmarks/chinese.json").read_text(encoding="utf-8"))
    longest_first = sorted(words, key=len, reverse=True)
    english = re.compile("|".join(rf"(?<!\w){re.escape(each)}(?!\w)" for each in longest_first))
    tables = {
        found["name"]: english.sub(lambda word: words[word[0]], found["body"]) for found in TABLE.finditer(original)
    }
    return TABLE.sub(lambda found: found[1] + tables[found["name"]] + found["end"], text)


def main(folder: Path) -> None:
    results = read_all(folder)
    for document in DOCUMENTS:
        document.write_text(rewritten(document.read_text(encoding="utf-8"), results), encoding="utf-8")
    pages = ((REPOSITORY / "docs" / page.name, page) for page in (REPOSITORY / "docs/zh").glob("*.md"))
    for english, chinese in ((REPOSITORY / "README.md", CHINESE), *pages):
        text = in_chinese(chinese.read_text(encoding="utf-8"), english.read_text(encoding="utf-8"))
        chinese.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "h200")
