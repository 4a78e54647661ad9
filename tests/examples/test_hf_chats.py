"""Chats and texts of `examples/finetune_hf`: the tokens, and those that are learned."""

import csv
import itertools
import json
import sys

import numpy as np
import pytest

from helpers.hf_folders import TEMPLATE

why = 'not installed: pip install ".[hf]", from Python 3.12 on'
pytest.importorskip("eqx_zoo", reason=why)
transformers = pytest.importorskip("transformers", reason=why)


@pytest.fixture
def tokenizer(folders):
    return transformers.AutoTokenizer.from_pretrained(folders("qwen3"))


@pytest.fixture
def read(example, tokenizer):
    """A line's first document in a template, and what is learned, as text."""

    def read(template, turns, **others):
        tokenizer.chat_template = template
        given = {"messages": turns, **others}
        found = example.text.documents_of("x, line 7", given, tokenizer)
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
# As GLM's, whose turns end as the next role's token begins another.
ROLES = (
    "{% for m in messages %}{{ '<|im_end|>' if m.role == 'user' else '<|im_start|>' }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
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
    "roles": (ROLES, "a s<|im_end|>end a <|im_end|>"),
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


#: As REASONED, without thoughts, and without all roles but two.
CUT = REASONED.replace("m.content }}</s>", "m.content.split('</think>')[-1] }}</s>")
BOTH = REASONED.replace("{% else %}", "{% elif m.role == 'assistant' %}")
WEATHER = {"type": "function", "function": {"name": "weather", "arguments": {}}}
LEFT_OUT = "the chat template leaves out what the"
REFUSED = {
    "thoughts": (
        CUT,
        [user("a"), assistant("<think>b</think>c")],
        "assistant says in turn 2: 'b'",
    ),
    "a role": (
        BOTH,
        [{"role": "developer", "content": " be kind "}, *TURNS],
        f"x, line 7: {LEFT_OUT} developer says in turn 1: 'be kind'",
    ),
    "a system": (
        BRACKETS,
        [{"role": "system", "content": "x"}, *TURNS],
        "x, line 7: the chat template says: only user and assistant",
    ),
    "a call": (
        BRACKETS,
        [user("a"), assistant("Look.", tool_calls=[WEATHER])],
        f"{LEFT_OUT} assistant says in turn 2: 'weather'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_template_refuses_or_leaves_out(read, example, name):
    """A sentence with what is said, and nothing is learned as something else."""
    template, turns, says = REFUSED[name]
    with pytest.raises(example.folder.FolderError, match=says):
        read(template, turns)


def test_a_blank_turn_may_be_left_out(read):
    blank = {"role": "developer", "content": " "}
    assert read(BOTH, [blank, *TURNS])[1] == TEMPLATES["reasoned"][1]


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


def test_text_of_other_line_ends(example, tokenizer, tmp_path):
    """Within a string of JSON, and a mark at the beginning."""
    path = tmp_path / "a.jsonl"
    path.write_text("\ufeff" + json.dumps({"text": "a\u2028b"}, ensure_ascii=False))
    ((found,),) = example.text.documents(path, tokenizer)
    assert tokenizer.decode(found.tokens) == "a\u2028b</s>"


def test_records_are_held_out_whole(example, tokenizer, tmp_path):
    """Drawn by the seed, short ones and long ones, before a row has any of them."""
    path, words = tmp_path / "a.jsonl", [f"{n} " * (1 + 9 * (n % 2)) for n in range(40)]
    record = lambda x: {"messages": [TURNS[0], assistant(f"<think>b</think>{x}")] * 2}
    path.write_text("\n".join(json.dumps(record(x)) for x in words))
    found = example.text.documents(path, tokenizer)
    parts = [example.text.divided(found, 0.25, seed) for seed in (0, 0, 1)]
    assert parts[0] == parts[1] != parts[2]
    for kept, aside in parts:
        of = lambda part: {n for n, x in enumerate(found) if any(y in part for y in x)}
        assert of(kept) | of(aside) == {*range(40)} and len(of(aside)) == 10
        assert of(kept).isdisjoint(of(aside))
        assert {n % 2 for n in of(aside)} == {0, 1}


def test_the_end_of_one_text_is_held_out(example, tokenizer, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abcdefgh" * 50)
    ((whole,),) = found = example.text.documents(path, tokenizer)
    (kept,), (aside,) = example.text.divided(found, 0.25, 0)
    assert [*kept.tokens, *aside.tokens] == [*whole.tokens]
    assert len(aside.tokens) == pytest.approx(0.25 * len(whole.tokens), abs=1)
    assert example.text.divided(found, 0.0, 0) == [[whole], []]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_that_the_template_leaves_out(read, name, capsys):
    read(BRACKETS, [TURNS[0], assistant("a", **{name: "because"})])
    assert f"leaves out the {name} of turn 2" in capsys.readouterr().err


TASK = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
#: A record, and what it reads as with what is learned after the bar.
RECORDS = {
    "two strings": ({"prompt": "1 + 1 =", "completion": " 2"}, "1 + 1 =| 2</s>"),
    "no prompt": ({"prompt": "", "completion": "2"}, "|2</s>"),
    "ended": ({"prompt": "1", "completion": "2</s>"}, "1|2</s>"),
    "no completion": ({"prompt": "1", "completion": ""}, "1|</s>"),
    "parts": (
        {
            "messages": [
                user([{"type": "text", "text": x} for x in "ab"]),
                assistant([{"type": "text", "text": "c"}]),
            ]
        },
        "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n|c<|im_end|>\n",
    ),
    "a weight of 0": (
        {"messages": [*TURNS[:1], assistant("b", weight=0), assistant("c", weight=1)]},
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>assistant\n|c<|im_end|>\n",
    ),
    "two lists": (
        {"prompt": TURNS[:1], "completion": [assistant("b")]},
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n|b<|im_end|>\n",
    ),
    "an answer in the prompt": (
        {"prompt": TURNS[:3], "completion": [assistant("b")]},
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\na s<|im_end|>\n"
        "<|im_start|>user\nassistant a<|im_end|>\n"
        "<|im_start|>assistant\n|b<|im_end|>\n",
    ),
    "Alpaca": (
        TASK,
        "<|im_start|>user\nAdd.\n1 and 2<|im_end|>\n<|im_start|>assistant\n"
        "|3<|im_end|>\n",
    ),
    "text beside Alpaca": (
        {"instruction": "x", "input": None, "output": "y", "text": "z"},
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n|y<|im_end|>\n",
    ),
    "text": ({"text": "a b"}, "|a b</s>"),
}


def shown(tokenizer, document):
    start = document.learned.index(True)
    assert all(document.learned[start:])
    parts = document.tokens[:start], document.tokens[start:]
    return "|".join(map(tokenizer.decode, parts))


@pytest.mark.parametrize("name", RECORDS)
def test_records(example, tokenizer, name):
    record, wanted = RECORDS[name]
    (document,) = example.text.documents_of("x, line 1", record, tokenizer)
    assert shown(tokenizer, document) == wanted
    assert document.whole == (name != "text")


#: Earlier answers without their thoughts, as Qwen 3's template has them.
WITHOUT_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.index < loop.length %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)


def test_a_turn_that_is_rendered_differently_later(example, tokenizer):
    """Each has a document of its own, as `docs/start.md` says."""
    tokenizer.chat_template = WITHOUT_THOUGHTS
    turns = [user("p"), assistant("<think>why</think>a")]
    turns += [user("q"), assistant("<think>so</think>b")]
    record = {"messages": turns}
    found = example.text.documents_of("x, line 1", record, tokenizer)
    asked = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n".format
    end = "<|im_end|>\n"
    assert [shown(tokenizer, x) for x in found] == [
        f"{asked('p')}|<think>why</think>a{end}",
        f"{asked('p')}a{end}{asked('q')}|<think>so</think>b{end}",
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["strings", "lists"])
def test_prompts_and_completions_as_trl_has_them(example, folders, kind, tmp_path):
    """The tokens of its trainer, and its mask."""
    for name in ("torch", "accelerate"):
        pytest.importorskip(name)
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    records = {
        "strings": [
            {"prompt": "1 + 1 =", "completion": " 2"},
            {"prompt": "the qui", "completion": "ck fox"},  # tokens merge in between
            {"prompt": "a", "completion": "b</s>"},
            {"prompt": "a", "completion": ""},
        ],
        "lists": [
            {"prompt": TURNS[:1], "completion": [assistant("b")]},
            {"prompt": TURNS[:3], "completion": [assistant("c")]},
        ],
    }[kind]
    path = folders("qwen3")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    how = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True}
    trainer = trl.SFTTrainer(
        str(path),
        args=trl.SFTConfig(**how, max_length=None),
        train_dataset=datasets.Dataset.from_list(records),
        processing_class=tokenizer,
    )
    for row, record in zip(trainer.train_dataset, records, strict=True):
        (document,) = example.text.documents_of("x, line 1", record, tokenizer)
        assert list(document.tokens) == row["input_ids"]
        pairs = zip(document.tokens, document.learned, strict=True)
        assert [token if learned else -100 for token, learned in pairs] == row["labels"]


@pytest.mark.parametrize("given", ["1 and 2", ""])
def test_alpaca_of_a_model_without_a_template(example, tokenizer, given):
    """As the `text` of the data set's own table has it."""
    tokenizer.chat_template = None
    record = TASK | {"input": given}
    (document,) = example.text.documents_of("x, line 1", record, tokenizer)
    context = ", paired with an input that provides further context" if given else ""
    given = f"### Input:\n{given}\n\n" if given else ""
    assert shown(tokenizer, document) == (
        f"Below is an instruction that describes a task{context}. Write a response that"
        " appropriately completes the request.\n\n### Instruction:\nAdd.\n\n"
        f"{given}### Response:\n|3</s>"
    )


@pytest.mark.parametrize(
    "record",
    [{"prompt": "a"}, {"output": "a"}, [1], "a", None, {"messages": [*TURNS, 1]}],
)
def test_records_of_no_known_fields(example, tokenizer, record):
    says = "x, line 1 has no messages of role and content, no prompt and completion"
    if isinstance(record, dict) and "messages" in record:
        says = "x, line 1, turn 5 has no role and content, it is 1"
    with pytest.raises(example.folder.FolderError, match=says):
        example.text.documents_of("x, line 1", record, tokenizer)


HUMAN = {"from": "human", "value": "a"}
PICTURE = [{"type": "text", "text": "a"}, {"type": "image"}]
#: What is wrong with a record, and what the error says after its place.
WRONG = [
    ({"messages": "a"}, " has messages='a': give a list"),
    ({"prompt": "a", "completion": TURNS}, ": prompt is a str, completion a list"),
    ({"prompt": TURNS, "completion": "b"}, ": prompt is a list, completion a str"),
    ({"prompt": TURNS, "completion": ["b"]}, ", turn 5 has no role and content, it is"),
    ({"conversations": [HUMAN]}, " is ShareGPT's: rename conversations to messages"),
    ({"messages": [HUMAN]}, ", turn 1 has no role and content, only from, value"),
    *(
        ({"messages": [{"role": role, "content": "a"}]}, f", turn 1 has role='{role}'")
        for role in ("human", "gpt", "Assistant")
    ),
    ({"messages": [user(5)]}, ", turn 1 has content=5: give a text"),
    ({"messages": [*TURNS, assistant(None)]}, ", turn 5 has content=None"),
    ({"messages": [user(PICTURE)]}, ", turn 1: only text is read, not type='image'"),
    ({"messages": [assistant("a", weight=0.5)]}, ", turn 1 has weight=0.5: give 0 or"),
    ({"messages": [user("a"), assistant("a", weight=0)]}, " has no assistant's turn"),
    ({"prompt": TURNS[:2], "completion": [user("c")]}, ".* no assistant's turn"),
    ({"messages": TURNS, "chat_template_kwargs": [1]}, ": chat_template_kwargs=.1."),
]


@pytest.mark.parametrize(("record", "says"), WRONG)
def test_wrong_records(example, tokenizer, record, says):
    with pytest.raises(example.folder.FolderError, match=f"^x, line 1{says}"):
        example.text.documents_of("x, line 1", record, tokenizer)


@pytest.mark.parametrize("given", [{"thinks": False}, '{"thinks": false}'])
def test_arguments_of_a_template(read, given):
    """As TRL has them in a record."""
    begun = "assistant\n{% if thinks == false %}<think></think>{% endif %}"
    template = TEMPLATE.replace("assistant\n", begun).replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' and thinks == false %}<think></think>{% endif %}"
        "{{ m.content }}",
    )
    whole, learned = read(template, TURNS[:2], chat_template_kwargs=given)
    assert learned == "a s<|im_end|>\n" and "assistant\n<think></think>a s" in whole


ROWS = [TASK, {"instruction": 'a "b",\nc', "input": "", "output": "NA"}]


def write_rows(path):
    if path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as file:
            mark = "\t" if path.suffix == ".tsv" else ","
            writer = csv.DictWriter(file, TASK, delimiter=mark)
            writer.writeheader()
            writer.writerows(ROWS)
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS, indent=2))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)))
    else:
        datasets = pytest.importorskip("datasets")
        table = datasets.Dataset.from_list([*ROWS])
        table.save_to_disk(path) if not path.suffix else table.to_parquet(path)
    return path


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a"]
)
def test_files_of_records(example, tokenizer, name, tmp_path):
    """The same documents, whatever has the rows."""
    found = example.text.documents(write_rows(tmp_path / name), tokenizer)
    wanted = [example.text.documents_of("", r, tokenizer) for r in ROWS]
    assert found == wanted


def test_chats_of_a_table(example, tokenizer, tmp_path):
    """Rows have all fields that one of them has: absent ones are left out."""
    datasets = pytest.importorskip("datasets")
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    chats = [TURNS[:2], [TURNS[0], assistant(None, tool_calls=[call])]]
    lines = [{"messages": x} for x in chats]
    tables = {"train": datasets.Dataset.from_list(lines)}
    datasets.DatasetDict(tables).save_to_disk(tmp_path / "both")
    with pytest.raises(example.folder.FolderError, match=r"such as .*both/train\."):
        example.text.documents(tmp_path / "both", tokenizer)
    found = [record for _, record in example.records.records(tmp_path / "both/train")]
    assert found[0] == lines[0]
    assert found[1]["messages"][1] == {"role": "assistant", "tool_calls": [call]}


@pytest.mark.parametrize("name", ["a.parquet", "a"])
def test_tables_without_their_library(example, tokenizer, name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    path = tmp_path / name
    path.mkdir()
    with pytest.raises(example.folder.FolderError, match="pip install datasets"):
        example.text.documents(path, tokenizer)


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
            assert set((row["labels"] - row["tokens"])[chosen]) == {1}
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
