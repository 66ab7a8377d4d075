"""Whole models through eager, Inductor and tilewright: inference, training, decoding of one token.

    python -m benchmarks.models --device cuda --out benchmarks/results/h200/models.jsonl
    python -m benchmarks.models --tiny --models gpt2,unet --kinds infer      # on a CPU
    python -m benchmarks.models --device cuda --models wider                 # those of `wider_zoo`
    python -m benchmarks.models --device cuda --kinds infer --problems KernelBench/KernelBench --models level1

Every model runs in a process of its own, with caches that hold the native executor alone. All compile side by side and
are then measured one at a time. Inference is evaluation: the forward pass with its loss. A step of training ends with
the gradients released. Rows are `suite` "models"; a replayed entrant has no peak of memory, since CUDA graphs hold
theirs between calls. `first_call_us` was measured while the other models compiled.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from benchmarks.kernelbench import problems
from benchmarks.model_launches import read
from benchmarks.model_launches import table as launch_table
from benchmarks.model_runs import DEFAULT_ENTRANTS, DTYPES, ENTRANTS, KINDS, Request, run
from benchmarks.model_table import table
from benchmarks.model_zoo import DECODERS, MODELS
from benchmarks.wider_zoo import WIDER
from tilewright.measure.racing.results import append_results, read_results
from tilewright.records.measurement import Measurement

ROOT = Path(__file__).parents[1]
BUILT = "built"
"""Cache that holds the native executor alone."""


def options() -> argparse.Namespace:
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument("--problems", type=Path, help="folder of KernelBench's problems, which are models then")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[folder]
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can take")
    parser.add_argument("--dtype", choices=DTYPES, help="bf16 on a GPU, fp32 on a CPU if not given")
    names = [*MODELS, *DECODERS]
    given, _ = folder.parse_known_args()
    more = list(problems(given.problems)) if given.problems else []
    levels = {level: [name for name in more if name.startswith(level)] for level in ("level1", "level2", "level3")}
    known = [*names, *WIDER, *more]
    parser.add_argument(
        "--models",
        type=_list(known, wider=list(WIDER), **levels),
        default=names,
        help=f"of {', '.join([*names, *WIDER])}, or wider; of problems the names of files, as level1-1_…, or a level",
    )
    parser.add_argument("--kinds", type=_list(KINDS), default=list(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument(
        "--entrants", type=_list(ENTRANTS), default=list(DEFAULT_ENTRANTS), help=f"of {', '.join(ENTRANTS)}"
    )
    parser.add_argument("--seconds", type=float, default=2.5, help="of timing for one model and kind")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="models that compile side by side")
    parser.add_argument("--compile-seconds", type=float, default=300.0, help="a model not compiled by then is left out")
    parser.add_argument("--out", type=Path, help="result file to which rows are added")
    parser.add_argument("--kernels", type=Path, help="file for the kernels of every entrant, JSON lines")
    parser.add_argument(
        "--launches", type=Path, help="file for predicted and measured times of our launches, JSON lines"
    )
    parser.add_argument("--show", type=Path, help="print the table of a result file and measure nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _list(known: Iterable[str], **groups: list[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        found = [name for part in text.split(",") for name in groups.get(part, [part])]
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return found

    return parse


def main() -> None:
    given = options()
    if given.show:
        print(table(read_results(given.show)))
        return
    if given.worker:
        request = Request(
            given.worker,
            given.device,
            given.tiny,
            tuple(given.kinds),
            tuple(given.entrants),
            given.seconds,
            given.folder,
            given.launches is not None,
            given.problems,
            given.dtype,
        )
        run(request)
        return
    # `timeout` ends this process so; the workers must not stay.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))
    decodes, others = "decode" in given.kinds, bool({"infer", "train"} & set(given.kinds))
    wanted = [name for name in given.models if (decodes if name in DECODERS else others)]
    rows: list[Measurement] = []
    # What is ended may still write.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        _build_executor(Path(place) / BUILT)
        for start in range(0, len(wanted), given.jobs):
            folder = Path(place) / str(start)
            folder.mkdir()
            rows += _side_by_side(wanted[start : start + given.jobs], folder, given)
    print(table(rows))
    if given.launches and given.launches.exists():
        print(launch_table(read(given.launches)))


def _build_executor(cache: Path) -> None:
    """What runs tilewright's graphs is built once for all processes of a machine, so also for all models here."""
    build = "from tilewright.launch.executor import EXTENSION; EXTENSION.built()"
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"TILEWRIGHT_CACHE": str(cache), "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", build], env=env, check=True)


def _side_by_side(names: list[str], folder: Path, given: argparse.Namespace) -> list[Measurement]:
    """Run the models of one batch; their rows, which also go to `--out` as soon as a model is done."""
    workers = {name: _start(name, folder, given, len(names)) for name in names}
    try:
        _await_compiled(workers, folder, given.compile_seconds)
        return [row for name in _ended(workers) for row in _collected(name, folder, given)]
    finally:
        for worker in workers.values():
            worker.kill()


def _await_compiled(workers: Mapping[str, subprocess.Popen[bytes]], folder: Path, seconds: float) -> None:
    """Let all measure once every model is compiled; one that is not after `seconds` is ended."""
    deadline = time.monotonic() + seconds

    def compiling() -> list[str]:
        return [n for n, worker in workers.items() if not (folder / f"{n}.ready").exists() and worker.poll() is None]

    while compiling() and time.monotonic() < deadline:
        time.sleep(0.2)
    for name in compiling():
        workers[name].kill()
        print(f"{name}: not compiled within {seconds:.0f} s", flush=True)
    (folder / "go").touch()


def _ended(workers: Mapping[str, subprocess.Popen[bytes]]) -> Iterator[str]:
    """The names of the workers in the order in which they end."""
    left = dict(workers)
    while left:
        for name in [name for name, worker in left.items() if worker.poll() is not None]:
            del left[name]
            yield name
        time.sleep(0.1)


def _collected(name: str, folder: Path, given: argparse.Namespace) -> list[Measurement]:
    """The rows of a worker that has ended; its last lines are printed."""
    log = (folder / f"{name}.log").read_text().strip()
    if log:
        print("\n".join(f"{name}: {line}" for line in log.splitlines()[-12:]), flush=True)
    kernels, shard = folder / f"{name}.kernels", folder / f"{name}.jsonl"
    if given.kernels and kernels.exists():
        with given.kernels.open("a") as out:
            out.write(kernels.read_text())
    launches = folder / f"{name}.launches"
    if given.launches and launches.exists():
        with given.launches.open("a") as out:
            out.write(launches.read_text())
    rows = read_results(shard) if shard.exists() else []
    if given.out and rows:
        append_results(given.out, rows)
    return rows


def _start(name: str, folder: Path, given: argparse.Namespace, side_by_side: int) -> subprocess.Popen[bytes]:
    caches = folder / f"{name}.caches"
    shutil.copytree(folder.parent / BUILT, caches / "tilewright")
    threads = max(2, (os.cpu_count() or 1) // side_by_side)
    env = os.environ | {
        "TILEWRIGHT_CACHE": str(caches / "tilewright"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [
        sys.executable, "-m", "benchmarks.models", "--worker", name, "--folder", str(folder), "--device", given.device,
        "--kinds", ",".join(given.kinds), "--entrants", ",".join(given.entrants), "--seconds", str(given.seconds),
    ]  # fmt: skip
    command += ["--tiny"] if given.tiny else []
    command += ["--launches", str(given.launches)] if given.launches else []
    command += ["--problems", str(given.problems)] if given.problems else []
    command += ["--dtype", given.dtype] if given.dtype else []
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    main()
