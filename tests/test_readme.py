"""The README and the documents: code runs and prints what they say, and what they name exists."""

from __future__ import annotations

import contextlib
import io
import re
import stat
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# A block of Python, and the block of text that follows it, if one does.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def test_code_of_the_readme_prints_what_the_readme_shows():
    namespace: dict[str, object] = {"__name__": "readme"}
    blocks = BLOCK.findall(README)
    assert len(blocks) == len(re.findall(r"^```python$", README, re.MULTILINE)) >= 3
    for code, shown in blocks:
        printed = io.StringIO()
        line = README[: README.index(code)].count("\n")
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + code, "README.md", "exec"), namespace)
        assert printed.getvalue() == shown, code


def test_readme_is_short_enough_to_be_read():
    assert len(README.splitlines()) <= 150


def test_readme_gives_one_line_for_each_of_its_two_commands():
    (commands,) = re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    run, check = [line for line in commands.splitlines() if line and not line.startswith("#")]
    assert run.startswith("python -m venv .venv && . .venv/bin/activate && pip install -e '.[examples]' && ")
    assert check == "pip install -e '.[test]' && python -m pytest"
    assert (ROOT / run.rsplit(" ", 1)[1]).is_file()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w.]+/[\w./]+)`", README))))
def test_every_file_that_the_readme_names_exists(path):
    assert (ROOT / path).exists(), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_every_link_of_a_document_leads_to_a_file(document):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
        assert (document.parent / target).is_file(), target


def test_every_test_that_the_cases_name_exists():
    defined = {
        name
        for path in (ROOT / "tests").glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "cases.md").read_text()))
    assert len(named) > 100
    assert named - defined == set()


def test_every_case_has_a_test_or_says_why_not():
    rows = re.findall(r"^\| [A-Z]{2}-\d+ \|.*$", (ROOT / "docs" / "cases.md").read_text(), re.MULTILINE)
    assert len(rows) > 80
    for row in rows:
        *_, test, _ = row.split("|")
        assert re.fullmatch(r" (`test_\w+`(, )?)+ | none: .+ ", test), row


def test_checks_run_the_readmes_own_test_command():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    assert "README.md" in script.read_text()
