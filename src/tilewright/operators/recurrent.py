"""Recurrent layers: one call of a library for all steps of one layer in one direction.

oneDNN runs LSTMs (Hochreiter and Schmidhuber 1997; with a forget gate, Gers et al. 2000). A step computes four gates,
i, f and o sigmoids and g a tanh, from the features and the last output, then c' = f · c + i · g and h' = o · tanh(c').
"""

from __future__ import annotations

from tilewright.operators.arithmetic import Arithmetic, CallSizes, Count, Shape, elements, nothing
from tilewright.operators.row import calls
from tilewright.operators.shapes import CallAxes, Result

GATES = 4
SIGMOID_FLOPS = 3
FORWARD_FLOPS = 3 * SIGMOID_FLOPS + 4
# Of a cell: the gradient of c' (5), of the gates and of c (4), through three sigmoids (3 each) and a tanh (3), the sum
# of both gradients of the output (1), and the sum of each gate for the bias (4).
BACKWARD_FLOPS = 5 + 4 + 3 * 3 + 3 + 1 + 4


def _shape(sizes: CallSizes, name: str) -> Shape:
    shape = sizes.shape(name)
    assert shape is not None
    return shape


def _products(sizes: CallSizes) -> Count:
    """FLOPs of [steps · batch, features] × [features, 4 H] and, step by step, [batch, H] × [H, 4 H]."""
    source, hidden = _shape(sizes, "input"), _shape(sizes, "hx_")[-1]
    return 2 * elements(source[:-1]) * GATES * hidden * (source[-1] + hidden)


def _cells(sizes: CallSizes) -> Count:
    return elements(_shape(sizes, "input")[:-1]) * _shape(sizes, "hx_")[-1]


def _layer(call: CallAxes) -> Result:
    hidden = call.tensor("hx_")
    # The workspace of a training step is the library's own: it has no formula.
    return [(*call.tensor("input")[:-1], hidden[-1]), hidden, hidden, None]


DIFFERENTIATED = ("input", "weight1", "weight2", "weight3", "weight4", "hx_", "hx_")
calls(
    """
    mkldnn_rnn_layer.default(input, weight0, weight1, weight2, weight3, hx_, cx_, reverse, batch_sizes, mode,
    hidden_size, num_layers, has_biases, bidirectional, batch_first, train)
    """,
    "compute",
    arithmetic=Arithmetic(
        lambda sizes: _products(sizes) + FORWARD_FLOPS * _cells(sizes), lambda sizes: 5 * _cells(sizes)
    ),
    shapes=_layer,
    dtypes=("input", "hx_", "cx_", "uint8"),
    role="LSTM",
)
calls(
    """
    mkldnn_rnn_layer_backward.default(input, weight1, weight2, weight3, weight4, hx_, cx_tmp, output, hy_, cy_,
    grad_output, grad_hy, grad_cy, reverse, mode, hidden_size, num_layers, has_biases, train, bidirectional,
    batch_sizes, batch_first, workspace)
    """,
    "compute",
    arithmetic=Arithmetic(lambda sizes: 2 * _products(sizes) + BACKWARD_FLOPS * _cells(sizes), nothing),
    shapes=lambda call: [call.tensor(name) for name in DIFFERENTIATED],
    dtypes=DIFFERENTIATED,
    role="LSTM backward",
)
