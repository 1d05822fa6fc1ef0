"""What the guide "Your own loop" says of scaled gradients and of several processes, against a plain loop."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import dohyo
from dohyo.objectives import MaximumLikelihood
from real import finished

OBJECTIVE = MaximumLikelihood(dohyo.SUMO.at_cost(15), encoder="dreg")


def loss_of(model: nn.Module, x: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return OBJECTIVE(model, x, torch.Generator().manual_seed(seed)).loss


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return dohyo.models.VAE(data=6, hidden=8, latent=2), (torch.rand(40, 6) < 0.3).float()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_scaler_scales_both_gradients() -> None:
    model, x = made()
    loss_of(model, x, 1).backward()
    expected = gradients(model)
    model.zero_grad()
    scaler, optimiser = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    scaler.scale(loss_of(model, x, 1)).backward()
    for name, found in gradients(model).items():
        assert torch.allclose(found, 1024 * expected[name], rtol=1e-4, atol=1e-4), name
    scaler.step(optimiser)
    for name, p in model.named_parameters():
        assert torch.allclose(p, before[name] - expected[name], rtol=1e-4, atol=1e-6), name
        assert float(expected[name].norm()) > 0, name


SCRIPT = """
import sys
sys.path[:0] = {path!r}
import torch, torch.distributed, torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from test_own_loop import gradients, loss_of, made

class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, seed):
        return loss_of(self.model, x, seed)

def work(rank):
    torch.distributed.init_process_group("gloo", init_method="file://{out}/store", rank=rank, world_size=2)
    model, x = made()
    parallel = DistributedDataParallel(Loss(model))
    parallel(x[rank::2], rank).backward()
    torch.save(gradients(model), "{out}/" + str(rank))
    model.zero_grad()
    loss_of(parallel.module.model, x[rank::2], rank).backward()
    torch.save(gradients(model), "{out}/alone" + str(rank))
    try:
        loss_of(parallel, x, 0)
    except ValueError as error:
        open("{out}/error", "w").write(str(error))
    torch.distributed.destroy_process_group()

torch.multiprocessing.start_processes(work, nprocs=2, start_method="fork")
"""


def test_two_processes_share_both_gradients(tmp_path: Path) -> None:
    """As the guide wraps it; the wrapper itself is no model, and says what to do."""
    script = SCRIPT.format(path=[str(Path(__file__).parent)], out=tmp_path)
    done = finished([sys.executable, "-c", script], tmp_path)
    assert done.returncode == 0, done.stderr
    model, x = made()
    for rank in (0, 1):
        (loss_of(model, x[rank::2], rank) / 2).backward()
    expected = gradients(model)
    for rank in "01":
        found = torch.load(tmp_path / rank, weights_only=True)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert torch.allclose(value, expected[name], rtol=1e-4, atol=1e-6), name
    alone = [torch.load(tmp_path / f"alone{rank}", weights_only=True) for rank in "01"]  # what the guide warns of
    assert all(not torch.equal(alone[0][name], alone[1][name]) for name in expected)
    assert "wrap a module whose forward returns the loss, as docs/guides/own-loop.md" in (tmp_path / "error").read_text()
