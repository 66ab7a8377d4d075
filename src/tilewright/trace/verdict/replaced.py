"""Sentences on calls for which PyTorch itself has a cheaper way."""

from __future__ import annotations

from tilewright.trace.verdict.candidate import Advice, Candidate, Step

_REPLACED: dict[str, tuple[str, str, str]] = {
    "EmbeddingBackward0": (
        "The gradient of an embedding",
        "It is as large as the table of the embedding, and most of it is zero.",
        "nn.Embedding(..., sparse=True) has a gradient of the rows that were read; SGD and SparseAdam take it",
    ),
    "EmbeddingBackward0 of many": (
        "The gradient of an embedding",
        "More rows are looked up than the table has, and each is added to its gradient in turn.",
        'Where they are summed or averaged next, nn.EmbeddingBag(..., mode="mean") does both in one call, forward and '
        "backward",
    ),
    "aten::one_hot": (
        "one_hot()",
        "It writes a row of all classes for each index, of which one element is not zero.",
        "functional.embedding(indices, weight) reads the chosen rows alone, .gather() one element of each row",
    ),
    **dict.fromkeys(
        ("aten::sort", "aten::argsort"),
        (
            "Sorting",
            "It orders all elements, whatever is read of them.",
            "torch.topk, kthvalue or median find the few that are needed; what does not change is sorted once",
        ),
    ),
    "format": (
        "Formatting a tensor",
        "Its elements are copied to the host and turned to text one by one, also where nothing prints the text.",
        "Format a number (loss.item()), every 100th step",
    ),
    "sampler": (
        "Choosing the next batch (the DataLoader's sampler)",
        "The sampler runs in the process of the training, whatever num_workers is.",
        "Make the order once an epoch (one sort, torch.randperm), and let the sampler only read it",
    ),
    "sampler anew": (
        "Choosing the next batch (the DataLoader's sampler)",
        "Each step makes an iterator of the DataLoader, and its sampler first orders all rows of the data set.",
        "Make one iterator before the loop (batches = iter(loader)), and take next(batches) in each step",
    ),
    "zero_grad": (
        "zero_grad(set_to_none=False)",
        "It writes zeros into every gradient, and backward adds to them where it could keep its own result.",
        "optimizer.zero_grad() sets gradients to None",
    ),
    "trace": (
        "Tracing a model",
        "torch.jit, torch.fx and torch.export run or read the whole model in Python, to make a program of it.",
        "Do it once before the loop, and call what it returns",
    ),
    "compile": (
        "Calling torch.compile",
        "Each step wraps the function anew, and what was compiled for it is looked for again.",
        "Call torch.compile once before the loop, and in the step what it returns",
    ),
    "modules": (
        "Going through a model's modules",
        "eval(), train(), state_dict(), parameters() and their like visit each module in Python.",
        "Keep list(model.parameters()) from before the loop, and call eval() and train() where the mode changes",
    ),
    "new optimizer": (
        "Making an optimizer",
        "Each step makes one, and its state of every parameter anew; what the last one had averaged is lost.",
        "Make the optimizer once before the loop",
    ),
    "aten::randperm": (
        "Drawing a random order",
        "torch.randperm(n) orders all n numbers, whatever is read of them.",
        "torch.randint(n, (k,)) draws k of them, some perhaps twice; an order is drawn once an epoch and read in parts",
    ),
    "aten::_unique2": (
        "Finding the elements that differ",
        "torch.unique() sorts all elements, and looks for the repeated ones.",
        "torch.bincount or a mask (seen[ids] = True) finds those of a known range; what does not change is found once",
    ),
    **dict.fromkeys(
        ("aten::nonzero", "aten::masked_select"),
        (
            "Selecting by a mask",
            "It lists the positions first, and the size of the result is known only then.",
            "torch.where(mask, x, 0), or a product by the mask, keeps the size instead of x[mask]",
        ),
    ),
    "aten::linalg_inv_ex": (
        "Inverting a matrix",
        "An inverse takes three times the operations of a solution, and rounds more.",
        "torch.linalg.solve(A, B) instead of torch.inverse(A) @ B; torch.linalg.lu_factor once if A stays",
    ),
    "aten::linalg_svd": (
        "Decomposing a matrix (svd)",
        "It computes all singular vectors, whatever is read of them.",
        "torch.linalg.svdvals for the values alone, matrix_norm(A, 2) or some steps of power iteration for the largest",
    ),
    "jacobian": (
        "A Jacobian row by row",
        "torch.autograd.functional goes backward once for each element of the result, from Python.",
        "torch.func.jacrev(f)(x), or jacobian(f, x, vectorize=True), goes backward once for all of them",
    ),
    "unfold": (
        "Unfolding an image (unfold)",
        "It copies each element to every window that it is in, and backward adds all of them up again.",
        "functional.conv2d(x, weight, stride=, groups=) sums over windows without the copies; windows that do not "
        "overlap are a reshape",
    ),
    "recompute": (
        "Computing forward again in backward (checkpoint)",
        "torch.utils.checkpoint keeps no activations, and backward computes them once more.",
        "Checkpoint only blocks whose activations do not fit, or keep products (create_selective_checkpoint_contexts)",
    ),
}
_PARTLY = {
    "EmbeddingBackward0 of many": 0.6,
    "aten::linalg_inv_ex": 0.6,
    "aten::linalg_svd": 0.5,
    "jacobian": 0.8,
    "unfold": 0.8,
}
"""How much of the time the cheaper way saves, where it is not almost all."""


def instead_of_random(function: str) -> str | None:
    """What to do instead of a function of Python's `random`; None of others."""
    module, _, name = function.rpartition(".")
    if module != "random" and function not in ("random", "getrandbits"):
        return None
    match name:
        case "sample" | "choices" | "choice":
            return (
                "Draw all places at once, places = torch.randint(n, (k,)); of data in a tensor that is written in turn "
                "x[places] are their rows, of a list [x[i] for i in places.tolist()]"
            )
        case "shuffle":
            return "Shuffle places instead, torch.randperm(n), once an epoch or by the DataLoader (shuffle=True)"
        case "seed" | "getstate" | "setstate" | "__init__":
            return "Seed it once before the loop"
    return "torch.rand(n), torch.randint(low, high, (n,)) or torch.randn(n).tolist() draws all numbers at once"


def advise_half(cause: Candidate, step: Step) -> Advice:
    floor_ms = cause.inner_ms or 0.0
    why = f"PyTorch is slow in float16 on this processor: {cause.what} and others are far from their floors."
    action = 'Use float32 on a CPU (model.float()), or torch.autocast("cpu", dtype=torch.bfloat16)'
    return Advice("Computing in float16", why, action, cause.ms - 4 * floor_ms)


def advise_replaceable(cause: Candidate, step: Step) -> Advice:
    kind = "sampler anew" if cause.what == "sampler" and step.restarts else cause.what
    slow, why, action = _REPLACED[kind]
    return Advice(slow, why, action, _PARTLY.get(cause.what, 0.99) * cause.ms)
