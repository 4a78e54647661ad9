"""What is written for people is true: README and reference, word by word."""

import ast
import importlib
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import optax
import pytest
from flax import nnx

import paged_optax as po
from helpers import step_model
from paged_optax.backend.platforms import GPU_NEEDS_RAW_INDEX
from paged_optax.planning.cards import find_card
from paged_optax.planning.models import DECODERS

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GUIDES = ROOT / "docs"
#: What is too deep for the README.
DEEPER = sorted(set(GUIDES.glob("*.md")) - {GUIDES / "index.md"})
TROUBLESHOOTING = GUIDES / "troubleshooting.md"
CONTRIBUTING = ROOT / ".github" / "CONTRIBUTING.md"
RELEASE = ROOT / ".ci" / "release.md"
RESULTS = ROOT / "tests" / "benchmarks" / "results"
#: The interpreter's programs.
BIN = pathlib.Path(sys.executable).parent
#: Blocks that make an environment, which `.ci/run` runs.
ENVIRONMENTS = {"test", "example", "tunix", "hf"}


def section(title, page=README):
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", page, re.S | re.M)
    return text


def guide(name):
    """A page, in one line."""
    return " ".join((GUIDES / f"{name}.md").read_text().split())


def result(name):
    """The file that a benchmark wrote."""
    (file,) = RESULTS.glob(f"{name}-jax*.json")
    return json.loads(file.read_text())


def rows(text):
    """The cells of a section's table, without its heading."""
    found = re.findall(r"^\| (.*) \|$", text, re.M)
    return [row.split(" | ") for row in found[2:]]


def shell_blocks():
    return dict(re.findall(r"<!-- command: (\w+) -->\n```sh\n(.*?)```", README, re.S))


def test_every_shell_block_is_run_somewhere():
    every = re.findall(r"```sh\n(.*?)```", README, re.S)
    assert sorted(every) == sorted(shell_blocks().values())
    assert shell_blocks().keys() == {"plan", "doctor", "docs"} | ENVIRONMENTS
    for name in ENVIRONMENTS:
        assert f"$(readme_command {name})" in (ROOT / ".ci" / "run").read_text()
    assert set(re.findall(r"```(\w+)\n", README)) == {"python", "sh", "diff"}


@pytest.mark.quick("plan")
@pytest.mark.parametrize("name", ["plan", "doctor"])
def test_shell_block(name, tmp_path):
    """As it is written, with the interpreter that is there."""
    done = run_block(name, tmp_path)
    assert "Warn" not in done.stderr
    expected = {"plan": "Fits counts 18.0 GiB", "doctor": "Paging is right"}
    assert expected[name] in done.stdout


def run_block(name, folder, more=""):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    environment |= {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", shell_blocks()[name].strip() + more],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.skipif(not (BIN / "mkdocs").exists(), reason="mkdocs builds the reference")
def test_reference(tmp_path):
    """Each public name has its place, and its docstring was understood."""
    run_block("docs", ROOT, f" --site-dir {tmp_path}")
    pages = {
        path.parent.relative_to(tmp_path).as_posix(): path.read_text()
        for path in tmp_path.rglob("index.html")
    }
    for guide in DEEPER:
        title = guide.read_text().splitlines()[0].removeprefix("# ")
        assert re.search(f"<h1[^>]*>{title.split('`')[0]}", pages[guide.stem]), guide
    reference = "".join(text for name, text in pages.items() if name.startswith("api"))
    for name in po.__all__:
        assert f'id="paged_optax.{name}"' in reference, name
    for room in (ROOT / "paged_optax").glob("[a-z]*"):
        if room.suffix in ("", ".py"):
            assert f'id="paged_optax.{room.stem}"' in reference, room
    for sign in ("Args:\n", ".. math::", ":math:", ":class:", "| --- |"):
        assert sign not in reference


def test_translated_docstrings(monkeypatch):
    """Directives of reStructuredText become Markdown, at their indentation."""
    pytest.importorskip("griffe")
    monkeypatch.syspath_prepend(str(GUIDES))
    translate = importlib.import_module("docstrings").markdown
    text = "Sums.\n\n  .. math::\n    n = 1\n\nwith :math:`n`.\n\nExample:\n  >>> 1"
    wanted = "Sums.\n\n  $$\n  n = 1\n  $$\nwith $n$.\n\nExamples:\n  >>> 1"
    assert translate(text) == wanted
    assert translate("`ZeRO <https://a.b>`_, 2020") == "[ZeRO](https://a.b), 2020"


NAMES = {name: getattr(po, name) for name in po.__all__}


def test_names_for_those_who_come_from_elsewhere():
    """Each right-hand side is Python that runs, and optimizers are transformations."""
    table = rows((GUIDES / "bitsandbytes.md").read_text())
    assert len(table) > 10
    scope = NAMES | {"nnx": nnx, "optax": optax}
    scope["model"] = nnx.LoRA(8, 2, 8, rngs=nnx.Rngs(0))
    for there, here in table:
        codes = re.findall(r"`([^`]+)`", here)
        assert codes and there
        for code in codes:
            made = eval(code, scope)
            if "(" in code:
                kinds = (optax.GradientTransformation, nnx.Optimizer, po.MultiSteps)
                assert isinstance(made, kinds), code
            else:
                assert made is NAMES[code]


def test_names_of_hugging_face_are_ours():
    """`optim="paged_..."` is found under the same name."""
    text = (GUIDES / "bitsandbytes.md").read_text()
    named = re.findall(r'`optim="(paged_\w+)"`.*\| `(\w+)` \|', text)
    assert len(named) == 6
    assert all(there == here and there in po.__all__ for there, here in named)


def test_choices():
    """Each is an argument that `paged` takes."""
    page = (GUIDES / "how_it_works.md").read_text()
    table = rows(section("Page size and budget", page))
    choices = [x for x, *when in table if len(when) == 1]
    assert len(choices) == 4
    for choice in choices:
        for code in re.findall(r"`([^`]+)`", choice):
            eval(f"paged_adamw(1e-3, {code})", NAMES)


def strings_of(path):
    """Every string of a file, f-strings with their expressions left out."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [
                x.value if isinstance(x, ast.Constant) else "" for x in node.values
            ]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_are_those_of_the_package():
    files = (ROOT / "paged_optax").rglob("*.py")
    texts = [text for path in files for text in strings_of(path)]
    table = rows(TROUBLESHOOTING.read_text())
    assert len(table) > 10
    for message, way_out in table:
        if message.endswith("by JAX"):  # those are held in test_impossible.py
            continue
        pattern = re.escape(message.strip("`")).replace("…", ".*")
        assert any(re.search(pattern, text, re.S) for text in texts), message
        assert way_out


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", RELEASE, CONTRIBUTING, *DEEPER], ids=lambda x: x.stem
)
def test_links_lead_somewhere(path):
    text = path.read_text()
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    anchors = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif "://" not in target:
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DEEPER, ids=lambda x: x.stem)
def test_what_is_deeper_is_found(path):
    """By a link of the README, and in the reference's navigation."""
    assert f"](docs/{path.name})" in README
    assert f"- {path.name}\n" in (ROOT / "mkdocs.yml").read_text()


@pytest.fixture
def program(monkeypatch):
    """What computes and draws the first table."""
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    return importlib.import_module("memory_and_time")


def cells_of(program, row):
    """What a table says of a row: bytes, the card and its share, seconds."""
    gib = (f"{row[f'{space}_bytes'] / 2**30:.1f}" for space in ("device", "host"))
    card = f"{program.name(row['card'])}, {program.share(row)}%"
    return [*gib, card, program.span(row)]


#: The ways of the README's own table.
SHOWN = ("resident", "paged", "the same, embeddings on host too")


def test_figures_are_those_of_the_compiler(program):
    """Of the tables and of the first number, from what `--measure` wrote."""
    figures = json.loads(program.FIGURES.read_text())
    first = program.shown(figures)
    assert [row["way"] for row in first] == list(program.WAYS)
    page = (GUIDES / "what_fits.md").read_text()
    table = [x for x in rows(page) if re.fullmatch(r"[\d.]+-[\d.]+", x[-1])]
    of_first = [[row["way"], *cells_of(program, row)] for row in first]
    assert [[way, *cells] for way, _, *cells in table[: len(first)]] == of_first
    others = [row for row in figures["rows"] if row not in first]
    assert table[len(first) :] == [
        [row["way"], "{} x {}".format(*row["batch"]), *cells_of(program, row)]
        for row in others
    ]
    shortest = [[*cells[:2], cells[2].split(",")[0]] for _, *cells in of_first]
    three = [x[1:] for x in rows(README[: README.index("\n## ")])]
    assert three == [shortest[list(program.WAYS).index(way)] for way in SHOWN]
    claim = re.search(
        r"takes ([\d.]+) GiB of device memory instead of (\d+\.\d)", README
    )
    assert claim and list(claim.groups()) == [three[-1][0], three[0][0]]


def test_the_cards_hold_what_is_said(program):
    """By the memory that CUDA has of each; and none computes faster than it can."""
    figures = json.loads(program.FIGURES.read_text())["rows"]
    sizes = DECODERS["llama3-8b"]
    multiplied = sizes.size - sizes.vocabulary * sizes.hidden  # embeddings are not
    for row in figures:
        card = find_card(program.name(row["card"]))
        assert row["card_bytes"] == card.memory
        assert row["rematerialized"] == 0 and program.holds(row)
        tokens = math.prod(row["batch"])
        least = 6 * multiplied * tokens / step_model.machine_of(row["card"]).flops
        assert least <= row["seconds"][0] <= row["seconds"][1]


def test_picture_of_the_figures(program, monkeypatch, tmp_path, capsys):
    """Drawn as its command draws it; the README shows it."""
    picture = tmp_path / "picture.png"
    monkeypatch.setattr(sys, "argv", ["memory_and_time.py", "--picture", str(picture)])
    program.main()
    assert picture.read_bytes()[:4] == program.PICTURE.read_bytes()[:4] == b"\x89PNG"
    assert f"]({program.PICTURE.relative_to(ROOT).as_posix()})" in README
    assert "resident, 8 x 512: 6" in capsys.readouterr().out


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.skipif(GPU_NEEDS_RAW_INDEX, reason="the figures are those of a newer JAX")
def test_figures_again(program):
    """The compiler still says what the file says, of one row and its card."""
    rows = program.shown(json.loads(program.FIGURES.read_text()))
    (row,) = (x for x in rows if x["way"] == "layerwise")
    again = program.measured("layerwise", row["batch"], row["card"])
    assert program.holds(again)
    assert again["rematerialized"] == 0
    assert again["device_bytes"] == pytest.approx(row["device_bytes"], rel=0.03)
    assert again["host_bytes"] == row["host_bytes"]
    assert again["seconds"] == pytest.approx(row["seconds"], rel=0.05)


def test_seconds_of_a_step():
    """The page of the layerwise step says what its figures' file says."""
    page, rows = guide("layerwise"), result("steps-h200")["rows"]
    for way in {row["way"] for row in rows if row["way"] != "resident"}:
        few, many = (row for row in rows if row["way"] == way)
        ratios = f"{few['over_resident']:.2f} | {many['over_resident']:.2f}"
        gib = f"{few['device_gib']:.1f}, {many['device_gib']:.1f}"
        assert f"| {way} | {ratios} | {gib} |" in page
    (file,) = RESULTS.glob("steps-h200-*")
    assert file.stem.removeprefix("steps-h200-jax") in page


def test_what_was_measured():
    """The page says what the files of an H200 say."""
    page = guide("what_fits")
    rows = {row["name"]: row for row in result("gpu-nvidia-h200")["rows"]}
    decoders = [row for row in rows.values() if row["section"] == "decoder"]
    for row in decoders:
        name = row["name"].partition(": ")[2]
        gib = (row[key] / 2**30 for key in ("peak_device_bytes", "xla_device_bytes"))
        cells = (f"{row['seconds']:.2f}", *(f"{x:.1f}" for x in gib))
        assert f"| {name} | {' | '.join(cells)} |" in page
    assert len(decoders) == 4
    less = [1 - row["seconds"] / row["predicted_range"][0] for row in decoders]
    assert f"{100 * min(less):.0f} to {100 * max(less):.0f}% less than the low" in page
    rate = lambda name: f"{rows[name]['gigabytes_per_second']:.0f}"
    up, down = rate("host to device"), rate("device to host")
    assert f"{up} GB/s to the device, {down} to the host, and " in page
    assert f"and {rate('both at once')} both" in page
    assert f"16 MiB {rate('both at once, in pages')} both ways" in page
    seconds = lambda name: 1e3 * rows[f"8 x 2048x2048: {name}"]["seconds"]
    resident, paged = seconds("optax.adamw, resident"), seconds("paged, default")
    assert f"2048x2048 take {paged:.0f} ms for {resident:.1f}: 2.0" in page


def test_tokens_a_second(monkeypatch):
    """The page has the tables that `tests/benchmarks/tables.py` makes of its files."""
    monkeypatch.syspath_prepend(str(RESULTS.parent))
    tables = importlib.import_module("tables")
    read = result("tokens-modelled"), result("gpu-nvidia-h200")
    rows = [row for found in read for row in found["rows"]]
    page = (GUIDES / "what_fits.md").read_text()
    assert tables.speeds(rows) in page
    assert tables.shares(tables.profiled(rows), tables.markdown) in page
    of_h200 = [row for row in read[0]["rows"] if row["card"] == "h200"]
    rates = {x["name"]: x["tokens_per_second"] for x in of_h200}
    layerwise = "{}: layerwise, 8 bits{}, {} x 4,096"
    resident = "{}: jax.grad, 8 bits, resident{}, {} x 4,096"
    over = lambda *row: rates[layerwise.format(*row)] / rates[resident.format(*row)]
    assert over("Llama-3-8B", ", products saved", 128) >= 1.05
    for model in ("Llama-3-8B", "Qwen3-4B"):
        assert min(over(model, "", count) for count in (1, 16, 128)) >= 0.97


def test_what_was_measured_of_graphs():
    page, found = guide("what_fits"), result("graphs-gpu-nvidia-h200")
    default, _, concurrent = found["rows"]
    assert f"the third row takes {default['seconds']:.2f} s" in page
    assert f"took {default['seconds']:.2f} s of an H200, and 0.79 w" in guide("start")
    gib = concurrent["peak_device_bytes"] / 2**30
    assert f"the row takes {concurrent['seconds']:.2f} s, and {gib:.1f} GiB" in page
    model = found["model"]
    in_turn, alone = model["four streams in turn"], model["nothing at once"]
    assert f"{in_turn:.2f} s by the model without overheads, and {alone:.2f} if" in page
    assert f"the model has {model['a stream each way']:.2f};" in page
    pages = {row["name"]: row for row in found["link"]["with graphs"]}
    rate = pages["both at once, in pages"]["gigabytes_per_second"]
    assert f"{rate:.0f} GB/s for both ways together" in page


#: Code with what it prints, in the block right after it.
PRINTING = [
    pytest.param(*found, id=path.stem)
    for path in DEEPER
    for found in re.findall(
        r"^```python\n([^`]*)```\n\n```text\n([^`]*)```", path.read_text(), re.M
    )
]


@pytest.mark.parametrize(("code", "shown"), PRINTING)
def test_code_prints_what_is_shown(code, shown, capsys):
    assert "how_it_works" in [x.id for x in PRINTING]
    exec(code, {})
    assert capsys.readouterr().out == shown


def test_the_readme_is_short():
    """Who reads it all needs five minutes, and meets what is for few last."""
    assert len(README.splitlines()) <= 120
    assert re.findall(r"^## (.*)$", README, re.M)[-1] == "Contribute"


def test_parts_of_ci():
    """`.ci/run` has a function for each part that it names, and refuses others."""
    run = ROOT / ".ci" / "run"
    listed = subprocess.run([run, "--list"], capture_output=True, text=True, check=True)
    parts = listed.stdout.split()
    functions = re.findall(r"^(\w+)\(\) \{", run.read_text(), re.M)
    assert parts[:3] == ["example", "tests", "style"] and {*parts} < {*functions}
    unknown = subprocess.run([run, "nonsense"], capture_output=True, text=True)
    assert unknown.returncode == 2 and "nonsense: no part" in unknown.stderr
    told = re.findall(r"`(\w+)`(?=[^|]*\|[^|\n]*\|$)", CONTRIBUTING.read_text(), re.M)
    assert {*told} <= {*parts} | {"newest_"}


def test_files_of_the_repository_are_read():
    """Workflows, forms and hooks are YAML with the keys that their readers need."""
    yaml = pytest.importorskip("yaml")
    folder = ROOT / ".github"
    read = lambda path: yaml.safe_load(path.read_text())
    for path in (folder / "workflows").glob("*.yml"):
        assert {"name", "jobs", "permissions"} < read(path).keys()
    ci = (folder / "workflows" / "ci.yml").read_text()
    assert "run: .ci/run ${{ matrix.name }}" in ci and ".ci/run --list" in ci
    forms = [read(path) for path in (folder / "ISSUE_TEMPLATE").glob("[!c]*.yml")]
    assert len(forms) == 2
    assert all({"name", "description", "body"} < form.keys() for form in forms)
    hooks = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert "ruff-format" in [hook["id"] for repo in hooks for hook in repo["hooks"]]
