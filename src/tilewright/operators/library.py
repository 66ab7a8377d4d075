"""Operators that stay library calls: matrix products, attention, convolution, gathers, random draws."""

from __future__ import annotations

from tilewright.operators.row import Row, declare

COMPUTE = """
mm.default addmm.default bmm.default baddbmm.default addbmm.default mv.default addmv.default dot.default
matmul.default linear.default
convolution.default convolution_backward.default
_scaled_dot_product_flash_attention_for_cpu.default _scaled_dot_product_flash_attention_for_cpu_backward.default
_scaled_dot_product_flash_attention.default _scaled_dot_product_flash_attention_backward.default
_scaled_dot_product_efficient_attention.default _scaled_dot_product_efficient_attention_backward.default
_scaled_dot_product_cudnn_attention.default _scaled_dot_product_cudnn_attention_backward.default
scaled_dot_product_attention.default
"""
RANDOM = """
native_dropout.default bernoulli.default bernoulli.p rand.default randn.default rand_like.default
randn_like.default randint.low normal_functional.default uniform.default multinomial.default
"""
LIBRARY = """
embedding.default embedding_dense_backward.default index.Tensor index_put.default index_select.default
gather.default scatter_add.default slice_scatter.default select_scatter.default
select_backward.default slice_backward.default value_selecting_reduction_backward.default cat.default
stack.default constant_pad_nd.default cumsum.default cumprod.default sort.default topk.default tril.default
triu.default flip.default roll.default nll_loss_forward.default nll_loss_backward.default repeat.default
copy.default empty.memory_format empty_like.default new_empty.default new_empty_strided.default eye.default eye.m
"""

declare(*(Row(f"aten.{name}", "compute") for name in COMPUTE.split()))
declare(*(Row(f"aten.{name}", "random", pure=False) for name in RANDOM.split()))
declare(*(Row(f"aten.{name}", "library") for name in LIBRARY.split()))
