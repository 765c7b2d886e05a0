"""Reference of keys and variables, from the schema: ``python -m ci.keys`` rewrites docs/keys.md."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from epd_portable import envs
from epd_portable.config.groups import LAUNCHER_OWNED_ARGS, InstanceGroup
from epd_portable.config.instance import PLATFORMS
from epd_portable.config.load import OVERLAYS
from epd_portable.config.quantities import UNITS
from epd_portable.config.schema import Topology
from epd_portable.config.store import StoreSection

PAGE = Path(__file__).resolve().parents[1] / "docs/keys.md"
HEAD = """# Keys and variables

For users who write a topology file: every key with its default. Generated from the schema by
`python -m ci.keys`. How a file is read, roles and features: [configuration](configuration.md).

Sizes are bytes, or a number with `KiB`, `MiB`, `GiB` or `TiB`. Times are seconds for keys in `_s`,
milliseconds for keys in `_ms`. `*` stands for any role: `encode`, `prefill`, `decode`,
`encode_prefill`, `prefill_decode`, `encode_prefill_decode`.
"""


def default_of(name: str, model: type[BaseModel]) -> str:
    """Return the default of a field as the page shows it."""
    field = model.model_fields[name]
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if name.endswith("_bytes") and value:
        unit, size = max(
            ((unit, size) for unit, size in UNITS.items() if value % size == 0),
            key=lambda pair: pair[1],
        )
        return f"`{value // size}{unit}`"
    return f"`{value}`"


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of a model's fields by name, without line breaks."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(node, ast.ClassDef)
            for field, text in zip(node.body, node.body[1:], strict=False):
                if not isinstance(field, ast.AnnAssign) or not isinstance(text, ast.Expr):
                    continue
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


def all_keys(model: type[BaseModel] = Topology, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield every key of the file, its default and its meaning; keys of all roles have a ``*``."""
    shared = InstanceGroup.model_fields if issubclass(model, InstanceGroup) else ()
    texts = meanings(model)
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from all_keys(kind, f"{prefix}{name}.")
        else:
            where = "instances.*." if name in shared else prefix
            yield f"{where}{name}", default_of(name, model), texts[name]
            if kind == StoreSection | None:
                yield from all_keys(StoreSection, f"{prefix}{name}.")


def page() -> str:
    """Return the whole page."""
    rows = {key: (default, meaning) for key, default, meaning in all_keys()}
    sections: dict[str, list[str]] = {"Top": []}
    for key, (default, meaning) in rows.items():
        section = key.partition(".")[0] if "." in key else "Top"
        if key.startswith(("front.media.", "front.admission.")):
            section = ".".join(key.split(".")[:2])
        title = section if section == "Top" else f"`{section}`"
        sections.setdefault(title, []).append(f"| `{key}` | {default} | {meaning} |")
    parts = [HEAD]
    for title, lines in sections.items():
        parts += [f"## {title}\n", "| key | default | meaning |", "|---|---|---|", *lines, ""]
    overlays = ", ".join(f"`{OVERLAYS}.{name}`" for name in PLATFORMS)
    parts += [
        f"## `{OVERLAYS}`\n",
        f"{overlays}: any of the keys above, laid over the rest on that platform.\n",
        "## Refused engine arguments\n",
        "Names are vLLM's with underscores. The launcher writes or refuses these:\n",
        *("| name | instead |", "|---|---|"),
        *(f"| `{name}` | {instead} |" for name, instead in LAUNCHER_OWNED_ARGS.items()),
        "",
        "## Variables of the package\n",
        *("| variable | default | meaning |", "|---|---|---|"),
        *(f"| `{each.name}` | {each.default or 'empty'} | {each.meaning} |" for each in envs.TABLE),
        "",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
