"""Runs the passes over every graph in order, whether it is compiled or only explained."""

from __future__ import annotations

from torch import fx

from tilewright.hardware.target import Target
from tilewright.passes.attention.contiguous_masks import make_masks_contiguous
from tilewright.passes.attention.flex import call_for_bands
from tilewright.passes.attention.kernel import Raced, choose_kernels, not_raced
from tilewright.passes.attention.pinned import mark_pinned
from tilewright.passes.attention.recognise import Price, recognise_attention, unpriced
from tilewright.passes.attention.sdpa import prepare_calls
from tilewright.passes.attention.shift import zero_shift_gradients
from tilewright.passes.attention.unread_weights import leave_weights_out
from tilewright.passes.candidates import choose_candidates
from tilewright.passes.casts import drop_round_trips
from tilewright.passes.constant_copies import copy_constants_once
from tilewright.passes.convolution.channels_last import channels_last
from tilewright.passes.convolution.gradients import lighten_gradients
from tilewright.passes.convolution.one_row import convolve_as_images
from tilewright.passes.convolution.operands import lay_operands
from tilewright.passes.convolution.padded_groups import pad_groups
from tilewright.passes.convolution.patches import multiply_patches
from tilewright.passes.convolution.request import LayoutTimes, not_timed
from tilewright.passes.copies import drop_copies
from tilewright.passes.encoder_layers import write_layers_out
from tilewright.passes.fold_constants import fold_constants
from tilewright.passes.index.embeddings import sum_sorted
from tilewright.passes.index.narrow_sorts import narrow_sorts
from tilewright.passes.index.permutations import gather_back
from tilewright.passes.index.sums import sum_by_index
from tilewright.passes.index.upsampling import gather_gradients
from tilewright.passes.leaky_gradients import read_results
from tilewright.passes.loss.log_softmaxes import compute_where_read
from tilewright.passes.loss.picked import compute_across, compute_from_rows
from tilewright.passes.norm.results import compute_from_moments
from tilewright.passes.norm.rms import as_aten, norm_as_one
from tilewright.passes.product.biases import place_biases
from tilewright.passes.product.contractions import contract
from tilewright.passes.product.padded import pad_products
from tilewright.passes.product.skinny import skinny_products
from tilewright.passes.random.dropout import split_dropout
from tilewright.passes.simplify import drop_unread, simplify
from tilewright.records.program import Decision


def optimise_module(
    module: fx.GraphModule, target: Target, price: Price = unpriced, layout_times: LayoutTimes = not_timed
) -> list[Decision]:
    """The passes on the torch-level graph, before autograd: attention and RMS norms are recognised before they are
    decomposed, and layouts chosen. `price` predicts the time of an attention; `layout_times` races layouts.
    """
    mark_pinned(module)
    decisions = write_layers_out(module, target)
    decisions += leave_weights_out(module, target) + call_for_bands(module, target)
    decisions += recognise_attention(module, target, price) + prepare_calls(module, target)
    zero_shift_gradients(module)
    gather_gradients(module)
    convolve_as_images(module, target)
    multiply_patches(module, target)
    return decisions + norm_as_one(module, target) + channels_last(module, target, layout_times)


def optimise_joint(
    graph: fx.Graph, target: Target, raced: Raced = not_raced, *, hand_written: bool = True
) -> list[Decision]:
    """The passes on the joint graph, before the cut into forward and backward.

    `raced` returns how long tilewright's attention and PyTorch's took, if they were raced. Without `hand_written` no
    hand-written kernel is proposed.
    """
    as_aten(graph)
    fold_constants(graph)
    copy_constants_once(graph)
    drop_copies(graph)
    contracted = contract(graph)
    simplify(graph)
    read_results(graph)
    place_biases(graph, target)
    gathered = gather_back(graph) + narrow_sorts(graph, target)
    decisions = choose_kernels(graph, target, raced) if hand_written else []
    skinny = skinny_products(graph, target) if hand_written else []
    summed = sum_sorted(graph, target) + sum_by_index(graph, target) if hand_written else []
    compute_across(graph, target)
    compute_where_read(graph, target)
    chosen = choose_candidates(graph, target) if hand_written else []
    if any(decision.verdict == "taken" for decision in chosen):
        drop_round_trips(graph)
        drop_unread(graph)
    compute_from_rows(graph, target)
    lighten_gradients(graph, target)
    lay_operands(graph, target)
    grouped = pad_groups(graph, target)
    make_masks_contiguous(graph, target)
    padded = pad_products(graph, target)
    if any(decision.verdict == "taken" for decision in padded):
        drop_unread(graph)
    compute_from_moments(graph, target)
    split_dropout(graph, target)
    return [*contracted, *gathered, *decisions, *skinny, *summed, *chosen, *grouped, *padded]
