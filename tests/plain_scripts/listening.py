"""Says which addresses the process listens at once all workers are connected."""

from pathlib import Path

import torch.distributed as dist

dist.init_process_group()
dist.barrier()
mine = {entry.stat().st_ino for entry in Path("/proc/self/fd").iterdir() if entry.exists()}
rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
print("listens", *sorted(row[1] for row in rows if row[3] == "0A" and int(row[9]) in mine), flush=True)
dist.barrier()
dist.destroy_process_group()
