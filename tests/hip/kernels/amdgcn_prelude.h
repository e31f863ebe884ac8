// The few names of HIP that our kernels use, for a clang without ROCm's headers: compiles them, never runs them.
#pragma once
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

struct Indices {
    unsigned x, y, z;
};
#define threadIdx (Indices{ __builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(), 0 })
#define blockIdx (Indices{ __builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(), 0 })
#define blockDim (Indices{ __builtin_amdgcn_workgroup_size_x(), __builtin_amdgcn_workgroup_size_y(), 1 })
#define gridDim                                                                                                        \
    (Indices{ __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x(),                                    \
              __builtin_amdgcn_grid_size_y() / __builtin_amdgcn_workgroup_size_y(), 1 })
