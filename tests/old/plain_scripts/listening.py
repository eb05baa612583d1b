"""Says which addresses the process listens at once all workers are connected."""

from pathlib import Path

import torch.distributed as dist

dist.init_process_group()
dist.barrier()
mine = {entry.stat().st_ino for entry in Path("/proc/self/fd").iterdir() if entry.exists()}
found = set()
for _ in range(20):  # a table that changes while it is read may lack rows
    for table in ("tcp", "tcp6"):
        rows = [row.split() for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        found |= {row[1] for row in rows if row[3] == "0A" and int(row[9]) in mine}
print("listens", *sorted(found), flush=True)
dist.barrier()
dist.destroy_process_group()
