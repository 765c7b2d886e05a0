"""Variables that would change how instances are reached; all others are passed on. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from epd_portable.launch.plan.processes import Plan


def variable_problems(plan: Plan, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield why a plan cannot run with the variables of the launcher, or with its own.

    Args:
        environ: Of the launcher; variables of the plan are laid over it.
    """
    for name, problem in _PROBLEMS.items():
        for spec in plan.processes:
            value = {**environ, **spec.env}.get(name, "")
            if value and (text := problem(value)):
                yield f"{name} is set for {spec.name}: {text}"
                break


def _port(value: str) -> str:
    if value.isdecimal():
        return ""
    return (
        f"{value} is no port number; Kubernetes sets it for a Service named vllm. Unset it, or set "
        "enableServiceLinks: false in the Pod."
    )


def _ranks(value: str) -> str:
    return "" if value == "1" else f"{value} is data parallelism, which is not supported. Unset it."


_PROBLEMS = {"VLLM_PORT": _port, "VLLM_DP_SIZE": _ranks}
