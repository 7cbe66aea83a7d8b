"""What all models of the custom resource share: strictness, camelCase on the wire, and a few field types."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Final, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

MAX_DEPTH: Final = 32
"""Deepest nesting of a free-form field (``environment.args``, ``podTemplate``, ...)."""
MAX_MAP_ENTRIES: Final = 64
"""Most entries of a map: in a longer one the API server's rules would cost too much."""
MAX_INTEGER: Final = 2**63 - 1
"""Largest number that is a whole number to the API server."""
QUANTITY_PATTERN: Final = r"^[+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[munkMGTPE]|[eE][+-]?[0-9]+)?$"


class ApiModel(BaseModel):
    """Base of the custom resource: immutable, strictly typed, unknown fields refused, camelCase on the wire.

    In Python a field is named by its snake_case name or by its wire name; a job file knows the wire name only. A null
    for a field that has a default and cannot be null means the default, as it does to the API server.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, data: Any) -> Any:
        if not isinstance(data, dict) or None not in data.values():
            return data
        pruned = {
            name
            for key, field in cls.model_fields.items()
            if not field.is_required() and type(None) not in get_args(field.annotation)
            for name in (key, field.alias)
        }
        return {name: value for name, value in data.items() if value is not None or name not in pruned}


def refusal(reason: str, remedy: str) -> PydanticCustomError:
    """An error for a validator to raise, with the remedy that goes into its :class:`~.errors.Problem`."""
    # Custom errors format their template with the context, so literal braces in a text must not be read as places.
    return PydanticCustomError("refused", "{reason}", {"reason": reason, "remedy": remedy})


def _check_json(value: Any, where: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise refusal(f"is nested more than {MAX_DEPTH} levels deep{where}", "flatten it")
    if value is None or isinstance(value, str | bool | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise refusal(f"holds {value}{where}, which JSON cannot carry", "give a finite number")
        return
    if isinstance(value, list):
        for number, item in enumerate(value):
            _check_json(item, f"{where or ' at '}[{number}]", depth + 1)
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise refusal(f"has the key {key!r}{where}, which is not text", f'write it in quotes: "{key}"')
            _check_json(item, f"{where}.{key}" if where else f" at {key}", depth + 1)
        return
    raise refusal(f"holds a {type(value).__name__}{where}, which JSON cannot carry", "write it as text, in quotes")


def _json_object(value: dict[str, Any]) -> dict[str, Any]:
    _check_json(value, "", 0)
    return value


def _quantity(value: Any) -> Any:
    if isinstance(value, float):
        # A number with a fraction is no quantity to the API server's schema of custom resources.
        raise refusal("must be a whole number or text", f'write it in quotes: "{value}"')
    if isinstance(value, bool) or not isinstance(value, int | str):
        return value
    if isinstance(value, int) and value > MAX_INTEGER:
        raise refusal("is too large for a number", f'write it in quotes: "{value}"')
    text = str(value)
    if re.fullmatch(QUANTITY_PATTERN, text) is None:
        raise refusal(
            f"is not a Kubernetes quantity ({text!r})", 'write a number with an optional unit, for instance "16Gi"'
        )
    return text


JsonObject = Annotated[dict[Any, Any], AfterValidator(_json_object)]
"""A free-form map that is passed on as it is: text keys, JSON values."""

Quantity = Annotated[
    str, BeforeValidator(_quantity, json_schema_input_type=int | str), Field(examples=["16Gi", "500m"])
]
"""A Kubernetes quantity: ``16Gi``, ``500m``, ``2``."""

ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", examples=["my-object"]),
]
"""The name of another Kubernetes object (RFC 1123 subdomain)."""
