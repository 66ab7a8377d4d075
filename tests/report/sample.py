"""A believable run, made without torch: one training step of a small pre-norm Transformer block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from tilewright.records.measurement import Ceiling, Direction, Measurement, Verified
from tilewright.records.program import (
    Cost,
    Decision,
    Fallback,
    GraphName,
    MemoryPoint,
    Operator,
    OperatorClass,
    Program,
    Region,
    Stage,
)
from tilewright.store import Run

DIMS = {"B": 4, "S": 512, "D": 256, "H": 8, "d": 32, "F": 1024}
CEILINGS = [
    Ceiling("2 × Xeon 2.9 GHz", "copy", "", 11.4, "GB/s", "measured"),
    Ceiling("2 × Xeon 2.9 GHz", "read", "", 16.8, "GB/s", "measured"),
    Ceiling("2 × Xeon 2.9 GHz", "matmul", "fp32", 0.148, "TFLOP/s", "measured"),
    Ceiling("2 × Xeon 2.9 GHz", "vector", "fp32", 0.021, "TFLOP/s", "measured"),
    Ceiling("2 × Xeon 2.9 GHz", "matmul", "fp32", 0.186, "TFLOP/s", "datasheet"),
    Ceiling("2 × Xeon 2.9 GHz", "launch", "", 2.1, "us", "measured"),
]

SHAPES = {"B*S*D": "[B, S, D]", "B*S*F": "[B, S, F]", "B*H*S**2": "[B, H, S, S]"}

Row = tuple[str, str, OperatorClass, str, str, str, str | None, str, str]
FORWARD_TABLE = """\
name | target | class | shape | reads | FLOPs | region | inputs | line of the source
ln1 | aten.native_layer_norm | reduction | B*S*D | B*S*D + 2*D | 8*B*S*D | layer_norm_0 | | h = self.ln1(x)
q | aten.addmm | compute | B*S*D | B*S*D + D**2 + D | 2*B*S*D*D | | ln1 | q = self.q(h)
k | aten.addmm | compute | B*S*D | B*S*D + D**2 + D | 2*B*S*D*D | | ln1 | k = self.k(h)
v | aten.addmm | compute | B*S*D | B*S*D + D**2 + D | 2*B*S*D*D | | ln1 | v = self.v(h)
heads_q | aten.permute | layout | B*S*D | 0 | 0 | | q | q, k, v = map(self.heads, (q, k, v))
heads_k | aten.permute | layout | B*S*D | 0 | 0 | | k | q, k, v = map(self.heads, (q, k, v))
heads_v | aten.permute | layout | B*S*D | 0 | 0 | | v | q, k, v = map(self.heads, (q, k, v))
scores | aten.bmm | compute | B*H*S**2 | 2*B*S*D | 2*B*H*S**2*d | attention | heads_q heads_k | a = q @ k.mT
scale | aten.div.Tensor | pointwise | B*H*S**2 | B*H*S**2 | B*H*S**2 | attention | scores | a = a / d ** 0.5
softmax | aten._softmax | reduction | B*H*S**2 | B*H*S**2 | 5*B*H*S**2 | attention | scale | p = a.softmax(-1)
drop_p | aten.native_dropout | random | B*H*S**2 | B*H*S**2 | B*H*S**2 | attention | softmax | p = self.drop(p)
mix | aten.bmm | compute | B*S*D | B*H*S**2 + B*S*D | 2*B*H*S**2*d | attention | drop_p heads_v | y = p @ v
merge | aten.clone | layout | B*S*D | B*S*D | 0 | | mix | y = y.transpose(1, 2).reshape(B, S, D)
out | aten.addmm | compute | B*S*D | B*S*D + D**2 + D | 2*B*S*D*D | | merge | y = self.out(y)
drop_1 | aten.native_dropout | random | B*S*D | B*S*D | B*S*D | dropout_add_ln | out | x = x + self.drop(y)
res_1 | aten.add.Tensor | pointwise | B*S*D | 2*B*S*D | B*S*D | dropout_add_ln | drop_1 | x = x + self.drop(y)
ln2 | aten.native_layer_norm | reduction | B*S*D | B*S*D + 2*D | 8*B*S*D | dropout_add_ln | res_1 | h = self.ln2(x)
ff1 | aten.addmm | compute | B*S*F | B*S*D + D*F + F | 2*B*S*D*F | | ln2 | h = self.ff1(h)
cube | aten.pow.Tensor_Scalar | pointwise | B*S*F | B*S*F | 2*B*S*F | gelu_0 | ff1 | u = h + 0.044715 * h ** 3
inner | aten.add.Tensor | pointwise | B*S*F | 2*B*S*F | 2*B*S*F | gelu_0 | ff1 cube | u = h + 0.044715 * h ** 3
tanh | aten.tanh | pointwise | B*S*F | B*S*F | 0 | gelu_0 | inner | h = 0.5 * h * (1 + (c * u).tanh())
gelu | aten.mul.Tensor | pointwise | B*S*F | 2*B*S*F | 3*B*S*F | gelu_0 | ff1 tanh | h = 0.5 * h * (1 + …)
ff2 | aten.addmm | compute | B*S*D | B*S*F + D*F + D | 2*B*S*D*F | | gelu | h = self.ff2(h)
drop_2 | aten.native_dropout | random | B*S*D | B*S*D | B*S*D | dropout_add | ff2 | return x + self.drop(h)
res_2 | aten.add.Tensor | pointwise | B*S*D | 2*B*S*D | B*S*D | dropout_add | drop_2 res_1 | return x + self.drop(h)
"""


def _row(line: str) -> Row:
    name, target, kind, shape, reads, flops, region, inputs, source = (cell.strip() for cell in line.split("|"))
    return name, target, cast(OperatorClass, kind), shape, reads, flops, region or None, inputs, source


FORWARD = [_row(line) for line in FORWARD_TABLE.splitlines()[1:]]


def program() -> Program:
    """Forward and backward, before and after fusion."""
    forward, backward = _graph("forward", FORWARD), _graph("backward", _backward())
    return Program(
        operators=forward.operators + backward.operators,
        regions=forward.regions + backward.regions,
        decisions=forward.decisions + backward.decisions,
        memory=forward.memory + backward.memory,
        fallbacks=[Fallback("aten.native_layer_norm_backward", "block.py:31: h = self.ln1(x)", "no row yet")],
    )


def write_sample(path: Path) -> Path:
    """The run of a Transformer block, as `tilewright optimize` would leave it."""
    with Run.create(
        path,
        command="tilewright optimize examples/transformer_block.py:case",
        target="examples/transformer_block.py:case",
        case="Transformer block, B4 S512 D256 H8",
        dims=DIMS,
        machine={
            "CPU": "2 × Intel Xeon, 2.9 GHz, AVX-512",
            "memory": "8 GB",
            "threads": "2",
            "system": "Debian 12, Linux 6.1",
            "Python": "3.11.7",
            "PyTorch": "2.13.0",
        },
    ) as run:
        run.add_program(program())
        run.add_ceilings(CEILINGS)
        run.add_measurements(measurements())
        run.add_verified(verified())
    return path


def measurements() -> list[Measurement]:
    times: Mapping[Direction, Mapping[str, tuple[float, int]]] = {
        "fwd": {"tilewright": (37_200, 41), "eager": (71_300, 88), "inductor": (45_800, 56)},
        "fwd+bwd": {"tilewright": (112_000, 63), "eager": (205_000, 131), "inductor": (131_000, 74)},
    }
    flops = {"fwd": 4.38e9, "fwd+bwd": 13.05e9}
    return [
        Measurement(
            suite="block",
            case="D256 H8 B4 S512 fp32",
            impl=impl,
            direction=direction,
            median_us=median,
            p20_us=median * 0.985,
            p80_us=median * 1.03,
            repeats=40,
            predicted_us=median * 0.91 if impl == "tilewright" else None,
            peak_bytes=megabytes * 1_000_000,
            TFLOPs=round(flops[direction] / median / 1e6, 3),
            of_ceiling=round(flops[direction] / median / 1e6 / 0.148, 3),
            device="cpu",
            threads=2,
            torch="2.13.0",
        )
        for direction, impls in times.items()
        for impl, (median, megabytes) in impls.items()
    ]


def verified() -> list[Verified]:
    names = ["out", "x.grad"] + [
        f"{layer}.{part}.grad"
        for layer in ("ln1", "q", "k", "v", "out", "ln2", "ff1", "ff2")
        for part in ("weight", "bias")
    ]
    return [
        Verified(
            direction="fwd" if name == "out" else "bwd",
            tensor=name,
            dtype="float32",
            error=1.1e-7 + 9e-9 * place,
            eager_error=1.3e-7 + 5e-9 * place,
            max_error=4.1e-7 + 2e-8 * place,
            eager_max_error=4.8e-7 + 2e-8 * place,
            bound=7.4e-7 + 1e-8 * place,
            max_bound=1.9e-6 + 4e-8 * place,
            ok=True,
        )
        for place, name in enumerate(names)
    ]


def _backward() -> list[Row]:
    """The forward graph in reverse: a matmul becomes two, everything else reads one tensor more."""
    rows: list[Row] = []
    readers: dict[str, list[str]] = {}
    for name, target, kind, shape, reads, flops, region, inputs, line in reversed(FORWARD):
        grads = " ".join(readers.get(name, []))
        names = [f"{name}_dx", f"{name}_dw"] if kind == "compute" else [f"{name}_bwd"]
        more = reads if kind == "layout" else f"{reads} + {shape}"
        group = f"{region}_bwd" if region else None
        rows += [(each, target, kind, shape, more, flops, group, grads, line) for each in names]
        for source in inputs.split():
            readers.setdefault(source, []).append(names[0])
    return rows


def _graph(graph: GraphName, rows: list[Row]) -> Program:
    before = [_operator(graph, "before", index, row) for index, row in enumerate(rows)]
    after, regions = _fuse(graph, before)
    return Program(
        operators=before + after,
        regions=regions,
        decisions=_decide(graph, before),
        memory=_memory(graph, "before", before) + _memory(graph, "after", after),
    )


def _operator(graph: GraphName, stage: Stage, index: int, row: Row) -> Operator:
    name, target, kind, shape, reads, flops, region, inputs, line = row
    writes = "0" if target == "aten.permute" else shape
    cost = Cost(
        reads=_value(reads) if writes != "0" else 0,
        writes=_value(writes),
        bytes_read=4 * _value(reads) if writes != "0" else 0,
        bytes_written=4 * _value(writes),
        flops=_value(flops),
        transcendentals=_value(shape) if name.startswith(("tanh", "softmax")) else 0,
        reads_symbolic=reads if writes != "0" else "0",
        writes_symbolic=writes,
        flops_symbolic=flops,
    )
    place = 24 + [each[-1] for each in FORWARD].index(line)
    axes = SHAPES[shape].strip("[]").split(", ")
    floor, bound = _floor(cost, kind) if cost.bytes else (0.0, None)
    return Operator(
        graph=graph,
        stage=stage,
        index=index,
        name=name,
        target=target,
        operator_class=kind,
        shape=tuple(DIMS[axis] for axis in axes),
        dtype="float32",
        cost=cost,
        floor_us=floor,
        bound=bound,
        region=region,
        source=f"examples/transformer_block.py:{place}: {line}",
        shape_symbolic=SHAPES[shape],
        inputs=tuple(inputs.split()),
        measured_us=round(floor * (1.15 + 0.07 * (index % 9)), 1) if floor else None,
    )


def _fuse(graph: GraphName, before: list[Operator]) -> tuple[list[Operator], list[Region]]:
    """One launch for each region and each operator outside of them; views vanish."""
    groups: dict[str, list[Operator]] = {}
    for op in before:
        if op.target != "aten.permute":
            groups.setdefault(op.region or op.name, []).append(op)
    launch_of = {op.name: name for name, group in groups.items() for op in group}
    for op in before:
        if op.target == "aten.permute":
            launch_of[op.name] = launch_of.get(op.inputs[0], "") if op.inputs else ""
    after, regions = [], []
    for index, (name, group) in enumerate(groups.items()):
        first, last = group[0], group[-1]
        reads = sum(op.cost.reads for op in group if op is first)
        cost = replace(
            last.cost,
            reads=reads,
            bytes_read=4 * reads,
            reads_symbolic=first.cost.reads_symbolic,
            flops=sum(op.cost.flops for op in group),
        )
        floor, bound = _floor(cost, "compute" if "attention" in name else last.operator_class)
        measured = round(floor * (1.08 + 0.05 * (index % 6)), 1)
        sources = {launch_of[source] for op in group for source in op.inputs if source in launch_of}
        launch = replace(
            last,
            stage="after",
            index=index,
            name=name,
            target=first.target if len(group) == 1 else f"tilewright.{name}",
            operator_class="library" if "attention" in name else last.operator_class,
            cost=cost,
            floor_us=floor,
            bound=bound,
            measured_us=measured,
            inputs=tuple(sorted(sources - {name, ""})),
        )
        after.append(launch)
        if last.region:
            members = tuple(op.name for op in group)
            code = f'// {name}: {", ".join(members)}\nextern "C" void {name}(const float* x, float* y) {{\n}}\n'
            predicted = round(floor * 1.12, 1)
            regions.append(Region(graph, name, members, cost, "c++", code, floor, bound, predicted, measured))
    return after, regions


def _decide(graph: GraphName, before: list[Operator]) -> list[Decision]:
    by_name = {op.name: op for op in before}
    decisions = []
    for consumer in before:
        for producer in (by_name[name] for name in consumer.inputs):
            pair = (graph, producer.name, consumer.name)
            saved, floor = 2 * producer.cost.bytes_written, consumer.floor_us or 0.0
            if producer.region and producer.region == consumer.region:
                reason = "the value stays in registers: one pass over the rows instead of two"
                decisions.append(
                    Decision(*pair, "taken", reason, saved, floor * 0.5, None, consumer.source, _pass(consumer))
                )
            elif "compute" in (producer.operator_class, consumer.operator_class):
                if consumer.operator_class == "pointwise":
                    reason = "as an epilogue it was slower than the library's GEMM and a pass of its own"
                    decisions.append(
                        Decision(*pair, "tried and lost", reason, saved, floor, floor * 1.31, consumer.source)
                    )
                else:
                    reason = "a library call: its operands must be whole in memory"
                    decisions.append(Decision(*pair, "impossible", reason, source=consumer.source))
            else:
                reason = "recomputing the producer for its other readers would move more bytes than it saves"
                decisions.append(Decision(*pair, "refused", reason, saved, floor, source=consumer.source))
    return decisions


def _pass(consumer: Operator) -> str:
    return "attention" if "attention" in (consumer.region or "") else "fusion"


def _memory(graph: GraphName, stage: Stage, operators: list[Operator]) -> list[MemoryPoint]:
    """Forward fills up with what backward will read; backward lets go of it."""
    live = 12_000_000 if graph == "forward" else {"before": 131_000_000, "after": 63_000_000}[stage]
    points = []
    for place, op in enumerate(operators):
        size = op.cost.bytes_written
        live += round(size * 0.45) if graph == "forward" else round(-live * 0.9 / len(operators))
        workspace = size // 2 if place % 3 == 1 else 0
        points.append(MemoryPoint(graph, stage, op.index, op.name, live + workspace))
    return points


def _floor(cost: Cost, kind: OperatorClass) -> tuple[float, str]:
    rate = 0.148e6 if kind in ("compute", "library") else 0.021e6
    compute, memory = cost.flops / rate, cost.bytes / 11.4e3
    return round(max(compute, memory), 2), "compute" if compute > memory else "DRAM"


def _value(formula: str) -> int:
    """The formulas above are products and powers of the dimensions: Python's own arithmetic."""
    return int(eval(formula, {"__builtins__": {}}, dict(DIMS)))
