"""The order of all rewrites, as data.

torch-level graph → joint graph of ATen operators → cut into forward and backward → each graph → fusion
"""

from __future__ import annotations

from tilewright.choose.attention import choose_kernels
from tilewright.choose.cache_writes import write_caches
from tilewright.choose.embeddings import sum_sorted
from tilewright.choose.kernels import choose_candidates
from tilewright.choose.layouts import channels_last
from tilewright.choose.padded import pad_products, write_padded
from tilewright.choose.padded_groups import pad_groups
from tilewright.choose.skinny import skinny_products
from tilewright.choose.sums import sum_by_index
from tilewright.loops.exact import mark_exact
from tilewright.passes import products
from tilewright.passes.attention.flex import find_shown_keys, lower_flex_attention
from tilewright.passes.attention.library import make_masks_contiguous, name_attention
from tilewright.passes.attention.recognise import recognise_attention
from tilewright.passes.attention.sdpa import leave_weights_out, mark_pinned, prepare_calls
from tilewright.passes.attention.shift import zero_shift_gradients
from tilewright.passes.constants import copy_constants_once, fold_constants
from tilewright.passes.convolution import other_forms
from tilewright.passes.convolution.channels_last import drop_kept_copies, lay_operands
from tilewright.passes.dropout import split_dropout
from tilewright.passes.encoder_layers import write_layers_out
from tilewright.passes.in_place import write_back_together, write_in_place
from tilewright.passes.index.embeddings import add_sums_in_place
from tilewright.passes.index.sorted_rows import gather_back, narrow_sorts
from tilewright.passes.index.upsampling import gather_gradients
from tilewright.passes.loss import compute_where_read, split_losses
from tilewright.passes.norm.rms import as_aten, norm_as_one
from tilewright.passes.norm.split import (
    compute_from_moments,
    split_group_norms,
    split_norms,
    sum_samples_last,
    widen_moments,
)
from tilewright.passes.pointwise import compute_with_tensors, drop_identities, leaky_gradient_from_result
from tilewright.passes.rule import Rule
from tilewright.passes.simplify import simplify
from tilewright.passes.stage import Pass, Stage
from tilewright.passes.strided import split_strided_rows
from tilewright.passes.windows import refuse_written_windows
from tilewright.passes.zeros import drop_undefined

TORCH_LEVEL = Stage(
    "torch level",
    before="functions and methods of torch, as Dynamo captured them",
    after="each attention is one call, an RMS norm too; convolutions have their layouts; autograd can differentiate it",
    passes=(
        Pass("refuse_written_windows", refuse_written_windows, required=True),
        Pass("mark_pinned", mark_pinned),
        write_layers_out,
        leave_weights_out,
        lower_flex_attention,
        Pass("recognise_attention", recognise_attention),
        Pass("prepare_calls", prepare_calls),
        Pass("zero_shift_gradients", zero_shift_gradients),
        drop_identities,
        compute_with_tensors,
        gather_gradients,
        other_forms.convolve_as_images,
        other_forms.multiply_patches,
        norm_as_one,
        Pass("channels_last", channels_last),
    ),
)
JOINT = Stage(
    "joint",
    before="ATen operators without writes but those at the end; forward and backward, or inference, in one graph",
    after="attention, products and other operators are those that run; draws are of known generators; nothing is dead",
    passes=(
        as_aten,
        Pass("fold_constants", fold_constants),
        copy_constants_once,
        products.contract,
        Pass("simplify", simplify),
        leaky_gradient_from_result,
        products.add_biases_in_products,
        products.sum_few_terms,
        gather_back,
        narrow_sorts,
        Pass("choose_kernels", choose_kernels, hand_written=True),
        Pass("skinny_products", skinny_products, hand_written=True),
        Pass("sum_sorted", sum_sorted, hand_written=True),
        Pass("sum_by_index", sum_by_index, hand_written=True),
        compute_where_read,
        Pass("choose_candidates", choose_candidates, hand_written=True),
        # Behind the choice: a hand-written norm adds a residual to what a product gives, but no bias.
        products.add_biases_in_kernels,
        Pass("split_losses", split_losses),
        drop_kept_copies,
        lay_operands,
        Pass("pad_groups", pad_groups),
        make_masks_contiguous,
        Pass("pad_products", pad_products),
        widen_moments,
        compute_from_moments,
        Pass("split_dropout", split_dropout),
        Pass("mark_exact", mark_exact, required=True),
    ),
)
EACH_GRAPH = Stage(
    "each graph",
    before="forward, backward or inference, of fixed sizes; zeros stand for undefined gradients",
    after="what fusion partitions: norms are their formulas, writes are in place, no undefined gradient is read",
    passes=(
        Pass("drop_undefined", drop_undefined),
        write_padded,
        name_attention,
        find_shown_keys,
        split_norms,
        split_group_norms,
        split_strided_rows,
        other_forms.split_bias,
        other_forms.generate_depthwise,
        sum_samples_last,
        Pass("write_in_place", write_in_place),
        products.accumulate_products,
        Pass("write_caches", write_caches, hand_written=True),
        add_sums_in_place,
        Pass("write_back_together", write_back_together),
        Pass("mark_parts", mark_exact),
    ),
)
STAGES = (TORCH_LEVEL, JOINT, EACH_GRAPH)


def rewrite(name: str) -> Pass | Rule:
    """The rewrite with this name. Raises KeyError."""
    return {one.name: one for stage in STAGES for one in stage.passes}[name]
