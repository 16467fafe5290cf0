#pragma once

// The one header that knows which accelerator there is: CUDA by nvcc, HIP by hipcc, or none. Everything else
// here is written against the names below, so the same sources serve all of them. Not installed.

#include <thrust/detail/config.h>

#if THRUST_DEVICE_SYSTEM == THRUST_DEVICE_SYSTEM_CUDA
#include <cuda_runtime.h>
#define HAE_ACCELERATOR "cuda"
#define HAE_GPU(name) cuda##name
#define HAE_GPU_SYSTEM ::thrust::cuda
#define HAE_SHUFFLE_XOR(x, offset) __shfl_xor_sync(0xffffffffu, x, offset, 32)
namespace hae::device {
using DeviceProperties = cudaDeviceProp;
}
#elif defined(THRUST_DEVICE_SYSTEM_HIP) && THRUST_DEVICE_SYSTEM == THRUST_DEVICE_SYSTEM_HIP
#include <hip/hip_runtime.h>
#define HAE_ACCELERATOR "hip"
#define HAE_GPU(name) hip##name
#define HAE_GPU_SYSTEM ::thrust::hip
#define HAE_SHUFFLE_XOR(x, offset) __shfl_xor(x, offset, 32)
namespace hae::device {
using DeviceProperties = hipDeviceProp_t;
}
#endif
