"""Operators of optimizers, and others over lists of parameters, gradients and states."""

from __future__ import annotations

from tilewright.operators.arithmetic import NOTHING, each, of_argument
from tilewright.operators.row import Traffic, calls
from tilewright.operators.shapes import no_result

ELEMENTS = of_argument("self")
MOMENTS = Traffic(writes=("self", "exp_avgs", "exp_avg_sqs"))
BUFFERS = Traffic(writes=("self", "momentum_buffer_list"))

for name, flops in (("adamw", 14), ("adam", 13)):
    calls(
        f"_fused_{name}_.default(self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, ...)",
        "library",
        arithmetic=each(ELEMENTS, flops, 1),
        shapes=no_result,
        traffic=MOMENTS,
    )
calls(
    "_fused_sgd_.default(self, grads, momentum_buffer_list, ...)",
    "library",
    arithmetic=each(ELEMENTS, 4),
    shapes=no_result,
    traffic=BUFFERS,
)
calls(
    "_foreach_norm.Scalar(self, ord, dtype)",
    "library",
    arithmetic=each(ELEMENTS, 2),
    shapes=lambda call: [()] * len(call.list_of("self")),
)
# What compiled graphs write back at their end (`passes/in_place.py`); a trace prices it tensor by tensor.
calls(
    "_foreach_copy_.default(self, src, non_blocking)",
    "library",
    arithmetic=NOTHING,
    shapes=no_result,
    traffic=Traffic(unread=("self",)),
    priced=False,
)
calls("_foreach_add_.Scalar(self, scalar)", "library", arithmetic=each(ELEMENTS, 1), shapes=no_result, priced=False)
