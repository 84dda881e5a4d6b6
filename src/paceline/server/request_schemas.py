"""What the JSON types of request fields leave unsaid: bounds, values that are refused, examples.

Only for the OpenAPI document; requests are checked where they are read. Knows neither routes nor replies.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeAlias

from paceline.request import MAX_LOGPROBS, MAX_SEED
from paceline.server.protocol import NEUTRAL

JsonSchema: TypeAlias = dict[str, Any]

_POSITIVE = {"minimum": 1}
_COUNT = {"minimum": 0}
_PENALTY = {"minimum": -2, "maximum": 2}
_LOGPROBS = {"minimum": 0, "maximum": MAX_LOGPROBS}
_MESSAGES = [{"role": "user", "content": "Name a colour."}]
_TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]

_BOUNDS: dict[str, JsonSchema] = {
    "n": _POSITIVE,
    "best_of": _POSITIVE,
    "max_tokens": _COUNT,  # 0 with echo
    "max_completion_tokens": _POSITIVE,
    "min_tokens": _COUNT,
    "temperature": {"minimum": 0, "maximum": 100},
    "top_k": {"minimum": -1},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "seed": {"minimum": -(2**63), "maximum": MAX_SEED},
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 100},
    "top_logprobs": _LOGPROBS,
}
_EXAMPLES: dict[str, list[Any]] = {
    "messages": [_MESSAGES],
    "prompt": ["Once upon a time"],
    "tools": [_TOOLS],
    "tokens": [[72, 105]],
    "max_tokens": [16],
    "max_completion_tokens": [16],
    "stop": [["\n\n"]],
    "stop_token_ids": [[0]],
    "logit_bias": [{"42": -5.0}],
    "guided_regex": ["[a-z]+"],
    "guided_choice": [["yes", "no"]],
    "guided_json": [{"type": "object"}],
    "guided_grammar": ['start: "yes" | "no"'],
    "speculation": [{"summary": True}],
}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPTS: list[JsonSchema] = [
    {"type": "string"},
    _TOKEN_IDS,
    {"type": "array", "items": {"type": "string"}, "minItems": 1},
    {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
]
_BODIES: dict[str, JsonSchema] = {
    "ChatRequest": {"messages": _MESSAGES, "max_tokens": 16},
    "CompletionRequest": {"prompt": "Once upon a time", "max_tokens": 16},
    "TokenizeRequest": {"prompt": "Once upon a time"},
    "DetokenizeRequest": {"tokens": [72, 105]},
}


def describe_requests(schemas: dict[str, JsonSchema], model_name: str, max_depth: int) -> None:
    """Complete the schemas of the request records, in place.

    `model_name` is the one model served, `max_depth` the most drafts of a round.
    """
    for name, body in _BODIES.items():
        schemas[name]["examples"] = [body]
        properties = schemas[name]["properties"]
        properties["model"]["anyOf"] = [{"enum": [model_name]}, {"type": "null"}]
        for field, schema in properties.items():
            _describe(field, schema)
    properties = schemas["ChatRequest"]["properties"]
    _bound(properties["max_tokens"], _POSITIVE)
    _bound(schemas["CompletionRequest"]["properties"]["logprobs"], _LOGPROBS)
    _bound(schemas["SpeculationOptions"]["properties"]["depth"], {"minimum": 0, "maximum": max_depth})
    schemas["CalledFunction"]["properties"]["arguments"] |= {
        "contentMediaType": "application/json",
        "examples": ["{}"],
    }
    schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"] = _PROMPTS
    schemas["ChatMessage"] = _messages(schemas["ChatMessage"])
    schemas["TokenizeRequest"] = _tokenized(schemas["TokenizeRequest"])


def _messages(record: JsonSchema) -> JsonSchema:
    """What a message must have and may have, by its role."""
    record["properties"]["content"]["examples"] = ["Name a colour."]
    speakers = ["system", "developer", "user"]
    return {
        "title": record["title"],
        "description": record["description"],
        "anyOf": [
            _variant(record, ("content",), ("tool_calls", "tool_call_id"), role={"enum": speakers}),
            _variant(record, ("content",), ("tool_call_id",), role={"const": "assistant"}),
            _variant(record, ("tool_calls",), ("tool_call_id",), role={"const": "assistant"}),
            _variant(record, ("content", "tool_call_id"), ("tool_calls",), role={"const": "tool"}),
        ],
    }


def _tokenized(record: JsonSchema) -> JsonSchema:
    """A prompt or a conversation."""
    about_both = ("model", "prompt", "add_special_tokens", "return_token_strs")
    return {
        "title": record["title"],
        "description": record["description"],
        "anyOf": [
            _variant(record, ("prompt",), [f for f in record["properties"] if f not in about_both]),
            _variant(record, ("messages",), ("prompt",)),
        ],
        "examples": record["examples"],
    }


def _variant(
    record: JsonSchema, required: Collection[str], absent: Collection[str], **fields: JsonSchema
) -> JsonSchema:
    """A record with more fields that must be there, and not null, and fields that must not."""
    properties = {**record["properties"], **fields}
    for field in required:
        kinds = [kind for kind in properties[field]["anyOf"] if kind.get("type") != "null"]
        properties[field] = {**properties[field], "anyOf": [_non_empty(kind) for kind in kinds]}
        properties[field].pop("default", None)
    properties |= {field: {"type": "null"} for field in absent}
    return {
        "type": "object",
        "properties": properties,
        "required": [*record["required"], *required],
        "additionalProperties": False,
    }


def _non_empty(kind: JsonSchema) -> JsonSchema:
    return {**kind, "minItems": 1} if kind.get("type") == "array" else kind


def _describe(field: str, schema: JsonSchema) -> None:
    if field in _BOUNDS:
        _bound(schema, _BOUNDS[field])
    if field in _EXAMPLES:
        schema["examples"] = _EXAMPLES[field]
    if field in NEUTRAL:
        schema.pop("anyOf")
        schema["enum"] = [*NEUTRAL[field], None]
    if field == "messages" and "anyOf" not in schema:
        schema["minItems"] = 1
    if field == "logit_bias":
        schema["anyOf"][0] |= {
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }


def _bound(schema: JsonSchema, bounds: JsonSchema) -> None:
    """Set bounds for the numbers among what a field may be."""
    for kind in schema["anyOf"]:
        if kind["type"] in ("integer", "number"):
            kind |= bounds
