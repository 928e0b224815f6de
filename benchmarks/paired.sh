#!/usr/bin/env bash
# Compare two checkouts on this machine, in turns: benchmarks/paired.sh OLD NEW gpu|cpu [TURNS [OPTIONS]]
# gpu: auto on the course's layers; cpu: auto on the course's layers, and calls with one image. OPTIONS, such as
# "--images 100", are for the layers. Every run's JSON goes into the folder that OUT names (default: .).
set -euo pipefail
old="$(realpath "$1")" new="$(realpath "$2")" context="$3" turns="${4:-3}" out="$(realpath "${OUT:-.}")"
shift "$(($# < 4 ? $# : 4))"

measure() { # SIDE KIND FILE [OPTIONS]
    cd "${!1}"
    rm -f "$3"
    PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" \
        python3 -m ece408_op bench "$2" --context "$context" "${@:4}" --json "$3" > "${3%.json}.txt"
}

for turn in $(seq "$turns"); do
    for side in old new; do measure "$side" layers "$out/layers-$context-$side-$turn.json" "$@"; done
    [ "$context" = gpu ] && continue
    for side in old new; do measure "$side" one-image "$out/one-image-$context-$side-$turn.json"; done
done
python3 - "$out" "$context" << 'PYTHON'
import json, statistics, sys
from pathlib import Path

times = {}
for path in sorted(Path(sys.argv[1]).glob(f"*-{sys.argv[2]}-*.json")):
    data, side = json.loads(path.read_text()), path.stem.split("-")[-2]
    for case in data["cases"]:
        for row in case["rows"]:
            if row.get("impl") == "auto" and row["call"] != "first":
                key = case["name"], "one image" if data["command"] == "one-image" else row["call"]
                times.setdefault(key, {}).setdefault(side, []).append(row["median"])
print("| case | call | old, ms | new, ms | new / old |\n| --- | --- | --- | --- | --- |")
for (case, call), sides in times.items():
    old, new = (1000 * statistics.median(sides[side]) for side in ("old", "new"))
    print(f"| {case} | {call} | {old:.4g} | {new:.4g} | {new / old:.3f} |")
PYTHON
