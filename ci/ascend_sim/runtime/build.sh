#!/bin/sh
# build.sh FOLDER: compile the simulated Ascend runtime into FOLDER.
#
# PYTHON (default python3) is an interpreter whose environment has torch_npu: the CANN headers are taken
# from its wheel, so a function whose signature differs from the wheel's does not compile.
# torch_npu's own search path contains site-packages/torch_npu.libs, a folder that its wheel leaves out:
# built there, the runtime is found without LD_LIBRARY_PATH.
set -eu

folder=${1:?usage: build.sh FOLDER}
sources=$(cd "$(dirname "$0")" && pwd)
headers=$("${PYTHON:-python3}" -c '
import importlib.util
import pathlib
import sys

found = importlib.util.find_spec("torch_npu")
if found is None:
    sys.exit("build.sh: no torch_npu in " + sys.executable + "; set PYTHON to an interpreter that has it")
print(pathlib.Path(found.origin).parent / "include/third_party/acl/inc")
')

mkdir -p "$folder"
# Written beside and moved over: a process that has the old library loaded keeps it.
"${CC:-gcc}" -std=gnu11 -O2 -g -Wall -Wextra -D_GNU_SOURCE -fPIC -shared -fvisibility=hidden \
    -pthread -isystem "$headers" -o "$folder/libascend_sim.so.new" "$sources"/*.c
mv "$folder/libascend_sim.so.new" "$folder/libascend_sim.so"

# One library under the names of all that torch_npu loads: the loader maps it once.
for name in libascendcl libhccl libacl_op_compiler libge_runner libgraph libacl_tdt_channel libopapi \
    libnnopbase; do
    ln -sf libascend_sim.so "$folder/$name.so"
done
