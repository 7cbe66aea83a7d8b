"""A pydantic model as a structural OpenAPI v3 schema, the dialect of CustomResourceDefinitions.

Pydantic writes JSON Schema 2020-12 with references; a CRD takes OpenAPI 3.0 without any: no ``$ref``, no ``const``, no
``anyOf`` around types, ``nullable`` for null, boolean ``exclusiveMinimum``, and unknown fields are pruned unless a
schema says otherwise.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from inflight_runtime.api.base import MAX_MAP_ENTRIES, QUANTITY_PATTERN
from inflight_runtime.api.errors import inner_model

Schema = dict[str, Any]

KEPT: Final = (
    "type",
    "enum",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
)
"""JSON Schema keywords that mean the same in a CRD."""


def structural_schema(model: type[BaseModel]) -> Schema:
    """The schema of a model's objects, with its descriptions and defaults.

    A default that depends on other fields is left to the operator, and so is ``None``: such a field stays away.
    """
    generated = model.model_json_schema(by_alias=True)
    return _object(model, generated, generated.get("$defs", {}))


def _object(model: type[BaseModel], node: Schema, definitions: Schema) -> Schema:
    properties: Schema = {}
    for field in model.model_fields.values():
        name = field.alias or ""
        part = _field(field, node["properties"][name], definitions)
        if (default := _default(field)) is not PydanticUndefined:
            # Spelt out: the API server checks rules on a default before it fills in the defaults inside.
            nested = part.get("properties", {})
            part["default"] = {key: inner["default"] for key, inner in nested.items() if "default" in inner} or default
        properties[name] = part
    schema: Schema = {"type": "object", **_description(node), "properties": properties}
    if required := node.get("required"):
        schema["required"] = sorted(required)
    return schema


def _field(field: FieldInfo, node: Schema, definitions: Schema) -> Schema:
    nested = inner_model(field.annotation)
    if nested is None:
        return _value(node, definitions)
    inner = definitions[nested.__name__]
    if field.description:
        inner = inner | {"description": field.description}
    schema = _object(nested, inner, definitions)
    return _around(node, schema)


def _around(node: Schema, inner: Schema) -> Schema:
    """``inner`` in the list or the optional that ``node`` has around its reference."""
    if node.get("type") == "array":
        listed = {key: value for key, value in inner.items() if key != "description"}
        return {"type": "array", **_description(node), **_kept(node), "items": listed}
    if any(part.get("type") == "null" for part in node.get("anyOf", ())):
        return inner | {"nullable": True}
    return inner


def _value(node: Schema, definitions: Schema) -> Schema:
    """A field that holds no model."""
    description = _description(node)
    variants = [part for part in node.get("anyOf", ()) if part.get("type") != "null"]
    if {part.get("type") for part in variants} == {"integer", "string"}:
        # A Kubernetes quantity.
        # The pattern is for a text, the bound for a number.
        return {**description, "x-kubernetes-int-or-string": True, "pattern": QUANTITY_PATTERN, "minimum": 0}
    if variants:
        (only,) = variants
        schema = _value(only, definitions)
        return {**schema, **description, "nullable": len(variants) < len(node["anyOf"])}
    if "const" in node:
        return {**description, "type": node["type"], "enum": [node["const"]]}
    schema = {**description, **_kept(node)}
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if exclusive in node:
            schema |= {bound: node[exclusive], exclusive: True}
    if node.get("type") == "array":
        schema["items"] = _value(node["items"], definitions)
    if node.get("type") == "object":
        values = node.get("additionalProperties", True)
        if values is True:
            schema["x-kubernetes-preserve-unknown-fields"] = True
        else:
            # Without a bound CEL rules inside it cost too much to be accepted.
            most = node.get("maxProperties", MAX_MAP_ENTRIES)
            schema |= {"additionalProperties": _value(values, definitions), "maxProperties": most}
    return schema


def _kept(node: Schema) -> Schema:
    return {key: node[key] for key in KEPT if key in node}


def _description(node: Schema) -> Schema:
    text = node.get("description")
    return {"description": " ".join(text.split())} if text else {}


def _default(field: FieldInfo) -> Any:
    """The default as JSON, or ``PydanticUndefined`` where the schema is to have none."""
    if field.default_factory_takes_validated_data:
        return PydanticUndefined
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined:
        return PydanticUndefined
    return {} if isinstance(value, BaseModel) else value
