"""The colour classes of slices and operators on the page."""

from __future__ import annotations

import re

KINDS = (
    *("compute", "pointwise", "reduction", "layout", "random", "library", "unknown", "region"),
    *("launch", "wait", "range", "python"),
)
"""What a colour stands for: an operator class, or a role on the host. `draw.js` has the colours in this order."""
ACCOUNTING = "accounting"
"""The category of the spans into which a device's time is divided; their names are its classes."""
_CLASSES = {
    "kernel": "compute", "wave tail": "reduction", "communication": "library", "copy": "layout",
    "synchronisation": "wait", "launch-bound": "launch", "idle": "python",
}  # fmt: skip
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("library", r"nccl|all_?reduce|all_?gather|reduce_?scatter|broadcast|c10d::"),
        ("random", r"dropout|rand|bernoulli|philox"),
        ("compute", r"gemm|(?<![a-z])(b?add)?b?mm(backward\d*)?(?![a-z])|"
                    r"matmul|linear|conv|attention|fmha|flash|einsum"),
        ("reduction", r"norm|softmax|reduce|loss|entropy|"
                      r"(^|[:_])(sum|mean|max|min|amax|var|std|cumsum|prod|argmax)(_|$)"),
        ("layout", r"mem(cpy|set)|copy|transpose|permute|view|reshape|expand|clone|contiguous|stride|slice|select|"
                   r"squeeze|empty|zeros|(^|[:_])(cat|t|to|fill|zero|resize|detach|alias|split|unbind|stack)_?$"),
    )
)  # fmt: skip


def kind_of(name: str, category: str) -> str:
    """The colour class of a slice, guessed from its name: an operator class, or a role on the host.

    >>> kind_of("aten::addmm", "cpu_op"), kind_of("cudaStreamSynchronize", "cuda_runtime")
    ('compute', 'wait')
    """
    if category == ACCOUNTING:
        return _CLASSES.get(name, "range")
    if category in ("python_function", "thread"):
        return "python"
    if category in ("user_annotation", "gpu_user_annotation", "nvtx", "Trace"):
        return "range"
    if re.search(r"Synchronize|EventQuery|WaitEvent", name) and category.startswith("cuda"):
        return "wait"
    if category in ("cuda_runtime", "cuda_driver"):
        return "launch"
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "pointwise")
