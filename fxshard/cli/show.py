"""print or draw the schedule of a training step

The model is traced on the meta device: neither it nor its inputs take memory.
"""

from __future__ import annotations

import argparse

from fxshard.cli import output, source
from fxshard.cli.syntax import UsageError
from fxshard.ir.text import LEVELS

EPILOG = """\
examples:
  fxshard show examples.models:gpt_175b --F 128 --world 128
  fxshard show examples.models:gpt_demo --F 4 -o step.svg
  fxshard show examples.models:gpt_demo --F 4 --set rate_limit=None --pass 'backward-prefetch{depth=2}'
  fxshard show examples.models:gpt_demo --F 2 --world 8 --set mixed_precision.param=bfloat16 -o step.json
  fxshard show 'hf:LlamaConfig{num_hidden_layers=4}' --F 8 --batch 2 --length 1024 --level units
  fxshard show step.json --format svg > step.svg
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODEL", help=source.TARGET)
    source.add_arguments(parser)
    group = parser.add_argument_group("what is written")
    group.add_argument("--level", choices=LEVELS, help="how much the text says (default: communication)")
    group.add_argument("--format", choices=list(output.formats()), help="default: by the suffix of -o, else text")
    group.add_argument("-o", "--output", metavar="FILE", help="a file to write, instead of stdout")


def run(parsed: argparse.Namespace) -> int:
    form = output.choose(parsed.format, parsed.output)
    if parsed.level is not None and form != "text":
        raise UsageError(f"--level is of the text, not of {form}: leave it out")
    schedule = source.schedule_of(parsed.target, source.Settings.of(parsed))
    output.write(schedule, form, parsed.level or "communication", parsed.output)
    return 0
