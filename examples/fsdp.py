"""A model sharded by FSDP2, compressed between replicas.    torchrun --nproc-per-node 4 examples/fsdp.py

Two replicas of two shards each. On two machines with 8 GPUs each, the mesh is ("cuda", (2, 8)): each machine holds one
replica, FSDP uses the fast links inside, and thinwire the slow ones between.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire

STEPS = 100


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)  # the same weights in all replicas
    teacher, model = nn.Linear(256, 8), nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 8))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shard"])  # FSDP sees the shards alone
    optimizer = thinwire.AdamW(model, lr=1e-3, group=mesh["replicate"])
    data = torch.Generator().manual_seed(1 + dist.get_rank())  # each rank has batches of its own
    for step in range(STEPS):
        inputs = torch.randn(64, 256, generator=data)
        loss = nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()  # exchanges shards with other replicas while it goes on
        optimizer.step()
        if dist.get_rank() == 0 and (step + 1) % 50 == 0:
            sent = optimizer.sync.stats.bytes_sent / (step + 1) / 1000
            print(f"step {step + 1}: loss {loss.item():.4f}, {sent:.1f} kB/step to other replicas")

    paths = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(paths)  # a folder that all ranks see
    state = {"model": model.state_dict(), "optimizer": thinwire.per_rank(optimizer)}
    dcp.save(state, checkpoint_id=paths[0])  # type: ignore[attr-defined]
    optimizer.load_state_dict(thinwire.load_per_rank(str(paths[0]), "optimizer", owner=optimizer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
