"""Plans and findings as text for people. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from epd_portable.config.roles import ENCODES
from epd_portable.encode.two_levels import FILLED
from epd_portable.launch.plan.check import Finding
from epd_portable.launch.plan.engine import CPU_KV_GIB
from epd_portable.launch.plan.processes import Plan, ProcessSpec


def plan_table(plan: Plan) -> str:
    """Return one line a process, then each process's command and environment."""
    rows = [("process", "role", "runs on", "ports", "starts")]
    rows += [
        (
            spec.name,
            spec.role,
            _place(spec),
            ports_text(spec.ports),
            f"after {', '.join(spec.after)}" if spec.after else "at once",
        )
        for spec in plan.processes
    ]
    lines = [f"platform {plan.platform}, model {plan.model}, clients use {plan.url}", ""]
    lines += columns(rows)
    if plan.joins:
        lines += ["", f"instances join {', '.join(plan.joins)}"]
    if encoders := [spec.name for spec in plan.processes if spec.role in ENCODES]:
        lines += ["", f"items are encoded by {', '.join(encoders)}"]
    if plan.kv:
        lines += ["", f"KV goes to decode instances by {plan.kv.cls}"]
    if plan.store:
        lines += ["", f"encoder outputs are kept by {plan.store}"]
    for spec in plan.processes:
        if spec.role == "encode" and (space := spec.env.get(CPU_KV_GIB)):
            cache = f"{FILLED:.0%} of {CPU_KV_GIB}={space} (GiB), for it has no KV cache"
            lines += ["", f"the encoder cache of {spec.name} takes {cache}"]
    if plan.hardware:
        lines += ["", f"planned for {plan.hardware}"]
    for spec in plan.processes:
        lines += ["", f"{spec.name}:"]
        lines += [f"  {name}={shlex.quote(value)} \\" for name, value in spec.env.items()]
        lines += [f"  {shlex.join(spec.argv)}"]
    return "\n".join(lines)


def findings_table(findings: Sequence[Finding]) -> str:
    """Return one line a finding."""
    rows = [
        (finding.kind, finding.name, "yes" if finding.usable else "no", finding.reason)
        for finding in findings
    ]
    return "\n".join(columns([("what", "name", "usable", "why"), *rows]))


def _place(spec: ProcessSpec) -> str:
    if spec.devices:
        place = f"devices {','.join(spec.devices)}"
    elif spec.cores:
        place = f"cores {'|'.join(','.join(map(str, cores)) for cores in spec.cores)}"
    else:
        place = "any core"
    return f"{place} ({spec.apart})" if spec.apart else place


def ports_text(ports: Mapping[str, int], *, without: str = "") -> str:
    """Return ports with their purposes, but for one purpose."""
    return ", ".join(f"{purpose} {port}" for purpose, port in ports.items() if purpose != without)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line a row, with its cells below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
