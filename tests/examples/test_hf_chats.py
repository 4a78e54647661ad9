"""Chats and texts of `examples/finetune_hf`: the tokens, and those that are learned."""

import itertools
import json
import pathlib

import pytest

from helpers.hf_folders import TEMPLATE

why = 'not installed: pip install ".[hf]", from Python 3.12 on'
pytest.importorskip("eqx_zoo", reason=why)
transformers = pytest.importorskip("transformers", reason=why)


@pytest.fixture(scope="module")
def read(example, folders):
    """A line's document in a template: its tokens, and what is learned, as text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders("qwen3"))

    def read(template, turns, **others):
        tokenizer.chat_template = template
        line = json.dumps({"messages": turns, **others})
        found = example.text._line(pathlib.Path("x"), 7, line, tokenizer)
        pairs = zip(found.tokens, found.learned, strict=True)
        learned = [token for token, is_learned in pairs if is_learned]
        return tokenizer.decode(found.tokens), tokenizer.decode(learned)

    return read


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **others):
    return {"role": "assistant", "content": content, **others}


#: Templates in the manner of some families, and what is learned of `TURNS`.
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REASONED = (
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% else %}<|Assistant|>{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
TURNS = [user("a"), assistant("a s"), user("assistant a"), assistant("end a ")]
TEMPLATES = {
    "plain": (TEMPLATE, "a s<|im_end|>\nend a <|im_end|>\n"),
    "thinking": (
        THINKING,
        "a s<|im_end|>\n<think>\n\n</think>\n\nend a <|im_end|>\n",
    ),
    "reasoned": (REASONED, "a s</s>end a </s>"),
    "brackets": (BRACKETS, " a s</s> end a </s>"),
}


#: The first of them are also in what else the templates write.
ANSWERS = ["d", "end", "<", "|", "think", "s", "/s", "a", "", "end a "]


@pytest.mark.parametrize(("name", "answer"), [*itertools.product(TEMPLATES, ANSWERS)])
def test_all_turns_of_a_chat(read, name, answer):
    """Also where a turn is shown otherwise as soon as another one follows."""
    template, wanted = TEMPLATES[name]
    _, learned = read(template, [*TURNS[:3], assistant(answer)])
    assert learned == wanted.replace("end a ", answer)


def test_a_chat_may_begin_with_an_answer(read):
    assert read(TEMPLATE, TURNS[1:])[1] == TEMPLATES["plain"][1]


def test_a_prompt_is_seen_and_not_learned(read):
    whole, learned = read(TEMPLATE, [user("hi"), assistant("ho")])
    assert learned == "ho<|im_end|>\n"
    assert whole.startswith("<|im_start|>user\nhi<|im_end|>")


def test_thoughts_that_are_left_out(read, example):
    """Of an earlier turn: a sentence, and nothing is learned as something else."""
    cut = "m.content.split('</think>')[-1] }}</s>"
    template = REASONED.replace("m.content }}</s>", cut)
    with pytest.raises(example.folder.FolderError, match="end the chat there"):
        read(template, [*TURNS[:1], assistant("<think>b</think>c")])


def test_a_call_of_a_tool(read):
    """Is learned with what ends the turn; templates are told of the tools."""
    template = (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{% endfor %}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    turns = [*TURNS[:1], assistant(None, tool_calls=[call])]
    whole, learned = read(template, turns, tools=[tool])
    assert learned == "!f<|im_end|>\n"
    assert whole.startswith("f;<|im_start|>user")


def test_a_template_that_refuses(read, example):
    says = "x, line 7: the chat template says: only user and assistant"
    with pytest.raises(example.folder.FolderError, match=says):
        read(BRACKETS, [{"role": "system", "content": "x"}, *TURNS])


def test_text_of_other_line_ends(example, folders, tmp_path):
    """Within a string of JSON, and a mark at the beginning."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders("qwen3"))
    path = tmp_path / "a.jsonl"
    path.write_text("\ufeff" + json.dumps({"text": "a\u2028b"}, ensure_ascii=False))
    (found,) = example.text.documents(path, tokenizer)
    assert tokenizer.decode(found.tokens) == "a\u2028b</s>"
