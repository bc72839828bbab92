#!/usr/bin/env bash
# From nothing to two trained models: set-up, shards, sync and dcasgd on 4 ranks, and a table of both.
# usage: bash jobs/quickstart.sh [--digits] [options of jobs/setup.sh]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

data=fashion-mnist setup=()
for option in "$@"; do
    case "$option" in
        --digits) data=digits ;;
        -h | --help) sed -n '2,3s/^# //p' "$0"; bash jobs/setup.sh --help; exit 0 ;;
        *) setup+=("$option") ;;
    esac
done

bash jobs/setup.sh "${setup[@]}"
source jobs/site.sh

if [ "$data" = fashion-mnist ] && [ ! -d shards/fashion-mnist ]; then
    python data_prep/fashion_mnist.py --out shards/fashion-mnist || {
        echo 'quickstart: Fashion-MNIST is not to be had here (see above): training on the digits instead'
        data=digits
    }
fi
[ -d shards/$data ] || python data_prep/$data.py --out shards/$data

length=(--epochs 2)
[ $data = fashion-mnist ] || length=(--epochs 20 --eval_every 5)
for algorithm in sync dcasgd; do
    run=(mpirun -n 4 hvdist train "$algorithm" --data "shards/$data" "${length[@]}" --batch 32
        --out "runs/quickstart/$algorithm" --overwrite)
    printf '\n$ %s\n' "${run[*]}"
    "${run[@]}"
done

echo
hvdist report runs/quickstart/sync runs/quickstart/dcasgd --out runs/quickstart/report.html
echo 'The runs are in runs/quickstart/: config.yaml, record.jsonl, summary.json and checkpoint/ of each.'
