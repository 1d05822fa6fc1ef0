"""Whole chains of leapfrogs in one launch, written in Triton: for `models.VAE` with Bernoulli pixels.

A leapfrog of the compiled program is a dozen small launches, each of which waits for the one before. Here each block of the GPU
takes a few rows through all leapfrogs of their chains. A layer's units are computed a few at a time and used at once, so that all
but the decoder's weights stays inside the block. Forces are computed from factors of 11 bits, as those of other products are by
default. That changes where chains go, but no expectation: a leapfrog keeps volumes and can be undone for any force that depends
on the place alone, and log p(x, z) at the end is computed by the network itself.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from dohyo.annealing.chain import FARTHEST, State
from dohyo.lab.fast.captured import compiled
from dohyo.models.networks import LOG_SCALE_LIMIT

_HIDDEN, _LATENT = 256, 128  # the most units and dimensions that a block has room for
_ROOM = 160 * 1024  # bytes that it then takes of a GPU's shared memory
_PIXELS, _UNITS = 128, 64  # that a block computes at a time
_LEAST, _MOST = 16, 32  # rows of a block
_WARPS, _STAGES = 8, 3  # of a block, and of its loops


@triton.jit
def _tanh(a):
    return 1 - 2 / (1 + tl.exp(2 * a))


@triton.jit
def _short(a):
    """In half precision, limited to what that can hold: a force that overflows would end the chain."""
    return tl.minimum(tl.maximum(a, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def _chains(
    u_at, v_at, ratio_at, noise_at, code_at, x_at, rows_at, w1_at, w2_at, w3_at, b1_at, b2_at, b3_at,
    step_at, bridge_at, persistence_at, widening_at, end_at, alive_at, end_ratio_at,
    n, data, noise_stride, b1_stride, b2_stride, b3_stride, limit, farthest,
    steps: tl.constexpr, latent: tl.constexpr, hidden: tl.constexpr, pixels: tl.constexpr,
    block: tl.constexpr, block_latent: tl.constexpr, block_hidden: tl.constexpr, block_pixels: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * block + tl.arange(0, block)
    i, h, j, c = tl.arange(0, block_latent), tl.arange(0, block_hidden), tl.arange(0, block_pixels), tl.arange(0, part)
    inside = row < n
    own = inside[:, None] & (i < latent)[None, :]
    place = (run * n + row)[:, None] * latent + i[None, :]
    u, v = tl.load(u_at + place, own, 0.0), tl.load(v_at + place, own, 0.0)
    log_ratio = tl.load(ratio_at + run * n + row, inside, 0.0)
    alive = row >= 0

    datum = run * data + tl.load(rows_at + row, inside, 0)
    code = code_at + datum[:, None] * (2 * latent) + i[None, :]
    mean, log_scale = tl.load(code, own, 0.0), tl.load(code + latent, own, 0.0)
    widening = tl.load(widening_at + run * latent + i, i < latent, 0.0).to(tl.float32)
    scale = tl.exp(tl.minimum(tl.maximum(log_scale, -limit), limit)) * widening[None, :]
    keep = tl.load(persistence_at + run).to(tl.float32)

    w1_at += run * block_hidden * block_latent
    w2_at += run * block_hidden * block_hidden
    w3_at += run * tl.cdiv(pixels, block_pixels) * block_pixels * block_hidden
    b1_at += run * b1_stride
    b3_at += run * b3_stride
    b2 = tl.load(b2_at + run * b2_stride + h, h < hidden, 0.0)[None, :]
    image = x_at + datum[:, None] * pixels + j[None, :]
    for t in range(steps):
        if t > 0:  # `run` makes the offset one of 64 bits
            v = keep * v + tl.sqrt(1 - keep * keep) * tl.load(noise_at + (run * 0 + t - 1) * noise_stride + place, own, 0.0)
        log_ratio += tl.sum(v * v, 1) / 2
        step = tl.load(step_at + (run * steps + t) * latent + i, i < latent, 0.0).to(tl.float32)[None, :]
        beta = tl.load(bridge_at + run * steps + t).to(tl.float32)
        u += step / 2 * v
        z = mean + scale * u
        short = _short(z)
        h2 = tl.zeros([block, block_hidden], tl.float32)
        for begin in range(0, block_hidden, part):
            w1 = tl.load(w1_at + (begin + c)[:, None] * block_latent + i[None, :])
            w2 = tl.load(w2_at + h[:, None] * block_hidden + (begin + c)[None, :])
            b1 = tl.load(b1_at + begin + c, begin + c < hidden, 0.0)[None, :]
            h1 = _tanh(tl.dot(short, tl.trans(w1)) + b1)
            h2 = tl.dot(h1.to(tl.float16), tl.trans(w2), h2)
        h2 = _tanh(h2 + b2)
        short2 = h2.to(tl.float16)
        slope = tl.zeros([block, block_hidden], tl.float32)  # of log p(x | z), by h2
        x = tl.load(image, inside[:, None] & (j < pixels)[None, :], 0.0)
        b3 = tl.load(b3_at + j, j < pixels, 0.0)
        for begin in range(0, pixels, block_pixels):
            w3 = tl.load(w3_at + (begin + j)[:, None] * block_hidden + h[None, :])
            later = begin + block_pixels + j < pixels
            next_x = tl.load(image + begin + block_pixels, inside[:, None] & later[None, :], 0.0)  # while this one is used
            next_b3 = tl.load(b3_at + begin + block_pixels + j, later, 0.0)
            left = x - tl.sigmoid(tl.dot(short2, tl.trans(w3)) + b3[None, :])
            left = tl.where((begin + j < pixels)[None, :], left, 0.0)
            slope = tl.dot(left.to(tl.float16), w3, slope)
            x, b3 = next_x, next_b3
        short2 = _short(slope * (1 - h2 * h2))
        force = tl.zeros([block, block_latent], tl.float32)  # the same by z, and then the whole force
        for begin in range(0, block_hidden, part):
            w1 = tl.load(w1_at + (begin + c)[:, None] * block_latent + i[None, :])
            w2 = tl.load(w2_at + h[:, None] * block_hidden + (begin + c)[None, :])
            b1 = tl.load(b1_at + begin + c, begin + c < hidden, 0.0)[None, :]
            h1 = _tanh(tl.dot(short, tl.trans(w1)) + b1)
            force = tl.dot(_short(tl.dot(short2, w2) * (1 - h1 * h1)), w1, force)
        force = (beta - 1) * u + beta * scale * (force - z)
        v += step * force
        u += step / 2 * v
        sound = (tl.abs(force) < float("inf")) & (tl.abs(u) < farthest)
        alive = alive & (tl.min(sound.to(tl.int32), 1) > 0)
        u, v = tl.where(alive[:, None], u, 0.0), tl.where(alive[:, None], v, 0.0)
        log_ratio -= tl.sum(v * v, 1) / 2
    tl.store(end_at + place, u, own)
    tl.store(alive_at + run * n + row, alive, inside)
    tl.store(end_ratio_at + run * n + row, log_ratio, inside)


def fits(parameters: dict[str, Tensor], constants: dict[str, Tensor]) -> bool:
    """Whether the kernel can lead chains of these decoders, and a GPU has room for them. With few pixels the compiler would keep
    all weights in a block."""
    first, second, third = (parameters[f"{layer}.weight"].shape[1:] for layer in (0, 2, 4))
    hidden, latent = first
    alike = second == (hidden, hidden) and third[1] == hidden and "mixing" not in constants
    sized = all(constants[name].shape[-1] == latent for name in ("step", "widening"))
    if not alike or not sized or hidden > _HIDDEN or latent > _LATENT or third[0] <= _PIXELS:
        return False
    device = parameters["0.weight"].device
    properties = triton.runtime.driver.active.utils.get_device_properties
    return device.type == "cuda" and bool(properties(device.index)["max_shared_mem"] >= _ROOM)


class Leapfrogs:
    """The leapfrogs of several models' chains. The models' parameters are read anew in each call."""

    def __init__(self, parameters: dict[str, Tensor], constants: dict[str, Tensor]) -> None:
        """Parameters (models, ...) of the three layers of each decoder, and constants (models, ...), by name."""
        self.weights = [parameters[f"{layer}.weight"] for layer in (0, 2, 4)]
        self.biases = [parameters[f"{layer}.bias"] for layer in (0, 2, 4)]
        self.constants = constants
        (_, self.hidden, self.latent), self.pixels = self.weights[0].shape, self.weights[2].shape[1]
        self.blocks = [max(16, triton.next_power_of_2(size)) for size in (self.latent, self.hidden)]
        self.packed = compiled(self._pack, *self.weights)
        self.units = torch.cuda.get_device_properties(self.weights[0].device).multi_processor_count

    def _pack(self, *weights: Tensor) -> list[Tensor]:
        """The weights in half precision, with zeros in what blocks have room for."""
        latent, hidden = self.blocks
        sizes = (hidden, latent), (hidden, hidden), (triton.cdiv(self.pixels, _PIXELS) * _PIXELS, hidden)
        return [pad(w, (0, b - w.shape[2], 0, a - w.shape[1])).half() for w, (a, b) in zip(weights, sizes, strict=True)]

    def __call__(self, x: Tensor, rows: Tensor, code: Tensor, state: State, noise: list[Tensor]) -> State:
        """From the chains' start to their end, momentum aside; `noise` refreshes it before each leapfrog but the first."""
        u, v, log_ratio = (part.contiguous() for part in (state.u, state.v, state.log_ratio))
        models, n, _ = u.shape
        again = torch.stack(noise) if noise else v
        end, alive, end_ratio = torch.empty_like(u), torch.empty_like(state.alive), torch.empty_like(log_ratio)
        constants = [self.constants[name] for name in ("step", "bridge", "persistence", "widening")]
        block = _LEAST
        while models * triton.cdiv(n, block) > self.units and block < _MOST:
            block *= 2
        _chains[triton.cdiv(n, block), models](
            u, v, log_ratio, again, code.contiguous(), x.flatten(2), rows, *self.packed(*self.weights), *self.biases,
            *constants, end, alive, end_ratio,
            n, x.shape[1], again.stride(0), *(bias.stride(0) for bias in self.biases), LOG_SCALE_LIMIT, FARTHEST,
            steps=constants[1].shape[1], latent=self.latent, hidden=self.hidden, pixels=self.pixels,
            block=block, block_latent=self.blocks[0], block_hidden=self.blocks[1], block_pixels=_PIXELS,
            part=min(_UNITS, self.blocks[1]), num_warps=_WARPS, num_stages=_STAGES,
        )  # fmt: skip
        return State(end, state.v, alive, end_ratio)
