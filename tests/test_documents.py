"""What the documents tell people to type, set and open exists."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import click
import msgspec
import pytest

import warmroute
from cli.settings import SECTIONS, Config

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"docs/{path.name}" for path in (ROOT / "docs").iterdir()),
)
OTHERS_FLAGS = {
    *("--build", "--profile", "--strict"),
    *(
        "--chat-template",
        "--data-parallel-size",
        "--enable-force-include-usage",
        "--enable-per-request-metrics",
    ),
    *("--enable-prompt-tokens-details", "--exclude-tools-when-tool-choice-none", "--kv-events-config"),
    *("--max-num-seqs", "--router"),
}
FOLDERS = ("compose", "docs", "tests", *warmroute.PACKAGES)


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def fences(document: str, language: str = "") -> list[str]:
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text_of(document), re.DOTALL | re.MULTILINE)
    return [body for name, body in found if name == language]


def flags(command: click.Command) -> set[str]:
    own = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
    below = command.commands.values() if isinstance(command, click.Group) else ()
    return own.union(*(flags(each) for each in below))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_flags_in_the_documents_exist(document: str) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*(?!\w|-?\*)", text_of(document)))
    assert named - flags(warmroute.main) - OTHERS_FLAGS == set()


@pytest.mark.parametrize("document", ["README.md", "docs/operating.md"])
def test_commands_in_the_documents_are_understood(document: str) -> None:
    lines = "\n".join(fences(document)).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if line.strip().startswith("warmroute ")]
    assert commands
    for _, *words in commands:
        arguments = [word for word in words if word != "..."]
        name = next(word for word in arguments if word in warmroute.main.commands)
        command = warmroute.main.commands[name]
        values = command.make_context(name, arguments[arguments.index(name) + 1 :]).params
        if name in SECTIONS:
            fields = {field.name for field in msgspec.structs.fields(SECTIONS[name])}
            given = {key: value for key, value in values.items() if key in fields}
            msgspec.convert(given, SECTIONS[name]).check()


def test_files_of_settings_in_the_documents_are_taken() -> None:
    tables = [tomllib.loads(fence) for fence in fences("docs/operating.md", "toml")]
    assert len(tables) >= 2
    for table in tables:
        config = msgspec.convert(table, Config)
        for name in table:
            getattr(config, name).check()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_the_documents_name_are_there(document: str) -> None:
    text = text_of(document)
    linked = re.findall(r"\]\((?!http)([^)#]+)", text)
    named = re.findall(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)", text)
    missing = [path for path in linked if not ((ROOT / document).parent / path).exists()]
    assert missing + [path for path in named if not (ROOT / path).exists()] == []


def anchors(document: Path) -> set[str]:
    """What a page's headings are linked by, as GitHub makes it of them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_headings_that_the_documents_link_to_are_there(document: str) -> None:
    linked = re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", text_of(document))
    page = ROOT / document
    targets = [(page.parent / path if path else page, heading) for path, heading in linked]
    assert [heading for target, heading in targets if heading not in anchors(target)] == []


def test_each_setting_and_parameter_stands_in_a_table_once() -> None:
    rows = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", text_of("docs/operating.md"), re.MULTILINE)
    assert rows
    assert len(rows) == len(set(rows))


def modules_named(package: str) -> list[str]:
    section = re.search(
        rf"^## {package}/.*?(?=^## |\Z)", text_of("docs/architecture.md"), re.DOTALL | re.MULTILINE
    )
    assert section is not None
    listed = re.findall(r"^\* \*\*\w+\*\* \(([^)]*)\)", section[0], re.MULTILINE)
    return [name for each in listed for name in re.findall(r"`(\w+)/?`", each)]


@pytest.mark.parametrize("package", warmroute.PACKAGES)
def test_every_module_is_named_in_its_section_of_the_architecture(package: str) -> None:
    section = re.search(
        rf"^## {package}/.*?(?=^## |\Z)", text_of("docs/architecture.md"), re.DOTALL | re.MULTILINE
    )
    assert section is not None
    named = set(re.findall(r"(?:`|\*\*)(\w+)(?:`|\*\*)", section[0]))
    assert sorted({path.stem for path in (ROOT / package).rglob("*.py")} - {"__init__"} - named) == []


def test_modules_that_the_architecture_lists_exist() -> None:
    named = modules_named("router")
    assert {"plan", "decider", "pool"} <= set(named)
    folder = ROOT / "router"
    assert [
        name for name in named if not ((folder / f"{name}.py").is_file() or (folder / name).is_dir())
    ] == []


def metrics_of_the_code() -> set[str]:
    """As the sources have them, without what Prometheus adds to their names."""
    router = (ROOT / "router/metrics.py").read_text()
    made = re.findall(r'(?:PREFIX \+ |_counter\(\s*|_gauge\(\s*|_fast\(\s*)"(\w+)"', router)
    sources = [
        path.read_text() for package in ("indexer", "router") for path in (ROOT / package).glob("*.py")
    ]
    named = re.findall(r'"(warmroute_(?:indexer|router)_\w*\w)"', "\n".join(sources))
    return {*named, *(f"warmroute_router_{name}" for name in made)} - {"warmroute_router_"}


def metrics_in(text: str) -> set[str]:
    """Those that are named; a row of them may leave out the prefix of all but the first."""
    named = set(re.findall(r"\bwarmroute_(?:router|indexer)_\w+", text))
    named |= {f"warmroute_router_{name}" for name in re.findall(r"`\.\.\._?(\w+)", text)}
    return {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in named}


def test_metrics_that_are_named_exist_and_those_that_exist_are_named() -> None:
    there = metrics_of_the_code()
    dashboard = metrics_in(text_of("compose/grafana/warmroute.json"))
    documented = set().union(*(metrics_in(text_of(document)) for document in DOCUMENTS))
    assert len(there) > 50
    assert sorted((documented | dashboard) - there) == []
    assert sorted(there - documented - dashboard) == []
