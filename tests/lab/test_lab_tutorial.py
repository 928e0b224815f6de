"""docs/lab.md as a reader follows it: its commands, its changes one after another, the hints and counters it shows."""

import json
import re
from pathlib import Path

import pytest
from text_changes import changed

from ece408_op.emulator import _counters
from ece408_op.lab import __main__ as lab

PAGE = Path(__file__).resolve().parents[2] / "docs" / "lab.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
#: What "before -> after" counts.
COUNTED = {"bytes of global memory per output": "bytes_per_output", "cycles of shared memory": "wavefronts"}


@pytest.mark.usefixtures("emulates")
def test_the_ladder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source, counters, earlier = tmp_path / "my_kernel.cu", {}, {}
    (_, commands), *steps = BLOCKS
    write, check = (line.split()[1:] for line in commands.splitlines())
    assert lab.main(write) == 0

    def run(code: int = 0) -> str:
        assert lab.main([*check, "--json", "out.json"]) == code
        (layer,) = json.loads(Path("out.json").read_text())["layers"]
        counters.clear()
        counters.update(layer["counters"])
        return " ".join(capsys.readouterr().out.split())

    right = source.read_text()
    source.write_text(right.replace("k4d(m, c, p, q);", "k4d(m, c, q, p);"))
    assert steps.pop(0)[1].strip() in run(1)
    source.write_text(right)
    printed, stale = run(), False
    for kind, text in steps:
        if kind == "diff":
            earlier = earlier if stale else dict(counters)
            source.write_text(changed(source.read_text(), text))
            stale = True
            continue
        if stale:
            printed, stale = run(), False
        if kind == "text":
            assert " ".join(text.split()) in printed
        else:
            assert kind == "counters"
            before, after, what = re.fullmatch(r"([\d.]+) -> ([\d.]+) (.*)\n", text).groups()
            key = COUNTED[what]
            assert (float(before), float(after)) == (round(earlier[key], 1), round(counters[key], 1))
    assert len([kind for kind, _ in steps if kind == "counters"]) == 5


def test_every_section_that_a_hint_names_is_there():
    headings = {re.sub(r"\W+", "-", line.lower()) for line in re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)}
    named = {value for name, value in vars(_counters).items() if name.isupper() and isinstance(value, str)}
    assert named and {f"docs/lab.md#{heading}" for heading in headings} >= named
