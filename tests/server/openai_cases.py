"""What the official client asks in the suite of test_openai_client: fields of requests that are
answered as the offline engine answers, and requests that are refused.
"""

from typing import Any

SHIP = {"type": "object", "properties": {"ship": {"type": "integer"}}, "required": ["ship"]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "ship", "schema": SHIP}}
CHAT = [{"role": "user", "content": "the quick"}]
PROMPT = [1, 267, 334]

# API fields, and the offline engine's.
SAME_ANSWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0}, {}),
    "drawn": ({"temperature": 0.9, "seed": 5}, {"temperature": 0.9, "seed": 5}),
    "another seed": ({"temperature": 0.9, "seed": 6}, {"temperature": 0.9, "seed": 6}),
    "top_p": (
        {"temperature": 1.0, "seed": 1, "top_p": 0.5},
        {"temperature": 1.0, "seed": 1, "top_p": 0.5},
    ),
    "presence": ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    "frequency": ({"frequency_penalty": -1.5}, {"frequency_penalty": -1.5}),
    "logit_bias": ({"logit_bias": {"17": 100}}, {"logit_bias": {17: 100.0}}),
    "stop": ({"stop": ["q", "e"], "max_tokens": 40}, {"stop": ["q", "e"], "max_tokens": 40}),
    "one stop": ({"stop": "e", "max_tokens": 40}, {"stop": "e", "max_tokens": 40}),
    "n": (
        {"n": 3, "temperature": 1.0, "seed": 2},
        {"n": 3, "temperature": 1.0, "seed": 2},
    ),
    "length": ({"max_tokens": 1}, {"max_tokens": 1}),
}
EXTRA_ANSWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "top_k": (
        {"top_k": 3, "temperature": 1.0, "seed": 3},
        {"top_k": 3, "temperature": 1.0, "seed": 3},
    ),
    "top_k off": (
        {"top_k": -1, "temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "seed": 3},
    ),
    "min_p": (
        {"min_p": 0.2, "temperature": 1.0, "seed": 3},
        {"min_p": 0.2, "temperature": 1.0, "seed": 3},
    ),
    "repetition": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "stop_token_ids": ({"stop_token_ids": [126, 264]}, {"stop_token_ids": [126, 264]}),
    "bad_words": ({"bad_words": ["the", "fox"]}, {"bad_words": ["the", "fox"]}),
    "min_tokens": (
        {"min_tokens": 6, "stop": "e", "max_tokens": 20},
        {"min_tokens": 6, "stop": "e", "max_tokens": 20},
    ),
    "keep stop": (
        {"include_stop_str_in_output": True, "stop": "e", "max_tokens": 40},
        {"include_stop_str_in_output": True, "stop": "e", "max_tokens": 40},
    ),
    "ignore_eos": ({"ignore_eos": True, "max_tokens": 30}, {"ignore_eos": True, "max_tokens": 30}),
    "regex": ({"regex": "[ab]{4}"}, {"regex": "[ab]{4}"}),
    "grammar": ({"grammar": 'start: "yes" | "no"'}, {"grammar": 'start: "yes" | "no"'}),
    "json_schema": (
        {"response_format": SCHEMA, "max_tokens": 60},
        {"json_schema": SHIP, "max_tokens": 60},
    ),
    "json_object": (
        {"response_format": {"type": "json_object"}, "max_tokens": 12},
        {"json_schema": {"type": "object"}, "max_tokens": 12},
    ),
    "text": ({"response_format": {"type": "text"}}, {}),
    "weights": ({"adapter": {"rank1": 0.5, "pattern": -0.25}}, {}),
}

# Fields of a completion that is refused with 400, and a part of the reason.
BAD_COMPLETIONS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": -1}, "temperature: got -1"),
    "top_p": ({"top_p": 2}, "top_p: got 2"),
    "n of 0": ({"n": 0}, "n: got 0"),
    "many n": ({"n": 17}, "server.max_n"),
    "no tokens": ({"max_tokens": 0}, "max_tokens: got 0"),
    "huge int": ({"max_tokens": 10**30}, "max_tokens"),
    "negative seed": ({"seed": -1}, "seed: got -1"),
    "too long": ({"max_tokens": 600}, "512 positions"),
    "logprobs": ({"logprobs": 21}, "logprobs: got 21"),
    "logit_bias": ({"logit_bias": {"5000": 1}}, "outside the vocabulary"),
    "best_of": ({"best_of": 3}, "best_of: not served"),
    "suffix": ({"suffix": "end"}, "suffix: not served"),
    "many stops": ({"stop": ["x"] * 17}, "stop: got 17"),
    "empty stop": ({"stop": [""]}, "stop: got ''"),
    "text as number": ({"temperature": "hot"}, "temperature: Expected float"),
    "no prompt": ({"prompt": []}, "prompt: is empty"),
    "empty prompt": ({"prompt": ""}, "the prompt is empty"),
    "mixed prompts": ({"prompt": ["a", [1]]}, "prompt: is empty or mixes"),
    "foreign ids": ({"prompt": [600]}, "token id 600"),
    "negative ids": ({"prompt": [-1]}, "prompt[0]"),
    "typo": ({"extra_body": {"temprature": 1}}, "did you mean temperature"),
    "beam search": ({"extra_body": {"use_beam_search": True}}, "use_beam_search: not served"),
    "guided": ({"extra_body": {"guided_regex": "a"}}, "use regex"),
    "regex": ({"extra_body": {"regex": "("}}, "regex:"),
    "two forms": ({"extra_body": {"regex": "a", "grammar": "b"}}, "given together"),
    "weights": ({"extra_body": {"adapter": {"rank1": 99}}}, "weight 99"),
    "no weights": ({"extra_body": {"adapter": {}}}, "adapter: got 0 names"),
    "stream_options": ({"stream_options": {"include_usage": True}}, "set stream to true"),
}
BAD_CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages: is empty"),
    "role": ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
    "image": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}],
                }
            ]
        },
        "parts of type text only",
    ),
    "required tool": ({"tool_choice": "required"}, "tool_choice"),
    "named tool": (
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
    ),
    "top_logprobs alone": ({"top_logprobs": 2}, "needs logprobs"),
    "audio": ({"audio": {"voice": "x", "format": "wav"}}, "audio: not served"),
    "modalities": ({"modalities": ["audio"]}, "modalities: not served"),
    "format": ({"extra_body": {"response_format": {"type": "xml"}}}, "response_format.type"),
    "no schema": (
        {"extra_body": {"response_format": {"type": "json_schema"}}},
        "response_format.json_schema",
    ),
    "bad schema": (
        {
            "extra_body": {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "nothing"}},
                }
            }
        },
        "json_schema",
    ),
    "tool arguments": (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "f", "arguments": "[1"},
                        }
                    ],
                }
            ]
        },
        "no JSON object",
    ),
    "template": (
        {"extra_body": {"chat_template": "{{ x }}"}},
        "chat_template: not served",
    ),
    "reserved": (
        {"extra_body": {"chat_template_kwargs": {"messages": []}}},
        "cannot be set there",
    ),
}
HARMLESS: dict[str, Any] = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "prompt_cache_key": "k",
}
