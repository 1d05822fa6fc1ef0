"""Trained SCVI models, small enough for quadrature over their latents, beside scvi-tools' own number."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import dohyo

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    scvi = pytest.importorskip("scvi")
    from dohyo.integrations.scvi import from_scvi

pytestmark = pytest.mark.filterwarnings("ignore")  # scvi-tools and Lightning under it
ESTIMATOR = dohyo.MultilevelRR.at_cost(15)


def synthetic(genes: int = 12) -> Any:
    return scvi.data.synthetic_iid(batch_size=45, n_genes=genes, n_proteins=0, n_regions=0)


def trained(**options: Any) -> Any:
    scvi.settings.seed = 0
    cells = synthetic()
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    model = scvi.model.SCVI(cells, n_hidden=16, **options)
    model.train(max_epochs=40, batch_size=32, enable_progress_bar=False, logger=False, accelerator="cpu")
    return model


def by_quadrature(model: Any, latent: int, latent_library: bool) -> Tensor:
    """log p(x) of each cell: the sum over a grid of u, and of the standardised log library size where it is latent."""
    module, (tensors,) = model.module, model._make_data_loader(adata=model.adata, batch_size=len(model.adata))
    encoded = module.inference(**module._get_inference_input(tensors))
    pl = module.generative(**module._get_generative_input(tensors, encoded))["pl"] if latent_library else None
    axis, cells = torch.linspace(-6, 6, 121), len(model.adata)
    grid = torch.cartesian_prod(*[axis] * (latent + latent_library)).view(-1, latent + latent_library)
    log_p = []
    for points in grid.split(400):
        every = torch.arange(cells).repeat(len(points))
        noise = points.repeat_interleave(cells, 0)
        own = {name: part[every] for name, part in tensors.items()}
        drawn = {"z": module.z_encoder.z_transformation(noise[:, :latent]), "library": encoded["library"][every]}
        if pl is not None:
            drawn["library"] = pl.loc[every] + pl.scale[every] * noise[:, latent:]
        px = module.generative(**module._get_generative_input(own, drawn))["px"]
        prior = torch.distributions.Normal(0.0, 1.0).log_prob(noise).sum(-1)
        log_p.append((prior + px.log_prob(own["X"]).sum(-1)).double().view(len(points), cells))
    return torch.cat(log_p).logsumexp(0) + grid.shape[1] * math.log(float(axis[1] - axis[0]))


@pytest.mark.parametrize(("distribution", "latent"), [("normal", 1), ("ln", 2)])
def test_exact_answers(distribution: str, latent: int) -> None:
    model = trained(n_latent=latent, latent_distribution=distribution)
    with torch.no_grad():
        exact = by_quadrature(model, latent, False)
    found = dohyo.evaluate(from_scvi(model), torch.arange(90), ESTIMATOR, replicates=20)
    assert found.noise_stderr is not None
    assert abs(found.mean - float(exact.mean())) < 4 * found.noise_stderr
    assert float((found.per_datum - exact).abs().median()) < 0.1  # each cell's own; they differ by 5 nats
    theirs = model.get_marginal_ll(n_mc_samples=1000, batch_size=64, return_mean=True)
    cells = model.get_marginal_ll(n_mc_samples=1000, batch_size=64, return_mean=False)
    halves = [float(cells[:64].mean()), float(cells[64:].mean())]
    assert theirs == pytest.approx(sum(halves) / 2, abs=0.05)  # the mean of unequal minibatches
    off = float((cells - exact).abs().median())
    assert off > 0.1 if distribution == "ln" else off < 0.03  # with "ln" they take p and q at softmax(u)


def test_a_latent_library_size_is_warned_of() -> None:
    model = trained(n_latent=1, use_observed_lib_size=False)
    found = dohyo.evaluate(from_scvi(model), torch.arange(90), ESTIMATOR)
    assert any("k-hat" in warning for warning in found.warnings)
    with torch.no_grad():
        exact = by_quadrature(model, 1, True)
    # Weights this heavy say little; what the bound says must at least not be above the truth, and come near it.
    bound = dohyo.evaluate(from_scvi(model), torch.arange(90), dohyo.IWAE(2000), khat_samples=0)
    assert bound.mean < float(exact.mean()) + 0.5
    assert float((bound.per_datum - exact).median()) > -30


def test_other_cells_with_the_same_genes() -> None:
    model = trained(n_latent=1)
    other = synthetic()
    mine = from_scvi(model, other)
    assert dohyo.evaluate(mine, torch.tensor([3, 80]), dohyo.IWAE(5)).per_datum.shape == (2,)
    a, b = (dohyo.evaluate(from_scvi(model, cells), torch.arange(90), dohyo.IWAE(5)).mean for cells in (model.adata, other))
    assert a != b


def test_bad_input() -> None:
    cells = synthetic()
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    with pytest.raises(dohyo.DohyoError, match="not trained"):
        from_scvi(scvi.model.SCVI(cells))
    model = trained(n_latent=1)
    with pytest.raises(dohyo.DohyoError, match=r"adata has 9 genes .*trained on 12"):
        from_scvi(model, synthetic(genes=9))
    renamed = synthetic()
    renamed.var_names = [f"other{i}" for i in range(12)]
    with pytest.raises(dohyo.DohyoError, match="other0"):
        from_scvi(model, renamed)
    with pytest.raises(dohyo.DohyoError, match="the model is a int"):
        from_scvi(3)
    for x in (torch.arange(91), torch.rand(3), torch.tensor([[1]])):
        with pytest.raises(dohyo.DohyoError, match="numbers of cells"):
            dohyo.evaluate(from_scvi(model), x, ESTIMATOR)
