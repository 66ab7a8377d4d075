"""The problems of KernelBench as models of `benchmarks/models.py`, from a checkout that the user names.

    python -m benchmarks.models --device cuda --problems KernelBench/KernelBench --models level2 --kinds infer

KernelBench: Ouyang et al., "KernelBench: Can LLMs Write Efficient GPU Kernels?", 2025. A problem is a file with a
class `Model`, `get_init_inputs` and `get_inputs`; it is measured with its own sizes and random weights.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._guards import detect_fake_mode

from benchmarks.model_zoo import Build, Size, Workload


def problems(folder: Path) -> Mapping[str, Build]:
    """By level and file name, as `level2-1_Conv2D_ReLU_BiasAdd`; in the order of their numbers."""
    files = sorted(folder.glob("level[123]/*.py"), key=lambda file: (file.parent.name, int(file.stem.split("_")[0])))
    return {f"{file.parent.name}-{file.stem}": partial(_build, file) for file in files}


def _module(file: Path) -> Any:
    """The problem as an imported module: Dynamo looks up the globals of a function in the module of its name."""
    name = "kernelbench_" + re.sub(r"\W", "_", f"{file.parent.name}_{file.stem}")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _build(file: Path, size: Size) -> Workload:
    torch.manual_seed(0)
    # Inputs are up to 13 GB, and other processes draw theirs at the same time; without memory, any device will do.
    on_gpu = torch.cuda.is_available() and detect_fake_mode() is None
    with torch.device("cuda" if on_gpu else "cpu"):
        module = _module(file)
        model = module.Model(*module.get_init_inputs())
        given = module.get_inputs()
    inputs: dict[str, Any] = dict(zip(inspect.signature(model.forward).parameters, given, strict=False))
    sizes = " ".join("x".join(map(str, x.shape)) for x in given if isinstance(x, torch.Tensor))
    return Workload(model, inputs, sizes)
