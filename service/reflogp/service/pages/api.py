"""Prepare data for the web pages: routes and JSON objects for the page /docs, and the names of jobs and datasets.

The routes and JSON objects are read from the service's OpenAPI document. The page /docs is rendered on the server. Unlike
FastAPI's own /docs, it needs no script and loads nothing from other servers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from reflogp.service.models import DatasetSpec, Job
from reflogp.store.texts import hide_secrets


def dataset_name(dataset: DatasetSpec | None) -> str:
    """Return the location of a dataset (its URI, upload name or path), or an empty string if `dataset` is None.

    The user name, password, query and fragment of a URI are removed, because they may contain secrets.
    """
    if dataset is None:
        return ""
    if dataset.uri is not None:
        return hide_secrets(dataset.uri).removesuffix("?…")
    return dataset.upload or dataset.path or ""


def job_name(job: Job) -> str:
    """Return the name that pages show for a job: its title, else the last part of its dataset's location, else its id."""
    return job.settings.title.strip() or dataset_name(job.dataset).rstrip("/").rpartition("/")[2] or job.id


@dataclass(frozen=True)
class Field:
    """A parameter of a route, or a field of a JSON object.

    Attributes:
        name: name of the parameter or field. For a field of a nested object, its dotted path, such as `dataset.uri`.
        kind: type of the value in words. For a parameter, also where it is sent, such as "query, integer".
        default: default value as JSON, "required" if there must be a value, or "" if the value can be left out and has no
            default.
        about: description of the parameter or field.
    """

    name: str
    kind: str
    default: str
    about: str


@dataclass(frozen=True)
class Answer:
    """A route's response for one HTTP status.

    Attributes:
        body: media types of the response body and names of their JSON objects, such as "application/json (Job)", or "" if there
            is no body.
    """

    status: str
    about: str
    body: str


@dataclass(frozen=True)
class Operation:
    """One HTTP method of a route.

    Attributes:
        bodies: media types that are accepted for the request body.
        fields: fields of the request body if it is a JSON object.
    """

    id: str
    method: str
    path: str
    summary: str
    about: str
    parameters: list[Field]
    bodies: list[str]
    fields: list[Field]
    answers: list[Answer]


@dataclass(frozen=True)
class Shape:
    """A JSON object of the API, with its fields."""

    name: str
    about: str
    fields: list[Field]


def operations(spec: dict[str, Any]) -> list[Operation]:
    """Return the operations of all routes in an OpenAPI document, in the document's order."""
    return [
        _operation(method.upper(), path, operation)
        for path, methods in spec["paths"].items()
        for method, operation in methods.items()
    ]


def shapes(spec: dict[str, Any]) -> list[Shape]:
    """Return the JSON objects that an OpenAPI document defines under `components.schemas`."""
    named = spec.get("components", {}).get("schemas", {})
    return [Shape(name, schema.get("description", ""), list(_fields(schema))) for name, schema in named.items()]


def _operation(method: str, path: str, operation: dict[str, Any]) -> Operation:
    bodies = operation.get("requestBody", {}).get("content", {})
    json_body = bodies.get("application/json", {}).get("schema", {})
    parameters = [
        Field(
            entry["name"],
            f"{entry['in']}, {_kind(entry['schema'])}",
            "required" if entry.get("required") else _default(entry["schema"]),
            entry.get("description", ""),
        )
        for entry in operation.get("parameters", [])
    ]
    answers = [
        Answer(status, answer.get("description", ""), ", ".join(_content(answer.get("content", {}))))
        for status, answer in sorted(operation["responses"].items())
    ]
    return Operation(
        id=operation["operationId"],
        method=method,
        path=path,
        summary=operation.get("summary", ""),
        about=operation.get("description", ""),
        parameters=parameters,
        bodies=list(bodies),
        fields=list(_fields(json_body)),
        answers=answers,
    )


def _fields(schema: dict[str, Any], outer: str = "") -> Iterator[Field]:
    for name, entry in schema.get("properties", {}).items():
        default = "required" if name in schema.get("required", []) else _default(entry)
        yield Field(outer + name, _kind(entry), default, entry.get("description", ""))
        inner = entry.get("items", entry) if entry.get("type") == "array" else entry
        yield from _fields(inner, f"{outer}{name}.")


def _content(content: dict[str, Any]) -> Iterator[str]:
    for media_type, entry in content.items():
        schema = entry.get("schema", {})
        yield f"{media_type} ({_kind(schema)})" if "$ref" in schema else media_type


def _kind(schema: dict[str, Any]) -> str:
    """Describe in words the type that a JSON schema allows, such as "string or null" or "list of integer"."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_kind, schema["anyOf"])))
    if "enum" in schema or "const" in schema:
        return " or ".join(map(str, schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "array" and "items" in schema:
        return f"list of {_kind(schema['items'])}"
    return str(schema.get("type", "any"))


def _default(schema: dict[str, Any]) -> str:
    return json.dumps(schema["default"]) if schema.get("default") is not None else ""
