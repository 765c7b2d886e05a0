"""llm-d's picker in front: the file of instances that it reads, and docs/llm-d.md as it stands."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from epd_portable.errors import ConfigError
from epd_portable.placement.instances import EndpointPool
from epd_portable.router.fleet.endpoints_file import EndpointsFile
from epd_portable.router.settings import InstanceSettings
from tests.integration.router.conftest import Build

PAGE = (Path(__file__).parents[3] / "docs/llm-d.md").read_text()
TOPOLOGY, SAMPLE, PICKER = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.S | re.M)
MOST_BYTES = 1 << 20


def endpoints(path: Path) -> dict[str, dict[str, Any]]:
    """Return a file's endpoints by name, held against the rules of llm-d's format."""
    assert path.stat().st_size <= MOST_BYTES
    [(key, listed)] = yaml.safe_load(path.read_text()).items()
    assert key == "endpoints"
    for each in listed:
        assert each.keys() <= {"name", "namespace", "address", "port", "labels"}
        ipaddress.IPv4Address(each["address"])
        assert isinstance(each["port"], str) and 1 <= int(each["port"]) <= 65535
        assert all(isinstance(word, str) for pair in each["labels"].items() for word in pair)
    found = {each["name"]: each for each in listed}
    assert len(found) == len(listed)
    return found


async def test_the_file_names_the_instances_that_are_up(build: Build, tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    t = await build(encoders=1, pds=2, endpoints_file=str(path))
    found = endpoints(path)
    assert found.keys() == {"encode-0", "pd-0", "pd-1"}
    assert found["pd-0"]["port"] == str(t.pd.serving.port)
    assert found["encode-0"]["labels"]["llm-d.ai/role"] == "encode"
    await t.pds[1].serving.stop()
    await t.until_health(lambda instances: instances["pd-1"]["state"] == "down")
    assert endpoints(path).keys() == {"encode-0", "pd-0"}
    await t.pds[1].serving.start()
    await t.until_health(lambda instances: instances["pd-1"]["state"] == "up")
    assert endpoints(path).keys() == {"encode-0", "pd-0", "pd-1"}


def up(pool: EndpointPool, name: str, role: str, url: str) -> None:
    control = {} if role == "encode" else {"control": "tcp://10.0.0.9:1"}
    settings = {"name": name, "role": role, "url": url, **control}
    pool.add(InstanceSettings.model_validate(settings)).seen_well()


def test_the_sample_of_the_page_is_what_is_written(tmp_path: Path) -> None:
    pool, path = EndpointPool(), tmp_path / "endpoints.yaml"
    EndpointsFile(str(path), pool)
    assert endpoints(path) == {}
    up(pool, "encode-0", "encode", "http://10.0.0.1:20000")
    up(pool, "prefill_decode-0", "prefill-decode", "http://10.0.0.2:20000")
    assert path.read_text() == SAMPLE
    endpoints(path)


def test_what_the_format_cannot_name_is_left_out_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool, path = EndpointPool(), tmp_path / "endpoints.yaml"
    EndpointsFile(str(path), pool)
    urls = ("http://host-a:20000", "http://[fd00::1]:20000", "https://10.0.0.1:20000")
    for number, url in enumerate(urls):
        up(pool, f"pd-{number}", "prefill-decode", url)
    assert endpoints(path) == {}
    said = [each.getMessage() for each in caplog.records if "leaves out" in each.message]
    for number, url in enumerate(urls):
        assert f"leaves out pd-{number} at {url}: it can name http:// and an IPv4" in said[number]
    assert len(said) == len(urls)


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router.endpoints_file .* name a file in a folder"):
        EndpointsFile(str(tmp_path / "gone" / "endpoints.yaml"), EndpointPool())


def test_the_files_of_the_page_are_about_each_other() -> None:
    router, picker = yaml.safe_load(TOPOLOGY)["router"], yaml.safe_load(PICKER)
    [discovery] = [each for each in picker["plugins"] if each["type"] == "file-discovery"]
    assert discovery["parameters"] == {"path": router["endpoints_file"], "watchFile": True}
    named = {each["type"] for each in picker["plugins"]}
    profiles = picker["schedulingProfiles"]
    used = [each["pluginRef"] for profile in profiles for each in profile["plugins"]]
    assert {*used, picker["dataLayer"]["discovery"]["endpoints"]["pluginRef"]} <= named
