"""How workloads are named in tables and result files."""

from __future__ import annotations

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
"""Dtypes, by PyTorch's names."""
