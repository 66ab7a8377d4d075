"""The numbers contract for every example: outputs and gradients beside eager and float64.

    python benchmarks/contract.py --device cuda --sizes large --out benchmarks/results/h200/contract_large.jsonl

One JSON line for each tensor of each example in fp32 and bf16, training and inference, inputs
contiguous or not, at sizes that hurt (odd, prime) and at the example's own. Every compiled result must
come from compiled kernels. Exit code 8 where the contract does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch

from examples import attention, gelu_dropout_residual, manual_gelu, mlp, naive_softmax, transformer_block
from tilewright.measure.truth.verify import verify
from tilewright.records.case import Case
from tilewright.records.errors import VerificationError
from tilewright.records.measurement import Verified
from tilewright.verbs import Subject

SMALL: Mapping[str, Callable[[str], Case]] = {
    "naive_softmax": lambda dtype: naive_softmax.case(N=37, M=131, dtype=dtype),
    "manual_gelu": lambda dtype: manual_gelu.case(N=33, M=129, dtype=dtype),
    "gelu_dropout_residual": lambda dtype: gelu_dropout_residual.case(N=33, M=129, dtype=dtype),
    "attention": lambda dtype: attention.case(B=3, N=37, d=24, dtype=dtype),
    "mlp": lambda dtype: mlp.case(dimension=40, layers=3, batch=7, dtype=dtype),
    "transformer_block": lambda dtype: transformer_block.case(B=2, S=19, D=24, H=3, dtype=dtype),
}
LARGE: Mapping[str, Callable[[str], Case]] = {
    "naive_softmax": lambda dtype: naive_softmax.case(dtype=dtype),
    "manual_gelu": lambda dtype: manual_gelu.case(dtype=dtype),
    "gelu_dropout_residual": lambda dtype: gelu_dropout_residual.case(dtype=dtype),
    "attention": lambda dtype: attention.case(dtype=dtype),
    "mlp": lambda dtype: mlp.case(dtype=dtype),
    "transformer_block": lambda dtype: transformer_block.case(dtype=dtype),
}


def scattered(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with strides that are not contiguous: every other element of a transposed tensor."""
    if tensor.dim() < 2:
        return tensor
    shape = [*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2] * 2]
    wide = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    view = wide[..., ::2].transpose(-1, -2)
    return view.copy_(tensor.detach()).detach().requires_grad_(tensor.requires_grad)


def check(case: Case, device: str, contiguous: bool) -> list[Verified]:
    """Every output and gradient of one compiled case; VerificationError if nothing was fused."""
    subject = Subject(case, device)
    inputs = subject.inputs if contiguous else [scattered(t) for t in subject.inputs]
    rows = verify(subject.model, subject.functions["tilewright"], inputs, seed=1, training=case.training)
    generated = any(g.executable and g.executable.kernels for g in subject.recording.graphs)
    fused = any(d.passed_by == "attention" and d.verdict == "taken" for d in subject.recording.decisions)
    if subject.recording.fallbacks or not (generated or fused):
        raise VerificationError(f"{case.name}: no compiled kernel ran: {subject.recording.fallbacks}")
    return rows


def rows(device: str, sizes: str) -> Iterator[dict[str, object]]:
    """One row for each tensor, as it is checked."""
    for name, make in (SMALL if sizes == "small" else LARGE).items():
        for dtype in ("fp32", "bf16"):
            for training in (False, True):
                for contiguous in (True, False):
                    case = replace(make(dtype), training=training)
                    where = {"example": name, "sizes": case.named_sizes(), "dtype": dtype, "training": training}
                    for verified in check(case, device, contiguous):
                        yield where | {"contiguous": contiguous} | asdict(verified)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", choices=("small", "large"), default="small")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    for row in rows(options.device, options.sizes):
        found.append(row)
        if not row["ok"]:
            print("broken", row)
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(row | {"device": device, "torch": torch.__version__}) + "\n" for row in found)
        options.out.write_text("".join(lines))
    broken = sum(not row["ok"] for row in found)
    print(f"{len(found)} tensors on {device}, {broken} outside the contract")
    sys.exit(VerificationError.exit_code if broken else 0)


if __name__ == "__main__":
    main()
