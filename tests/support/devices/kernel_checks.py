"""A kernel whose threads must wait for each other: for the fake compiler and for real ones."""

from __future__ import annotations

from expertier.hip.driver.vendor import Vendor

WARP_SIZE_ATTRIBUTE = {Vendor.HIP: 87, Vendor.CUDA: 10}
"""The device attribute that holds the number of threads of a warp, by vendor."""

BLOCK_SUMS = r"""
extern "C" __global__ void block_sums(const unsigned* values, unsigned* sums) {
    __shared__ unsigned shared[256];
    unsigned t = threadIdx.x;
    shared[t] = values[blockIdx.x * blockDim.x + t];
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (t < half) shared[t] += shared[t + half];
        __syncthreads();
    }
    if (t == 0) sums[blockIdx.x] = shared[0] * 1000 + warpSize;
}
"""
"""Sums of 256 values a block, times 1000, plus the wave size: uint32 in, uint32 out."""
