/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The functions that compiled host code of CuTe DSL calls, with the signatures of the `llvm.func` declarations in its
 * printed IR, and the prefix emulator_host_ before their names: the CUDA runtime's own, which may be in the process too, are
 * never meant. They hand every question to the callbacks of a table that Python installs.
 *
 * Sources: printed host IR of nvidia-cutlass-dsl 4.6.0, 4.8.0 and 4.8.1; CUDA's public headers for numbers of errors.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define HOST(name) emulator_host_##name

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, NOT_SUPPORTED = 801, UNKNOWN = 999 };

/* Binaries that one host module may hold: the size of the slots that cuda_init fills. */
enum { MAX_BINARIES = 64 };

struct dim3 {
    uint32_t x, y, z;
};

/* cudaLaunchConfig_t */
struct config {
    struct dim3 grid, block;
    uint64_t shared_bytes;
    void *stream;
    const void *attributes;
    uint32_t attribute_count;
};

/* What cuTensorMapEncodeTiled makes a tensor map of; runtime.py has the same. */
struct tiled {
    void *address;
    const uint64_t *dims, *strides;
    const uint32_t *box, *element_strides;
    int type, rank, interleave, swizzle, promotion, fill;
};

struct callbacks {
    int (*load)(void **library, const void *image);
    int (*kernel)(void **kernel, void *library, const char *name);
    int (*device_attribute)(int *value, int attribute);
    int (*kernel_attribute)(int *value, int attribute, void *kernel);
    int (*set_kernel_attribute)(void *kernel, int attribute, int value);
    int (*occupancy)(int *blocks, void *kernel, int block_threads, size_t shared_bytes);
    int (*launch)(const struct config *config, void *kernel, void **arguments);
    int (*encode_tiled)(void *map, const struct tiled *tiled);
    int (*failed)(int error);
};

static struct callbacks python;
static int installed;

EXPORT void emulator_install(const struct callbacks *table)
{
    python = *table;
    installed = 1;
}

/* Python is going away: whatever host code still calls fails without entering it. */
EXPORT void emulator_remove(void)
{
    installed = 0;
}

EXPORT int HOST(_cudaGetDevice)(int *device)
{
    *device = 0;
    return SUCCESS;
}

EXPORT int HOST(_cudaSetDevice)(int device)
{
    return device == 0 ? SUCCESS : INVALID_DEVICE;
}

EXPORT int HOST(_cudaDeviceGetAttribute)(int *value, int attribute, int device)
{
    if (device != 0)
        return INVALID_DEVICE;
    return installed ? python.device_attribute(value, attribute) : UNKNOWN;
}

EXPORT int HOST(_cudaLibraryLoadData)(void **library, const void *image, void *jit_options, void *jit_values, uint32_t jit_count,
                                void *options, void *values, uint32_t count)
{
    (void)jit_options, (void)jit_values, (void)options, (void)values;
    if (jit_count || count)
        return NOT_SUPPORTED;
    return installed ? python.load(library, image) : UNKNOWN;
}

EXPORT int HOST(_cudaLibraryGetKernel)(void **kernel, void *library, const char *name)
{
    return installed ? python.kernel(kernel, library, name) : UNKNOWN;
}

EXPORT int HOST(_cuKernelGetAttribute)(int *value, int attribute, void *kernel, int device)
{
    if (device != 0)
        return INVALID_DEVICE;
    return installed ? python.kernel_attribute(value, attribute, kernel) : UNKNOWN;
}

EXPORT int HOST(_cudaFuncSetAttribute)(void *kernel, int attribute, int value)
{
    return installed ? python.set_kernel_attribute(kernel, attribute, value) : UNKNOWN;
}

EXPORT int HOST(_cudaKernelSetAttributeForDevice)(void *kernel, int attribute, int value, int device)
{
    if (device != 0)
        return INVALID_DEVICE;
    return HOST(_cudaFuncSetAttribute)(kernel, attribute, value);
}

EXPORT int HOST(_cudaOccupancyMaxActiveBlocksPerMultiprocessor)(int *blocks, void *kernel, int block_threads,
                                                          size_t shared_bytes)
{
    return installed ? python.occupancy(blocks, kernel, block_threads, shared_bytes) : UNKNOWN;
}

EXPORT int HOST(_cudaLaunchKernelEx)(const struct config *config, void *kernel, void **arguments)
{
    return installed ? python.launch(config, kernel, arguments) : UNKNOWN;
}

EXPORT int HOST(_cudaLaunchKernel)(void *kernel, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block_x,
                             uint32_t block_y, uint32_t block_z, void **arguments, uint64_t shared_bytes, void *stream)
{
    const struct config config = {
        {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, stream, NULL, 0};
    return HOST(_cudaLaunchKernelEx)(&config, kernel, arguments);
}

EXPORT int HOST(_cuTensorMapEncodeTiled)(void *map, int type, int rank, void *address, const uint64_t *dims,
                                         const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides,
                                         int interleave, int swizzle, int promotion, int fill)
{
    const struct tiled tiled = {address, dims, strides, box, element_strides, type, rank, interleave, swizzle, promotion,
                                fill};
    return installed ? python.encode_tiled(map, &tiled) : UNKNOWN;
}

/* Ends the process where it is CUDA's. Here host code goes on, and its call raises when it comes back to Python. */
EXPORT void HOST(cuda_dialect_assert_success)(int error)
{
    if (error && installed)
        python.failed(error);
}

EXPORT const char *HOST(cuda_dialect_get_error_name)(int error)
{
    switch (error) {
    case SUCCESS:
        return "cudaSuccess";
    case INVALID_VALUE:
        return "cudaErrorInvalidValue";
    case INVALID_DEVICE:
        return "cudaErrorInvalidDevice";
    case NOT_SUPPORTED:
        return "cudaErrorNotSupported";
    default:
        return "cudaErrorUnknown";
    }
}

/* `state` is a 64-bit zero of the host module; it stays zero until its binaries are loaded. */
EXPORT int HOST(cuda_dialect_init_library_once)(uint64_t *state, int (*init)(void **libraries),
                                          int (*load_to_device)(void **libraries, int device),
                                          void (*set_error)(const char *kind, const char *message))
{
    void *libraries[MAX_BINARIES] = {NULL};
    int error;

    if (*state)
        return SUCCESS;
    error = init(libraries);
    if (!error)
        error = load_to_device(libraries, 0);
    if (error)
        set_error("RuntimeError", "the emulator could not load a compiled module");
    else
        *state = 1;
    return error;
}

/* Runs when the host code is freed, at times after Python's end: kernels of the library are Python's to forget. */
EXPORT void HOST(cuda_dialect_unload_library_once)(uint64_t *state)
{
    *state = 0;
}

/* 4.8: the counterpart of the helper that 4.6 writes into every module. */
EXPORT void HOST(CuteDSLRT_TVMFFISetRaisedCudaError)(void (*set_error)(const char *kind, const char **parts, int count),
                                               int error)
{
    char number[16];
    const char *parts[] = {"CUDA Error Code: ", number};

    snprintf(number, sizeof number, "%d", error);
    set_error("CUDADialectError", parts, 2);
}
