"""The files in deploy/: schemas accept them, and each reference leads to something."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import promql_parser
import pytest
import yaml

from epd_portable.launch import cli
from epd_portable.launch.plan.request import PlanRequest
from epd_portable.launch.run.supervisor import DRAIN_MARGIN_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
FOLDERS = sorted(path.parent for path in KUBERNETES.rglob("kustomization.yaml"))
VERSIONS = ("1.30", "1.36")
"""Versions of Kubernetes."""
DEVICES = {"cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}
SHM_OF_ENGINES = 1 << 30
PRE_STOP_S = ENDING_S = 5
Object = dict[str, Any]


def as_served(schema: Any) -> Any:
    """Return a custom resource's schema as an API server applies it: strictly, after defaults."""
    if isinstance(schema, list):
        return [as_served(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: as_served(each) for key, each in schema.items()}
    if isinstance(fields := schema.get("properties"), dict):
        found.setdefault("additionalProperties", False)
        found["required"] = [
            name for name in schema.get("required", ()) if "default" not in fields[name]
        ]
    return found


CRDS = as_served(yaml.safe_load((ROOT / "tests/unit/crds.yaml").read_text()))


def documents(file: Path) -> list[Object]:
    return [each for each in yaml.safe_load_all(file.read_text("utf-8")) if each]


def kustomization(folder: Path) -> Object:
    [found] = documents(folder / "kustomization.yaml")
    return found


def key(document: Object) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def read(folder: Path) -> dict[tuple[str, str], Object]:
    """Return the resources that a kustomization reads, before its patches."""
    found: dict[tuple[str, str], Object] = {}
    for name in kustomization(folder)["resources"]:
        path = (folder / name).resolve()
        assert path.exists(), f"{folder.name}: no resource {name}"
        of_path = built(path) if path.is_dir() else {key(each): each for each in documents(path)}
        assert not of_path.keys() & found.keys()
        found |= of_path
    return found


def built(folder: Path) -> dict[tuple[str, str], Object]:
    """Return the resources of a kustomization that its patches do not delete, unpatched."""
    deleted = {key(each) for each in patches(folder) if is_deletion(each)}
    return {each: document for each, document in read(folder).items() if each not in deleted}


def patches(folder: Path) -> Iterator[Object]:
    """Yield patches. Kustomize 5.5 panics at a patch file with two deletions."""
    for each in kustomization(folder).get("patches", ()):
        if "patch" in each:
            yield yaml.safe_load(each["patch"])
        else:
            yield from documents(folder / each["path"])


def is_deletion(patch: Object) -> bool:
    return patch.get("$patch") == "delete"


def templates(document: Object) -> list[Object]:
    match document["kind"]:
        case "Deployment":
            return [document["spec"]["template"]]
        case "DisaggregatedSet":
            roles = [each["spec"]["leaderWorkerTemplate"] for each in document["spec"]["roles"]]
            return [each["workerTemplate"] for each in roles]
        case _:
            return []


def check(document: Object) -> None:
    """Validate a document by the schemas of its kind."""
    if schema := CRDS.get(document["kind"]):
        jsonschema.validate(document, schema)
        for template in templates(document):
            check({"apiVersion": "v1", "kind": "PodTemplate", "template": template})
        return
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


def resource_files() -> Iterator[Path]:
    for folder in FOLDERS:
        for name in kustomization(folder)["resources"]:
            if (folder / name).is_file():
                yield folder / name


@pytest.mark.parametrize(
    "file", [*resource_files()], ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_resources_are_valid_by_published_schemas(file: Path) -> None:
    for document in documents(file):
        check(document)
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            check({**document, "spek": {}})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_kustomizations_name_existing_files_and_resources(folder: Path) -> None:
    own = kustomization(folder)
    jsonschema.validate(own, CRDS["Kustomization"])
    resources = read(folder)
    for generator in own.get("configMapGenerator", ()):
        assert all((folder / name).is_file() for name in generator["files"])
    for name in own.get("configurations", ()):
        jsonschema.validate(documents(folder / name)[0], CRDS["Configuration"])
    for patch in patches(folder):
        target = resources[key(patch)]
        if is_deletion(patch):
            continue
        assert patch["apiVersion"] == target["apiVersion"]
        mine, theirs = (each["spec"]["template"]["spec"] for each in (patch, target))
        mounts = {m["name"] for each in mine["containers"] for m in each.get("volumeMounts", ())}
        volumes = {each["name"] for each in theirs["volumes"]}
        assert {each["name"] for each in mine["containers"]} <= {
            each["name"] for each in theirs["containers"]
        }
        assert {each["name"] for each in mine["volumes"]} <= volumes | mounts


def pods(folder: Path) -> Iterator[Object]:
    """Yield the Pods of a kustomization after its patches, merged as `kubectl` does."""
    changes = {key(each): each for each in patches(folder)}
    for each, document in built(folder).items():
        for template in templates(document):
            pod = template["spec"]
            if each in changes:
                change = changes[each]["spec"]["template"]["spec"]
                [container], [own] = pod["containers"], change["containers"]
                mounts = container["volumeMounts"] + own.get("volumeMounts", [])
                pod["containers"] = [{**container, **own, "volumeMounts": mounts}]
                volumes = {v["name"]: v for v in (*pod["volumes"], *change["volumes"])}
                pod["volumes"] = [*volumes.values()]
            yield pod


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_pods_have_devices_memory_and_time_by_their_plan(folder: Path) -> None:
    own = folder / "topology.yaml"
    config = own if own.is_file() else KUBERNETES / "one-node/topology.yaml"
    for pod in pods(folder):
        [container] = pod["containers"]
        assert container["command"] == ["epd-launch"]
        command, *words = container["args"]
        params = cli.main.commands[command].make_context(command, words).params
        assert str(params["config"]) == "/etc/epd/topology.yaml"
        options = {name: params[name] for name in ("platform", "hardware", "overrides", "model")}
        request = PlanRequest.from_options(
            config=config, alone="encode" if command == "engine" else None, **options
        )
        if "launch.host=auto" in params["overrides"]:  # No address of this machine.
            overrides = (*request.overrides, "launch.host=192.0.2.1")
            request = dataclasses.replace(request, overrides=overrides)
        topology, plan = request.plan_elsewhere()
        if plan.devices:
            limits = container["resources"]["limits"]
            assert limits == {DEVICES[request.traits.name]: str(len(plan.devices))}
        pools = sum(bool(spec.shm_name) for spec in plan.processes)
        [shm] = [each for each in pod["volumes"] if each["name"] == "shm"]
        number, unit = shm["emptyDir"]["sizeLimit"][:-2], shm["emptyDir"]["sizeLimit"][-2]
        room = int(number) << {"M": 20, "G": 30}[unit]
        assert room >= pools * topology.transfer.pool_bytes + SHM_OF_ENGINES
        stop_s = topology.front.drain_s + DRAIN_MARGIN_S + topology.launch.stop_grace_s
        assert pod["terminationGracePeriodSeconds"] >= PRE_STOP_S + stop_s + ENDING_S
        probe = container["startupProbe"]
        most_s = probe["periodSeconds"] * probe["failureThreshold"]
        assert most_s >= topology.launch.startup_timeout_s
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert volumes == {mount["name"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_selectors_and_references_lead_to_pods_and_resources(folder: Path) -> None:
    resources = built(folder)
    labels = [
        template["metadata"]["labels"]
        for document in resources.values()
        for template in templates(document)
    ]
    for document in resources.values():
        spec = document["spec"]
        for selector in filter(None, (spec.get("selector"), spec.get("podSelector"))):
            wanted = selector.get("matchLabels", selector).items()
            assert any(wanted <= each.items() for each in labels)
        if target := spec.get("scaleTargetRef"):
            assert (target["kind"], target["name"]) in resources
        for rule in spec.get("rules", ()):
            for backend in rule["backendRefs"]:
                assert (backend["kind"], backend["name"]) in resources
        for trigger in spec.get("triggers", ()):
            promql_parser.parse(trigger["metadata"]["query"])
    for pod in pods(folder):
        for word in pod["containers"][0]["args"]:
            if joined := re.fullmatch(r"--set=front\.join=http://([\w-]+):8000", word):
                assert ("Service", joined[1]) in resources


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_images_of_pods_are_named_by_their_kustomization(folder: Path) -> None:
    own = kustomization(folder)
    files = [folder / name for name in own["resources"] if (folder / name).is_file()]
    used = {
        container["image"]
        for file in files
        for document in documents(file)
        for template in templates(document)
        for container in template["spec"]["containers"]
    }
    # Kustomize applies them to resources of this folder, and not to those of an overlay.
    assert used == {each["name"] for each in own.get("images", ())}


@pytest.mark.needs_kubectl
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_kubectl_builds_pods_with_a_topology_and_an_image(folder: Path) -> None:
    ended = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, check=True)
    found = [*yaml.safe_load_all(ended.stdout)]
    names = {key(each) for each in found}
    made = [template["spec"] for document in found for template in templates(document)]
    assert made
    for pod in made:
        assert pod["containers"][0]["image"] == "registry.example/epd:1"
        [topology] = [each for each in pod["volumes"] if each["name"] == "topology"]
        assert ("ConfigMap", topology["configMap"]["name"]) in names


def test_images_have_the_dependencies_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {*project["dependencies"]}
    for platform in ("cuda", "npu"):
        text = (DEPLOY / f"containers/Containerfile.{platform}").read_text()
        assert set(re.findall(r'"([^"\[]+[>=][^"]*)"', text)) == wanted
        assert re.search(r"^ARG BASE$", text, re.MULTILINE)
    text = (DEPLOY / "containers/Containerfile.cpu").read_text()
    assert "ARG BASE\n" in text and '"/opt/epd-portable[cpu]"' in text


def test_the_batch_script_is_well_formed() -> None:
    script = DEPLOY / "slurm/epd.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    for command in re.findall(r"epd-launch (\w+)", script.read_text()):
        assert command in cli.main.commands


def test_the_application_of_ray_names_the_package_and_a_topology() -> None:
    [application] = yaml.safe_load((DEPLOY / "ray/serve.yaml").read_text())["applications"]
    assert application["import_path"] == "epd_portable.ray:build_app"
    assert (ROOT / application["args"]["config"]).is_file()
