"""Random JSON schemas whose every value is short, and a run that checks answers against them.

`run_schemas(count, engine)` serves all of them in one go, base and adapters mixed.
"""

import json
import random
import re
from typing import Any

import jsonschema
from tests_support import random_adapter

from engine.runtime.request import FinishReason
from engine.serving.engine import Engine

WIDTHS = {
    f"model.layers.{layer}.self_attn.{name}": (64, width)
    for layer in (0, 1)
    for name, width in (("q_proj", 64), ("v_proj", 32))
}
ADAPTERS: tuple[Any, ...] = (None, "a", "b", {"a": 0.7, "b": -0.3}, {"b": 0.5})
MAX_TOKENS = 440
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


def random_schema(choose: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema for values of a few dozen characters, all of whose parts are bounded."""
    kinds = ["string", "pattern", "integer", "boolean", "enum", "const", "null", "date"]
    if depth:
        kinds += ["object", "object", "array", "anyOf", "ref"]
    kind = choose.choice(kinds)
    if kind == "string":
        low = choose.randint(0, 2)
        return {"type": "string", "minLength": low, "maxLength": low + choose.randint(0, 2)}
    if kind == "pattern":
        return {"type": "string", "pattern": choose.choice(["^[a-f]{1,4}$", "^x[0-9]{2}(y|zz)$"])}
    if kind == "integer":
        low = choose.randint(-2000, 2000)
        return {"type": "integer", "minimum": low, "maximum": low + choose.randint(0, 999)}
    if kind == "enum":
        return {"enum": choose.sample(["red", 'a "quote"', "größe", 7, -1.5, None, True, [1]], 3)}
    if kind == "const":
        return {"const": choose.choice(["x", 0, {"k": [1, "v"]}])}
    if kind == "date":
        return {"type": "string", "format": "date"}
    if kind == "array":
        low = choose.randint(0, 1)
        items = random_schema(choose, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 1}
    if kind == "anyOf":
        return {"anyOf": [random_schema(choose, depth - 1) for _ in range(2)]}
    if kind == "ref":
        return {"$ref": "#/$defs/part"}
    if kind == "object":
        names = choose.sample(["id", "name", "größe", "a b", "x"], choose.randint(1, 3))
        return object_schema(choose, {name: random_schema(choose, depth - 1) for name in names})
    return {"type": kind}


def object_schema(choose: random.Random, properties: dict[str, Any]) -> dict[str, Any]:
    """A closed object; each property is required or not."""
    required = [name for name in properties if choose.random() < 0.85]
    closed = {"additionalProperties": False, "required": required}
    return {"type": "object", "properties": properties} | closed


def load_adapters(engine: Engine) -> None:
    for seed, name in enumerate("ab"):
        engine.load_adapter_from_tensors(name, *random_adapter(WIDTHS, 4 + 4 * seed, seed))


def run_schemas(count: int, engine: Engine, seed: int = 0) -> int:
    """Serve `count` random schemas together and assert that each answer is compact JSON of its
    schema; the number of distinct answers. The engine must have no adapters yet.
    """
    choose = random.Random(seed)
    load_adapters(engine)
    schemas = [
        object_schema(choose, {"v": random_schema(choose)})
        | {"$defs": {"part": random_schema(choose, 0)}}
        for _ in range(count)
    ]
    sampling = [
        engine.sampling_params(
            json_schema=schema,
            max_tokens=MAX_TOKENS,
            temperature=choose.choice([0.0, 0.8, 1.5]),
            seed=index,
            min_tokens=choose.choice([0, 0, 3]),
            logprobs=choose.choice([None, 2]),
        )
        for index, schema in enumerate(schemas)
    ]
    prompts = [[choose.randrange(4, 348) for _ in range(choose.randint(1, 9))] for _ in schemas]
    adapters = [ADAPTERS[index % len(ADAPTERS)] for index in range(count)]
    answers = engine.generate(prompts, sampling, adapters)
    for schema, answer in zip(schemas, answers, strict=True):
        assert answer.finish_reason is FinishReason.stop, (schema, answer)
        jsonschema.validate(json.loads(answer.text), schema)
        assert not re.search(r"\s", QUOTED.sub("", answer.text)), "blanks between the parts"
    engine.scheduler.check_integrity()
    return len({answer.text for answer in answers})
