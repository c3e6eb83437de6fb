"""`serried generate`, which stays when its prompts are answered, and answers what standard input brings.

    offline_group.py WORDS OF GENERATE      a line {"prompts": [[5, 6], ...], "max_tokens": 8} is answered with one
                                            {"tokens": 16}, tokens of all answers together; it ends with the input

Ranks other than 0 are those of `serried generate`, unchanged.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from launch.cli import main
from launch.command import generate
from launch.command.answers import Answer, Printer
from runtime import Engine, SamplingParams

plain = generate.follow


def follow(engine: Engine, answers: Sequence[Answer], printer: Printer) -> float:
    seconds = plain(engine, answers, printer)
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True)
        outputs = engine.generate(asked["prompts"], params)
        sys.stdout.write(json.dumps({"tokens": sum(len(output.token_ids) for output in outputs)}) + "\n")
        sys.stdout.flush()
    return seconds


if __name__ == "__main__":
    generate.follow = follow
    sys.exit(main(["generate", *sys.argv[1:]]))
