"""A believable run, made without torch: one training step of attention and a feed-forward layer."""

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
)
from tilewright.store import Run

DIMS = {"B": 4, "S": 512, "D": 256, "H": 8}
MACHINE = "2 × Xeon 2.9 GHz"
CEILINGS = [
    Ceiling(MACHINE, "copy", "", 11.4, "GB/s", "measured"),
    Ceiling(MACHINE, "read", "", 16.8, "GB/s", "measured"),
    Ceiling(MACHINE, "matmul", "fp32", 0.148, "TFLOP/s", "measured"),
    Ceiling(MACHINE, "vector", "fp32", 0.021, "TFLOP/s", "measured"),
    Ceiling(MACHINE, "matmul", "fp32", 0.186, "TFLOP/s", "datasheet"),
    Ceiling(MACHINE, "launch", "", 2.1, "us", "measured"),
]
TABLE = """\
ln1 | native_layer_norm | reduction | B*S*D | B*S*D + 2*D | 8*B*S*D | | | h = self.ln1(x)
q | addmm | compute | B*S*D | B*S*D + D**2 + D | 2*B*S*D**2 | | ln1 | q = self.q(h)
heads | permute | layout | B*S*D | 0 | 0 | | q | q = self.heads(q)
scores | bmm | compute | B*H*S**2 | 2*B*S*D | 2*B*S**2*D | attention | heads | a = q @ k.mT
scale | div.Tensor | pointwise | B*H*S**2 | B*H*S**2 | B*H*S**2 | attention | scores | a = a / d ** 0.5
softmax | _softmax | reduction | B*H*S**2 | B*H*S**2 | 5*B*H*S**2 | attention | scale | p = a.softmax(-1)
mix | bmm | compute | B*S*D | B*H*S**2 + B*S*D | 2*B*S**2*D | attention | softmax | y = p @ v
merge | clone | layout | B*S*D | B*S*D | 0 | | mix | y = y.reshape(B, S, D)
drop | native_dropout | random | B*S*D | B*S*D | B*S*D | dropout_add | merge | x = x + self.drop(y)
res | add.Tensor | pointwise | B*S*D | 2*B*S*D | B*S*D | dropout_add | drop | x = x + self.drop(y)
ff | addmm | compute | B*S*D | B*S*D + D**2 + D | 2*B*S*D**2 | | res | h = self.ff(x)
cube | pow.Tensor_Scalar | pointwise | B*S*D | B*S*D | 2*B*S*D | gelu | ff | u = h + 0.044715 * h ** 3
tanh | tanh | pointwise | B*S*D | B*S*D | 0 | gelu | cube | h = 0.5 * h * (1 + u.tanh())
"""
"""Name, operator, class, elements, elements read, FLOPs, region, inputs, line of the source."""
SHAPES = {"B*S*D": "[B, S, D]", "B*H*S**2": "[B, H, S, S]"}


def program() -> Program:
    """Forward and backward, before and after fusion."""
    made = Program(
        fallbacks=[Fallback("aten.native_layer_norm_backward", "block.py:31: h = self.ln1(x)", "no row yet")]
    )
    rows = [[cell.strip() for cell in line.split("|")] for line in TABLE.splitlines()]
    _add(made, "forward", [_operator("forward", index, row) for index, row in enumerate(rows)])
    # Backward does what forward did, the last operator first.
    names = [row[0] for row in rows]
    reversed_rows = [
        [f"{row[0]}_bwd", *row[1:6], row[6] and f"{row[6]}_bwd", f"{after}_bwd" if after else "", row[8]]
        for row, after in zip(rows[::-1], ["", *names[:0:-1]], strict=True)
    ]
    _add(made, "backward", [_operator("backward", index, row) for index, row in enumerate(reversed_rows)])
    return made


def write_sample(path: Path) -> Path:
    """The run as `tilewright optimize` would leave it."""
    target = "examples/transformer_block.py:case"
    case = "Transformer block, B4 S512 D256 H8"
    machine = {"CPU": MACHINE, "threads": "2", "PyTorch": "2.13.0"}
    with Run.create(
        path, command=f"tilewright optimize {target}", target=target, case=case, dims=DIMS, machine=machine
    ) as run:
        run.add_program(program())
        run.add(CEILINGS)
        run.add(measurements())
        run.add(verified())
    return path


def measurements() -> list[Measurement]:
    times: dict[Direction, dict[str, float]] = {
        "fwd": {"tilewright": 37_200, "eager": 71_300, "inductor": 45_800},
        "fwd+bwd": {"tilewright": 112_000, "eager": 205_000, "inductor": 131_000},
    }
    common = Measurement("block", "D256 H8 B4 S512 fp32", "", "fwd", 0, 0, 0, 40, peak_bytes=63_000_000, device="cpu")
    return [
        replace(common, impl=impl, direction=direction, median_us=us, p20_us=us * 0.985, p80_us=us * 1.03)
        for direction, impls in times.items()
        for impl, us in impls.items()
    ]


def verified() -> list[Verified]:
    """The result and 17 gradients, their errors rising."""
    names = ["out", "x.grad", *(f"layer{number}.{part}.grad" for number in range(8) for part in ("weight", "bias"))]
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


def _operator(graph: GraphName, index: int, row: list[str]) -> Operator:
    name, target, kind, shape, reads, flops, region, inputs, line = row
    writes = shape if reads != "0" else "0"
    special = _value(shape) if target in ("tanh", "_softmax") else 0
    cost = Cost(
        reads=_value(reads),
        writes=_value(writes),
        bytes_read=4 * _value(reads),
        bytes_written=4 * _value(writes),
        flops=_value(flops),
        transcendentals=special,
        reads_symbolic=reads,
        writes_symbolic=writes,
        flops_symbolic=flops,
    )
    # 11.4 GB/s, and 0.148 TFLOP/s of products or 0.021 of other arithmetic.
    moved, computed = cost.bytes / 11.4e3, cost.flops / (0.148e6 if kind == "compute" else 0.021e6)
    floor = round(max(moved, computed), 2)
    return Operator(
        graph=graph,
        stage="before",
        index=index,
        name=name,
        target=f"aten.{target}",
        operator_class=cast(OperatorClass, kind),
        shape=tuple(DIMS[axis] for axis in SHAPES[shape].strip("[]").split(", ")),
        dtype="float32",
        cost=cost,
        floor_us=floor,
        bound=None if not floor else "DRAM" if moved > computed else "compute",
        region=region or None,
        source=f"examples/transformer_block.py:{24 + index}: {line}",
        shape_symbolic=SHAPES[shape],
        inputs=tuple(inputs.split()),
        measured_us=round(floor * 1.4, 1) or None,
    )


def _add(made: Program, graph: GraphName, before: list[Operator]) -> None:
    """One launch for each region and each other operator but a view; a decision for each pair of neighbours."""
    made.operators += before
    groups: dict[str, list[Operator]] = {}
    for op in before:
        if op.cost.bytes:
            groups.setdefault(op.region or op.name, []).append(op)
    for index, (name, (first, *rest)) in enumerate(groups.items()):
        last = (first, *rest)[-1]
        read = first.cost
        cost = replace(last.cost, reads=read.reads, bytes_read=read.bytes_read, reads_symbolic=read.reads_symbolic)
        launch = replace(last, stage="after", index=index, name=name, cost=cost, inputs=())
        if last.region:
            members = (first.name, *(op.name for op in rest))
            code = f"// {name}: {', '.join(members)}"
            launch = replace(launch, target="kernel", measured_us=50_000.0 / (index + 1))
            made.regions.append(
                Region(graph, name, members, cost, "c++", code, launch.floor_us, launch.bound, 1e4, launch.measured_us)
            )
        made.operators.append(launch)
    for place, op in enumerate(before):
        points = {"before": 10_000_000, "after": 6_000_000}
        made.memory += [
            MemoryPoint(graph, stage, op.index, op.name, live * (place + 1)) for stage, live in points.items()
        ]  # type: ignore[arg-type]
        made.decisions += [_decision(producer, op) for producer in before if producer.name in op.inputs]


def _decision(producer: Operator, consumer: Operator) -> Decision:
    pair, saved = (consumer.graph, producer.name, consumer.name), 2 * producer.cost.bytes_written
    if producer.region and producer.region == consumer.region:
        reason = "the value stays in registers: one pass over the rows instead of two"
        passed_by = "attention" if "attention" in producer.region else "fusion"
        return Decision(*pair, "taken", reason, saved, 50.0, None, consumer.source, passed_by)
    if "compute" not in (producer.operator_class, consumer.operator_class):
        reason = "recomputing the producer for its other readers would move more bytes than it saves"
        return Decision(*pair, "refused", reason, saved, 50.0, source=consumer.source)
    if consumer.operator_class == "pointwise":
        reason = "as an epilogue it was slower than the library's GEMM and a pass of its own"
        return Decision(*pair, "tried and lost", reason, saved, 50.0, 65.5, consumer.source)
    reason = "a library call: its operands must be whole in memory"
    return Decision(*pair, "impossible", reason, source=consumer.source)


def _value(formula: str) -> int:
    """The formulas above are products and powers of the dimensions: Python's own arithmetic."""
    return int(eval(formula, {"__builtins__": {}}, dict(DIMS)))
