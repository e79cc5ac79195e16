"""docs: the code of a page runs and prints what follows it, its links lead somewhere, and a page of a pass has a test."""

import re
from pathlib import Path

import pytest

from tests.snippets import printed_by

ROOT = Path(__file__).parent.parent
OF_PASSES = sorted((ROOT / "docs" / "passes").glob("*.md"))
PAGES = [ROOT / "docs" / "from_fsdp2.md", *OF_PASSES]
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_their_code_runs_and_prints_what_follows_it():
    examples = [EXAMPLE.findall(page.read_text()) for page in PAGES]
    assert [len(of) for of in examples] == [page.read_text().count("```python") for page in PAGES]
    assert all(examples)
    codes, outputs = zip(*(example for of in examples for example in of))
    assert printed_by(codes) == list(outputs)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_links_lead_somewhere(page: Path):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_every_example_pass_has_a_page_and_a_test():
    names = {path.stem for path in (ROOT / "examples" / "passes").glob("*.py")} - {"__init__"}
    assert names == {page.stem for page in OF_PASSES}
    assert all((ROOT / "tests" / "examples" / f"test_{name}.py").exists() for name in names)
