"""A run with as many operators as asked for."""

from dataclasses import replace
from pathlib import Path

from tests.report.sample import CEILINGS, program
from tilewright.records.program import MemoryPoint, Program
from tilewright.store import Run


def write_large(path: Path, count: int) -> Path:
    """A run of `count` operators before fusion, in regions of three, each pair with its decision."""
    block = program()
    before = [op for op in block.operators if op.stage == "before"]
    operators, regions, decisions, memory = [], [], [], []
    for index in range(count):
        name, region = f"operator_{index}", f"region_{index // 3}"
        made = replace(before[index % len(before)], graph="forward", index=index, name=name, region=region)
        operators.append(replace(made, inputs=(f"operator_{index - 1}",) if index else ()))
        decisions.append(replace(block.decisions[index % len(block.decisions)], producer=name))
        memory.append(MemoryPoint("forward", "before", index, name, (index % 97) * 1_000_000))
        if index % 3 == 0:
            operators.append(replace(made, stage="after", name=region))
            regions.append(replace(block.regions[0], graph="forward", name=region, source_code="code;\n" * 400))
    with Run.create(path, command="tilewright optimize m:f", target="m:f", case="large") as run:
        run.add_program(Program(operators, regions, decisions, memory))
        run.add(CEILINGS)
    return path
