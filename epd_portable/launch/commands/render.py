"""``epd-launch render``: a topology as files for Kubernetes."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from epd_portable.config.secret import read_private_file
from epd_portable.errors import ConfigError
from epd_portable.launch.commands.command_line import (
    SECONDS,
    json_option,
    show,
    topology_options,
    warn,
)
from epd_portable.launch.plan.launchers import MostOwed
from epd_portable.launch.plan.request import PlanRequest
from epd_portable.launch.render.objects import Object
from epd_portable.launch.render.shapes import SHAPES, Rendering

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,30}[a-z0-9])?")
"""Of a Service, with room for what is put behind it."""

RENDER_HELP = """Write a topology as YAML for Kubernetes: plain objects and a kustomization.yaml.

Shape nodes has a launcher with all stages in each Pod, which serves as a plain vLLM server does.
Shape roles has a Deployment for each role, and two routers that their Pods join; shape
disaggregatedset has a DisaggregatedSet of LeaderWorkerSet in place of the Deployments.
docs/kubernetes.md says what to do with the files.

\b
  epd-launch render --target kubernetes --shape nodes --platform cuda \\
    --config configs/1e1pd.yaml --image registry.example/epd:1 --output k8s

Nothing is asked of a cluster, and no device is needed. No secret is written without --secret-file.
"""


@click.command(help=RENDER_HELP)
@click.option(
    "--target", type=click.Choice(["kubernetes"]), required=True, help="What the files are for."
)
@click.option("--shape", type=click.Choice(list(SHAPES)), required=True, help="See above.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    metavar="DIR",
    help="Folder for the files; those of an earlier call are replaced.",
)
@topology_options
@click.option(
    "--image",
    default=f"epd-portable:{importlib.metadata.version('epd-portable')}",
    show_default=True,
    metavar="IMAGE",
    help="Image with this package and the engine (containers/).",
)
@click.option(
    "--name",
    default="epd",
    show_default=True,
    metavar="NAME",
    help="Name of the Service for clients, and the beginning of all other names.",
)
@click.option(
    "--replicas",
    default=2,
    show_default=True,
    type=click.IntRange(min=1),
    help="Pods of shape nodes. Other shapes have as many as the file says (count).",
)
@click.option(
    "--gateway",
    default="",
    metavar="NAME",
    help="Also write an HTTPRoute of this Gateway; in shape nodes to an InferencePool, whose "
    "picker is a Service: that of --name, with -picker.",
)
@click.option(
    "--prometheus",
    default="",
    metavar="URL",
    help="Scale by KEDA, which asks this server; by default a HorizontalPodAutoscaler does, by an "
    "adapter for metrics.",
)
@click.option(
    "--most-encode-s",
    default=MostOwed().encode_s,
    show_default=True,
    type=SECONDS,
    help="Seconds of work that an encode or prefill instance may owe before there is another.",
)
@click.option(
    "--most-answer-s",
    default=MostOwed().answer_s,
    show_default=True,
    type=SECONDS,
    help="The same of an instance that answers: about as long as an answer takes under full load.",
)
@click.option(
    "--secret-file",
    metavar="FILE",
    help="Write this secret into secret.yaml, mode 600. By default a Secret must be made by hand.",
)
@json_option
def render(
    shape: str,
    output: Path,
    image: str,
    name: str,
    replicas: int,
    gateway: str,
    prometheus: str,
    most_encode_s: float,
    most_answer_s: float,
    secret_file: str | None,
    as_json: bool,
    target: str,
    **options: Any,
) -> None:
    """Write files for Kubernetes; users read `RENDER_HELP`."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name!r}: write at most 32 small letters, digits and hyphens, a letter first"
        )
    if prometheus and not prometheus.startswith(("http://", "https://")):
        raise ConfigError(f"--prometheus {prometheus!r}: write it as http://HOST:PORT")
    rendering = Rendering(
        name=name,
        image=image,
        request=PlanRequest.from_options(**options),
        replicas=replicas,
        gateway=gateway,
        prometheus=prometheus,
        most=MostOwed(encode_s=most_encode_s, answer_s=most_answer_s),
        secret=read_private_file(secret_file, key="--secret-file") if secret_file else "",
    )
    files = rendering.files(shape)
    warnings = list(rendering.warnings())
    written = [str(path) for path in _write_files(output, files)]
    if not as_json:
        warn(warnings)
    show("\n".join(written), as_json=as_json, files=written, warnings=warnings)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are, and repeats what stands twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _write_files(folder: Path, files: Mapping[str, Sequence[Object]]) -> list[Path]:
    """Write files, and the list of them that ``kubectl apply -k`` reads.

    Files that are there are replaced. Those that hold a secret can be read by their owner only.

    Raises:
        ConfigError: They cannot be written.
    """
    written = []
    api = "kustomize.config.k8s.io/v1beta1"
    kustomization = {"apiVersion": api, "kind": "Kustomization", "resources": list(files)}
    listed = {"kustomization.yaml": [kustomization], **files}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, objects in listed.items():
            path = folder / name
            is_secret = any(each["kind"] == "Secret" for each in objects)
            path.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(os.open(path, flags, 0o600 if is_secret else 0o644), "w") as file:
                yaml.dump_all(
                    objects, file, _Dumper, sort_keys=False, width=100, explicit_start=True
                )
            written.append(path)
    except OSError as error:
        raise ConfigError(f"--output {folder}: cannot be written: {error}") from error
    return written
