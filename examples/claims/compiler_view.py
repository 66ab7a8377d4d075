"""A compiler's view of a pre-norm Transformer block: classes of operators, layouts, fusions, memory.

tilewright claims --only "V*"
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from tilewright.records.case import Case, InputSpec
from tilewright.records.program import Operator, Program

from .claim import Claim, Document, Finding, equal, holds, percent
from .lab import Lab, after, before, flops, named

B, S, D, H = 2, 1024, 768, 12
"""Sizes of `block_large`."""
CHAIN = ("native_layer_norm", "addmm", "addmm", "addmm", "bmm", "div", "_softmax", "bmm", "addmm", "add",
         "native_layer_norm", "addmm", "gelu", "addmm", "add")  # fmt: skip
MEMORY_BOUND = {"DRAM-bound", "cache-bound"}


def block(lab: Lab) -> Program:
    return lab.program("transformer_block.py:block_large")


def operators(lab: Lab, *names: str) -> list[Operator]:
    return named(before(block(lab)), *names)


def order(lab: Lab) -> Finding:
    found = before(lab.program("transformer_block.py:block_large_no_dropout"))
    names = [it.target.removeprefix("aten.").partition(".")[0] for it in found]
    kept = [name for name in names if name != "clone"]
    return holds(tuple(kept) == CHAIN, " → ".join(kept))


def norm_class(lab: Lab) -> Finding:
    norm = operators(lab, "native_layer_norm")[0]
    shape = norm.shape == (B, S, D)
    ours = f"{norm.operator_class}, {norm.bound}, {norm.shape_symbolic or norm.shape}"
    return holds(shape and norm.operator_class == "pointwise" and norm.bound in MEMORY_BOUND, ours)


def three_products(lab: Lab) -> Finding:
    names = [it.target.split(".")[1] for it in operators(lab, "addmm", "bmm")]
    shapes = [it.shape for it in operators(lab, "addmm")[: names.index("bmm")]]
    return equal(shapes, [(B * S, D)] * 3)


def heads(lab: Lab) -> Finding:
    def make() -> tuple[tuple[int, ...], bool]:
        view = torch.empty(B, S, D).unflatten(-1, (H, -1)).transpose(1, 2)
        return tuple(view.shape), view.is_contiguous()

    shape, contiguous = lab.once("the view by heads", make)
    ours = f"{list(shape)}, {'contiguous' if contiguous else 'not contiguous'}"
    return holds(shape == (B, H, S, D // H) and not contiguous, ours)


def scores(lab: Lab) -> Finding:
    shapes = [it.shape for it in operators(lab, "bmm")]
    softmax = operators(lab, "_softmax")[0]
    ours = f"{shapes[0]}, {shapes[1]}; softmax a {softmax.operator_class}"
    return holds(shapes == [(B * H, S, S), (B * H, S, D // H)], ours)


def merge(lab: Lab) -> Finding:
    product, add = operators(lab, "addmm")[3], operators(lab, "add")[0]
    ours = f"{product.shape}, then an addition that is {add.bound}"
    return holds(product.shape == (B * S, D) and add.bound in MEMORY_BOUND, ours)


def feed_forward(lab: Lab) -> Finding:
    shapes = [it.shape for it in operators(lab, "addmm")[4:]]
    return equal([*shapes, operators(lab, "add")[1].shape], [(B * S, 4 * D), (B * S, D), (B, S, D)])


def products_lead(lab: Lab) -> Finding:
    found = operators(lab, "addmm", "bmm")
    share = flops(found) / flops(before(block(lab)))
    bounds = sorted({str(it.bound) for it in found})
    return holds(share > 0.5 and bounds == ["compute-bound"], f"{percent(share)} of FLOPs; {', '.join(bounds)}")


def tiled_product(lab: Lab) -> Finding:
    found = lab.bench("matmul", "512x512x512", "fp32", "torch", "eager-steps")
    tiled, steps = found["torch"], found["eager-steps"]
    return holds(
        tiled.p80_us < steps.p20_us, f"{steps.median_us / tiled.median_us:,.0f} × the speed of writing products out"
    )


def classes(lab: Lab) -> Finding:
    names = ("native_layer_norm", "gelu", "_softmax", "native_dropout", "add")
    found = {name: operators(lab, name)[0] for name in names}
    right = all(it.operator_class == "pointwise" and it.bound in MEMORY_BOUND for it in found.values())
    ours = ", ".join(f"{name.removeprefix('native_')} {it.operator_class} {it.bound}" for name, it in found.items())
    return holds(right, ours)


def transposes(lab: Lab) -> Finding:
    def make() -> tuple[bool, bool]:
        x = torch.empty(8, 16)
        return x.t().data_ptr() != x.data_ptr(), x.t().contiguous().data_ptr() != x.data_ptr()

    transposed, contiguous = lab.once("addresses of a transpose", make)
    return holds(transposed, f"transpose copies: {transposed}; contiguous() after it: {contiguous}")


def no_copies(lab: Lab) -> Finding:
    old, new = (len(named(found, "clone", "copy", "contiguous")) for found in (before(block(lab)), after(block(lab))))
    return holds(new == 0, f"{old} copies before, {new} after")


def passes(lab: Lab) -> Finding:
    program = lab.program("gelu_dropout_residual.py:gelu_dropout_residual")
    unit = 4096 * 4096
    old, new = (
        [round(sum(getattr(it.cost, what) for it in found) / unit, 3) for what in ("reads", "writes")]
        for found in (before(program), after(program))
    )
    return holds(old == [3, 3] and new == [1, 1], f"{old[0]:g} reads, {old[1]:g} writes → {new[0]:g} and {new[1]:g}")


def norm_epilogue(lab: Lab) -> Finding:
    found = [it for it in block(lab).decisions if "norm" in it.consumer and it.passed_by != "attention"]
    taken = [it for it in found if it.verdict == "taken" and it.producer.startswith("addmm")]
    reason = next((it.reason for it in found if it.verdict != "taken"), "")
    return holds(bool(taken), f"{len(taken)} taken; {reason}")


def one_kernel(lab: Lab) -> Finding:
    def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, w, b)) + r

    specs = [
        InputSpec.parse(f"bf16[{shape}]") for shape in ("N=4096,K=1024", "M=4096,K=1024", "M=4096", "N=4096,M=4096")
    ]
    made = Case("linear_gelu_residual", lambda: layer, specs, training=False)
    found = after(lab.program("gelu(linear(x)) + r in bf16", "h200", case=made))
    return holds(len(found) == 1, f"{len(found)}: {', '.join(it.name for it in found)}")


def reuse(lab: Lab) -> Finding:
    peak = block(lab).peak_bytes("forward", "after")
    made = sum(it.cost.bytes_written for it in after(block(lab)))
    assert peak is not None
    return holds(peak < made, f"{made / 1e6:.1f} MB of results in {peak / 1e6:.1f} MB")


class Embedded(nn.Module):
    """Positional encodings, one normalisation that three readers share, and dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = torch.arange(x.shape[0], device=x.device)[:, None] / 10_000 ** (torch.arange(8, device=x.device) / 8)
        normed = F.layer_norm(x + place.sin(), (8,))
        again = F.layer_norm(x + place.sin(), (8,))
        return F.dropout(normed.sin() + again.cos(), 0.1, training=False)


def folded(lab: Lab) -> Finding:
    made = Case("embedded", Embedded, [InputSpec.parse("fp32[N=64,8]")], training=False)
    program = lab.program("positions, a shared norm and dropout at inference", case=made)
    old, new = before(program), after(program)
    return holds(len(new) == 1 and "dropout" not in new[0].name, f"{len(old)} operators → {new[0].name}")


def flash(lab: Lab) -> Finding:
    program = lab.program("attention.py:attention")
    old, new = before(program), after(program)
    square = [it.name for it in new if it.shape[-2:] == (S, S)]
    ours = f"{len(old)} → {', '.join(it.name for it in new)}; N×N results: {len(square)}"
    return holds(not square and len(new) == 1, ours)


def recognised(lab: Lab) -> Finding:
    programs = (lab.program("attention.py:attention"), block(lab))
    taken = [
        it.reason
        for program in programs
        for it in program.decisions
        if "attention" in it.reason and it.verdict == "taken"
    ]
    return holds(len(taken) == 2, f"{len(taken)} of 2 spellings: {taken[0] if taken else 'none'}")


def ablation(lab: Lab) -> Finding:
    from tilewright.verbs import Subject

    def make() -> dict[str, Subject]:
        case = lab.case("transformer_block.py:block_large_no_dropout")
        half = lab.example("transformer_block.py").case(
            D=D, H=H, B=B, S=S, dropout=0.0, dtype="bf16", name="block bf16"
        )
        return {"fp32": Subject(case, lab.device), "bf16": Subject(replace(half, training=False), lab.device)}

    of = lab.once("tilewright bench examples/transformer_block.py:block_large_no_dropout", make)
    times = lab.race(
        "a block: eager, fused, and eager in bf16",
        {
            "eager": lambda: of["fp32"].call("eager"),
            "fused": lambda: of["fp32"].call("tilewright"),
            "bf16": lambda: of["bf16"].call("eager"),
        },
    )
    gains = {name: times["eager"].median_us / times[name].median_us for name in ("fused", "bf16")}
    return holds(
        gains["fused"] > gains["bf16"], f"fusion {gains['fused']:.2f} ×, Tensor Cores by bf16 {gains['bf16']:.2f} ×"
    )


CLAIMS = (
    Claim("V1", "The graph of a pre-norm block.", "LN→QKV→…→softmax→PV→out→add→LN→FF1→GELU→FF2→add", order,
          "The captured graph without copies."),
    Claim("V2", "LayerNorm keeps [B,S,D]; it is pointwise and memory-bound.", "–", norm_class,
          "It reduces each row before it scales it."),
    Claim("V3", "Q, K and V are three products.", "3 × [B,S,D]", three_products, "One wider product would do."),
    Claim("V4", "Splitting heads gives [B,H,S,Dh], not contiguous.", "Dh = D/H", heads, "It is a view."),
    Claim("V5", "Scores and PV are large products, O(S²).", "[B,H,S,S], [B,H,S,Dh]", scores,
          "Shapes of the captured products."),
    Claim("V6", "Heads merge into [B,S,D]; a product; a memory-bound addition.", "–", merge,
          "An addition has a third of a FLOP for 4 bytes; small ones are launch-bound."),
    Claim("V7", "Feed-forward.", "to 4D, back to D; [B,S,D]", feed_forward, "Shapes of the captured products."),
    Claim("V8", "Products hold most of the computation and are compute-bound.", "8 of them", products_lead,
          "The share is; the bound depends on shape and device."),
    Claim("V9", "Optimise products by tiling, layout and matrix units.", "–", tiled_product,
          "A tiled product against one whose products are written to memory, 512³."),
    Claim("V10", "LayerNorm, GELU, softmax, dropout and residual are pointwise and bandwidth-bound.", "–", classes,
          "Two of them reduce rows; small ones are launch-bound."),
    Claim("V11", "Reshape and transpose compute nothing, but an explicit transpose copies.", "–", transposes,
          "A transpose is a view of the same memory; only contiguous() or a merge copies."),
    Claim("V12", "A kernel can read [B,S,D] as [B,H,S,Dh] through strides.", "0 copies", no_copies,
          "Copies in the plan of the block."),
    Claim("V13", "GELU, dropout and residual as one kernel.", "3 reads and writes → 1 read, 1 write", passes,
          "The residual is a second operand, before and after."),
    Claim("V14", "LayerNorm as an epilogue saves writing the product.", "–", norm_epilogue,
          "A tile must hold a whole row, and here the residual needs the product as well."),
    Claim("V15", "A compiler makes one kernel of product, bias, GELU and residual.", "1", one_kernel,
          "In this block GELU and residual follow different products."),
    Claim("V16", "Lifetimes let a later result take an earlier one's buffer.", "–", reuse,
          "The peak of the plan beside all that it writes."),
    Claim("V17", "Fold positional encodings, normalise once, drop dropout at inference.", "–", folded,
          "All three in one small module; what depends on positions alone may be computed anew, in registers."),
    Claim("V18", "Flash attention makes one kernel of five operators and never writes [S,S].", "5 → 1", flash,
          "Here the matrix is not masked: four operators."),
    Claim("V19", "Compilers can apply such tiling by themselves.", "–", recognised,
          "Two spellings of attention without a call of it."),
    Claim("V20", "Fusion is the most important optimisation.", "–", ablation,
          "Against the same block on matrix units; which wins depends on shapes.", "cuda"),
)  # fmt: skip
DOCUMENT = Document("A compiler's view", "none: nothing is measured", CLAIMS)
