"""Chat templates: as transformers renders them, and none of Python reachable from one."""

import pytest
from transformers import AutoTokenizer

from engine.errors import RequestError
from engine.text.chat import ChatTemplate
from engine.text.tokenizer import Tokenizer
from engine.weights.checkpoint import DirectoryCheckpoint
from engine.weights.default_model import default_model_directory

CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?\n\nNow."}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "{{ 1 + 1 }} <|im_end|>"},
    ],
]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("ask", [True, False])
def test_default_model_renders_as_transformers(
    conversation: list[dict[str, str]], ask: bool
) -> None:
    directory = default_model_directory(None)
    own = Tokenizer.from_checkpoint(DirectoryCheckpoint(directory))
    expected = AutoTokenizer.from_pretrained(directory).apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=ask
    )
    assert own.render_chat(conversation, add_generation_prompt=ask) == expected


def test_conventions_of_hugging_face() -> None:
    source = (
        "{% for m in messages %}\n{% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "    {{ m | tojson }}\n{% endfor %}\n{{ bos_token }}{{ strftime_now('%Y')|length }}"
    )
    messages = [{"role": "skip"}, {"role": "user", "content": "\u00e9"}]
    rendered = ChatTemplate(source).render(messages, bos_token="<s>")
    assert rendered.split() == ['{"role":', '"user",', '"content":', '"\u00e9"}', "<s>4"]


def test_a_named_template_list_gives_its_default() -> None:
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    assert ChatTemplate.from_config({"chat_template": named}).render([]) == "D"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for m in messages %}",
        "{{ raise_exception('roles must alternate') }}",
    ],
)
def test_attacks_and_faults_are_refusals(attack: str) -> None:
    with pytest.raises(RequestError, match="the chat template refused the conversation"):
        ChatTemplate(attack).render([{"role": "user", "content": "x"}])


def test_no_template_says_what_to_do() -> None:
    with pytest.raises(RequestError, match="no chat template; give plain prompts"):
        ChatTemplate(None).render([])
