"""Findings of the operator table in sentences: what dominates, self and total time, one-off calls, advice."""

from __future__ import annotations

import re

from tilewright.records.counted import counted
from tilewright.trace.operators.operator_table import OperatorTable, OperatorTime, ParentTime

_NAMED = 3
_WRAPPER = "autograd::engine::evaluate_function: "
"""The autograd engine's range around one node of the backward graph."""
_PASSES = ("add", "sub", "mul", "div", "exp", "sum", "max", "amax", "mean", "copy_", "where", "tanh", "pow", "neg")


def findings(table: OperatorTable) -> list[str]:
    """The findings of a table, a sentence or two each; none for an empty table."""
    if not table.rows or not table.cpu_ns:
        return []
    sentences = [
        _dominates(table),
        _shares(table),
        _self_and_total(table),
        _launching(table),
        _one_off(table),
        *_advice(table),
    ]
    return [sentence for sentence in sentences if sentence]


def short_name(name: str) -> str:
    """`name`, with the key of an Inductor graph shortened.

    >>> short_name("## Call CompiledFxGraph fa6llolwa7dg6wcgfb7sxpssnesm4pj35kx4km33tuyttnyonx3s ##")
    'CompiledFxGraph fa6llolw…'
    """
    return re.sub(r"^## Call (CompiledFxGraph \w{8})\w* ##$", r"\1…", name)


def _shares(table: OperatorTable) -> str:
    """The shares of the operator with the most host time, in its parents and in the steps."""
    operators = [row for row in table.rows if row.kind == "operator" and not row.one_off]
    # With a device, host time is launch time, and `_dominates` covers the device.
    if not operators or table.on_device:
        return ""
    row = max(operators, key=lambda row: row.cpu_self)
    outer = [it for it in table.inside if it.name == row.name != it.outer_name and it.outer_dur]
    shares = [
        f"{_percent(it.dur, it.outer_dur)} of {short_name(it.outer_name)} ({_ms(it.dur)} of {_ms(it.outer_dur)})"
        for it in outer[:_NAMED]
    ]
    if table.steps_ns:
        shares.append(
            f"{_percent(row.cpu_total, table.steps_ns)} of the {_steps(table)} "
            f"({_ms(row.cpu_total)} of {_ms(table.steps_ns)})"
        )
    return f"On the host {short_name(row.name)} takes {', '.join(shares)}." if shares else ""


def _dominates(table: OperatorTable) -> str:
    device = table.on_device
    rows = [row for row in table.rows if row.kind != "range" and not row.one_off]
    whole = table.device_ns if device else table.cpu_ns

    def self_time(row: OperatorTime) -> int:
        return row.device_self if device else row.cpu_self

    largest = [row for row in sorted(rows, key=self_time, reverse=True)[:_NAMED] if self_time(row)]
    if not largest:
        return ""
    listed = ", ".join(
        f"{short_name(row.name)} {_ms(self_time(row))} ({_percent(self_time(row), whole)})" for row in largest
    )
    together = _percent(sum(map(self_time, largest)), whole)
    where = f"the {_ms(whole)} of device time" if device else f"the {_ms(whole)} of host time"
    return f"Most time goes to {listed}: together {together} of {where}."


def _self_and_total(table: OperatorTable) -> str:
    operators = [
        row for row in table.rows if row.kind == "operator" and row.cpu_total and not row.name.startswith(_WRAPPER)
    ]
    if not operators:
        return ""
    row = max(operators, key=lambda row: row.cpu_total - row.cpu_self)
    called = sorted(
        (inside for inside in table.inside if (inside.outer_name, inside.outer_kind) == (row.name, row.kind)),
        key=lambda inside: inside.dur,
        reverse=True,
    )[:_NAMED]
    rest = row.cpu_total - row.cpu_self
    if rest * 20 < row.cpu_total or not called:
        return "Self and total agree: no operator spends a twentieth of its time in others that it calls."
    parts = ", ".join(f"{short_name(inside.name)} {_ms(inside.dur)}" for inside in called)
    sentence = (
        f"Total counts what an operator calls, self does not: of the {_ms(row.cpu_total)} of {short_name(row.name)} "
        f"on the host, {_ms(row.cpu_self)} are self time and the rest is in {parts}."
    )
    if table.on_device:
        sentence += " Host time of an operator that runs on a device is the time to launch it, not to compute it."
    return sentence


def _launching(table: OperatorTable) -> str:
    if not table.on_device:
        return ""
    launches = [row for row in table.rows if row.kind == "call" and "Launch" in row.name]
    count, spent = sum(row.calls for row in launches), sum(row.cpu_self for row in launches)
    if not count or not table.timed_steps:
        return ""
    launched = f"{counted(count, 'launch')} {'takes' if count == 1 else 'take'}"
    at_work, step = table.timed_device_ns / table.timed_steps, table.timed_ns / table.timed_steps
    return (
        f"{launched} {_ms(spent)} of host time, {_percent(spent, table.cpu_ns)} of it and "
        f"{spent / count / 1e3:.2f} µs each. The device is busy for {_ms(at_work)} of the {_ms(step)} that a step "
        f"takes ({_timed_steps(table)})."
    )


def _one_off(table: OperatorTable) -> str:
    rows = [row for row in table.rows if row.one_off]
    if not rows:
        return ""
    named = ", ".join(f"{short_name(row.name)} ({_ms(row.cpu_self)})" for row in sorted(rows, key=_host_time)[:_NAMED])
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    spent = sum(row.cpu_self for row in rows)
    if spent < table.cpu_ns / 1000:
        return ""
    return (
        f"Once, so irrelevant in a long run: {named}{more}; "
        f"{_ms(spent)} in all, {_percent(spent, table.cpu_ns)} of the host time."
    )


def _advice(table: OperatorTable) -> list[str]:
    advice = []
    if table.on_device and table.timed_ns and table.timed_device_ns < 0.6 * table.timed_ns:
        compiled = any(row.name.startswith("Torch-Compiled Region") for row in table.rows)
        fewer = "" if compiled else "torch.compile with backend='tilewright', "
        advice.append(
            f"The device is busy for {_percent(table.timed_device_ns, table.timed_ns)} of the "
            f"{_timed_steps(table)}: the host is what limits them. Fewer launches help ({fewer}a CUDA graph, larger "
            "batches); faster kernels would not."
        )
    passes = [row for row in table.rows if row.kind == "operator" and row.name.removeprefix("aten::") in _PASSES]
    spent = sum(row.device_self if table.on_device else row.cpu_self for row in passes)
    whole = table.device_ns if table.on_device else table.cpu_ns
    if len(passes) > 1 and spent > whole / 5:
        advice.append(
            f"Pointwise operators and reductions take {_percent(spent, whole)}, each with a pass over memory of its "
            "own: fused, they would share one. `tilewright explain` prices that, `tilewright optimize` does it."
        )
    return advice


def _host_time(row: OperatorTime | ParentTime) -> int:
    return -(row.cpu_self if isinstance(row, OperatorTime) else row.dur)


def _steps(table: OperatorTable) -> str:
    return "recorded step" if table.steps == 1 else f"{table.steps} recorded steps"


def _timed_steps(table: OperatorTable) -> str:
    how = "timed" if table.described else "recorded"
    return f"{how} step" if table.timed_steps == 1 else f"{table.timed_steps} {how} steps"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.2f} ms" if ns >= 10_000 else f"{ns / 1e3:,.2f} µs"
