#!/usr/bin/env bash
# Compare two checkouts on this machine, in turns: benchmarks/paired.sh OLD NEW gpu|cpu [TURNS [OPTIONS]]
# gpu: auto on the course's layers; cpu: auto on the course's layers, and calls with one image. OPTIONS, such as
# "--images 100", are for the layers. Every run's JSON goes into the folder that OUT names (default: .). A checkout may be
# one from before the command had subcommands.
set -euo pipefail
old="$(realpath "$1")" new="$(realpath "$2")" context="$3" turns="${4:-3}" out="$(realpath "${OUT:-.}")"
shift "$(($# < 4 ? $# : 4))"
options=("$@")

measure() { # SIDE KIND FILE
    cd "${!1}"
    local words=("$2" --context "$context")
    [ -e ece408_op/bench/results.py ] || words=(--context "$context")
    case "$2" in
        layers) words+=("${options[@]}") ;;
        *) [ -e ece408_op/bench/results.py ] || words=(--one-image) ;;
    esac
    rm -f "$3"
    PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" python3 -m ece408_op bench "${words[@]}" --json "$3" > "${3%.json}.txt"
}

kinds=(layers)
[ "$context" = gpu ] || kinds+=(one-image)
for turn in $(seq "$turns"); do
    for kind in "${kinds[@]}"; do
        for side in old new; do measure "$side" "$kind" "$out/$kind-$context-$side-$turn.json"; done
    done
done
python3 - "$out" "$context" << 'PYTHON'
import json, statistics, sys
from pathlib import Path

def medians(data):
    """Seconds by case and kind of call, from either format."""
    if "one_image" in data:
        return {("2017", "one image"): 1e-6 * data["one_image"]["operator"]["median"]}
    if "cases" in data:
        kind = {"one-image": lambda row: "one image"}.get(data["command"], lambda row: row["call"])
        return {(case["name"], kind(row)): row["median"] for case in data["cases"] for row in case["rows"]
                if row.get("impl") == "auto" and row["call"] != "first"}
    found = {}
    for layer in data["layers"]:
        results = layer["results"]
        if "auto" in results:
            found[layer["name"], "kernel"] = results["auto"]["median"] / 1000
        else:
            found |= {(layer["name"], call): one["median"] for call, one in results["New auto"].items()}
    return found

times = {}
for path in sorted(Path(sys.argv[1]).glob(f"*-{sys.argv[2]}-*.json")):
    for key, seconds in medians(json.loads(path.read_text())).items():
        times.setdefault(key, {}).setdefault(path.stem.split("-")[-2], []).append(seconds)
print("| case | call | old, ms | new, ms | new / old |\n| --- | --- | --- | --- | --- |")
for (case, call), sides in times.items():
    old, new = (1000 * statistics.median(sides[side]) for side in ("old", "new"))
    print(f"| {case} | {call} | {old:.4g} | {new:.4g} | {new / old:.3f} |")
PYTHON
