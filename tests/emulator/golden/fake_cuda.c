// SPDX-License-Identifier: Apache-2.0
// A libcuda that has no chip, for tests of make.py: kernels add 1 to the first byte of their output; one faults and one
// hangs, by their names.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned grid[3], block[3], shared; void *stream; void *attributes; unsigned count; } Config;
static int broken;

int cuInit(unsigned flags) { return flags ? 1 : 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &broken; return device; }
int cuCtxSetCurrent(void *context) { return context != &broken; }
int cuMemAlloc_v2(uint64_t *address, size_t bytes) { return posix_memalign((void **)address, 512, bytes); }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "no chip", size); return device; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorName(int code, const char **name) { *name = code == 700 ? "FAULT" : "OTHER"; return 0; }

int cuModuleLoadDataEx(void **module, const char *text, unsigned count, int *options, void **values) {
    if (count != 2 || options[0] != 5 || options[1] != 6 || (uintptr_t)values[1] != 8192) return 1;
    if (strstr(text, "k_cp_async_1(")) { strcpy(values[0], "no such instruction"); return 218; }
    *module = strdup(text);
    return 0;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = strstr(module, name);
    return *function == NULL;
}

int cuFuncSetAttribute(void *function, int attribute, int value) { return !function || attribute != 8 || value <= 0; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) { memcpy((void *)to, from, bytes); return broken; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) { memcpy(to, (void *)from, bytes); return broken; }

int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, uint64_t *dims, uint64_t *strides,
                           uint32_t *box, uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
    if ((uintptr_t)map % 64 || rank > 5 || interleave || promotion || fill || !steps[rank - 1]) return 1;
    memset(map, 0, 128);
    memcpy(map, &address, 8);
    ((uint32_t *)map)[2] = type | swizzle << 8 | (uint32_t)dims[0] << 16 | (uint32_t)(rank > 1 ? strides[0] : 0) + box[0];
    return 0;
}

int cuLaunchKernelEx(Config *config, void *function, void **values, void **extra) {
    const char *name = function, *end = strstr(name, "\n{");
    int count = 0;
    if (extra || config->grid[1] != 1 || config->block[0] % 32) return 1;
    if (config->count && ((uint32_t *)config->attributes)[0] != 4) return 1;
    if (config->count && ((uint32_t *)config->attributes)[2] != 2) return 1;
    if (!strncmp(name, "k_cp_async_2(", 13)) { broken = 700; return 0; }
    if (!strncmp(name, "k_cp_async_3(", 13)) for (;;) sleep(1);
    for (const char *at = name; (at = strstr(at, ".param .b64 p")) && at < end; at++) count++;
    **(unsigned char **)values[count] += 1;
    return 0;
}

int cuCtxSynchronize(void) { return broken; }
