"""Plans and findings as text for people. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from epd_portable.launch.check import Finding
from epd_portable.launch.fit import HardwareFit
from epd_portable.launch.plan import Plan, ProcessSpec
from epd_portable.launch.sharing import SharedDevice


def plan_table(plan: Plan) -> str:
    """Return one line a process, then each process's command and environment."""
    rows = [("process", "role", "runs on", "ports", "starts")]
    rows += [
        (spec.name, spec.role, _place(spec), _ports(spec), _start(spec)) for spec in plan.processes
    ]
    lines = [f"platform {plan.platform}, model {plan.model}, clients use {plan.url}", ""]
    lines += _columns(rows)
    for device in plan.shared:
        lines += ["", *_shared(device)]
    if plan.hardware:
        lines += ["", *_hardware(plan.hardware)]
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
    return "\n".join(_columns([("what", "name", "usable", "why"), *rows]))


def _hardware(hardware: HardwareFit) -> list[str]:
    times: dict[float, list[str]] = {}
    for path, seconds in hardware.transfer_s.items():
        times.setdefault(seconds, []).append(path)
    each = "; ".join(f"{seconds * 1e3:.2f} ms by {', '.join(p)}" for seconds, p in times.items())
    return [
        f"planned for {hardware.profile}: {hardware.device}",
        f"an item of {hardware.item_bytes >> 20} MiB takes at least {each}; tcp adds its sockets "
        "to the time of shm",
    ]


def _start(spec: ProcessSpec) -> str:
    return f"after {', '.join(spec.after)}" if spec.after else "at once"


def _shared(shared: SharedDevice) -> list[str]:
    rows = []
    for tenant in shared.tenants:
        cache = "no KV cache"
        if tenant.kv_cache_bytes is not None:
            cache = f"{tenant.kv_cache_bytes} bytes of KV cache"
        elif tenant.measures:
            cache = "the KV cache takes what is left of it"
        compute = "takes turns" if tenant.share is None else f"{tenant.share}% of its compute"
        memory = f"{tenant.utilization:.0%} of its memory"
        rows.append((f"  {tenant.name}", memory, cache, compute))
    return [
        f"device {shared.device} is shared; engines measure its memory while they start, so they "
        "start one after the other:",
        *_columns(rows),
    ]


def _place(spec: ProcessSpec) -> str:
    if spec.devices:
        return f"devices {','.join(spec.devices)}"
    if spec.cores:
        return "cores " + "|".join(",".join(map(str, cores)) for cores in spec.cores)
    return "any core"


def _ports(spec: ProcessSpec) -> str:
    return ", ".join(f"{purpose} {port}" for purpose, port in spec.ports.items())


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
