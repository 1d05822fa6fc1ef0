"""log p(x) of the validation data in Lightning, with an error bar and k-hat, after each epoch.

Training needs nothing of this: an objective is one loss, so that `training_step` returns `objective(self.model, x).loss`.
"""

import math
import sys
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from dohyo.errors import DohyoError, whole
from dohyo.estimators import Estimator
from dohyo.evaluation import Evaluation, checksum, evaluate, summarise
from dohyo.integrations import missing

# Two distributions hold the same classes under two names, and a Trainer of either takes a callback of the other. So take the one
# that is loaded already, and do not make a program that uses one wait for the other.
try:
    if sys.modules.get("pytorch_lightning") and "lightning.pytorch" not in sys.modules:
        from pytorch_lightning import Callback
    else:
        from lightning.pytorch import Callback
except ModuleNotFoundError as error:
    try:
        from pytorch_lightning import Callback
    except ModuleNotFoundError:
        raise missing(error, "lightning") from None


class LogMarginalCallback(Callback):  # type: ignore[misc]
    """Logs `val_nll`, `val_nll_stderr` and `val_khat_max` at the end of each validation epoch.

    The model is the `LightningModule` itself if it has `log_weights` or `bind`, else its attribute `model`. A batch is x, or a
    tuple that begins with x. The estimates are made batch by batch while Lightning validates, so that no data are loaded
    twice. Under DDP each process evaluates its share, and all log the same number; data that a sampler repeated to make the
    shares equal count once. The sanity check is left out.

    Args:
        estimator: Any of `dohyo`'s.
        replicates: Estimates for each datum; with two or more the noise of the estimator is known too.
        khat_data, khat_samples: As for `dohyo.evaluate`; 0 skips k-hat.
        seed: Of K and of the noise, the same at each epoch.

    Attributes:
        evaluation: What was found last, a `dohyo.Evaluation`; None before.

    Example:
        >>> import dohyo, torch, lightning
        >>> class Module(lightning.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.model = dohyo.models.VAE(data=6, hidden=8, latent=2)
        ...     def validation_step(self, batch, index):
        ...         pass
        >>> callback = LogMarginalCallback(dohyo.MultilevelRR.at_cost(15), replicates=2)
        >>> trainer = lightning.Trainer(callbacks=[callback], accelerator="cpu", logger=False, enable_progress_bar=False,
        ...                             enable_model_summary=False, enable_checkpointing=False)
        >>> loader = torch.utils.data.DataLoader(torch.rand(50, 6).round(), batch_size=20)
        >>> (metrics,) = trainer.validate(Module(), loader, verbose=False)
        >>> sorted(metrics)
        ['val_khat_max', 'val_nll', 'val_nll_stderr']
        >>> callback.evaluation.kind
        'unbiased'
    """

    def __init__(
        self, estimator: Estimator, *, replicates: int = 2, khat_data: int = 64, khat_samples: int = 500, seed: int = 0
    ) -> None:
        super().__init__()
        if not isinstance(estimator, Estimator):
            raise DohyoError(
                f"the estimator is a {type(estimator).__name__}; give one of dohyo's, as dohyo.MultilevelRR.at_cost(15)"
            )
        self.estimator, self.replicates, self.seed = estimator, whole("replicates", replicates), seed
        self.khat_data, self.khat_samples = khat_data, khat_samples
        self.evaluation: Evaluation | None = None
        self._start()

    def _start(self) -> None:
        self._values: list[Tensor] = []
        self._khat: list[Tensor] = []
        self._seen: dict[int, int] = {}
        self._cost = self._fingerprint = 0

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._start()

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.sanity_checking:
            return
        x = batch[0] if isinstance(batch, tuple | list) else batch
        if not isinstance(x, Tensor):
            raise DohyoError(f"a validation batch is a {type(x).__name__}; it must be a tensor, or a tuple that begins with one")
        seen = self._seen.get(dataloader_idx, 0)
        self._seen[dataloader_idx] = seen + len(x)
        x = x[: int(max(0, min(len(x), _share(trainer, dataloader_idx) - seen)))]
        if not len(x):
            return
        model, world = _model(pl_module), trainer.world_size
        examined, first = sum(map(len, self._khat)), (dataloader_idx * 100_003 + batch_idx) * world + trainer.global_rank
        with torch.inference_mode(False):  # for models that need gradients inside, as annealed ones do
            x = x.clone()
            found = [
                evaluate(
                    model, x, self.estimator, batch_size=len(x), khat_samples=self.khat_samples if r == 0 else 0,
                    khat_data=max(0, math.ceil(self.khat_data / world) - examined), seed=self.seed + first * self.replicates + r,
                )
                for r in range(self.replicates)
            ]  # fmt: skip
        self._values.append(torch.stack([each.per_datum for each in found], -1))
        self._khat.append(found[0].khat)
        self._cost += sum(each.cost for each in found)
        self._fingerprint = checksum(x, self._fingerprint)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        shares: list[Any] = [(self._values, self._khat, self._cost)]
        if trainer.world_size > 1:
            mine, shares = shares[0], [None] * trainer.world_size
            torch.distributed.all_gather_object(shares, mine)
            self._fingerprint = 0  # unknown: the data are in another order
        values, khats = ([part for share in shares for part in share[i]] for i in (0, 1))
        if not values:
            raise DohyoError("no validation batch came; give the Trainer validation data of at least one datum")
        khat, cost = torch.cat(khats), sum(share[2] for share in shares)
        self.evaluation = summarise(torch.cat(values), self.estimator, cost, khat, fingerprint=self._fingerprint)
        self._start()
        finite = khat[khat.isfinite()]
        numbers = {"val_nll": -self.evaluation.mean, "val_nll_stderr": self.evaluation.stderr}
        if len(finite):
            numbers["val_khat_max"] = float(finite.max())
        pl_module.log_dict(
            {name: torch.tensor(value) for name, value in numbers.items()},
            on_step=False, on_epoch=True, sync_dist=trainer.world_size > 1,
        )  # fmt: skip


def _model(module: Any) -> Any:
    for model in (module, getattr(module, "model", None)):
        if hasattr(model, "log_weights") or hasattr(model, "bind"):
            return model
    raise DohyoError(
        f"neither {type(module).__name__} nor its attribute model has log_weights(x, rows); give one of them that method "
        "(see dohyo.models.LatentVariableModel)"
    )


def _share(trainer: Any, dataloader_idx: int) -> float:
    """How many data of this process are no repetitions, which a `DistributedSampler` puts at the end to make equal shares."""
    loaders = trainer.val_dataloaders
    loader = loaders[dataloader_idx] if isinstance(loaders, list | tuple) else loaders
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, torch.utils.data.DistributedSampler):
        return math.inf
    return len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))  # type: ignore[arg-type]
