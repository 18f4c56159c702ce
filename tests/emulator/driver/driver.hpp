// The driver's own state, and the errors it returns.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fibers.hpp"
#include "memory.hpp"

#define API(name) extern "C" int name

namespace emulated {

enum Error : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_PTX = 218,
    FILE_NOT_FOUND = 301,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    COOPERATIVE_LAUNCH_TOO_LARGE = 720,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
    LAUNCH_TIMEOUT = 702,
    LAUNCH_OUT_OF_RESOURCES = 701,
};

constexpr unsigned SHARED = 48 << 10, SHARED_OPT_IN = 227 << 10, MULTIPROCESSORS = 132;

// Says why a call fails, for the number alone says little.
int complain(int error, const char *format, ...) __attribute__((format(printf, 2, 3)));

// The error of a kernel: from then on every call returns it, as on a GPU.
extern int sticky;

// What a stream is given to do runs at once, or is recorded where the stream is being captured. What moves
// data between host and device runs on an idle device too.
//
// Work that cannot go on before another stream has done something returns BLOCKED, and is called again later. Its
// stream keeps what comes after it.
using Work = std::function<int()>;
constexpr int BLOCKED = -1;
int submit(void *stream, const char *what, Work work, bool moves = false);
// The same for work that reads what it is given only now.
bool capturing(void *stream);

// With EMULATED_GPU_DELAY=seed a stream does nothing before somebody waits for it, or chance will have it.
bool delayed();
// Whether the stream has yet to do something, or may have.
bool behind(void *stream);
// Does what the stream was given to do, and waits where that is blocked. Not a wait, as a capture sees it.
int finish(void *stream);
int finish_all();

// A call that waits for the device, or that may, which a capture forbids.
int not_while_capturing(const char *name);

// Has events that are recorded later count so much more time.
void spend(long long nanoseconds);

// Held while anything runs: one kernel, or one copy, at a time.
std::recursive_mutex &device_lock();

// Memory that a graph allocates.
int allocate_in_capture(void *stream, size_t size, void **result);
int release_in_capture(void *stream, void *start);
// Whether `start` is a graph's, which is then freed until the graph runs again.
bool release_of_graph(void *start, int &error);

// With EMULATED_GPU_IDLE=1 nothing is computed, and memory is not guarded: what is left is the host's work.
bool idle();
// With EMULATED_GPU_COUNT=1, how often each call was made is printed at exit.
void count(const char *name);

void catch_faults();
// Ends a kernel that takes too long.
void watch(bool begin);

} // namespace emulated

// Where a call returns the error of a kernel that ran before.
#define CHECK_STICKY()                                                                                                 \
    emulated::count(__func__);                                                                                         \
    if (emulated::sticky)                                                                                              \
    return emulated::sticky
