// Devices, contexts and errors: one device, one context.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "driver.hpp"

namespace emulated {

int sticky = SUCCESS;

int complain(int error, const char *format, ...) {
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "emulated GPU: %s (error %d)\n", text, error);
    return error;
}

bool idle() {
    static const bool yes = getenv("EMULATED_GPU_IDLE") && *getenv("EMULATED_GPU_IDLE") == '1';
    return yes;
}

namespace {

auto &counts = *new std::map<std::string, unsigned long>;

void print_counts() {
    for (const auto &[name, count] : counts)
        fprintf(stderr, "emulated GPU: %9lu %s\n", count, name.c_str());
}

} // namespace

void count(const char *name) {
    static const bool yes = getenv("EMULATED_GPU_COUNT") && !atexit(print_counts);
    if (!yes)
        return;
    std::lock_guard guard(device_lock());
    counts[name]++;
}

std::recursive_mutex &device_lock() {
    static std::recursive_mutex &lock = *new std::recursive_mutex;
    return lock;
}

namespace {

int context; // its address is the context
thread_local void *current = nullptr;
size_t limits[16] = {1024, 1 << 20, 8 << 20};

struct Name {
    const char *name, *text;
};

const std::map<int, Name> &names() {
    static const std::map<int, Name> names = {
        {0, {"CUDA_SUCCESS", "no error"}},
        {1, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
        {2, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
        {101, {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}},
        {201, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
        {218, {"CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"}},
        {301, {"CUDA_ERROR_FILE_NOT_FOUND", "file not found"}},
        {400, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
        {500, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
        {600, {"CUDA_ERROR_NOT_READY", "device not ready"}},
        {700, {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
        {701, {"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"}},
        {702, {"CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"}},
        {710, {"CUDA_ERROR_ASSERT", "device-side assert triggered"}},
        {716, {"CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"}},
        {719, {"CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"}},
        {720, {"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch"}},
        {801, {"CUDA_ERROR_NOT_SUPPORTED", "operation not supported"}},
        {900, {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"}},
        {901, {"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"}},
        {903, {"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not initiated in this stream"}},
        {904, {"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"}},
        {905, {"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"}},
        {906,
         {"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
          "operation would make the legacy stream depend on a capturing blocking stream"}},
        {907, {"CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"}},
        {908, {"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to end a thread's capture from another thread"}},
    };
    return names;
}

int attribute(int which) {
    static const std::map<int, int> values = {
        {1, 1024}, // threads of a block
        {2, 1024}, // and along each axis
        {3, 1024},
        {4, 64},
        {5, 2147483647}, // blocks of a grid along each axis
        {6, 65535},
        {7, 65535},
        {8, SHARED},
        {9, 65536}, // constant memory
        {10, 32},   // lanes of a warp
        {11, 2147483647},
        {12, 65536}, // registers of a block
        {13, 1980000},
        {14, 512},
        {15, 1},
        {16, MULTIPROCESSORS},
        {19, 1},
        {31, 1},
        {32, 1},
        {36, 2619000},
        {37, 5120},
        {38, 52428800}, // L2 cache
        {39, 2048},     // threads of a multiprocessor
        {40, 3},
        {41, 1},
        {75, 9}, // compute capability
        {76, 0},
        {78, 1},
        {79, 1},
        {80, 1},
        {81, 233472}, // shared memory of a multiprocessor
        {82, 65536},
        {83, 1},
        {89, 1},
        {90, 1},
        {95, 1}, // cooperative launches
        {97, SHARED_OPT_IN},
        {106, 32}, // blocks of a multiprocessor
        {111, 1024},
        {115, 1}, // memory pools
    };
    auto found = values.find(which);
    return found == values.end() ? 0 : found->second;
}

} // namespace

extern "C" {

int cuInit(unsigned) {
    catch_faults();
    return SUCCESS;
}
int cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}
int cuGetErrorName(int error, const char **name) {
    auto found = names().find(error);
    *name = found == names().end() ? "CUDA_ERROR_UNKNOWN" : found->second.name;
    return SUCCESS;
}
int cuGetErrorString(int error, const char **text) {
    auto found = names().find(error);
    *text = found == names().end() ? "unknown error" : found->second.text;
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = 0;
    return ordinal == 0 ? SUCCESS : INVALID_DEVICE;
}
int cuDeviceGetCount(int *count) {
    *count = 1;
    return SUCCESS;
}
int cuDeviceGetName(char *name, int length, int) {
    snprintf(name, length, "Emulated GPU");
    return SUCCESS;
}
int cuDeviceGetUuid_v2(void *uuid, int) {
    memcpy(uuid, "emulated GPU 0.1", 16);
    return SUCCESS;
}
int cuDeviceGetUuid(void *uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }
int cuDeviceTotalMem_v2(size_t *bytes, int) {
    *bytes = memory::total();
    return SUCCESS;
}
int cuDeviceGetAttribute(int *value, int which, int device) {
    if (device)
        return INVALID_DEVICE;
    *value = attribute(which);
    return SUCCESS;
}
int cuDeviceComputeCapability(int *major, int *minor, int) {
    *major = 9, *minor = 0;
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **result, int device) {
    if (device)
        return INVALID_DEVICE;
    *result = &context;
    return SUCCESS;
}
int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
int cuDevicePrimaryCtxGetState(int, unsigned *flags, int *active) {
    *flags = 0, *active = 1;
    return SUCCESS;
}
int cuCtxGetCurrent(void **result) {
    *result = current;
    return SUCCESS;
}
int cuCtxSetCurrent(void *wanted) {
    count(__func__);
    current = wanted;
    return SUCCESS;
}
int cuCtxPushCurrent_v2(void *wanted) { return cuCtxSetCurrent(wanted); }
int cuCtxPopCurrent_v2(void **was) {
    *was = current;
    current = nullptr;
    return SUCCESS;
}
int cuCtxGetDevice(int *device) {
    *device = 0;
    return current ? SUCCESS : INVALID_CONTEXT;
}
int cuCtxGetFlags(unsigned *flags) {
    *flags = 0;
    return SUCCESS;
}
int cuCtxSetFlags(unsigned) { return SUCCESS; }
int cuCtxGetApiVersion(void *, unsigned *version) {
    *version = 13000;
    return SUCCESS;
}
int cuCtxGetCacheConfig(int *config) {
    *config = 0;
    return SUCCESS;
}
int cuCtxSetCacheConfig(int) { return SUCCESS; }
int cuCtxGetLimit(size_t *value, unsigned limit) {
    *value = limit < 16 ? limits[limit] : 0;
    return limit < 16 ? SUCCESS : INVALID_VALUE;
}
int cuCtxSetLimit(unsigned limit, size_t value) {
    if (limit >= 16)
        return INVALID_VALUE;
    limits[limit] = value;
    return SUCCESS;
}
int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return SUCCESS;
}
int cuProfilerStart() { return SUCCESS; }
int cuProfilerStop() { return SUCCESS; }
}

} // namespace emulated
