"""How FlashAttention's CuTe kernels compare with cuDNN's, where they cannot be raced: a peer by its ratio.

Their package is built apart from PyTorch. Both were timed in one run on an H200 (torch 2.11, cuDNN 9.19,
16384 tokens, heads times head size 2048, bf16); a case's figure is cuDNN's time over CuTe's.
"""

from __future__ import annotations

TIMES_CUDNN = {
    ("d64 S1024 full", "fwd"): 0.929,
    ("d64 S1024 full", "bwd"): 1.190,
    ("d64 S1024 causal", "fwd"): 0.739,
    ("d64 S1024 causal", "bwd"): 1.297,
    ("d64 S4096 full", "fwd"): 1.053,
    ("d64 S4096 full", "bwd"): 1.120,
    ("d64 S4096 causal", "fwd"): 0.900,
    ("d64 S4096 causal", "bwd"): 1.194,
    ("d64 S16384 full", "fwd"): 1.129,
    ("d64 S16384 full", "bwd"): 1.164,
    ("d64 S16384 causal", "fwd"): 0.975,
    ("d64 S16384 causal", "bwd"): 1.181,
    ("d128 S1024 full", "fwd"): 0.972,
    ("d128 S1024 full", "bwd"): 1.118,
    ("d128 S1024 causal", "fwd"): 0.901,
    ("d128 S1024 causal", "bwd"): 1.172,
    ("d128 S4096 full", "fwd"): 0.985,
    ("d128 S4096 full", "bwd"): 1.065,
    ("d128 S4096 causal", "fwd"): 0.972,
    ("d128 S4096 causal", "bwd"): 1.079,
    ("d128 S16384 full", "fwd"): 1.090,
    ("d128 S16384 full", "bwd"): 1.137,
    ("d128 S16384 causal", "fwd"): 1.038,
    ("d128 S16384 causal", "bwd"): 1.170,
    ("d256 S1024 full", "fwd"): 1.047,
    ("d256 S1024 full", "bwd"): 0.893,
    ("d256 S1024 causal", "fwd"): 1.015,
    ("d256 S1024 causal", "bwd"): 0.903,
    ("d256 S4096 full", "fwd"): 0.971,
    ("d256 S4096 full", "bwd"): 0.745,
    ("d256 S4096 causal", "fwd"): 1.100,
    ("d256 S4096 causal", "bwd"): 0.812,
    ("d256 S16384 full", "fwd"): 1.077,
    ("d256 S16384 full", "bwd"): 0.840,
    ("d256 S16384 causal", "fwd"): 1.086,
    ("d256 S16384 causal", "bwd"): 0.785,
}
