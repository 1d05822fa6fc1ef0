r"""Trained models of scvi-tools: log p(x) of each cell with an error bar and k-hat.

.. math:: \log w = \log p(x \mid z, l) + \log p(u) + \log p(l) - \log q(u; x) - \log q(l; x), \qquad z = t(u)

u is what the encoder draws, t the identity or, for `latent_distribution="ln"`, the softmax. Prior and posterior are densities
of u; taken at z, as `get_marginal_ll` does, they are densities of nothing. The terms in l, the logarithm of the library
size, are there where it is latent.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from dohyo.errors import DohyoError
from dohyo.integrations import missing

try:
    from scvi import REGISTRY_KEYS
    from scvi.model import SCVI
    from scvi.module._constants import MODULE_KEYS
except ModuleNotFoundError as error:
    raise missing(error, "scvi") from None


def from_scvi(model: Any, adata: Any = None) -> "ScviModel":
    """A model of dohyo from a trained `scvi.model.SCVI`, whose data x are the numbers of cells, `torch.arange(adata.n_obs)`.

    The library size may be observed (the default of scvi-tools) or latent, the latent distribution "normal" or "ln". A latent
    library size is badly known to the encoder: k-hat was far above 0.7 wherever it was tried, `Evaluation.warnings` says so,
    and then no estimate of log p(x) is to be trusted, theirs neither.

    Args:
        adata: The cells, with the genes that the model was trained on; by default those that it was trained on.

    Example:
        >>> import dohyo, scvi, torch
        >>> cells = scvi.data.synthetic_iid(batch_size=30, n_genes=10, n_proteins=0, n_regions=0, generate_coordinates=False)
        >>> scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
        >>> trained = scvi.model.SCVI(cells, n_latent=2, n_hidden=8)
        >>> trained.train(max_epochs=2, enable_progress_bar=False, logger=False)
        >>> found = dohyo.evaluate(from_scvi(trained), torch.arange(cells.n_obs), dohyo.MultilevelRR.at_cost(15))
        >>> found.kind, len(found.per_datum)
        ('unbiased', 60)
    """
    if type(model) is not SCVI:
        raise DohyoError(
            f"the model is a {type(model).__name__}; only scvi.model.SCVI is known; write log_weights(x, rows) for others"
        )
    if not model.is_trained:
        raise DohyoError("the model is not trained; call model.train() first")
    cells = model.adata if adata is None else adata
    if cells is None:
        raise DohyoError("the model was loaded without its cells; give them: from_scvi(model, adata)")
    known = model.registry["field_registries"][REGISTRY_KEYS.X_KEY]["state_registry"]["column_names"]
    genes = [str(name) for name in getattr(cells, "var_names", ())]
    if genes != [str(name) for name in known]:
        raise DohyoError(
            f"adata has {len(genes)} genes ({', '.join(genes[:3])}, ...), and the model was trained on {len(known)} "
            f"({', '.join(map(str, known[:3]))}, ...); give the same genes in the same order"
        )
    if model.module.minified_data_type is not None:
        raise DohyoError("the cells are minified, without their counts; give the whole ones: from_scvi(model, adata)")
    try:
        return ScviModel(model, model._validate_anndata(cells))
    except (ValueError, KeyError) as error:
        raise DohyoError(f"scvi-tools cannot take these cells: {' '.join(str(error).split())}") from error


class ScviModel(nn.Module):
    """See `from_scvi`."""

    def __init__(self, model: Any, adata: Any) -> None:
        super().__init__()
        self.model, self.adata, self.module = model, adata, model.module

    def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
        """One log-weight for each row: a draw of u, and of l if it is latent, for cell x[row]."""
        return self.bind(x)(rows)

    def bind(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """rows -> log-weights of the cells x[rows], encoding each cell once."""
        if x.is_floating_point() or x.ndim != 1 or not bool(((x >= 0) & (x < self.adata.n_obs)).all()):
            raise DohyoError(
                f"x is {x.dtype} {tuple(x.shape)}; it holds numbers of cells, for all of them torch.arange({self.adata.n_obs})"
            )
        module = self.module
        (loaded,) = self.model._make_data_loader(adata=self.adata, indices=x.cpu().numpy(), batch_size=len(x))
        tensors = {name: part.to(module.device) for name, part in loaded.items()}
        encoded = module.inference(**module._get_inference_input(tensors, full_forward_pass=True))
        qz, ql = encoded[MODULE_KEYS.QZ_KEY], encoded[MODULE_KEYS.QL_KEY]

        def log_weights(rows: Tensor) -> Tensor:
            rows = rows.to(module.device)
            own = {name: part[rows] for name, part in tensors.items()}
            q = Normal(qz.loc[rows], qz.scale[rows], validate_args=False)
            u = q.rsample()
            drawn = {MODULE_KEYS.Z_KEY: module.z_encoder.z_transformation(u), MODULE_KEYS.LIBRARY_KEY: encoded["library"][rows]}
            log_w = (Normal(0.0, 1.0).log_prob(u) - q.log_prob(u)).sum(-1)
            if ql is not None:
                q_library = Normal(ql.loc[rows], ql.scale[rows], validate_args=False)
                drawn[MODULE_KEYS.LIBRARY_KEY] = q_library.rsample()
                log_w = log_w - q_library.log_prob(drawn[MODULE_KEYS.LIBRARY_KEY]).sum(-1)
            given = module.generative(**module._get_generative_input(own, drawn))
            if ql is not None:
                log_w = log_w + given[MODULE_KEYS.PL_KEY].log_prob(drawn[MODULE_KEYS.LIBRARY_KEY]).sum(-1)
            log_p: Tensor = given[MODULE_KEYS.PX_KEY].log_prob(own[REGISTRY_KEYS.X_KEY]).sum(-1)
            return torch.add(log_w, log_p).to(x.device)

        return log_weights
