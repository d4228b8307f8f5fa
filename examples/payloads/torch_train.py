"""Train a small network with Ray Train's TorchTrainer, one checkpoint each epoch."""

import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
from dagster_pipes import open_dagster_pipes
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.utils.data import DataLoader, TensorDataset


def train(config: dict[str, Any]) -> None:
    """The loop of each worker; Ray Train connects the workers, and gives each its share of the data."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 8)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, batch_size=32, shuffle=True))
    network = torch.nn.Linear(8, 1)
    first = 0
    checkpoint = ray.train.get_checkpoint()  # The last one of an earlier run with the same name, if there was one.
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory) / "state.pt")
        network.load_state_dict(state["network"])
        first = state["epoch"] + 1
    model = ray.train.torch.prepare_model(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(first, config["epochs"]):
        for batch, wanted in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), wanted)
            loss.backward()  # Gradients are averaged over the workers.
            optimizer.step()
        nodes = [""] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(nodes, ray.get_runtime_context().get_node_id())
        metrics = {"epoch": epoch, "first epoch": first, "loss": loss.item(), "nodes": len(set(nodes))}
        metrics["backend"] = torch.distributed.get_backend()
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                torch.save({"network": network.state_dict(), "epoch": epoch}, Path(directory) / "state.pt")
                checkpoint = Checkpoint.from_directory(directory)
            ray.train.report(metrics, checkpoint=checkpoint)


if __name__ == "__main__":
    with open_dagster_pipes() as pipes:
        ray.init()
        workers = pipes.get_extra("workers")
        trainer = TorchTrainer(
            train,
            train_loop_config={"epochs": pipes.get_extra("epochs")},
            scaling_config=ScalingConfig(num_workers=workers),  # With use_gpu=True the default backend is NCCL.
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(
                name=pipes.asset_key,
                storage_path=str(Path(os.environ["RAYSLURM_DATA_DIR"]) / "checkpoints"),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
            ),
        )
        result = trainer.fit()
        pipes.report_asset_materialization(
            metadata={**result.metrics, "workers": workers, "checkpoint": {"type": "path", "raw_value": result.checkpoint.path}}
        )
