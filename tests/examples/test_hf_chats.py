"""Chats and texts of `examples/finetune_hf`: the tokens, and those that are learned."""

import itertools
import json
import pathlib

import numpy as np
import pytest

from helpers.hf_folders import TEMPLATE

why = 'not installed: pip install ".[hf]", from Python 3.12 on'
pytest.importorskip("eqx_zoo", reason=why)
transformers = pytest.importorskip("transformers", reason=why)


@pytest.fixture(scope="module")
def read(example, folders):
    """A line's first document in a template, and what is learned, as text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders("qwen3"))

    def read(template, turns, **others):
        tokenizer.chat_template = template
        line = json.dumps({"messages": turns, **others})
        found = example.text._line(pathlib.Path("x"), 7, line, tokenizer)
        pairs = [p for x in found for p in zip(x.tokens, x.learned, strict=True)]
        learned = [token for token, is_learned in pairs if is_learned]
        return tokenizer.decode(found[0].tokens), tokenizer.decode(learned)

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
        "<think>\n\n</think>\n\na s<|im_end|>\n"
        "<think>\n\n</think>\n\nend a <|im_end|>\n",
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
    """Of the turn itself: a sentence, and nothing is learned as something else."""
    cut = "m.content.split('</think>')[-1] }}</s>"
    template = REASONED.replace("m.content }}</s>", cut)
    with pytest.raises(
        example.folder.FolderError, match="assistant says in turn 2: 'b'"
    ):
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


def documents(example, sizes, learned=10):
    """Chats of so many tokens, whose last ones are learned."""
    made, first = [], 0
    for size in sizes:
        tokens = list(range(first, first + size))
        flags = [n >= size - learned for n in range(size)]
        made.append(example.text.Document(tokens, flags, whole=True))
        first += size
    return made


def test_a_chat_that_fits_is_never_cut(example):
    """Each row's segments are whole chats, and every learned token is in one."""
    sizes = [86, 20, 512, 3, 129, 86, 400, 86, 86, 250, 17] * 7
    given = documents(example, sizes, learned=2)
    rows = example.text.rows(given, 512)
    found = []
    for row in rows:
        for segment in range(1, row["segments"].max() + 1):
            chosen = row["segments"] == segment
            assert row["positions"][chosen].tolist() == [*range(chosen.sum())]
            learned = np.flatnonzero(row["weights"][chosen]) + 1
            found.append((row["tokens"][chosen][0], chosen.sum() + 1, len(learned)))
            assert (row["labels"] - row["tokens"])[chosen].tolist() == [
                1
            ] * chosen.sum()
    wanted = [(x.tokens[0], len(x.tokens), 2) for x in given]
    assert sorted(found) == sorted(wanted)
    assert len(rows) <= 1.1 * sum(sizes) / 512


@pytest.mark.parametrize(
    ("too_long", "kept", "learned"), [("right", 0, 0), ("left", 35, 10), ("drop", 0, 0)]
)
def test_longer_chats(example, too_long, kept, learned):
    """From the left, the right, or left out: what has nothing to learn is, too."""
    given = documents(example, [100, 50])
    fit, longer = example.text.fitted(given, 64, too_long)
    assert longer == 1 and fit[-1] == given[1]
    if learned:
        assert fit[0].tokens == [*range(kept, 100)] and sum(fit[0].learned) == learned
    else:
        assert fit == given[1:]


@pytest.mark.parametrize(
    "kind", ["cosine", "linear", "constant_with_warmup", "constant"]
)
@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_rates(example, kind, steps):
    """No step's rate is 0; the highest is the one that was given."""
    rate = example.run.schedule(kind, 1e-3, 0.1, steps)
    rates = [float(rate(n)) for n in range(steps)]
    assert min(rates) > 0 and max(rates) == pytest.approx(1e-3)
    if kind in ("cosine", "linear") and steps > 10:
        assert rates[-1] < 0.05 * max(rates)


def test_norms_and_biases_do_not_decay(example):
    params = {"norm": {"weight": 1}, "q_proj": {"weight": 1, "bias": 1}, "q_norm": 1}
    assert example.run.decayed(params) == {
        "norm": {"weight": False},
        "q_proj": {"weight": True, "bias": False},
        "q_norm": False,
    }
