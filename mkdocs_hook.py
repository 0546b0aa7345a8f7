"""What MkDocs asks while it builds the docs: pages made of the code itself, and files of the repository that pages link to.

Knows the OpenAPI document, the settings' fields, the typer app, and Markdown. The build ends where a route, a setting, a
command, an option or an environment variable says nothing about itself. Named in mkdocs.yml.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from typer.core import TyperGroup, TyperOption

from reflogp.cli.main import app
from reflogp.service.app import create_app
from reflogp.service.settings import ReferenceSettings, ServerSettings, TokenSettings

_ROOT = Path(__file__).resolve().parent
_PACKAGES = ("store", "scoring", "service", "client", "cli", "trainer_ext")
#: A link from docs/ to a file of the repository, as it works on the repository's own pages.
_LINK_OUT = re.compile(r"\]\(\.\./([^)#\s]+)")
_MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
#: What FastAPI writes where nothing was said.
_UNSAID = ("Successful Response", "Validation Error")
_ENVIRONMENT = re.compile(r"\bREFLOGP_[A-Z][A-Z_]*[A-Z]\b")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that pages link to, so that the site needs nothing beside itself."""
    linked = {name for page in files.documentation_pages() for name in _LINK_OUT.findall(page.content_string)}
    for name in sorted(name for name in linked if (_ROOT / name).is_file()):  # a link to another is not found, and said
        files.append(File.generated(config, f"repository/{name}", abs_src_path=str(_ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put what is generated at its marker, and turn links out of docs/ to the copies in the site."""
    markdown = _LINK_OUT.sub(r"](repository/\1", markdown)
    return _MARKER.sub(lambda found: _GENERATED[found[1]](markdown), markdown)


class UndocumentedError(PluginError):
    """Something that people can use says nothing about itself."""


def _said(text: str | None, what: str) -> str:
    """`text` on one line; an error where there is none."""
    if text is None or not text.strip():
        raise UndocumentedError(f"{what} is not documented: describe it where it is defined")
    return " ".join(text.split())


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


# The HTTP API


def api_page(spec: dict[str, Any]) -> str:
    """Every route of an OpenAPI document, and the shapes that cross it."""
    parts = []
    for path, operations in spec["paths"].items():
        parts += [_route(method.upper(), path, operation) for method, operation in operations.items()]
    schemas = {name: schema for name, schema in spec["components"]["schemas"].items() if "ValidationError" not in name}
    parts += ["## Shapes\n", *(_shape(name, schema) for name, schema in schemas.items())]
    return "\n".join(parts)


def _route(method: str, path: str, operation: dict[str, Any]) -> str:
    name = f"route {method} {path}"
    summary = _said(operation.get("summary"), f"{name}: its summary")
    of_name = summary == summary.title() and operation["operationId"].startswith(summary.lower().replace(" ", "_") + "_")
    if of_name:  # FastAPI's own, made of the function's name
        raise UndocumentedError(f"{name} has no summary")
    _said(operation.get("description"), name)
    parts = [f"## {method} {path}\n", f"**{summary}.** {operation['description']}\n"]
    if parameters := operation.get("parameters"):
        rows = [
            (
                f"`{entry['name']}`",
                entry["in"] + (", needed" if entry.get("required") else ""),
                _kind(entry["schema"]),
                _default(entry["schema"].get("default")),
                _said(entry.get("description"), f"{name}: parameter {entry['name']}"),
            )
            for entry in parameters
        ]
        parts.append(_table(("parameter", "in", "type", "default", ""), rows))
    if body := operation.get("requestBody"):
        parts.append("Body: " + "; ".join(_content(body["content"])) + ".\n")
    answers = []
    for status, answer in sorted(operation["responses"].items()):
        description = _said(answer.get("description"), f"{name}: answer {status}")
        if description in _UNSAID:
            raise UndocumentedError(f"{name}: answer {status} is not documented")
        answers.append((status, description, "; ".join(_content(answer.get("content", {})))))
    parts.append(_table(("answer", "", "body"), answers))
    return "\n".join(parts)


def _content(content: dict[str, Any]) -> Iterator[str]:
    for media_type, entry in content.items():
        shape = _kind(entry["schema"]) if "$ref" in entry.get("schema", {}) else ""
        yield f"`{media_type}`" + (f", {shape}" if shape else "")


def _shape(name: str, schema: dict[str, Any]) -> str:
    about = _said(schema.get("description"), f"shape {name}")
    required = schema.get("required", [])
    rows = [
        (
            f"`{field}`",
            _kind(entry),
            "needed" if field in required else _default(entry.get("default")),
            _said(entry.get("description"), f"shape {name}: field {field}"),
        )
        for field, entry in schema["properties"].items()
    ]
    return f"### {name}\n\n{about}\n\n" + _table(("field", "type", "default", ""), rows)


def _kind(schema: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(entry) for entry in schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        entries = schema.get("prefixItems")
        return f"list of {_kind(schema['items'])}" if entries is None else f"({', '.join(map(_kind, entries))})"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        return f"object of {_kind(values)}" if isinstance(values, dict) else "object"
    word = {"date-time": "time", "path": "path"}.get(schema.get("format", ""), schema.get("type", "anything"))
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[name]:,}" for name, sign in signs.items() if name in schema]
    return " ".join([word, ", ".join(bounds)]).strip()


def _default(value: object) -> str:
    if value is None or value in ("", [], {}):
        return ""
    return f"`{value}`" if isinstance(value, (str, Path)) else f"`{json.dumps(value)}`"


# Settings


def settings_page() -> str:
    """Every field of the service's settings."""
    server = _fields(ServerSettings, lambda name: f"<br>`{_variable(name)}`")
    reference, token = _fields(ReferenceSettings), _fields(TokenSettings)
    return (
        f"## The service\n\n{server}\n## A reference: `[references.NAME]`\n\n{reference}\n## A token: `[[tokens]]`\n\n{token}"
    )


def _variable(name: str) -> str:
    return f"REFLOGP_{name.upper()}"


def _fields(model: type[BaseModel], variable: Callable[[str], str] = lambda name: "") -> str:
    schema = model.model_json_schema(ref_template="#/{model}")
    rows = []
    for name, field in model.model_fields.items():
        entry = schema["properties"][name]
        places = {"references": "tables, below", "tokens": "tables, below"}
        value = field.get_default(call_default_factory=True)
        default = "needed" if field.is_required() else _default(value)
        if name.endswith("_bytes") and isinstance(value, int):
            default = f"`{value}` ({_size(value)})"
        description = _said(field.description, f"setting {model.__name__}.{name}")
        rows.append((f"`{name}`{variable(name)}", places.get(name) or _kind(entry), default, description))
    return _table(("setting", "type", "default", ""), rows)


def _size(count: int) -> str:
    power = min((count.bit_length() - 1) // 10, 3)
    return f"{count / 1024**power:g} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


def _check_environment(page: str) -> None:
    """Every environment variable that the code reads is on the settings page."""
    own = {_variable(name) for name in ServerSettings.model_fields}
    sources = [file for package in _PACKAGES for file in (_ROOT / package).rglob("*.py")]
    read = {name for file in sources for name in _ENVIRONMENT.findall(file.read_text(encoding="utf-8"))}
    if unsaid := sorted(name for name in read - own if f"`{name}`" not in page):
        raise UndocumentedError(f"environment variable {unsaid[0]} is not on the settings page: docs/settings.md")


# Commands


def commands_page(root: typer.Typer) -> str:
    """Every command of a typer app, with its arguments and options."""
    return "\n".join(_command("reflogp", typer.main.get_command(root)))


def _command(path: str, command: Any) -> Iterator[str]:
    _said(command.help, f"command {path}")
    parts = [f"## {path}\n"]
    arguments = [entry for entry in command.params if entry.param_type_name == "argument"]
    options = [entry for entry in command.params if entry.param_type_name == "option" and not entry.hidden]
    names = {entry.name: entry.metavar or entry.name.upper() for entry in arguments}
    usage = [path, *names.values(), *(["COMMAND"] if isinstance(command, TyperGroup) else [])]
    parts.append(f"`{' '.join(usage)}{' [OPTIONS]' if options else ''}`\n")
    parts += [_paragraph(text) for text in re.split(r"\n\s*\n", command.help.strip())]
    if arguments:
        rows = [(f"`{names[entry.name]}`", _said(entry.help, f"{path}: argument {entry.name}")) for entry in arguments]
        parts.append(_table(("argument", ""), rows))
    if options:
        parts.append(_table(("option", "default", ""), [_option(path, entry) for entry in options]))
    yield "\n".join(parts)
    if isinstance(command, TyperGroup):
        for name, child in command.commands.items():
            yield from _command(f"{path} {name}", child)


def _paragraph(text: str) -> str:
    text = re.sub(r"\[/?bold\]", "**", " ".join(text.split()))
    example = text.removeprefix("Example: ")
    return f"```sh\n{example}\n```\n" if example != text or text.startswith("reflogp ") else f"{text}\n"


def _option(path: str, option: TyperOption) -> tuple[str, str, str]:
    text = _said(option.help, f"{path}: option {option.opts[0]}")
    value = "" if option.is_flag else f" {option.metavar or option.name.upper()}"
    if choices := _choices(option.type_descriptor.annotation):
        text += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
    if option.envvar:
        text += f" Environment: `{option.envvar}`."
    default = "needed" if option.required else "" if option.is_flag else _default(option.default)
    return f"`{', '.join(option.opts)}{value}`", default, text


def _choices(annotation: Any) -> tuple[str, ...]:
    """The values of a Literal, also of one that may be None."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((found for entry in get_args(annotation) if (found := _choices(entry))), ())


def _api(_: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        service = create_app(ServerSettings(store=f"{folder}/store", state=Path(folder, "state")))
        try:
            return api_page(service.openapi())
        finally:
            service.state.context.ledger.close()


def _settings(page: str) -> str:
    _check_environment(page)
    return settings_page()


#: What a marker stands for.
_GENERATED: dict[str, Callable[[str], str]] = {"api": _api, "settings": _settings, "commands": lambda _: commands_page(app)}
