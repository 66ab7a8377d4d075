"""How long the pre-norm Transformer block takes to compile, forward and backward: tilewright beside Inductor.

    python benchmarks/compile_time.py

Seconds from the first call of the compiled block to the end of its first backward, PyTorch and Dynamo
imported: with empty caches (cold), in a fresh process with warm caches (warm), and in the same
process for a second block (second) and for one that must be traced again (traced again).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
IMPLS = ("tilewright", "inductor")


def compile_once(impl: str) -> dict[str, float]:
    """The seconds of the first block of this process and of two more."""
    import torch

    from examples.transformer_block import Block

    if impl == "tilewright":
        import tilewright.backend

    def seconds() -> float:
        model = Block(256, 8, 0.1)
        x = torch.randn(4, 512, 256)
        run = torch.compile(model, backend=tilewright.backend.backend if impl == "tilewright" else impl)
        start = time.perf_counter()
        run(x).sum().backward()
        return time.perf_counter() - start

    first, second = seconds(), seconds()
    torch._dynamo.reset()
    return {"first": first, "second": second, "traced again": seconds()}


def in_a_process(impl: str, caches: Path) -> dict[str, float]:
    """`compile_once` in a fresh process that keeps its caches in a folder."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "TILEWRIGHT_CACHE": str(caches / "tilewright"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    command = [sys.executable, __file__, "--once", impl]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def measure(impl: str, repeats: int) -> dict[str, float]:
    """Medians of cold, warm, second and traced again, in seconds."""
    rows = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            cold = in_a_process(impl, Path(folder))["first"]
            warm = in_a_process(impl, Path(folder))
        rows.append({"cold": cold, "warm": warm.pop("first"), **warm})
    return {name: median(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description="compile time of the Transformer block")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--once", choices=IMPLS, help="only the first three compilations of this process, as JSON")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(compile_once(options.once)))
        return
    for number, impl in enumerate(IMPLS):
        seconds = measure(impl, options.repeats)
        if number == 0:
            print(f"{'seconds':12}" + "".join(f"{name:>14}" for name in seconds))
        print(f"{impl:12}" + "".join(f"{value:14.2f}" for value in seconds.values()))


if __name__ == "__main__":
    main()
