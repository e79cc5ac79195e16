"""docs/first_pass.md: its code, typed in as written, block after block, prints what the page says."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "first_pass.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", PAGE, re.DOTALL | re.MULTILINE)
MARK = "---- next block ----"


def test_its_code_runs_and_prints_what_follows_it():
    program = f"\nprint({MARK!r})\n".join(code for code, _ in BLOCKS)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(f"{MARK}\n") == [output for _, output in BLOCKS]


def test_nothing_on_the_page_is_left_out():
    assert len(BLOCKS) == PAGE.count("```python") == 7
    assert sum(output != "" for _, output in BLOCKS) == PAGE.count("```text") == 6


def test_the_pass_is_about_twenty_lines():
    (code,) = (code for code, _ in BLOCKS if "class MyPrefetch" in code)
    body = code[code.index("@dataclass") :].strip().splitlines()
    assert len([line for line in body if line.strip()]) <= 22


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert [link for link in links if "://" not in link and not (ROOT / "docs" / link).exists()] == []
