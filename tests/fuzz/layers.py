"""Layers of random modules, and statements over parameters, buffers and what interrupts a graph.

A layer is its constructor and its call: `{last}` is the extent of the last dimension of `{f}`, `{channels}` that of the
second, `{axes}` the number of dimensions beyond, `{shape}` all. The other letters are those of `templates.py`.
Recurrent layers get few steps, since PyTorch writes each one out.
"""

OF_ROWS = [
    ("nn.Linear({last}, 3)", "{layer}({f})"),
    ("nn.Linear({last}, {last}, bias=False)", "{layer}({layer}({f}).tanh())"),
    ("nn.Linear({last}, {last})", "F.linear({layer}({f}), {layer}.weight.mT, {layer}.bias)"),
    ("nn.Linear({last}, 2)", "{layer}({f}) @ {layer}.weight"),
    ("hooked(nn.Linear({last}, 4))", "{layer}({f})"),
    ("parametrizations.weight_norm(nn.Linear({last}, 5))", "{layer}({f})"),
    ("parametrizations.spectral_norm(nn.Linear({last}, 5))", "{layer}({f})"),
    ("nn.Bilinear({last}, {last}, 2)", "{layer}({f}, {s})"),
    ("nn.LayerNorm({last})", "{layer}({f})"),
    ("nn.RMSNorm({last})", "{layer}({f})"),
    ("nn.LayerNorm({last}, bias=False)", "{f} + {layer}({f})"),
    ("nn.BatchNorm1d({last})", "{layer}({f}.flatten(0, -2))"),
    ("nn.BatchNorm1d({last}, momentum=None)", "{layer}({f}.flatten(0, -2)).relu()"),
    ("nn.BatchNorm1d({last}, track_running_stats=False)", "{layer}({f}.flatten(0, -2))"),
    ("nn.LSTM({last}, 3, batch_first=True)", "{layer}({f}.reshape(1, -1, {last})[:, :7])[0]"),
    ("nn.GRU({last}, 2, bidirectional=True)", "{layer}({f}.reshape(-1, 1, {last})[:7])[0]"),
    ("nn.RNN({last}, 3, nonlinearity='relu')", "{layer}({f}.reshape(-1, 1, {last})[:7])[1]"),
    ("nn.LSTMCell({last}, 3)", "torch.cat({layer}({f}.reshape(-1, {last})))"),
    ("nn.MultiheadAttention({last}, 1, batch_first=True)", "{layer}(*[{f}.reshape(1, -1, {last})] * 3)[0]"),
    ("nn.TransformerEncoderLayer({last}, 1, 8, batch_first=True)", "{layer}({f}.reshape(1, -1, {last}))"),
    (
        "nn.Sequential(nn.Linear({last}, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, {last}))",
        "{f} + checkpoint({layer}, {f}, use_reentrant=False)",
    ),
    (
        "nn.Sequential(nn.LayerNorm({last}), nn.Linear({last}, {last}))",
        "checkpoint(lambda t: checkpoint({layer}, t.sin(), use_reentrant=False) + t, {f}, use_reentrant=False)",
    ),
    ("nn.Linear({last}, {last})", "checkpoint(lambda t: F.dropout({layer}(t), 0.3), {f}, use_reentrant=False)"),
    ("nn.Linear({last}, {last})", "autocast({f}, lambda: {layer}({f}).float().softmax(-1) @ {layer}.weight)"),
    ("nn.ModuleList([nn.Linear({last}, {last}) for _ in range(2)])", "sum(one({f}).sigmoid() for one in {layer})"),
    ("nn.Linear({last}, 3)", "torch.func.vmap({layer})({f})"),
    ("nn.AdaptiveAvgPool1d(2)", "{layer}({f}[None].flatten(0, -2)[None])"),
]
OF_IMAGES = [
    ("nn.Conv{axes}d({channels}, 3, 3, padding=1)", "{layer}({f})"),
    ("nn.Conv{axes}d({channels}, {channels}, 1, groups={channels})", "{layer}({f}) + {f}"),
    ("nn.Conv{axes}d({channels}, 2, 2, stride=2, bias=False)", "{layer}({f}).relu()"),
    ("nn.Conv{axes}d({channels}, 2, 3, padding=2, dilation=2)", "{layer}({f})"),
    ("nn.Conv{axes}d({channels}, 4, 3, padding=1, padding_mode='reflect')", "{layer}({f})"),
    ("nn.ConvTranspose{axes}d({channels}, 3, 2, stride=2)", "{layer}({f})"),
    ("nn.BatchNorm{axes}d({channels})", "{layer}({f})"),
    ("nn.BatchNorm{axes}d({channels}, affine=False)", "{layer}({f}).relu()"),
    (
        "nn.Sequential(nn.Conv{axes}d({channels}, 4, 1), nn.BatchNorm{axes}d(4), nn.ReLU(), nn.Conv{axes}d(4, 2, 1))",
        "{layer}({f})",
    ),
    ("nn.InstanceNorm{axes}d({channels}, affine=True, track_running_stats=True)", "{layer}({f})"),
    ("nn.GroupNorm({channels}, {channels})", "{layer}({f})"),
    ("nn.GroupNorm(1, {channels})", "F.silu({layer}({f}))"),
    ("nn.PReLU({channels})", "{layer}({f})"),
    ("nn.LocalResponseNorm(2)", "{layer}({f})"),
    ("nn.Dropout{axes}d(0.3)", "{layer}({f})"),
    ("nn.MaxPool{axes}d(2, ceil_mode=True)", "{layer}({f})"),
    ("nn.AvgPool{axes}d(2, 1)", "{layer}({f})"),
    ("nn.AdaptiveMaxPool{axes}d(2)", "{layer}({f})"),
    ("nn.Upsample(scale_factor=2)", "{layer}({f})"),
    ("parametrizations.weight_norm(nn.Conv{axes}d({channels}, 2, 1))", "{layer}({f})"),
]
OF_INTEGERS = [
    ("nn.Embedding(8, 5)", "{layer}({i}.long() % 8)"),
    ("nn.Embedding(8, 3, padding_idx=0)", "{layer}({i}.long() % 8) @ {layer}.weight.mT"),
    ("nn.EmbeddingBag(8, 3, mode='mean')", "{layer}({i}.long().flatten()[None] % 8)"),
]
STATE = [
    ("Buffer({shape})", "{layer}.held.mul_(0.9).add_({f}.detach(), alpha=0.1) + {f}"),
    ("Buffer(({last},))", "{layer}.assign({layer}.held * 0.9 + {f}.detach().flatten(0, -2).mean(0)) * {f}"),
    ("Buffer((3, {last}))", "{layer}.at(0, {f}.detach().flatten(0, -2)[0]).sum(0) + {f}"),
    ("Buffer((), torch.int64)", "{f} * {layer}.held.add_(1)"),
    ("Buffer((2, {last}))", "{layer}.held.copy_({layer}.held.roll(1, 0)).mean() + {f}"),
    ("Buffer(({last},))", "{layer}.held.lerp_({f}.detach().flatten(0, -2).amax(0), 0.1).clone() - {f}"),
    ("nn.ParameterList([torch.ones({last}), torch.zeros({last})])", "{f} * {layer}[0] + {layer}[1]"),
    ("nn.ParameterDict({{'scale': torch.full((), 0.5)}})", "{f} * {layer}['scale']"),
]
INTERRUPTIONS = [
    "interrupted({f})",
    "interrupted({f}).relu_()",
    "interrupted({f} * {s}) + {f}",
    "noise({f}, 3) * 0.1 + {f}",
    "noise({f}, 4) > 0.5",
    "({f} if {f}.sum() > 0 else -{f}) * 2",
    "{f} * float({f}.detach().sum().item() > 0)",
    "{f}.flatten()[{f}.detach().flatten() > 0].sum() * 0.1 + {f}",
    "skipped({f})",
]
OF_COMPLEX = [
    "{z}.sin()",
    "{z}.real.relu() + {z}.imag",
    "{z}.abs().softmax(-1)",
    "{z}.angle().cos()",
    "torch.view_as_real({z}).sum(-1)",
    "({z} * {z}.conj()).real",
    "{z} * {w}",
    "{z}.mT.contiguous() * 1j",
    "torch.einsum('...i,...i->...', {z}, {z}.conj()) * 0.1",
    "{z}.sigmoid()",
    "0.1 * torch.fft.ifft({z}).abs()",
    "(lambda t: (t.mul_(1j), t[..., :1])[1])({z}.clone())",
    "torch.where({z}.abs() > 1, {z} / ({z}.abs() + 1), {z})",
    "{z}.tanh().conj() - {z}",
]
