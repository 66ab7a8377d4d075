"""Operators that programs meet now and then and that stay calls of a library: distances, tables, quantisers, parts."""

from __future__ import annotations

from functools import partial

from tilewright.operators.arithmetic import NOTHING, Arithmetic, each, elements, nothing, of_argument, per_result
from tilewright.operators.row import ALL, Traffic, calls
from tilewright.operators.shapes import like, same

rare = partial(calls, operator_class="library", shapes=None, priced=False)

# Distances of all pairs of rows: of each coordinate a difference, a power and a sum. Their gradients compare a distance
# with the largest difference (p = inf), or have its sign.
rare(
    "_cdist_forward.default(x1, x2, p, compute_mode)\n_pdist_forward.default(self, p)",
    arithmetic=Arithmetic(lambda sizes: 3 * elements(sizes.result()) * sizes.operand()[-1], nothing),
)
rare(
    "_cdist_backward.default(grad, x1, x2, p, cdist)\n_pdist_backward.default(grad, self, p, pdist)",
    arithmetic=Arithmetic(lambda sizes: 5 * elements(sizes.operand()) * sizes.result()[-1], nothing),
    discontinuous=True,
)
rare("dist.default(self, other, p)", arithmetic=each(of_argument("self"), 3))
rare("renorm.default(self, p, dim, maxnorm)", arithmetic=per_result(3), shapes=same)
rare("addr.default(self, vec1, vec2, beta, alpha)", arithmetic=per_result(4))
rare("_trilinear.default(i1, i2, i3, expand1, expand2, expand3, sumdim, unroll_dim)")

# Tables of sizes alone.
tables = partial(rare, arithmetic=NOTHING, traffic=Traffic(unread=(ALL,)))
tables(
    """
    tril_indices.default(row, col, offset, ...)
    triu_indices.default(row, col, offset, ...)
    fft_fftfreq.default(n, d, ...)
    fft_rfftfreq.default(n, d, ...)
    logspace.default(start, end, steps, base, ...)
    """
)
for window in ("bartlett", "blackman", "hamming", "hann", "kaiser"):
    tables(
        f"{window}_window.default(window_length, ...)\n{window}_window.periodic(window_length, periodic, ...)",
        arithmetic=per_result(2, 1),
    )
tables("_new_zeros_with_same_feature_meta.default(self, other, self_num_batch_dims)", shapes=same)
tables("kaiser_window.beta(window_length, periodic, beta, ...)", arithmetic=per_result(2, 2))
rare(
    """
    linspace.Tensor_Tensor(start, end, steps, ...)
    linspace.Tensor_Scalar(start, end, steps, ...)
    linspace.Scalar_Tensor(start, end, steps, ...)
    logspace.Tensor_Tensor(start, end, steps, base, ...)
    logspace.Tensor_Scalar(start, end, steps, base, ...)
    logspace.Scalar_Tensor(start, end, steps, base, ...)
    affine_grid_generator.default(theta, size, align_corners)
    """,
    arithmetic=per_result(2),
)

rare("soft_margin_loss.default(self, target, reduction)", arithmetic=each(of_argument("self"), 2, 2))
rare("soft_margin_loss_backward.default(grad_output, self, target, reduction)", arithmetic=per_result(4, 1))

# What they move depends on values, or has no formula.
rare(
    """
    block_diag.default(tensors)
    channel_shuffle.default(self, groups)
    masked_scatter_backward.default(grad_output, mask, sizes)
    nonzero_static.default(self, size, fill_value)
    squeeze_copy.dim(self, dim)
    _chunk_cat.default(tensors, dim, num_chunks)
    _unsafe_masked_index.default(self, mask, indices, fill)
    _unsafe_masked_index_put_accumulate.default(self, mask, indices, values)
    repeat_interleave.Tensor(repeats, output_size)
    """,
    arithmetic=NOTHING,
)
rare(
    """
    _embedding_bag_forward_only.default(weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights,
        include_last_offset, padding_idx)
    _embedding_bag_backward.default(grad, ...)
    _embedding_bag_per_sample_weights_backward.default(grad, weight, indices, offsets, ...)
    """
)
# The gradient of a maximum compares it with the elements; so do sets and counts.
rare(
    """
    segment_reduce.default(data, reduce, ...)
    _segment_reduce_backward.default(grad, output, data, reduce, ...)
    _unique.default(self, sorted, return_inverse)
    _unique2.default(self, sorted, return_inverse, return_counts)
    unique_dim.default(self, dim, sorted, return_inverse, ...)
    unique_consecutive.default(self, return_inverse, return_counts, dim)
    bincount.default(self, weights, minlength)
    histogram.bins_tensor(self, bins, weight, density)
    histogram.bin_ct(self, bins, range, weight, ...)
    _histogramdd_bin_edges.default(self, bins, range, weight, ...)
    _histogramdd_from_bin_cts.default(self, bins, range, weight, ...)
    """,
    discontinuous=True,
)
rare("_upsample_bilinear2d_aa.default(self, ...)\n_upsample_bicubic2d_aa.default(self, ...)")
rare("_upsample_bilinear2d_aa_backward.default(grad_output, ...)")
rare("_upsample_bicubic2d_aa_backward.default(grad_output, ...)")
for axes in (2, 3):
    rare(f"fractional_max_pool{axes}d.default(self, kernel_size, output_size, random_samples)", discontinuous=True)
    rare(
        f"fractional_max_pool{axes}d_backward.default(grad_output, self, kernel_size, output_size, indices)",
        arithmetic=each(of_argument("grad_output"), 1),
        shapes=like("self"),
    )
rare(
    """
    fake_quantize_per_tensor_affine_cachemask.default(self, scale, zero_point, quant_min, quant_max)
    fake_quantize_per_channel_affine_cachemask.default(self, scale, zero_point, axis, quant_min, quant_max)
    """,
    arithmetic=per_result(6),
    shapes=same,
    dtypes=("self", "bool"),
    discontinuous=True,
)
