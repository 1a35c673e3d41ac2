/* A libcuda.so.1 for machines without a GPU: what KvikIO needs to write from "device" memory.
 *
 * Host memory that was declared by stub_declare is taken for device memory; copies are memcpy and
 * done when they return. Everything else is an answer that KvikIO accepts.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef void *CUhandle;

enum { OK = 0, INVALID_VALUE = 1, RANGES_MAX = 256, PAGE = 4096 };
enum { CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, ORDINAL = 9, IPC_CAPABLE = 10 };
enum { MEMORY_TYPE_DEVICE = 2 };

static struct {
    CUdeviceptr start;
    size_t length;
    int plain;
} ranges[RANGES_MAX];
static int count;
static int context;
static int copies;

void stub_declare(CUdeviceptr start, size_t length, int plain) {
    ranges[count].start = start;
    ranges[count].length = length;
    ranges[count++].plain = plain;
}

int stub_copies(void) { return __atomic_load_n(&copies, __ATOMIC_SEQ_CST); }

static int find(CUdeviceptr at) {
    for (int i = count - 1; i >= 0; i--)
        if (at >= ranges[i].start && at < ranges[i].start + ranges[i].length) return i;
    return -1;
}

static CUresult copy(void *target, const void *source, size_t length) {
    __atomic_add_fetch(&copies, 1, __ATOMIC_SEQ_CST);
    memcpy(target, source, length);
    return OK;
}

CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr at) {
    int i = find(at);
    if (i < 0) return INVALID_VALUE;
    switch (attribute) {
        case CONTEXT: *(CUhandle *)data = &context; return OK;
        case MEMORY_TYPE: *(unsigned *)data = MEMORY_TYPE_DEVICE; return OK;
        case DEVICE_POINTER: *(CUdeviceptr *)data = at; return OK;
        case ORDINAL: *(int *)data = 0; return OK;
        case IPC_CAPABLE: *(int *)data = ranges[i].plain; return OK;
        default: return INVALID_VALUE;
    }
}

CUresult cuPointerGetAttributes(unsigned n, int *names, void **data, CUdeviceptr at) {
    for (unsigned i = 0; i < n; i++) {
        CUresult result = cuPointerGetAttribute(data[i], names[i], at);
        if (result != OK) return result;
    }
    return OK;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *length, CUdeviceptr at) {
    int i = find(at);
    if (i < 0) return INVALID_VALUE;
    if (base) *base = ranges[i].start;
    if (length) *length = ranges[i].length;
    return OK;
}

CUresult cuMemHostAlloc(void **data, size_t length, unsigned flags) {
    return posix_memalign(data, PAGE, length) ? INVALID_VALUE : OK;
}
CUresult cuMemFreeHost(void *data) { free(data); return OK; }
CUresult cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t length, CUhandle stream) {
    return copy(target, (void *)(uintptr_t)source, length);
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, void *source, size_t length, CUhandle stream) {
    return copy((void *)(uintptr_t)target, source, length);
}
CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t length, CUhandle stream) {
    return copy((void *)(uintptr_t)target, (void *)(uintptr_t)source, length);
}
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *targets, CUdeviceptr *sources, size_t *lengths, size_t n,
                               void *attributes, size_t *indexes, size_t kinds, CUhandle stream) {
    for (size_t i = 0; i < n; i++) cuMemcpyAsync(targets[i], sources[i], lengths[i], stream);
    return OK;
}

CUresult cuDriverGetVersion(int *version) { *version = 13000; return OK; }
CUresult cuDeviceGet(int *device, int ordinal) { *device = ordinal; return OK; }
CUresult cuDeviceGetCount(int *devices) { *devices = 1; return OK; }
CUresult cuDeviceGetAttribute(int *value, int name, int device) { *value = 0; return OK; }
CUresult cuDevicePrimaryCtxRetain(CUhandle *made, int device) { *made = &context; return OK; }
CUresult cuCtxCreate_v2(CUhandle *made, unsigned flags, int dev) { *made = &context; return OK; }
CUresult cuCtxPopCurrent_v2(CUhandle *popped) { if (popped) *popped = &context; return OK; }
CUresult cuCtxGetCurrent(CUhandle *current) { *current = &context; return OK; }
CUresult cuCtxGetDevice(int *device) { *device = 0; return OK; }
CUresult cuStreamCreate(CUhandle *stream, unsigned flags) { *stream = &context; return OK; }
CUresult cuEventCreate(CUhandle *event, unsigned flags) { *event = &context; return OK; }
CUresult cuGetErrorName(CUresult error, const char **text) { *text = "STUB"; return OK; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "stub"; return OK; }

#define ACCEPT(name) \
    CUresult name(void) { return OK; }
ACCEPT(cuInit)
ACCEPT(cuCtxCreate_v4)
ACCEPT(cuCtxDestroy_v2)
ACCEPT(cuCtxPushCurrent_v2)
ACCEPT(cuDevicePrimaryCtxRelease_v2)
ACCEPT(cuEventDestroy_v2)
ACCEPT(cuEventQuery)
ACCEPT(cuEventRecord)
ACCEPT(cuEventSynchronize)
ACCEPT(cuLaunchHostFunc)
ACCEPT(cuMemHostRegister_v2)
ACCEPT(cuMemHostUnregister)
ACCEPT(cuStreamDestroy_v2)
ACCEPT(cuStreamSynchronize)
