"""What a release holds, and that it installs where there is no compiler.

The sdist and the wheel are made here as `.ci/release.md` makes them.
"""

import email
import email.policy
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
#: A command of the README's.
PLAN = ("plan", "--params", "8B", "--device-memory", "24GiB")
#: Tests that read files beside them: pages, figures, arrays, and `.ci/run`.
READERS = ("codecs/test_codecs_oracles", "project/test_docs")


def run(*command, **options):
    """What it prints, if it succeeds."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source, folder, **environment):
    """The wheel, made from the sdist, and the sdist."""
    kept = {k: v for k, v in os.environ.items() if k != "SOURCE_DATE_EPOCH"}
    command = (sys.executable, "-m", "build", "--outdir", folder, source)
    run(*map(str, command), env=kept | environment)
    wheel, sdist = sorted(folder.iterdir())
    return wheel, sdist


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def unpacked(made, tmp_path_factory):
    """The sdist's files, as if just written."""
    parent = tmp_path_factory.mktemp("unpacked")
    run("tar", "--extract", "--file", str(made[1]), "--directory", str(parent))
    (folder,) = parent.iterdir()
    for path in folder.rglob("*"):
        os.utime(path)
    return folder


def test_wheel_holds_the_package_and_no_more(made):
    with zipfile.ZipFile(made[0]) as wheel:
        names = set(wheel.namelist())
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "paged_optax").rglob("*.*")
        if path.suffix != ".pyc"
    }
    assert "paged_optax/py.typed" in wanted
    about = {x for x in names if re.match(r"paged_optax-[\d.]+\.dist-info/", x)}
    assert names - about == wanted
    assert {pathlib.Path(x).name for x in about} == (
        {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "LICENSE"}
    )


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="Git says what is the source")
def test_sdist_holds_the_source_and_no_more(unpacked):
    listed = ("git", "-C", str(ROOT), "ls-files", "--cached")
    tracked = set(run(*listed).splitlines())
    new = set(run(*listed[:-1], "--others", "--exclude-standard").splitlines())
    files = (x for x in unpacked.rglob("*") if x.is_file())
    held = {x.relative_to(unpacked).as_posix() for x in files}
    assert tracked <= held
    assert held - tracked - new == {"PKG-INFO"}


def test_built_again_elsewhere_it_is_the_same(made, unpacked, tmp_path):
    """From the sdist's own files, at another time and with other permissions."""
    for path in unpacked.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
    again = build(unpacked, tmp_path, TZ="Asia/Tokyo", PYTHONHASHSEED="7")
    for one, other in zip(made, again, strict=True):
        assert one.name == other.name
        sums = [hashlib.sha256(x.read_bytes()).hexdigest() for x in (one, other)]
        assert sums[0] == sums[1], one.name


def test_an_index_shows_it(made):
    """The README, without what leads to files that an index does not have."""
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, made))
    renderer = pytest.importorskip("readme_renderer.markdown")
    with zipfile.ZipFile(made[0]) as wheel:
        (name,) = (x for x in wheel.namelist() if x.endswith("/METADATA"))
        metadata = wheel.read(name).decode()
    text = email.message_from_string(metadata, policy=email.policy.default)
    shown = text.get_payload()
    page = renderer.render(shown)
    assert len(page) > len(README)
    targets = re.findall(r'(?:href|src)="([^"]*)"', page)
    anchors = {f"#{x}" for x in re.findall(r'id="([^"]*)"', page)}
    assert targets
    assert [x for x in targets if not x.startswith("https:") and x not in anchors] == []
    code = re.compile(r"^```.*?^```$", re.S | re.M)
    assert code.findall(shown) == code.findall(README)


def test_installed_without_a_compiler(made, tmp_path):
    """From the wheel, then from the sdist; all else comes as wheels."""
    run(sys.executable, "-m", "venv", str(tmp_path / "v"))
    bin = tmp_path / "v" / "bin"
    alone = {k: v for k, v in os.environ.items() if k not in ("CC", "PYTHONPATH")}
    alone |= {"PATH": str(bin), "JAX_PLATFORMS": "cpu"}
    assert not any(shutil.which(x, path=str(bin)) for x in ("cc", "gcc", "clang"))
    start = (ROOT / "docs" / "start.md").read_text()
    shortest = re.findall(r"```python\n(.*?)```", start, re.S)[0]
    options = dict(env=alone, cwd=tmp_path)
    for archive in made:
        pip = (bin / "python", "-m", "pip", "install", "--only-binary=:all:")
        run(*map(str, pip), "--force-reinstall", "--no-deps", str(archive), **options)
        run(*map(str, pip), str(archive), **options)
        printed = run(str(bin / "python"), "-c", shortest, **options)
        assert re.fullmatch(r"loss \d\.\d+\n", printed)
        fits = run(str(bin / "paged-optax"), *PLAN, **options)
        assert "layerwise" in fits


def test_import_brings_only_what_it_needs():
    """Libraries that one function or example uses are imported where it does."""
    code = "import sys, paged_optax; print(*sys.modules)"
    kept = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    names = run(sys.executable, "-c", code, env=kept).split()
    others = {"chex", "equinox", "flax", "matplotlib", "orbax", "qwix", "rich"}
    assert "optax" in names and others.isdisjoint(x.split(".")[0] for x in names)


def test_sdist_has_what_its_tests_read(unpacked):
    files = [f"tests/{name}.py" for name in READERS]
    command = (sys.executable, "-m", "pytest", "-q", "-m", "not slow", *files)
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    printed = run(*command, cwd=unpacked, env=kept)
    assert re.search(r"\d+ passed", printed)
