"""In llmcompressor's place, for what does not depend on it: hands over weights that the test made, and ends with its parent by the
real child's own code.

`python stand_in.py -P CHILD JOB.json`
"""

import json
import os
import runpy
import shutil
import sys
import threading
import time
from pathlib import Path

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

if does == "nothing":
    sys.exit(0)

shutil.copytree(os.environ["STAND_IN_GIVES"], job["output"], dirs_exist_ok=True)
Path(job["result"]).write_text(json.dumps({"group_size": 32, "versions": {"stand-in": "1"}}))
