"""Wrong command lines: what each gets is a status, and one line that helps."""

import shlex

import pytest

from paged_optax.cli import main

MODELS = """
import jax.numpy as jnp
def make(): return {"w": jnp.ones((512, 512))}
def sized(width, depth): return {"w": jnp.ones((width, depth))}
def fails(): raise RuntimeError("no weights here\\nnor there")
def empty(): return {}
def whole(): return {"w": jnp.ones((8, 8), int)}
size = 512
"""

FILES = {
    "mistaken.py": MODELS,
    "broken.py": "def make(:",
    "text.safetensors": "no header at all",
    "huge.safetensors": "\xff\xff\xff\xff\0\0\0\0{}",
    "short.safetensors": "\x02\0\0\0\0\0\0\0[]",
    "no.json": "{",
    "other/config.json": '{"model_type": "t5"}',
    "half/config.json": '{"model_type": "llama", "hidden_size": "big"}',
    "empty/readme": "",
}

DEVICE = "--device-memory 24GiB"

#: A command line; its exit status; words of its message.
MISTAKES = [
    # Of the commands.
    ("plann --params 8B", 2, "invalid choice: 'plann'"),
    ("doctor --fast", 2, "unrecognized arguments: --fast"),
    ("plan", 2, "one of the arguments --params --module --checkpoint is required"),
    ("plan --params 8B", 1, "neither --device-memory is given, nor --card: give one"),
    ("plan --params 8B --card rtx490", 1, "card='rtx490' is none of t4"),
    ("plan --params 1B --card t4 --batch four", 2, "invalid int value: 'four'"),
    (f"plan --params 8B --module a:b {DEVICE}", 2, "not allowed with"),
    (f"plan --params {DEVICE}", 2, "--params: expected one argument"),
    # Of the model's name.
    (f"plan --params 8Q {DEVICE}", 1, "'8Q' is neither"),
    (f"plan --params 8 {DEVICE}", 1, "model of 8 parameters: pass 40M"),
    (f"plan --params gpt2 {DEVICE}", 1, "nor one of llama2-7b"),
    (f"plan --params '' {DEVICE}", 1, "'' is neither"),
    (f"plan --params 1e999 {DEVICE}", 1, "inf parameters: pass 40M"),
    (f"plan --params=-8B {DEVICE}", 1, "'-8B' is neither"),
    # Of the device.
    ("plan --params 1B --device-memory 24gigs", 1, "device_memory='24gigs' is not a"),
    ("plan --params 1B --device-memory=-1GiB", 1, "device_memory='-1GiB' is not a"),
    # Of how it is trained.
    (f"plan --params 1B {DEVICE} --dtype float33", 1, "--dtype='float33' is no"),
    (f"plan --params 1B {DEVICE} --dtype int8", 1, "--dtype='int8' is no floating"),
    (f"plan --params 1B {DEVICE} --master-dtype foo", 1, "master_dtype='foo' is no"),
    (f"plan --params 1B {DEVICE} --teraflops many", 2, "invalid float value: 'many'"),
    (
        f"plan --params 1B {DEVICE} --link inf",
        1,
        "link_gigabytes_per_second=inf is no machine",
    ),
    # Of a module.
    (f"plan --module mistaken {DEVICE}", 1, "as package.module:function"),
    (f"plan --module mistaken.py:make {DEVICE}", 1, "No module named 'mistaken.py'"),
    (f"plan --module ../mistaken:make {DEVICE}", 1, "as package.module:function"),
    (f"plan --module :make {DEVICE}", 1, "as package.module:function"),
    (f"plan --module 'mistaken:make()' {DEVICE}", 1, "as package.module:function"),
    (f"plan --module mistaken:missing {DEVICE}", 1, "no attribute 'missing'"),
    (f"plan --module mistaken:sized {DEVICE}", 1, "missing 2 required positional"),
    (f"plan --module mistaken:fails {DEVICE}", 1, "RuntimeError: no weights here"),
    (f"plan --module mistaken:whole {DEVICE}", 1, "has dtype int32"),
    (f"plan --module mistaken:size {DEVICE}", 1, "'int' object is not callable"),
    (f"plan --module os:getcwd {DEVICE}", 1, "TypeError"),
    (f"plan --module sys:exit {DEVICE}", 1, "failed with SystemExit"),
    (f"plan --module broken:make {DEVICE}", 1, "SyntaxError"),
    # Of a checkpoint.
    (f"plan --checkpoint missing {DEVICE}", 1, "'missing' cannot be read"),
    (f"plan --checkpoint empty {DEVICE}", 1, "no .safetensors file, no config"),
    (f"plan --checkpoint mistaken.py {DEVICE}", 1, "'mistaken.py' holds no JSON"),
    (f"plan --checkpoint text.safetensors {DEVICE}", 1, "holds no JSON"),
    (f"plan --checkpoint huge.safetensors {DEVICE}", 1, "no floating point arrays"),
    (f"plan --checkpoint short.safetensors {DEVICE}", 1, "no object with fields"),
    (f"plan --checkpoint no.json {DEVICE}", 1, "'no.json' holds no JSON"),
    (f"plan --checkpoint other {DEVICE}", 1, "field 'model_type' is 't5', not one of"),
    (f"plan --checkpoint half {DEVICE}", 1, "'hidden_size' is 'big', not a whole"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "latin-1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(("line", "status", "words"), MISTAKES, ids=lambda x: str(x))
def test_mistake(line, status, words, folder, capfd):
    try:
        found = main(shlex.split(line))
    except SystemExit as exited:
        found = exited.code
    captured = capfd.readouterr()
    assert found == status
    assert words in captured.err and captured.out == ""
    assert captured.err.startswith(("paged_optax: ", "python -m paged_optax"))
    assert captured.err.count("\n") == 1
