"""Write `.env.example` and `docs/configuration.md` from the settings themselves: `make docs`."""

import json
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from app.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parent.parent


def sections() -> list[tuple[str, str, dict[str, Any]]]:
    """(environment prefix, what it is about, fields) of each section."""
    return [
        (f"{PREFIX}{name.upper()}__", (field.annotation.__doc__ or "").strip(), field.annotation.model_fields)
        for name, field in Settings.model_fields.items()
    ]


def default(name: str, field: Any) -> str:
    """The default as one would write it; empty when it depends on the machine or the checkpoint."""
    if name == "path":
        return ""  # the demo model, wherever the package lies
    if field.default is PydanticUndefined or field.default is None:
        return ""
    return field.default if isinstance(field.default, str) else json.dumps(field.default)


def env_example() -> str:
    lines = ["# Every setting with its default. Copy to .env and change what you need; `make run` reads it."]
    for prefix, about, fields in sections():
        lines += ["", f"# --- {about}"]
        for name, field in fields.items():
            lines += [f"# {field.description}", f"#{prefix}{name.upper()}={default(name, field)}"]
    return "\n".join(lines) + "\n"


def configuration() -> str:
    lines = [
        "# Configuration",
        "",
        "Environment variables, or lines of a `.env` file in the working directory, which holds nothing else. Lists",
        "and objects are JSON. An unknown name is an error that names the nearest valid one. `make docs` writes this.",
    ]
    for prefix, about, fields in sections():
        lines += ["", f"## {about}", "", "| variable | default | meaning |", "|---|---|---|"]
        for name, field in fields.items():
            value = default(name, field)
            lines.append(f"| `{prefix}{name.upper()}` | {f'`{value}`' if value else ''} | {field.description} |")
    return "\n".join(lines) + "\n"


FILES = {ROOT / ".env.example": env_example, ROOT / "docs" / "configuration.md": configuration}

if __name__ == "__main__":
    for path, write in FILES.items():
        path.write_text(write())
