"""Write the boards in `dashboards/`: `python deploy/grafana/generate.py`."""

import json
import sys
from pathlib import Path

from boards import engine, errors, gpu, images, latency, overview

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "dashboards"
    for each in (overview, latency, engine, gpu, images, errors):
        text = json.dumps(each.BOARD, indent=2, ensure_ascii=False)
        (folder / f"{each.BOARD['uid']}.json").write_text(f"{text}\n")
