"""Files that others wrote are read or refused: no crash, and no memory to speak of.

Ten thousand of them: `python tests/hostile.py`.
"""

import ast
import os
import pathlib

import pytest

import paged_optax as po
from helpers import hostile
from helpers.hostile import MOST, READERS, measured, read
from helpers.hostile_files import MONSTERS, Case, laid_out
from paged_optax.planning.checkpoint import checkpoint_shapes
from paged_optax.planning.hugging_face import Fields

#: Of a run in continuous integration, of all readers together.
FILES = 500


@pytest.mark.quick(*{*READERS} - {"safetensors", "json"})  # which take longest
@pytest.mark.parametrize("name", READERS)
def test_readers(name):
    count = round(FILES * READERS[name].share)
    outcome = hostile.fuzz(name, count, seed=0)
    assert outcome.ended.total() >= 0.9 * count
    assert outcome.ended["refused"]
    # Few changes leave a document whole; tests/engine/test_shapes.py reads whole ones.
    assert outcome.ended["read"] or name == "config"
    assert outcome.most_bytes < MOST


def one_json(given, folder):
    (folder / "a.file").write_bytes(given)
    return Fields(folder / "a.file")


def one_header(given, folder):
    (folder / "a.file").write_bytes(laid_out(given, 8))
    return checkpoint_shapes(folder / "a.file")


@pytest.mark.parametrize("name", MONSTERS)
@pytest.mark.parametrize("reader", [one_json, one_header])
def test_monsters(reader, name, tmp_path):
    case = Case(MONSTERS[name], ("a.file",), bad=True)
    with measured():
        assert read(reader, case, tmp_path)[0] == "refused"


COUNT = 2**19 - 8
LARGEST = {
    "objects": b'{"a":[' + b"{}," * (COUNT // 2) + b"{}]}",
    "texts": b'{"a":[' + b",".join([b'"%s"' % (b"a" * 50)] * (2**22 // 56)) + b"]}",
    "keys": b"{" + b",".join(b'"%x":1.5' % i for i in range(COUNT // 2)) + b"}",
    "one text": b'{"a":"' + b"a" * (2**22 - 10) + b'"}',
    "wide letters": b'{"a":"' + b"\xf0\x9f\x98\x80" * (2**20 - 4) + b'"}',
    "an escaped wide letter": b'{"a":"\\ud83d\\ude00' + b"a" * (2**22 - 40) + b'"}',
}


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_that_are_read(name, tmp_path):
    """Just under each bound, what Python makes of it is under a hundred megabytes."""
    with measured():
        read(one_json, Case(LARGEST[name], bad=False), tmp_path)


def test_only_module_runs_what_is_named():
    """Nothing unpickles, evaluates or starts a program."""
    package = pathlib.Path(po.__file__).parent
    dangerous = {"pickle", "marshal", "shelve", "subprocess", "ctypes", "runpy"}
    dangerous |= {"eval", "exec", "compile", "__import__", "import_module"}
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = {x.name for x in getattr(node, "names", ()) if hasattr(x, "name")}
            match node:
                case ast.ImportFrom(module=str(module)):
                    names.add(module)
                case ast.Call(func=ast.Name(id=name)):
                    names.add(name)
                case ast.Call(func=ast.Attribute(ast.Name("importlib"), name)):
                    names.add(name)
            found |= {(path.name, x) for x in names & dangerous}
    assert found == {("models.py", "import_module")}


def test_what_has_no_end_is_not_read(tmp_path):
    """A pipe or a device under a checkpoint's name, itself or by a link."""
    for name in ("m.safetensors", "_METADATA"):
        for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
            make(tmp_path / name)
            with measured(), pytest.raises(ValueError, match=name.replace(".", "[.]")):
                checkpoint_shapes(tmp_path)
            (tmp_path / name).unlink()
