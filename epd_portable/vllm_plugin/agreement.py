"""The compatibility fingerprint of an engine, and the identity of its entries in a store.

Both depend on files and settings that users control, never on defaults of a library: engines with
different releases of vLLM or transformers fill a configuration with different defaults.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm

from epd_portable.errors import ConfigError
from epd_portable.vllm_plugin import compat
from epd_portable.wire import fingerprint as fingerprints

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.model import ModelConfig

CONFIG_FILES = ("config.json", "params.json", "hf_quant_config.json")
"""The configuration in the format of transformers and of Mistral, and ModelOpt's quantization."""
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_VOLATILE = frozenset({"_name_or_path", "transformers_version", "_commit_hash", "chat_template"})
"""Keys of these files, at any depth, that do not concern encoder outputs."""
_DEVICE_KEYS = frozenset({"device", "backend"})
"""Media settings that vLLM adds on some devices; the place of the work does not change outputs."""
_DEFAULT_REVISIONS = (None, "main", "master")
_QUANTIZED = ("quantization_config", "compression_config")
_SAMPLE_BYTES = 64
_MAX_HEADER_BYTES = 100 << 20
_EXPERT = ".experts."
"""Values of tensors with such names are not sampled: there are thousands, of language models."""
_PLAIN = re.compile(rf"[\w./-]{{1,{fingerprints.MAX_SHOWN}}}", re.ASCII)


def fingerprint(vllm_config: VllmConfig) -> str:
    """Return what an encode and a prefill+decode instance must agree on.

    Raises:
        ConfigError: The model has no configuration file that can be read.
    """
    model = vllm_config.model_config
    folder = _config_folder(model)
    config = _read(folder, CONFIG_FILES)
    if not config.keys() & {"config.json", "params.json"}:
        raise ConfigError(
            f"model {model.model!r}: found neither config.json nor params.json in {folder}. "
            "Engines compare these files: add one, or name its folder as hf_config_path"
        )
    processor_folder = folder if _is_gguf(model.model) else _folder(model, model.model)
    processor = _read(processor_folder, PROCESSOR_FILES)
    multimodal = model.multimodal_config
    processor_kwargs = _without(getattr(multimodal, "mm_processor_kwargs", None) or {}, {"device"})
    media_kwargs = {
        modality: kept
        for modality, given in (getattr(multimodal, "media_io_kwargs", None) or {}).items()
        if (kept := _without(given or {}, _DEVICE_KEYS))
    }
    overrides = {
        "hf_overrides": _named(getattr(model, "hf_overrides", None) or {}),
        "config_format": str(_value(getattr(model, "config_format", "auto"))),
    }
    code = {}
    if getattr(model, "trust_remote_code", False) and _has_code(config, processor):
        code = _remote_code(model, (folder, processor_folder))
    return fingerprints.join(
        {
            "model": _digest(model.served_model_name),
            "revision": _revision(model),
            "config": _digest(config),
            "overrides": _digest(overrides),
            "code": _digest(code) if code else "none",
            "processor": _digest(processor),
            "processor_kwargs": _digest([processor_kwargs, media_kwargs]),
            "dtype": compat.dtype_name(vllm_config),
        }
    )


def stored_as(vllm_config: VllmConfig) -> str:
    """Return a digest of everything that entries of a store depend on, the weights included.

    Raises:
        ConfigError: The weights cannot be identified, or the model has no configuration file.
    """
    model = vllm_config.model_config
    load_format = str(_value(vllm_config.load_config.load_format))
    if load_format == "dummy":
        weights = f"dummy {model.seed}"
    elif os.path.isdir(model.model):
        weights = weights_of(Path(model.model))
    elif commit := _commit(_config_folder(model)):
        weights = f"commit {commit}"
    else:
        raise ConfigError(
            f"store: the weights of {model.model!r} are unknown: it is neither a folder nor a "
            "commit of a hub; name a folder as model, or leave store out of the configuration"
        )
    return _digest([fingerprint(vllm_config), weights, _quantization(model)], digits=16)


def weights_of(folder: Path) -> str:
    """Return a digest of the weights in a folder, 16 digits, without reading all of them.

    Hashes names, shapes and dtypes of all tensors, and a sample of the values of each: further
    training or merging changes nearly every value of the tensors concerned. The same tensors in
    other files, or in another folder, are the same weights.

    Raises:
        ConfigError: There are none in ``*.safetensors``, or a file is damaged.
    """
    try:
        parts = sorted(part for path in folder.glob("*.safetensors") for part in _tensors(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the weights in {folder} are not identified: {error}") from error
    if not parts:
        raise ConfigError(
            f"the weights in {folder} are not identified: there is no *.safetensors; "
            "convert them, or leave store out of the configuration"
        )
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def _tensors(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= _MAX_HEADER_BYTES:
            raise ValueError(f"{path} has a header of {size} bytes")
        header = json.loads(file.read(size))
        for name, about in header.items():
            if name == "__metadata__":
                continue
            first, end = about["data_offsets"]
            digest = hashlib.blake2b(digest_size=16)
            digest.update(json.dumps([name, about["dtype"], about["shape"]]).encode())
            if _EXPERT not in name:
                for offset in (first, (first + end) // 2, max(first, end - _SAMPLE_BYTES)):
                    wanted = min(_SAMPLE_BYTES, end - offset)
                    data = os.pread(file.fileno(), wanted, 8 + size + offset)
                    if len(data) != wanted:
                        raise ValueError(f"{path} ends within {name}")
                    digest.update(data)
            yield digest.digest()


def kv_form(vllm_config: VllmConfig) -> str:
    """Return what two engines must have in common for one to read the other's KV.

    vLLM's NIXL connector compares these, too, but only after a prompt was computed.
    """
    connector = getattr(vllm_config.kv_transfer_config, "kv_connector", None)
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return (
        f"{connector} of vLLM {vllm.__version__}, model {model.model!r}, "
        f"kv_cache_dtype {cache.cache_dtype}"
    )


def _config_folder(model: ModelConfig) -> Path:
    source = getattr(model, "hf_config_path", None) or model.model
    if _is_gguf(source):
        raise ConfigError(
            f"model {model.model!r}: a GGUF file has no config.json. Engines compare that file: "
            "name a folder or a repository that holds it as hf_config_path"
        )
    return _folder(model, source)


def _folder(model: ModelConfig, source: str) -> Path:
    """Return the folder with a model's small files; those of a hub are fetched if need be."""
    if os.path.isdir(source):
        return Path(source)
    patterns = [*CONFIG_FILES, *PROCESSOR_FILES]
    if getattr(model, "trust_remote_code", False):
        patterns.append("*.py")
    try:
        if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() == "true":
            from modelscope import snapshot_download as from_modelscope

            return Path(
                from_modelscope(source, revision=model.revision, allow_file_pattern=patterns)
            )
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                source,
                revision=model.revision,
                token=getattr(model, "hf_token", None),
                allow_patterns=patterns,
            )
        )
    except Exception as error:
        raise ConfigError(
            f"model {source!r}: its configuration files cannot be read: {error}. Engines compare "
            "these files: download the model, or name a folder as model"
        ) from error


def _read(folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the content of those JSON files that are there, without volatile keys."""
    found = {}
    for name in names:
        path = folder / name
        try:
            found[name] = json.loads(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        if not isinstance(found[name], dict):
            raise _unreadable(path, "no JSON object")
    return {name: _without_volatile(content) for name, content in found.items()}


def _unreadable(path: Path, reason: object) -> ConfigError:
    return ConfigError(f"{path}: cannot be read: {reason}. Download the model again")


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_volatile(each) for key, each in value.items() if key not in _VOLATILE}
    return [_without_volatile(each) for each in value] if isinstance(value, list) else value


def _without(given: Any, keys: frozenset[str] | set[str]) -> dict[str, Any]:
    return {key: each for key, each in dict(given).items() if key not in keys}


def _has_code(*files: dict[str, Any]) -> bool:
    return any("auto_map" in each for found in files for each in found.values())


def _remote_code(model: ModelConfig, folders: tuple[Path, Path]) -> dict[str, str]:
    """Return a digest of each Python file of the checkpoint, and the revision of code elsewhere."""
    paths = {path.name: path for folder in folders for path in folder.glob("*.py")}
    digests = {}
    for name, path in paths.items():
        try:
            digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise _unreadable(path, error) from error
    return {**digests, "revision": str(getattr(model, "code_revision", None) or "")}


def _named(overrides: Any) -> Any:
    """Return overrides as JSON values; a function or class is its qualified name."""
    if isinstance(overrides, dict):
        return {str(key): _named(each) for key, each in overrides.items()}
    if callable(overrides):
        return f"{overrides.__module__}.{overrides.__qualname__}"
    return overrides


def _revision(model: ModelConfig) -> str:
    """Return the revision that the user has set; a hub's default is none."""
    revision = model.revision
    if revision in _DEFAULT_REVISIONS:
        return "none"
    text = str(revision)
    return text if _PLAIN.fullmatch(text) else _digest(text)


def _commit(folder: Path) -> str:
    return folder.name if folder.parent.name == "snapshots" else ""


def _quantization(model: ModelConfig) -> str:
    """Return how the user has the weights quantized while they are loaded.

    That of a checkpoint is in its files. vLLM replaces the name of its method by one of the device.
    """
    files = _read(_config_folder(model), CONFIG_FILES)
    if "hf_quant_config.json" in files or any(
        key in each for each in files.values() for key in _QUANTIZED
    ):
        return ""
    return str(_value(model.quantization) or "")


def _is_gguf(source: str) -> bool:
    """Return whether a model is one GGUF file, by its path or as ``repository:type``."""
    if os.path.isdir(source):
        return False
    return source.endswith(".gguf") or (":" in source and "://" not in source)


def _value(setting: Any) -> Any:
    """Return the value of an enumeration's member; older releases of vLLM have them."""
    return getattr(setting, "value", setting)


def _digest(value: Any, *, digits: int = 12) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
