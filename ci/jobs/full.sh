#!/usr/bin/env bash
# Job "full": everything that `make test` runs, and what it leaves out because something else shows
# it too: every fault at every point with every seed, every path of the NPU side, every case of the
# comparisons. Hours. It goes in pieces: started again on the same commit it goes on where it ended.
set -euo pipefail
cd "$(dirname "$0")/../.."
make env PLATFORM=cpu
exec "${PYTHON:-python3}" -m ci.suite --full --resume
