# SPDX-License-Identifier: Apache-2.0
"""Adam on a GPU with the bits of DeepSpeed's CPU Adam, and Muon's step with those of torch's: one launch updates any
number of runs of elements.

The arithmetic is that of ``csrc/update/adam.h``, with one rounding per line: no contraction but the explicit ones,
square root and division rounded to nearest, no flushing of denormals. Where a gradient is not finite the payload of a
NaN may differ; DeepSpeed discards such a step. Needs Triton, which comes with torch's CUDA builds, and no CUDA toolkit.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_NUMEL = 4096
"""Elements of one program."""

RUN_FIELDS = tl.constexpr(7)
"""Addresses of master weights, moments, gradient (0: zeros) and weight (0: not wanted), length, length without tail."""

FLOAT32 = tl.constexpr(0)
BFLOAT16 = tl.constexpr(1)
FLOAT16 = tl.constexpr(2)
L2 = tl.constexpr(1)
DECOUPLED = tl.constexpr(2)


@triton.jit
def adam_runs(
    runs,
    block_run,
    block_start,
    scale,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    bias_correction2,
    eps,
    step_size,
    decay,
    GRADIENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    DECAY: tl.constexpr,
    TAIL_CONTRACTED: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Updates one block of one run.

    Args:
        runs: int64 ``[n_runs, RUN_FIELDS]``.
        block_run: int32 ``[n_blocks]``: the run of each block.
        block_start: int64 ``[n_blocks]``: its first element in the run.
        scale: to ``decay``: of :class:`tencache_ds.planning.adam_scalars.AdamScalars`.
        GRADIENT: dtype of the gradients.
        WEIGHT: dtype of the weights.
        DECAY: kind of weight decay.
        TAIL_CONTRACTED: whether the scalar tail of DeepSpeed's loop is contracted as GCC does it.
        WHOLE: whether every block has ``BLOCK`` elements and no tail, every address is there and a multiple of 16: then
            memory is touched 16 bytes at a time.
        BLOCK: elements of a block.
    """
    program = tl.program_id(0)
    run = runs + tl.load(block_run + program).to(tl.int64) * RUN_FIELDS
    start = tl.load(block_start + program)
    master_address, exp_avg_address, exp_avg_sq_address = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    gradient_address, weight_address = tl.load(run + 3), tl.load(run + 4)
    numel, body_end = tl.load(run + 5), tl.load(run + 6)
    master = master_address.to(tl.pointer_type(tl.float32))
    exp_avg = exp_avg_address.to(tl.pointer_type(tl.float32))
    exp_avg_sq = exp_avg_sq_address.to(tl.pointer_type(tl.float32))
    if GRADIENT == FLOAT32:
        gradient = gradient_address.to(tl.pointer_type(tl.float32))
    elif GRADIENT == BFLOAT16:
        gradient = gradient_address.to(tl.pointer_type(tl.bfloat16))
    else:
        gradient = gradient_address.to(tl.pointer_type(tl.float16))
    if WEIGHT == FLOAT32:
        weight = weight_address.to(tl.pointer_type(tl.float32))
    elif WEIGHT == BFLOAT16:
        weight = weight_address.to(tl.pointer_type(tl.uint16))
    else:
        weight = weight_address.to(tl.pointer_type(tl.float16))
    if WHOLE:
        master, gradient, weight = tl.multiple_of(master, 16), tl.multiple_of(gradient, 16), tl.multiple_of(weight, 16)
        exp_avg, exp_avg_sq = tl.multiple_of(exp_avg, 16), tl.multiple_of(exp_avg_sq, 16)
        start = tl.multiple_of(start, BLOCK)
    at = start + tl.arange(0, BLOCK)
    masters, gradients, weights = master + at, gradient + at, weight + at
    exp_avgs, exp_avg_sqs = exp_avg + at, exp_avg_sq + at
    if WHOLE:
        inside = None
        wanted = None
        g = tl.load(gradients).to(tl.float32)
        p, m, v = tl.load(masters), tl.load(exp_avgs), tl.load(exp_avg_sqs)
    else:
        inside = at < numel
        wanted = inside & (weight_address != 0)
        g = tl.load(gradients, mask=inside & (gradient_address != 0), other=0.0).to(tl.float32)
        p = tl.load(masters, mask=inside, other=0.0)
        m = tl.load(exp_avgs, mask=inside, other=0.0)
        v = tl.load(exp_avg_sqs, mask=inside, other=0.0)
    beta1s, one_minus_beta1s = tl.full([BLOCK], beta1, tl.float32), tl.full([BLOCK], one_minus_beta1, tl.float32)
    beta2s, one_minus_beta2s = tl.full([BLOCK], beta2, tl.float32), tl.full([BLOCK], one_minus_beta2, tl.float32)
    decays = tl.full([BLOCK], decay, tl.float32)
    g = g * scale
    if DECAY == L2:
        g = tl.fma(p, decays, g)
    q = g * g
    new_m = tl.fma(g, one_minus_beta1s, m * beta1)
    new_v = tl.fma(q, one_minus_beta2s, v * beta2)
    if TAIL_CONTRACTED and not WHOLE:
        in_tail = at >= body_end
        new_m = tl.where(in_tail, tl.fma(m, beta1s, g * one_minus_beta1), new_m)
        new_v = tl.where(in_tail, tl.fma(v, beta2s, q * one_minus_beta2), new_v)
    corrections, epsilons = tl.full([BLOCK], bias_correction2, tl.float32), tl.full([BLOCK], eps, tl.float32)
    u = tl.div_rn(new_m, tl.fma(tl.sqrt_rn(new_v), corrections, epsilons))
    if DECAY == DECOUPLED:
        p = tl.fma(p, decays, p)
    p = tl.fma(u, tl.full([BLOCK], step_size, tl.float32), p)
    tl.store(masters, p, mask=inside)
    tl.store(exp_avgs, new_m, mask=inside)
    tl.store(exp_avg_sqs, new_v, mask=inside)
    _store_weights(weights, p, wanted, WEIGHT)


@triton.jit
def descent_runs(
    runs,
    block_run,
    block_start,
    scale,
    retained,
    step,
    GRADIENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Takes a step along the gradient on one block of one run: what is left of Muon.

    Args:
        runs: as of :func:`adam_runs`; the moments' addresses are not used.
        block_run: see there.
        block_start: see there.
        scale: to ``step``: of :class:`tencache_ds.planning.adam_scalars.DescentScalars`.
        GRADIENT: see there.
        WEIGHT: see there.
        WHOLE: see there.
        BLOCK: see there.
    """
    program = tl.program_id(0)
    run = runs + tl.load(block_run + program).to(tl.int64) * RUN_FIELDS
    start = tl.load(block_start + program)
    gradient_address, weight_address, numel = tl.load(run + 3), tl.load(run + 4), tl.load(run + 5)
    master = tl.load(run).to(tl.pointer_type(tl.float32))
    # As in adam_runs: a pointer that a function returns is not known to be a multiple of 16 any more, and memory is
    # touched 2 bytes at a time.
    if GRADIENT == FLOAT32:
        gradient = gradient_address.to(tl.pointer_type(tl.float32))
    elif GRADIENT == BFLOAT16:
        gradient = gradient_address.to(tl.pointer_type(tl.bfloat16))
    else:
        gradient = gradient_address.to(tl.pointer_type(tl.float16))
    if WEIGHT == FLOAT32:
        weight = weight_address.to(tl.pointer_type(tl.float32))
    elif WEIGHT == BFLOAT16:
        weight = weight_address.to(tl.pointer_type(tl.uint16))
    else:
        weight = weight_address.to(tl.pointer_type(tl.float16))
    if WHOLE:
        master, gradient, weight = tl.multiple_of(master, 16), tl.multiple_of(gradient, 16), tl.multiple_of(weight, 16)
        start = tl.multiple_of(start, BLOCK)
    at = start + tl.arange(0, BLOCK)
    masters, gradients, weights = master + at, gradient + at, weight + at
    if WHOLE:
        inside = None
        wanted = None
        g, p = tl.load(gradients).to(tl.float32), tl.load(masters)
    else:
        inside = at < numel
        wanted = inside & (weight_address != 0)
        g = tl.load(gradients, mask=inside & (gradient_address != 0), other=0.0).to(tl.float32)
        p = tl.load(masters, mask=inside, other=0.0)
    p = tl.fma(g * scale, tl.full([BLOCK], step, tl.float32), p * retained)
    tl.store(masters, p, mask=inside)
    _store_weights(weights, p, wanted, WEIGHT)


@triton.jit
def _store_weights(weights, p, wanted, WEIGHT: tl.constexpr):
    """Stores rounded master weights."""
    if WEIGHT == FLOAT32:
        tl.store(weights, p, mask=wanted)
    elif WEIGHT == BFLOAT16:
        # As torch rounds on a CPU: to nearest, ties to even, and a NaN has all bits set.
        bits = p.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0xFFFF, rounded)
        tl.store(weights, rounded.to(tl.uint16), mask=wanted)
    else:
        tl.store(weights, p.to(tl.float16), mask=wanted)
