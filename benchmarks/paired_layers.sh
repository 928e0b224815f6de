#!/usr/bin/env bash
# Time `auto` on the course's layers with two checkouts in turn: paired_layers.sh OLD NEW [ROUNDS], on a GPU.
# The folder that OUT names (default: .) gets old1.json, new1.json and so on.
set -euo pipefail
old="$(realpath "$1")" new="$(realpath "$2")" out="$(realpath "${OUT:-.}")"
for round in $(seq "${3:-3}"); do
    for side in old new; do
        cd "${!side}"
        PYTHONPATH="${!side}" python3 -m ece408_op bench --context gpu --json "$out/$side$round.json" > "$out/$side$round.txt"
    done
done
grep -h auto "$out"/old*.txt "$out"/new*.txt
