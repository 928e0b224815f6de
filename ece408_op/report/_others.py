"""The published figures beside ours, as ratios, and what could not be run."""

from __future__ import annotations

from ._document import NONE, Section, Table, Text, over, ratio, seconds, total
from ._jobs import Asked, layers
from ._published import ACCURACIES, OP_TIMES, OpTimes, team
from ._runs import Runs


def published(runs: Runs, asked: Asked) -> Section:
    """What the course's teams published, on other hardware, beside the runs here."""
    words = (
        "Published by the course's teams and staff, 2017 to 2018, on other hardware: GPUs of the Kepler, Pascal and "
        "Volta generations and the CPUs beside them. Times are not comparable, so each is also given as a ratio to the "
        "naive GPU kernel that the same report began with (above 1: faster than it), and ours to our kernel like it. "
        "Only the networks and numbers of images that were run here are shown."
    )
    return Section(
        "Published figures, other hardware",
        [Text(words), _times(runs, asked), _accuracies(runs, asked)],
    )


def missing(runs: Runs) -> Section:
    """What there is no run of, with the reason."""
    found: dict[str, list[str]] = {}
    for run in runs.missing():
        found.setdefault(run.reason, []).append(run.command)
    if not found:
        return Section("What was not run", [Text("Everything that was asked for was run.")])
    rows = [[reason, str(len(commands)), "; ".join(commands)] for reason, commands in found.items()]
    words = "These commands gave no figure; each row has one reason and the commands that it stopped."
    table = Table("Runs without a result", ["reason", "runs", "commands"], rows)
    return Section("What was not run", [Text(words), table])


def _times(runs: Runs, asked: Asked) -> Table:
    head = ["report", "images", "what", "theirs", "to their naive", "ours", "our kernel", "to our naive"]
    rows = []
    for entry in OP_TIMES:
        ours = _ours(runs, asked, entry, entry.ours, entry.device)
        base = _ours(runs, asked, entry, entry.base_ours, "gpu") if entry.base_ours else None
        if ours is None:
            continue
        naive = total(entry.base_seconds)
        rows.append(
            [
                team(entry.report, entry.network),
                str(entry.images),
                entry.what,
                " + ".join(map(seconds, entry.seconds)),
                ratio(over(naive, total(entry.seconds))) if naive else "no naive kernel published",
                seconds(ours),
                entry.ours,
                ratio(over(base, ours)) if entry.base_ours else NONE,
            ]
        )
    return Table("Op Times; ours are sums over the layers", head, rows)


def _ours(runs: Runs, asked: Asked, entry: OpTimes, kernel: str, device: str) -> float | None:
    if entry.network not in asked.networks:
        return None
    if device == "cpu":
        return total(runs.op_times("m2", entry.network, entry.images, kernel))
    count = len(layers(entry.network))
    return total([runs.gpu_seconds(kernel, entry.network, entry.images, layer) for layer in range(count)])


def _accuracies(runs: Runs, asked: Asked) -> Table:
    rows = []
    for report, network, images, accuracy in ACCURACIES:
        result = runs.milestone("m1", network, images) if images in asked.sizes else None
        if result:
            own = f"{result['accuracy']:.4f}"
            rows.append([team(report, network), network, str(images), f"{accuracy:.4f}", own])
    caption = "Accuracy; the weights here are not theirs, so these are other networks of the same form"
    return Table(caption, ["report", "network", "images", "theirs", "ours, milestone 1"], rows)
