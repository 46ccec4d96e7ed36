// SPDX-License-Identifier: Apache-2.0
// CUDA's driver as far as Triton's launcher calls it: nothing runs, and every address is one of the device's.

#include <stdint.h>
#include <string.h>

#include "cuda.h"

// As far as Triton fills it: dimension 0 is the contiguous one, and the strides in bytes begin with dimension 1's.
typedef struct {
  uint64_t address;
  uint32_t type, rank, swizzle, promotion, fill;
  const uint64_t *sizes, *strides;
  const uint32_t *box, *element_strides;
} Tiled;

typedef void (*OnLaunch)(const CUlaunchConfig *config, uint64_t function, void **parameters);
typedef int (*OnEncode)(void *map, const Tiled *tiled);

static OnLaunch on_launch;
static OnEncode on_encode;
static int capability_major, capability_minor, shared_bytes, sms;
static uint64_t functions;

void stand_in(OnLaunch launch, OnEncode encode, int major, int minor, int most_shared, int sm_count) {
  on_launch = launch;
  on_encode = encode;
  capability_major = major;
  capability_minor = minor;
  shared_bytes = most_shared;
  sms = sm_count;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "of the stand-in for CUDA's driver";
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
    *value = capability_major;
    return CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
    *value = capability_minor;
    return CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
    *value = shared_bytes;
    return CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
    *value = sms;
    return CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    *value = 65536;
    return CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
    *value = 32;
    return CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
  case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
  case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
    *value = 1;
    return CUDA_SUCCESS;
  default: // oversized shared memory, of later GPUs
    *value = 0;
    return CUDA_SUCCESS;
  }
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)(uintptr_t)1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) { return cuDevicePrimaryCtxRetain(context, 0); }

CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)(uintptr_t)1;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)(uintptr_t)++functions;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    return CUDA_ERROR_INVALID_VALUE;
  memcpy(value, &address, sizeof address);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  on_launch(config, (uint64_t)(uintptr_t)function, parameters);
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  Tiled tiled = {(uint64_t)(uintptr_t)address, type, rank, swizzle, promotion, fill, sizes, strides, box,
                 element_strides};
  return on_encode(map, &tiled) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

// Triton's library is linked to these, and no launch calls them.

CUresult cuCtxGetDevice(CUdevice *device) { return CUDA_ERROR_NOT_SUPPORTED; }

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return CUDA_ERROR_NOT_SUPPORTED; }

CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_ERROR_NOT_SUPPORTED; }

CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **values, CUdeviceptr address) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
