"""In llmcompressor's place, for what does not depend on it: quantizes a tiny llama by hand, and ends with its parent by the real child's own code.

`python stand_in.py -P CHILD JOB.json`
"""

import json
import os
import runpy
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

job = json.loads(Path(sys.argv[-1]).read_text())
threading.Thread(target=runpy.run_path(sys.argv[-2])["_follow_parent"], args=(job["alive_fd"],), daemon=True).start()
does = os.environ.get("STAND_IN", "")
with open(os.environ["STAND_IN_CALLS"], "a") as calls:
    calls.write(f"{os.getpid()} {job['scheme']} {job['tokens']}\n")
if does == "fail":
    raise RuntimeError("the model has no layers")
if does == "die":
    os.kill(os.getpid(), 9)
if does == "wait":
    print("Smoothing:  40%|####      | 2/5 [00:01<00:02]", file=sys.stderr, flush=True)
    time.sleep(600)

from tests.weights.compressed import compress  # noqa: E402

compress(Path(job["model"]), Path(job["output"]), "w4a16")
Path(job["result"]).write_text(json.dumps({"group_size": 32, "versions": {"stand-in": "1"}}))
