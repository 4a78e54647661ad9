"""Names say what a thing is, and each name of a file, class or function exists once."""

import ast
import collections
import pathlib
import re

PACKAGE = pathlib.Path(__file__).parents[2] / "paged_optax"
FILES = sorted(PACKAGE.rglob("*.py"))

#: Words of how a thing came about, or where it is in the text. Optax and Equinox have
#: them in 0.1% of their identifiers, Optimistix and Lineax in none.
WORDS = frozenset("found made given own here ahead beside alone".split())
#: Arguments that users pass by these names, each with its reason.
ALLOWED: dict[str, str] = {}
SHARE = 0.003


def words(identifier):
    """The words of a name, in `snake_case` or in `CamelCase`."""
    return {x.lower() for x in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)}


def bound(tree):
    """The identifiers that a module binds, one for each place."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | (ast.arg(arg=name) | ast.alias(asname=str(name)))
                | (ast.FunctionDef(name=name) | ast.ClassDef(name=name))
                | ast.ExceptHandler(name=str(name))
                | (ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)))
            ):
                yield name


def names_of(file):
    return [file.stem, *bound(ast.parse(file.read_text()))]


def test_names_say_what_a_thing_is():
    everything, wrong, unused = 0, collections.Counter(), set(ALLOWED)
    for file in FILES:
        names = names_of(file)
        everything += len(names)
        unused -= {*names}
        wrong.update(
            (name, str(file.relative_to(PACKAGE)))
            for name in names
            if words(name) & WORDS and name not in ALLOWED
        )
    share = wrong.total() / everything
    worst = "\n".join(
        f"{n:4} {name}, {file}" for (name, file), n in wrong.most_common(60)
    )
    print(f"{wrong.total()} of {everything} identifiers, {share:.2%}:\n{worst}")
    assert share <= SHARE, f"{share:.2%} of all identifiers:\n{worst}"
    assert not unused, f"nothing is called so any more: {unused}"


def test_each_file_has_a_name_of_its_own():
    counts = collections.Counter(file.name for file in FILES)
    assert {name for name, n in counts.items() if n > 1} <= {"__init__.py"}


def test_tests_lie_as_the_package_lies():
    tests = PACKAGE.parent / "tests"
    rooms = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    others = {"libraries", "examples", "scripts", "project"}
    files = {path.relative_to(PACKAGE) for path in FILES}
    package = {path.parent for path in files} | {x.with_suffix("") for x in files}
    assert rooms <= package | {*map(pathlib.Path, others)}
    assert pathlib.Path() not in rooms


#: One name for one thing: both commands have these, and `argparse` calls them alike.
OF_COMMANDS = {"add_arguments", "run"}


def test_each_class_and_function_has_a_name_of_its_own():
    places = collections.defaultdict(list)
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                    places[name].append(str(file.relative_to(PACKAGE)))
    twice = {
        name: files
        for name, files in places.items()
        if len({*files}) > 1 and not name.startswith("_")
    }
    assert set(twice) <= OF_COMMANDS, twice
