"""What each choice of an option means, in one line, for `--help`."""

_FALLS = {"linear": "falls to zero over the steps", "none": "stays as it is"}

CHOICES: dict[str, dict[str, str]] = {
    "estimator": {
        "elbo": "the mean of the log-weights; a lower bound, and the loosest one",
        "iwae": "the log of the mean of the weights; a lower bound, tighter at a higher cost",
        "jvi": "iwae with a smaller bias by the jackknife; neither a bound nor unbiased",
        "sumo": "the paper's; unbiased, with infinite variance",
        "symmetric-sumo": "unbiased, with finite variance; slow at a high cost",
        "multilevel-rr": "unbiased, with finite variance; the first to try",
        "multilevel-ss": "the same from one random level instead of all up to it",
    },
    "encoder": {
        "same": "what theta follows; for bounds only",
        "variance": "the square of the estimate, as in the paper",
        "iwae": "IWAE on the same weights",
        "dreg": "IWAE on the same weights, with the doubly reparameterised gradient",
        "sleep": "the z that each sample was made from",
    },
    "optimiser": {"adam": "Adam", "amsgrad": "Adam with the maximum of its second moments", "rmsprop": "no momentum"},
    "recipe": {
        "paper": "amsgrad, learning rate 1e-3, epsilon 1e-4, schedule plateau, no average",
        "ours": "adam, learning rate 2e-3, epsilon 1e-8, schedule cosine, average 10",
    },
    "schedule": {
        "plateau": "lowered, and training stopped, when the validation NLL no longer falls",
        "cosine": "to a hundredth over --epochs or --max-seconds, whichever ends first; never stopped before",
    },
    "device": {"auto": "a GPU if there is one", "cpu": "the processor", "cuda": "an NVIDIA GPU", "mps": "an Apple GPU"},
    "program": {
        "auto": "captured on a CUDA GPU if that is possible, else plain (reverse-kl, qpbo and funnel: always plain)",
        "plain": "plain PyTorch, not compiled",
        "captured": "the same step compiled, and on a CUDA GPU recorded as a graph",
    },
    "data": {
        "digits": "1,797 images of 8 x 8, in the package",
        "mnist": "grey, binarised at random",
        "mnist-static": "binarised once and for all",
        "omniglot": "grey, binarised at random",
    },
    "data_kind": {
        "auto": "depends on the values",
        "binary": "0 and 1",
        "grey": "probabilities, from which every batch is binarised at random",
        "real": "any numbers, with a Gaussian likelihood",
    },
    "model": {"vae": "one stochastic layer", "vae2": "two stochastic layers"},
    "k_draw": {
        "batch": "one K for all data or samples of a step",
        "datum": "one K for each",
        "stratified": "one K for each, spread evenly over the law of K",
    },
    "baseline": {
        "zero": "zero, as in the paper",
        "running": "a running mean of IWAE over earlier batches",
        "target": "log p*(x) plus a running mean",
        "leave-one-out": "the mean of the other samples' gains: the reward, and with entropy - lambda log p",
        "none": "nothing",
    },
    "decay": _FALLS,
    "entropy_decay": _FALLS,
    "paths": {
        "all": "the whole gradient; the only choice for a bound",
        "x": "through x alone, in p(x | z) and in q(z; x)",
        "decoder": "through x in p(x | z) alone",
    },
    "on_divergence": {"stop": "end the run, and keep its checkpoint", "continue": "train on"},
    "split": {
        "test": "data that training never saw",
        "valid": "data that decided when to stop",
        "train": "data that the model was trained on",
    },
    "policy": {
        "latent": "bits that are independent given a Gaussian z; log p(x) is estimated",
        "independent": "independent bits",
        "gru": "each bit given those before it, by a recurrent network",
        "nade": "each bit given those before it, by a NADE",
    },
    "target": {
        "funnel": "2 dimensions; the spread of one is the exponential of the other",
        "banana": "2 dimensions, bent",
        "mixture": "2 dimensions, eight separate modes",
        "ring": "2 dimensions, a circle",
        "eight-schools": "10 dimensions, the hierarchical model of Rubin (1981)",
        "eight-schools-centred": "the same, centred, which has a funnel in it",
        "o-rings": "2 dimensions, logistic regression on the launches before Challenger's",
        "autoregressive": "4 dimensions, a sequential sampler to distil",
    },
}
