"""Best known values, found by a problem's weights and never by its file's name."""

import hashlib

import torch
from torch import Tensor

# x'Qx of Beasley's OR-Library instances (maximisation), by `checksum`: values from the literature, each reached again by tabu
# search.
BEST_KNOWN: dict[str, int] = {
    "841f2bc80619801525570b72300b55ca0370dfaa9e0fb443ea483c5d045d1f71": 2098,  # bqp50.1
    "98742840effaab878a475ac7d9f1da13359fc05f8141e13613791330dffb560c": 3702,  # bqp50.2
    "f19eb5d0d342f43f87ca57f300a6d045721c483586a004bd30140b8a43e77ff0": 4626,  # bqp50.3
    "91f21661b65e61a984a8a7b57acdd24734050b50dd7556394d3b520329144dc3": 3544,  # bqp50.4
    "2823569b1bb48006203df822b0f31ea2e8a41ec0878b917435c66c0aa1d38879": 4012,  # bqp50.5
    "1c6c777fb0c25a3016604ce43bfb8c956f65dfa5fca5ce83161dc4b9dfd606b1": 7970,  # bqp100.1
    "d361a7e9bdfffecb63e220d1dc9884bf3132fb3bf88ce6804e50c749142db68d": 11036,  # bqp100.2
    "fab4dbde6275773db1f14e4ea409e17361ebecbe169cf0eb991636a3010ace76": 12723,  # bqp100.3
    "77f12b5be89c84f5fcaafc9a7cabc157ba49a5783a1c254b6fb5c4e743335707": 10368,  # bqp100.4
    "abe199d9cd6941d201ca1a00b7e08ef3e65328e5265ecff1b59cca2b94041751": 9083,  # bqp100.5
    "8d44fd2f8412005e607e407be6ab41141a25b6b4518bda22b0324cb6483d6e5a": 45607,  # bqp250.1
    "2cb1ff18c4d8bcc7ccd67bfb8249c64a668c38553cea1ca3fbb06c8b1c978905": 44810,  # bqp250.2
    "b818255420ae2df55f0efdfccf143fbd12881dc0d7fe1b81ba2bd458029227fd": 49037,  # bqp250.3
    "879a9b1cd68442bc3009050578b6f920722c8edb3449950ca04661ed7aa38605": 41274,  # bqp250.4
    "f4cb17bcccfe3d410af9d2eb893fd027deb37cabe6df93bef2e4ceaa8b630155": 47961,  # bqp250.5
    "97c5ff4aac3cac842e1100a50092f318268d836be0a89f3e7177c0a6d0a2dcfa": 116586,  # bqp500.1
    "e73a38b8b3f65755e87024e51faed432580b6e3cf759f9eb14f971f4223b10c0": 128339,  # bqp500.2
    "ab308e2ec7718c91a34d024b2514699fb31e13661dc09a48a3a0fdb0eb442c81": 130812,  # bqp500.3
    "2c66400b9d9e009118e2d793adcb4211724aec8a9e97dbbe8d435d4684d927dd": 130097,  # bqp500.4
    "9bbd2f2fba77cd2755842e55ff5b5e7c0a67e52dba6c9756e5a712275a52c3d4": 125487,  # bqp500.5
}


def checksum(weights: Tensor) -> str | None:
    """The sha256 of a quadratic function with whole weights w, upper triangular (d, d); None if a weight is not whole.

    The bytes are d, then i, j, w_ij for each w_ij that is not 0 with i <= j, counted from zero, row by row, all as
    little-endian int64. So functions share it only if they are equal for every x, and a file's name, its format and the
    order of its lines do not matter.
    """
    whole = weights.long()
    if weights.is_floating_point() and not (bool((whole == weights).all()) and bool((weights.abs() < 2**53).all())):
        return None
    i, j = whole.nonzero(as_tuple=True)
    entries = torch.stack([i, j, whole[i, j]], 1)
    head = torch.tensor([len(weights)])
    return hashlib.sha256(torch.cat([head, entries.flatten()]).numpy().astype("<i8").tobytes()).hexdigest()
