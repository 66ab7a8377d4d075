"""PyTorch's cache of Dynamo's traces (`caching_precompile`), which drops guards: compiled programs stay out of it.

With Inductor, whose programs are in it, the second process of this test computes the first one's activation
(`docs/warm_start.md`).
"""

import json
from pathlib import Path

import pytest

from tests.processes import run

PROCESS = """
import json, sys
import torch
from torch.nn import functional as F
from tilewright.backend import backend
from tilewright.capture import program_cache

class Net(torch.nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.activation = activation

    def forward(self, x):
        return self.activation(x) * 2

assert torch._dynamo.config.caching_precompile
x = torch.linspace(-2, 2, 5)
result = torch.compile(Net(getattr(F, sys.argv[1])), backend=backend)(x)
torch.compiler.save_cache_artifacts()
print(json.dumps([result.tolist(), (getattr(F, sys.argv[1])(x) * 2).tolist(), dict(program_cache.counts)]))
"""


def test_a_changed_activation_is_compiled_as_what_it_is(tmp_path: Path) -> None:
    script = tmp_path / "net.py"
    script.write_text(PROCESS)
    env = {
        "TORCH_CACHING_PRECOMPILE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),
        "TILEWRIGHT_CACHE": str(tmp_path / "tilewright"),
        "TILEWRIGHT_KEEP_PROGRAMS": "1",
    }
    for activation, counts in (
        ("gelu", {"compiled": 1, "kept": 1}),
        ("relu", {"compiled": 1, "kept": 1}),
        ("gelu", {"loaded": 1}),
    ):
        output, _ = run([str(script), activation], env=env)
        result, expected, found = json.loads(output)
        assert result == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert found == counts, activation
