"""`examples/finetune_hf` learns of a chat what the model writes, as TRL's masks say."""

import importlib.metadata
import re

import pytest

why = 'not installed: pip install ".[hf]", from Python 3.12 on, and TRL without more'
pytest.importorskip("eqx_zoo", reason=why)
transformers = pytest.importorskip("transformers", reason=why)

try:
    FILES = importlib.metadata.files("trl") or ()
except importlib.metadata.PackageNotFoundError:
    pytest.skip(why, allow_module_level=True)
#: TRL's templates, and beside some of them one that marks what is trained on.
TEMPLATES = {x.stem: x.read_text() for x in FILES if x.suffix == ".jinja"}
NAMES = sorted(x for x in TEMPLATES if not x.endswith("_training"))

CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "f", "arguments": {"x": 1}},
}
ANSWER = {"role": "tool", "content": "42", "tool_call_id": "abcdefghi", "name": "f"}
SYSTEM = {"role": "system", "content": "be kind"}


def user(content):
    return {"role": "user", "content": content}


def said(content, **more):
    return {"role": "assistant", "content": content, **more}


THOUGHT = "<think>\nwhy\n</think>\n\nho"
CHATS = {
    "one turn": [user("hi"), said("ho there")],
    "a system": [SYSTEM, user("hi"), said("ho there")],
    "two turns": [user("hi"), said("ho"), user("a ho"), said("assistant end")],
    "three": [user("hi"), said("ho"), user("b"), said("c"), user("d"), said("ho")],
    "a thought": [user("hi"), said(THOUGHT)],
    "two thoughts": [user("hi"), said(THOUGHT), user("b"), said(THOUGHT)],
    "the first has one": [user("hi"), said(THOUGHT), user("b"), said("yes")],
    "reasoning": [user("hi"), said("ho", reasoning_content="why")],
    "two reasonings": [
        *[user("hi"), said("ho", reasoning_content="why")],
        *[user("b"), said("yes", reasoning_content="but")],
    ],
    "a tool": [user("hi"), said("", tool_calls=[CALL]), ANSWER, said("it is 42")],
    "no content": [user("hi"), said(None, tool_calls=[CALL]), ANSWER, said("42")],
    "a tool and a text": [
        *[user("hi"), said("let me see", tool_calls=[CALL])],
        *[ANSWER, said("it is 42")],
    ],
    "a tool and a thought": [
        *[user("hi"), said("<think>\nuse f\n</think>\n\n", tool_calls=[CALL])],
        *[ANSWER, said(THOUGHT)],
    ],
    "a line end first": [user("hi"), said("\nho")],
    "a line end last": [user("hi"), said("ho\n")],
    "spaces": [user("hi"), said("  ho  "), user("x"), said(" y ")],
    "empty": [user("hi"), said("")],
    "empty, then more": [user("hi"), said(""), user("x"), said("y")],
    "an answer first": [said("hello"), user("hi"), said("ho")],
    "a question last": [user("hi"), said("ho"), user("bye")],
    "the same words": [user("ho"), said("ho"), user("ho"), said("ho")],
    "no question": [SYSTEM, said("ho")],
    "two answers": [user("hi"), said("ho"), said("again")],
}
#: Their tools' answers are within the turn that called them.
WITHIN_A_TURN = {"diffusion_gemma": ["a tool", "no content"]}


def tokenizer_of(*templates):
    """Bytes, and a special token for each of the templates' own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    marks = r"<\|[^|>\s]+\|?>|<[^|>\s]+\|>|<｜[^｜>]+｜>|</?think>|</?s>|\[/?INST\]"
    special = sorted({"<s>", "</s>", *re.findall(marks, "".join(templates))})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox"], trainer)
    ends = ("<|im_end|>", "</s>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token=next(x for x in ends if x in special),
        extra_special_tokens=[x for x in special if "think" not in x],
    )


def spans(tokens, mask):
    """The texts of runs of tokens."""
    found = [[]]
    for token, yes in zip(tokens, mask, strict=True):
        if yes:
            found[-1].append(token)
        elif found[-1]:
            found.append([])
    return [x for x in found if x]


def trained_by_trl(tokenizer, name, chat):
    """For each turn its prompt and what TRL trains on; None if it renders otherwise."""
    turns = []
    for n, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        render = tokenizer.apply_chat_template
        text = render(chat[: n + 1], tokenize=False)
        try:
            prompt = render(chat[:n], tokenize=False, add_generation_prompt=True)
        except Exception:  # of no question
            prompt = None
        marked = {"chat_template": TEMPLATES[f"{name}_training"]}
        if render(chat[: n + 1], tokenize=False, **marked) != text:
            return None
        masked = render(
            chat[: n + 1], return_dict=True, return_assistant_tokens_mask=True, **marked
        )
        found = spans(masked["input_ids"], masked["assistant_masks"])
        turns.append((prompt, tokenizer.decode(found[-1]) if found else ""))
    return turns


def agree(prompt, trained, learned):
    """True if TRL trains on no more than that and the end of the prompt."""
    # A chat's end, which Phi does not write.
    ends = lambda text: text.replace("<|end|>\n</s>", "<|end|>\n")
    trained, learned = ends(trained), ends(learned)
    header = trained.removesuffix(learned).rstrip()
    asked = "" if prompt is None else prompt.rstrip()
    known = prompt is None or asked.removesuffix("<think>").endswith(header)
    return trained.endswith(learned) and (known or asked.endswith(header))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_learned_of_a_chat(example, name):
    """All that the model writes after its prompt; or a sentence with the line."""
    marked = TEMPLATES.get(f"{name}_training", "")
    tokenizer = tokenizer_of(TEMPLATES[name], marked)
    tokenizer.chat_template = TEMPLATES[name]
    compared = 0
    for kind, chat in CHATS.items():
        try:
            turns = example.chats.Chat.of("x, line 1", chat, {}, tokenizer).turns()
        except example.folder.FolderError as error:
            assert "x, line 1" in str(error), (kind, error)
            continue
        learned = [tokenizer.decode(x) for turn in turns for x in spans(*turn)]
        for message in (x for x in chat if x["role"] == "assistant"):
            for part in re.split("</?think>", message["content"] or ""):
                assert part.strip() in "".join(learned), kind
        trained = trained_by_trl(tokenizer, name, chat) if marked else None
        if trained is None or kind in WITHIN_A_TURN.get(name, ()):
            continue
        compared += 1
        for (prompt, by_trl), ours in zip(trained, learned, strict=True):
            assert agree(prompt, by_trl, ours), (kind, prompt, by_trl, ours)
    print(f"{compared} of {len(CHATS)} kinds of chats compared with TRL's masks")
